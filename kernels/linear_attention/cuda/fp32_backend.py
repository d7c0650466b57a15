"""The CUDA backend in fp32, an `operator.Backend`: the passes of tf32_passes.py; zeros fill heads up to a
multiple of 8."""

from __future__ import annotations

from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, Exchange, InputGradients, OutputGradients, Outputs
from lingpt.kernels.linear_attention.cuda import padding, recurrence, tf32, tf32_passes
from lingpt.kernels.linear_attention.cuda.launch import current_device

FALLBACK = "in fp32, several times slower (docs/kernel.md)"


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    D = call.shape[3]
    if not call.causal:
        return "it is causal only"
    if D > tf32.WIDEST:
        return f"it takes a head_dim up to {tf32.WIDEST}, not {D}"
    return recurrence.unsupported_reason(call.views[0], D)


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`; runs twice for an exchange."""
    if exchange is not None:
        own = forward(call._replace(return_state=True)).state
        assert own is not None
        call = call._replace(**exchange(own)._asdict())
    with current_device(call.device):
        return padding.forward(tf32_passes.forward, call, _widths(call))


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`; runs twice for an exchange."""
    if exchange is not None:
        own = backward(call, saved, gradients, out).initial_state
        assert own is not None
        gradients = gradients._replace(state=exchange(own))
    with current_device(call.device):
        return padding.backward(tf32_passes.backward, call, saved, gradients, out, _widths(call))


def _widths(call: Call) -> padding.Widths:
    width = padding.multiple_of_8(call.shape[3])
    return padding.Widths(width, width)
