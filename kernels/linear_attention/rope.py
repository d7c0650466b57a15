"""Rotary position embedding in LitGPT's half-split convention, and its transpose for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading R of x's dimensions: [x₁, x₂] → [x₁, x₂]·cos + [−x₂, x₁]·sin.

    Args:
        x: [B, N, H, D].
        cos, sin: [N, R], R even and at most D, as from `litgpt.model.build_rope_cache`; cast to x's dtype.

    Returns [B, N, H, D] in x's dtype.
    """
    return _turn(x, cos, sin, backward=False)


def rotate_backward(dx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of x, given that of `rotate(x, cos, sin)`: the transposed map.

    dx and the result: [B, N, H, D], of one dtype; cos, sin: [N, R].
    """
    return _turn(dx, cos, sin, backward=True)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    R = cos.shape[-1]
    cos, sin = (t.to(x.dtype).unsqueeze(1) for t in (cos, sin))  # [N, 1, R]: the same for every head
    first, second = x[..., : R // 2], x[..., R // 2 : R]
    cos1, cos2 = cos[..., : R // 2], cos[..., R // 2 :]
    sin1, sin2 = sin[..., : R // 2], sin[..., R // 2 :]
    if backward:
        turned = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        turned = first * cos1 - second * sin1, second * cos2 + first * sin2
    return torch.cat((*turned, x[..., R:]), dim=-1)
