"""The CUDA backend of heads that tensor cores do not have, an `operator.Backend`: zeros fill them up."""

from __future__ import annotations

import functools

from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, Exchange, InputGradients, OutputGradients, Outputs
from lingpt.kernels.linear_attention.cuda import backend, padding
from lingpt.kernels.linear_attention.cuda.variants import HEAD_DIMS

FALLBACK = ""


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    if call.shape[3] > HEAD_DIMS[-1]:
        return f"tensor cores take a head_dim up to {HEAD_DIMS[-1]}, not {call.shape[3]}"
    return backend.unsupported_reason(call, _width(call))


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`."""
    width = _width(call)
    run = functools.partial(backend.forward, exchange=padding.exchange_at(width, exchange, call))
    return padding.forward(run, call, width)


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`."""
    width = _width(call)
    run = functools.partial(backend.backward, exchange=padding.exchange_at(width, exchange, call))
    return padding.backward(run, call, saved, gradients, out, width)


def _width(call: Call) -> int:
    """The next head_dim that tensor cores have."""
    return next(width for width in HEAD_DIMS if width >= call.shape[3])
