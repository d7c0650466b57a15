"""The CUDA backend of calls that tensor cores take with a change, an `operator.Backend`.

- head_dim below 128: the kernels of wider heads read zeros for the columns that are missing. Zeros fill
  states up, and heads up to a multiple of 8.
- RoPE on a number of dimensions that is no multiple of 16: q and k are rotated before, and their gradients
  afterwards.
"""

from __future__ import annotations

import functools

from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, Exchange, InputGradients, OutputGradients, Outputs
from lingpt.kernels.linear_attention.cuda import backend, padding
from lingpt.kernels.linear_attention.cuda.variants import HEAD_DIMS, kernel_head_dim
from lingpt.kernels.numerics import rotate, rotate_backward

FALLBACK = ""


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    if call.shape[3] > HEAD_DIMS[-1]:
        return f"tensor cores take a head_dim up to {HEAD_DIMS[-1]}, not {call.shape[3]}"
    return backend.unsupported_reason(call._replace(cos=None, sin=None), kernel_head_dim(call.shape[3]))


def forward(call: Call, exchange: Exchange | None = None, *, divide: bool = True) -> Outputs:
    """As in `operator.Backend`. divide: o by the normaliser."""
    call, widths = _rotated(call), _widths(call)
    exchange = padding.exchange_at(widths, exchange, call)
    run = functools.partial(backend.forward, exchange=exchange, divide=divide)
    return padding.forward(run, call, widths)


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`."""
    rotated, widths = _rotated(call), _widths(call)
    run = functools.partial(backend.backward, exchange=padding.exchange_at(widths, exchange, call))
    found = padding.backward(run, rotated, saved, gradients, out, widths)
    if call.cos is not None and call.sin is not None and rotated.cos is None:
        for x in out[:2]:
            x.copy_(rotate_backward(x.float(), call.cos, call.sin))
    return found


def _widths(call: Call) -> padding.Widths:
    D = call.shape[3]
    return padding.Widths(padding.multiple_of_8(D), kernel_head_dim(D))


def _rotated(call: Call) -> Call:
    """The call without RoPE, if the kernels do not have it."""
    if call.cos is None or call.sin is None or backend.rotates(call):
        return call
    q, k, v = call.views
    q, k = (rotate(x.float(), call.cos, call.sin).to(x.dtype) for x in (q, k))
    return call._replace(qkv=None, q=q, k=k, v=v, cos=None, sin=None)
