"""A causal depthwise convolution along the sequence: in PyTorch, and the choice of the Triton kernel.

The PyTorch form has its own backward, arranged so that the compiler makes one pass over the tokens in each
direction and keeps only x.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from lingpt.kernels.numerics import state_dtype

triton: Any
try:
    from lingpt.kernels import short_conv_triton as triton
except ImportError:  # no Triton
    triton = None


def convolve_columns(x_BNW: torch.Tensor, weight_KC: torch.Tensor, silu: bool = False) -> torch.Tensor:
    """`short_convolution` of the first C columns of x, with `silu` followed by a SiLU; other columns
    unchanged.

    x_BNW: [B, N, W], W ≥ C. weight_KC: [K, C]. Returns [B, N, W] in x's dtype.
    """
    C, W = weight_KC.shape[1], x_BNW.shape[2]
    if not silu and x_BNW.is_cuda and triton is not None and triton.takes(x_BNW):
        return triton.convolve(x_BNW, _widened(weight_KC, W - C))
    # The compiler fuses the convolution with its SiLU, which would be a separate pass after the kernel.
    y_BNC = short_convolution(x_BNW[..., :C], weight_KC)
    y_BNC = F.silu(y_BNC) if silu else y_BNC
    return y_BNC if C == W else torch.cat((y_BNC, x_BNW[..., C:]), dim=-1)


def _widened(weight_KC: torch.Tensor, columns: int) -> torch.Tensor:
    """The filters and `columns` identity filters more, so that one pass writes whole rows."""
    if columns == 0:
        return weight_KC
    return torch.cat((F.pad(weight_KC[:-1], (0, columns)), F.pad(weight_KC[-1:], (0, columns), value=1.0)))


def short_convolution(x_BNC: torch.Tensor, weight_KC: torch.Tensor) -> torch.Tensor:
    """y_t = Σ_k w_k x_{t−K+1+k}, causal and per channel, zeros before the first token.

    Args:
        x_BNC: [B, N, C], any dtype.
        weight_KC: [K, C]; the last row is the weight of the token itself.

    Returns y [B, N, C] in x's dtype, summed in fp32 (float64 for float64 inputs).
    """
    return _Convolution.apply(x_BNC, weight_KC)


class _Convolution(torch.autograd.Function):
    """Autograd would keep a padded copy of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BNC: torch.Tensor, weight_KC: torch.Tensor) -> torch.Tensor:
        return _weighted(x_BNC, weight_KC, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy_BNC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        K, sums = weight.shape[0], state_dtype(x.dtype)
        dweight = [(_shifted(dy_BNC, k + 1 - K).to(sums) * x).sum((0, 1)) for k in range(K)]
        return _weighted(dy_BNC, weight, -1), torch.stack(dweight).to(weight.dtype)


def _weighted(x_BNC: torch.Tensor, weight_KC: torch.Tensor, direction: int) -> torch.Tensor:
    """Σ_k w_k x, x shifted by K − 1 − k tokens towards the future (direction 1) or the past (−1)."""
    K, weight_KC = weight_KC.shape[0], weight_KC.to(state_dtype(x_BNC.dtype))
    taps = (weight_KC[k] * _shifted(x_BNC, direction * (K - 1 - k)) for k in range(K))
    y_BNC = functools.reduce(torch.add, taps)
    # A conversion to the same dtype loses the function's gradient when PyTorch 2.11 compiles it.
    return y_BNC if y_BNC.dtype == x_BNC.dtype else y_BNC.to(x_BNC.dtype)


def _shifted(x_BNC: torch.Tensor, tokens: int) -> torch.Tensor:
    """y_t = x_{t − tokens}, with zeros beyond the ends."""
    N = x_BNC.shape[1]
    if tokens < 0:
        return F.pad(x_BNC, (0, 0, 0, -tokens))[:, -tokens:]
    return F.pad(x_BNC, (0, 0, tokens, 0))[:, :N]
