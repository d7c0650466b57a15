"""A short convolution along the sequence, one filter per channel, as in H3, Hyena and Mamba.

Linear attention compares a query with single tokens. A few taps bring a key to its value's place, which
decides associative recall.
"""

import functools

import torch

from lingpt.models.attention.base import RecurrentState

WIDTH = 4
SHORT_CONV_HELP = "a causal convolution of width 4 over q, k and v of `ours*` and `gla`."


def convolved(
    x_BNC: torch.Tensor, weight_KC: torch.Tensor, state: RecurrentState | None = None
) -> torch.Tensor:
    """`short_convolution` of x, which continues what the decoding state has seen, and updates it."""
    y_BNC, last = short_convolution(x_BNC, weight_KC, None if state is None else state.conv)
    if state is not None:
        state.conv = last
    return y_BNC


def short_convolution(
    x_BNC: torch.Tensor, weight_KC: torch.Tensor, before: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = Σ_k w_k x_{t−K+1+k}, causal and per channel, summed in fp32.

    Args:
        x_BNC: [B, N, C], any dtype.
        weight_KC: [K, C]; the last row weighs the token itself.
        before: the K − 1 tokens before x, [B, K − 1, C]; None for zeros.

    Returns y [B, N, C] in x's dtype, and the last K − 1 tokens, to go on with.
    """
    K, N = weight_KC.shape[0], x_BNC.shape[1]
    if before is None:
        before = x_BNC.new_zeros(x_BNC.shape[0], K - 1, x_BNC.shape[2])
    padded = torch.cat((before, x_BNC), dim=1)
    taps = [weight_KC[k].float() * padded[:, k : k + N].float() for k in range(K)]
    y = functools.reduce(torch.add, taps)
    return y.to(x_BNC.dtype), padded[:, N:]


def identity_filter(channels: int) -> torch.Tensor:
    """The filter [K, C] that changes nothing: where training starts."""
    weight = torch.zeros(WIDTH, channels)
    weight[-1] = 1.0
    return weight
