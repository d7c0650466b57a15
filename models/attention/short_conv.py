"""A short convolution along the sequence, one filter per channel, as in H3, Hyena and Mamba.

Linear attention compares a query with single tokens. A short convolution moves a key to its value's position,
which decides associative recall.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from lingpt.common.options import Option
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.numerics import first_tokens, state_dtype
from lingpt.kernels.short_conv import Mixture, convolve_columns, mix_columns, short_convolution

WIDTH = 4
SHORT_CONV = Option("a causal convolution of width 4 over q, k and v of `ours*` and, with a SiLU, of `gla`")


@dataclass
class ConvState:
    """The decoding state of a short convolution."""

    conv: torch.Tensor | None = field(default=None, kw_only=True)  # the last tokens that it has seen


def apply_short_conv(
    x_BNW: torch.Tensor,
    weight_KC: torch.Tensor | None,
    state: ConvState | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    silu: bool = False,
    context: Context | None = None,
    mixture: Mixture | None = None,
) -> torch.Tensor:
    """`short_convolution` of the first C columns of x, with `silu` followed by a SiLU; other columns
    unchanged.

    x_BNW: [B, N, W], W ≥ C; with a decoding state, W = C. weight_KC: [K, C]; None for no convolution.
    mixture: what is mixed into x before. x continues the tokens that the state has seen; `state.conv`
    [B, K − 1, C], the last of them (None before the first), is updated. cu_seqlens: borders of documents that
    are packed into the rows. With a context, x is this process's piece, of at least K − 1 tokens.
    Returns [B, N, W] in x's dtype.
    """
    if weight_KC is None:
        return mix_columns(x_BNW, mixture)
    if state is not None:
        y_BNC = _conv_with_state(mix_columns(x_BNW, mixture), weight_KC, state, cu_seqlens)
        return F.silu(y_BNC) if silu else y_BNC
    if context is None:
        return convolve_columns(x_BNW, weight_KC, silu, cu_seqlens, mixture)
    x_BNW = mix_columns(x_BNW, mixture)
    (B, N, _), seen = x_BNW.shape, weight_KC.shape[0] - 1
    x_BNW = torch.cat((context.previous(x_BNW[:, -seen:]), x_BNW), dim=1)
    if cu_seqlens is not None:
        cu_seqlens = (cu_seqlens + seen * (cu_seqlens // N + 1)).clamp(max=B * (N + seen))
    return convolve_columns(x_BNW, weight_KC, silu, cu_seqlens)[:, seen:]


def _conv_with_state(
    x_BNC: torch.Tensor, weight_KC: torch.Tensor, state: ConvState, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """`short_convolution` at x's tokens, with those that the state has seen before them."""
    K, N = weight_KC.shape[0], x_BNC.shape[1]
    seen = x_BNC.new_zeros(len(x_BNC), K - 1, x_BNC.shape[2]) if state.conv is None else state.conv
    whole_BNC = torch.cat((seen.to(x_BNC.dtype), x_BNC), dim=1)
    state.conv = whole_BNC[:, N:].clone()  # the last K − 1 tokens; a view would keep all in memory
    if cu_seqlens is not None:
        first_BN = F.pad(first_tokens(cu_seqlens, *x_BNC.shape[:2]), (K - 1, 0))
        later_BN = first_BN.flip(1).cumsum(1).flip(1) > first_BN.int()  # than the token a document begins
        state.conv.masked_fill_(later_BN[:, N:, None], 0)
        return short_convolution(whole_BNC, weight_KC, first_BN)[:, K - 1 :]
    if N == 1:  # only a few kernels; the form below is for the compiler: eager, it pads one copy per tap
        y_B1C = (weight_KC.to(state_dtype(x_BNC.dtype)) * whole_BNC).sum(1, keepdim=True)
        return y_B1C.to(x_BNC.dtype)
    return short_convolution(whole_BNC, weight_KC)[:, K - 1 :]


def identity_filter(channels: int) -> torch.Tensor:
    """The identity filter [K, C], the initial value in training."""
    weight = torch.zeros(WIDTH, channels)
    weight[-1] = 1.0
    return weight
