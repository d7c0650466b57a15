"""The CUDA backend of heads that tensor cores do not have, an `operator.Backend`: zeros fill them up.

They change no norm, score or rotation; the columns of o and of the state that come from them are cut off.
"""

from __future__ import annotations

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
from lingpt.kernels.linear_attention.cuda import backend
from lingpt.kernels.linear_attention.cuda.variants import HEAD_DIMS

FALLBACK = ""


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    if call.shape[3] > HEAD_DIMS[-1]:
        return f"tensor cores take a head_dim up to {HEAD_DIMS[-1]}, not {call.shape[3]}"
    return backend.unsupported_reason(call, call.shape[3] + _missing(call))


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`."""
    o, stats, state = backend.forward(_padded_call(call), _padded_exchange(exchange, call))
    return Outputs(o[..., : call.shape[3]].contiguous(), stats, _cut(state, call))


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`."""
    (o, stats, state), (do, dstate), extra = saved, gradients, _missing(call)
    o, do = (F.pad(x, (0, extra)) for x in (o, do))
    wide = tuple(torch.empty_like(o) for _ in out)
    padded = Outputs(o, stats, _padded(state, extra)), OutputGradients(do, _padded(dstate, extra))
    found = backend.backward(_padded_call(call), *padded, wide, _padded_exchange(exchange, call))
    for x, y in zip(out, wide, strict=True):
        x.copy_(y[..., : call.shape[3]])
    return found._replace(initial_state=_cut(found.initial_state, call))


def _missing(call: Call) -> int:
    """The columns between a call's head_dim and the next that tensor cores have."""
    D = call.shape[3]
    return next(width for width in HEAD_DIMS if width >= D) - D


def _padded_call(call: Call) -> Call:
    extra = _missing(call)
    tensors: dict[str, Any] = {
        name: F.pad(x, (0, extra))
        for name in ("qkv", "q", "k", "v")
        if (x := getattr(call, name)) is not None
    }
    if state := _padded(call.initial_state, extra):
        tensors |= state._asdict()
    return call._replace(**tensors)


def _padded_exchange(exchange: Exchange | None, call: Call) -> Exchange | None:
    return exchange and (lambda own: _wider(exchange(_narrower(own, call.shape[3])), _missing(call)))


def _padded(state: LinearAttentionState | None, extra: int) -> LinearAttentionState | None:
    return None if state is None else _wider(state, extra)


def _cut(state: LinearAttentionState | None, call: Call) -> LinearAttentionState | None:
    return None if state is None else _narrower(state, call.shape[3])


def _wider(state: LinearAttentionState, extra: int) -> LinearAttentionState:
    S, z, c, n = state
    return LinearAttentionState(F.pad(S, (0, extra, 0, extra)), F.pad(z, (0, extra)), F.pad(c, (0, extra)), n)


def _narrower(state: LinearAttentionState, D: int) -> LinearAttentionState:
    S, z, c, n = state
    return LinearAttentionState(*(x.contiguous() for x in (S[..., :D, :D], z[..., :D], c[..., :D], n)))
