"""The constants of the definition, which every backend shares, and small helpers of the PyTorch forms."""

import torch
from torch import Tensor

# The norm of x is sqrt(‖x‖² + NORM_EPS): a row of zeros stays zeros, so it gives weight 1 to everything.
NORM_EPS = 1e-12

# With unit q and k a weight 1 + b·q̂·k̂ may be as small as 1 − |b|: nothing at all for q = −k, b = 1, where
# rounding alone would decide the normaliser's sign. So the coefficient in use is b·B_SHRINK, which keeps
# every weight of |b| ≤ 1 at 2⁻⁶ or more, in every form, forward and backward (`Call.shrink_b`).
B_SHRINK = 1.0 - 2.0**-6

# ln of a decay that counts as 0: exp of it is 0. A smaller one, −inf (a reset) among them, is replaced by it:
# −inf − (−inf) is no number, and the smaller the running sums of a chunk, the more exact their differences.
LOG_ZERO = {torch.float32: -104.0, torch.float64: -1000.0}


def per_head(x: float | Tensor, ndim: int, dim: int, dtype: torch.dtype) -> float | Tensor:
    """[H] made to broadcast along dimension `dim` of a tensor with `ndim` dimensions; a number stays one."""
    if not isinstance(x, Tensor):
        return x
    shape = [1] * ndim
    shape[dim] = -1
    return x.to(dtype).view(shape)


def reciprocal_norm(x: Tensor) -> Tensor:
    """1/√(‖x‖² + NORM_EPS) over the last dimension: [..., D] → [..., 1], computed in x's dtype.

    That is fp32 (float64) in every form: in fp16 the constant would be 0.
    """
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + NORM_EPS).rsqrt()
