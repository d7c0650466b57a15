"""Passes of a call whose heads kernels do not have: zeros fill them up to a width that these have.

They change no norm, score or rotation; the columns of o and of the state that come from them are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def forward(run: Callable[[Call], Outputs], call: Call, width: int) -> Outputs:
    """`run` of the call with heads of this width."""
    D = call.shape[3]
    if width == D:
        return run(call)
    o, stats, state = run(_padded(call, width))
    return Outputs(o[..., :D].contiguous(), stats, state and _resized(state, D))


def backward(
    run: Callable[[Call, Outputs, OutputGradients, tuple[Tensor, ...]], InputGradients],
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    width: int,
) -> InputGradients:
    """The same of the backward pass."""
    (o, stats, state), (do, dstate), D = saved, gradients, call.shape[3]
    if width == D:
        return run(call, saved, gradients, out)
    o, do = (F.pad(x, (0, width - D)) for x in (o, do))
    state, dstate = (x and _resized(x, width) for x in (state, dstate))
    wide = tuple(torch.empty_like(o) for _ in out)
    found = run(_padded(call, width), Outputs(o, stats, state), OutputGradients(do, dstate), wide)
    for x, y in zip(out, wide, strict=True):
        x.copy_(y[..., :D])
    return found._replace(initial_state=found.initial_state and _resized(found.initial_state, D))


def exchange_at(width: int, exchange: Exchange | None, call: Call) -> Exchange | None:
    """The exchange for `run`, from the call's."""
    return exchange and (lambda own: _resized(exchange(_resized(own, call.shape[3])), width))


def _padded(call: Call, width: int) -> Call:
    tensors: dict[str, Any] = {
        name: F.pad(x, (0, width - call.shape[3]))
        for name in ("qkv", "q", "k", "v")
        if (x := getattr(call, name)) is not None
    }
    if call.initial_state is not None:
        tensors |= _resized(call.initial_state, width)._asdict()
    return call._replace(**tensors)


def _resized(state: LinearAttentionState, width: int) -> LinearAttentionState:
    """The state with zeros for more channels, or without the last ones."""
    S, z, c, n = state
    extra = width - z.shape[-1]  # F.pad cuts off if it is negative
    return LinearAttentionState(F.pad(S, (0, extra, 0, extra)), F.pad(z, (0, extra)), F.pad(c, (0, extra)), n)
