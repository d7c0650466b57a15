"""A causal depthwise convolution along the sequence: in PyTorch, and the choice of the Triton kernel.

The PyTorch form has its own backward, arranged so that the compiler makes one pass over the tokens in each
direction and keeps only x.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lingpt.kernels.numerics import first_tokens, state_dtype

triton: Any
try:
    from lingpt.kernels import short_conv_triton as triton
except ImportError:  # no Triton
    triton = None


class Mixture(NamedTuple):
    """What is mixed into rows: their V columns from `column` on become x + share·(values − x)."""

    column: int
    values_BNV: torch.Tensor  # [B, N, V]
    share_V: torch.Tensor  # [V]


def mix_columns(x_BNW: torch.Tensor, mixture: Mixture | None) -> torch.Tensor:
    """The rows x, mixed; as they are without a mixture."""
    if mixture is None:
        return x_BNW
    column, values, share = mixture
    before, v, behind = x_BNW.tensor_split((column, column + len(share)), dim=-1)
    return torch.cat((before, v + share.to(v.dtype) * (values - v), behind), dim=-1)


def convolve_columns(
    x_BNW: torch.Tensor,
    weight_KC: torch.Tensor,
    silu: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mixture: Mixture | None = None,
) -> torch.Tensor:
    """`short_convolution` of the first C columns of x, with `silu` followed by a SiLU; other columns
    unchanged.

    x_BNW: [B, N, W], W ≥ C. weight_KC: [K, C]. cu_seqlens: borders of sequences packed into the B·N tokens.
    mixture: what is mixed into x before.
    Returns [B, N, W] in x's dtype.
    """
    C, W = weight_KC.shape[1], x_BNW.shape[2]
    first = None if cu_seqlens is None else first_tokens(cu_seqlens, *x_BNW.shape[:2])
    if x_BNW.is_cuda and triton is not None and triton.takes(x_BNW):
        return triton.convolve(x_BNW, _widened(weight_KC, W - C), C if silu else 0, first, *(mixture or ()))
    x_BNW = mix_columns(x_BNW, mixture)
    y_BNC = short_convolution(x_BNW[..., :C], weight_KC, first)
    y_BNC = F.silu(y_BNC) if silu else y_BNC
    return y_BNC if C == W else torch.cat((y_BNC, x_BNW[..., C:]), dim=-1)


def _widened(weight_KC: torch.Tensor, columns: int) -> torch.Tensor:
    """The filters and `columns` identity filters more, so that one pass writes whole rows."""
    if columns == 0:
        return weight_KC
    return torch.cat((F.pad(weight_KC[:-1], (0, columns)), F.pad(weight_KC[-1:], (0, columns), value=1.0)))


def short_convolution(
    x_BNC: torch.Tensor, weight_KC: torch.Tensor, first_BN: torch.Tensor | None = None
) -> torch.Tensor:
    """y_t = Σ_k w_k x_{t−K+1+k}, causal and per channel, zeros before the first token.

    Args:
        x_BNC: [B, N, C], any dtype.
        weight_KC: [K, C]; the last row is the weight of the token itself.
        first_BN: bool [B, N], the first tokens of packed sequences: none reads what is before them.

    Returns y [B, N, C] in x's dtype, summed in fp32 (float64 for float64 inputs).
    """
    return _Convolution.apply(x_BNC, weight_KC, first_BN)


class _Convolution(torch.autograd.Function):
    """Autograd would keep a padded copy of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BNC: torch.Tensor, weight_KC: torch.Tensor, first_BN: torch.Tensor | None) -> torch.Tensor:
        return _weighted(x_BNC, weight_KC, first_BN, forward=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy_BNC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, first = ctx.saved_tensors
        K, sums = weight.shape[0], state_dtype(x.dtype)
        dweight = [(_from_later(dy_BNC, K - 1 - k, first).to(sums) * x).sum((0, 1)) for k in range(K)]
        return _weighted(dy_BNC, weight, first, forward=False), torch.stack(dweight).to(weight.dtype), None


def _weighted(
    x_BNC: torch.Tensor, weight_KC: torch.Tensor, first_BN: torch.Tensor | None, forward: bool
) -> torch.Tensor:
    """Σ_k w_k x, x shifted by K − 1 − k tokens towards the future (`forward`) or the past."""
    K, weight_KC = weight_KC.shape[0], weight_KC.to(state_dtype(x_BNC.dtype))
    shift = _from_earlier if forward else _from_later
    taps = (weight_KC[k] * shift(x_BNC, K - 1 - k, first_BN) for k in range(K))
    y_BNC = functools.reduce(torch.add, taps)
    # A conversion to the same dtype loses the function's gradient when PyTorch 2.11 compiles it.
    return y_BNC if y_BNC.dtype == x_BNC.dtype else y_BNC.to(x_BNC.dtype)


def _from_earlier(x_BNC: torch.Tensor, tokens: int, first_BN: torch.Tensor | None) -> torch.Tensor:
    """y_t = x_{t − tokens}, with zeros where that is before the sequence."""
    y_BNC = F.pad(x_BNC, (0, 0, tokens, 0))[:, : x_BNC.shape[1]]
    return y_BNC if first_BN is None else y_BNC.masked_fill(_begun(first_BN, tokens), 0)


def _from_later(dy_BNC: torch.Tensor, tokens: int, first_BN: torch.Tensor | None) -> torch.Tensor:
    """The transposed map: dx_t = dy_{t + tokens}, with zeros where that is after the sequence."""
    if first_BN is not None:
        dy_BNC = dy_BNC.masked_fill(_begun(first_BN, tokens), 0)
    return F.pad(dy_BNC, (0, 0, 0, tokens))[:, tokens:]


def _begun(first_BN: torch.Tensor, tokens: int) -> torch.Tensor:
    """Whether a token's sequence has begun less than `tokens` before it, bool [B, N, 1]."""
    begun_BN = torch.zeros_like(first_BN)
    for s in range(tokens):
        begun_BN = begun_BN | F.pad(first_BN, (s, 0))[:, : first_BN.shape[1]]
    return begun_BN[..., None]
