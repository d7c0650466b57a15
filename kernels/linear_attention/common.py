"""What every form of linear attention shares: the state, two constants and true fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# The norm of x is sqrt(‖x‖² + NORM_EPS): a row of zeros stays zeros, so it gives weight 1 to everything.
NORM_EPS = 1e-12

# With unit q and k a weight 1 + b·q̂·k̂ may be as small as 1 − |b|: nothing at all for q = −k, b = 1, where
# rounding alone would decide the normaliser's sign. So the coefficient in use is b·B_SHRINK, which keeps
# every weight of |b| ≤ 1 at 2⁻⁶ or more, in every form, forward and backward.
B_SHRINK = 1.0 - 2.0**-6


class LinearAttentionState(NamedTuple):
    """All that linear attention remembers of the tokens it has seen; fp32 (float64 for float64 inputs).

    It adds up: the state of a sequence is the sum of the states of its pieces, each decayed to the end.
    With a decay γ, token j of N counts γ^(N−1−j) in each of the sums.
    """

    S: Tensor  # Σ k̂ⱼ vⱼᵀ  [B, H, D, D], key index before value index
    z: Tensor  # Σ k̂ⱼ      [B, H, D]
    c: Tensor  # Σ vⱼ       [B, H, D]
    n: Tensor  # Σ 1        [B, H]

    @classmethod
    def zeros(
        cls, batch_size: int, n_head: int, head_dim: int, *, device=None, dtype: torch.dtype = torch.float32
    ) -> LinearAttentionState:
        """The state before the first token."""
        B, H, D = batch_size, n_head, head_dim
        return cls(*(torch.zeros(shape, device=device, dtype=dtype) for shape in state_shapes(B, H, D)))


def state_shapes(B: int, H: int, D: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of S, z, c and n."""
    return (B, H, D, D), (B, H, D), (B, H, D), (B, H)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in, and what the PyTorch forms compute in: fp32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def effective(b: float | Tensor, normalize_qk: bool) -> float | Tensor:
    """The coefficient in use: shrunk where q and k are unit rows (see B_SHRINK), else b itself."""
    return b * B_SHRINK if normalize_qk else b


def per_head(x: float | Tensor, ndim: int, dim: int, dtype: torch.dtype) -> float | Tensor:
    """[H] made to broadcast along dimension `dim` of a tensor with `ndim` dimensions; a number stays one."""
    if not isinstance(x, Tensor):
        return x
    shape = [1] * ndim
    shape[dim] = -1
    return x.to(dtype).view(shape)


def reciprocal_norm(x: Tensor) -> Tensor:
    """1/‖x‖ over the last dimension, which is kept."""
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + NORM_EPS).rsqrt()


@contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32: no autocast, no TF32 (CUDA), no bf16 (oneDNN), whatever the user's training
    asks.

    The sums over a long sequence live in these products, and a training run commonly allows TF32 for speed.
    """
    matmul = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul
    asked = matmul.fp32_precision
    if asked != "ieee":
        matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if asked != "ieee":
            matmul.fp32_precision = asked
