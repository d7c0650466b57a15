"""Numerical constants of the definition, shared by all backends, and small helpers of the PyTorch forms."""

import torch
from torch import Tensor

# The norm of x is sqrt(‖x‖² + NORM_EPS): a row of zeros stays zeros, so it gives weight 1 to everything.
NORM_EPS = 1e-12

# With unit q and k a weight 1 + b·q̂·k̂ may be as small as 1 − |b|: 0 for q = −k, b = 1, where rounding alone
# would decide the normaliser's sign. So the effective coefficient is b·B_SHRINK, which keeps every weight at
# 2⁻⁶ or more for |b| ≤ 1, in every form, forward and backward (`Call.shrink_b`).
B_SHRINK = 1.0 - 2.0**-6

# The log decay that counts as −inf (its exp is 0). Smaller ones, including −inf (a reset), are replaced by
# it: −inf − (−inf) is NaN, and the smaller the cumulative sums of a chunk, the more exact their differences.
LOG_ZERO = {torch.float32: -104.0, torch.float64: -1000.0}


def per_head(x: float | Tensor, ndim: int, dim: int, dtype: torch.dtype) -> float | Tensor:
    """[H] reshaped to broadcast along dimension `dim` of an `ndim`-dimensional tensor; a number unchanged."""
    if not isinstance(x, Tensor):
        return x
    shape = [1] * ndim
    shape[dim] = -1
    return x.to(dtype).view(shape)


def reciprocal_norm(x: Tensor) -> Tensor:
    """1/√(‖x‖² + NORM_EPS) over the last dimension: [..., D] → [..., 1], computed in x's dtype.

    Every form computes it in fp32 (float64): in fp16 NORM_EPS would be 0.
    """
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + NORM_EPS).rsqrt()
