"""Passes of a call whose heads kernels do not have: zeros fill up these, or their states alone.

They change no norm, score or rotation; the columns of o and of the state that come from them are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    Exchange,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
)


class Widths(NamedTuple):
    """Channels of the heads and of the states that kernels have for a call."""

    heads: int
    states: int


def multiple_of_8(head_dim: int) -> int:
    """The next one: kernels read 16 bytes at a time."""
    return -(-head_dim // 8) * 8


def forward(run: Callable[[Call], Outputs], call: Call, widths: Widths) -> Outputs:
    """`run` of the call with heads and states of these widths."""
    D = call.shape[3]
    if widths == (D, D):
        return run(call)
    o, stats, state = run(_padded(call, widths))
    return Outputs(o[..., :D].contiguous(), stats, state and _resized(state, D))


def backward(
    run: Callable[[Call, Outputs, OutputGradients, tuple[Tensor, ...]], InputGradients],
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    widths: Widths,
) -> InputGradients:
    """The same of the backward pass."""
    (o, stats, state), (do, dstate), D = saved, gradients, call.shape[3]
    if widths == (D, D):
        return run(call, saved, gradients, out)
    state, dstate = (x and _resized(x, widths.states) for x in (state, dstate))
    o, do = (_widened(x, widths.heads) for x in (o, do))
    wide = out if widths.heads == D else tuple(torch.empty_like(o) for _ in out)
    found = run(_padded(call, widths), Outputs(o, stats, state), OutputGradients(do, dstate), wide)
    for x, y in zip(out, wide, strict=True):
        if x is not y:
            x.copy_(y[..., :D])
    return found._replace(initial_state=found.initial_state and _resized(found.initial_state, D))


def exchange_at(widths: Widths, exchange: Exchange | None, call: Call) -> Exchange | None:
    """The exchange for `run`, from the call's."""
    return exchange and (lambda own: _resized(exchange(_resized(own, call.shape[3])), widths.states))


def _padded(call: Call, widths: Widths) -> Call:
    tensors: dict[str, Any] = {
        name: _widened(x, widths.heads)
        for name in ("qkv", "q", "k", "v")
        if (x := getattr(call, name)) is not None
    }
    if call.initial_state is not None:
        tensors |= _resized(call.initial_state, widths.states)._asdict()
    return call._replace(**tensors)


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _resized(state: LinearAttentionState, width: int) -> LinearAttentionState:
    """The state with zeros for more channels, or without the last ones."""
    S, z, c, n = state
    extra = width - z.shape[-1]  # F.pad cuts off if it is negative
    return LinearAttentionState(F.pad(S, (0, extra, 0, extra)), F.pad(z, (0, extra)), F.pad(c, (0, extra)), n)
