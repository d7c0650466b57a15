"""Linear attention as a torch.library operator: `attend(call)` returns o, stats and the final state.

    lingpt::linear_attention_fwd, lingpt::linear_attention_bwd

The schema comes from `Call`; both passes are those of the backend that `choose` takes: the CUDA kernel if it
can serve the call, else the chunkwise form. torch.compile does not trace that choice. The other two forms,
reference and recurrent, are differentiated by autograd and are called by interface.py.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels import custom_op
from lingpt.kernels.linear_attention import chunkwise
from lingpt.kernels.linear_attention.call import (
    Call,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
    split_projection,
    state_shapes,
)
from lingpt.kernels.numerics import state_dtype

_NO_STATE = (None,) * 4
_INPUTS = ("projected", "qkv", "q", "k", "v")  # a call has `projected`, `qkv`, or q, k and v


class Backend(Protocol):
    """A module that computes both passes of a call."""

    def unsupported_reason(self, call: Call) -> str | None:
        """Why the backend cannot serve this call, in words for a user; None if it can."""

    def forward(self, call: Call) -> Outputs: ...

    def backward(
        self, call: Call, saved: Outputs, gradients: OutputGradients, out: tuple[Tensor, ...]
    ) -> InputGradients:
        """Writes dq, dk and dv into `out` (last dimension contiguous); returns the other gradients."""


def choose(call: Call) -> Backend:
    """The backend for `call.backend` "cuda", "chunkwise" or "auto".

    Raises UserError if "cuda" cannot serve the call. "auto" falls back to chunkwise and warns once per
    reason, but not about fp32/fp64 inputs outside CUDA autocast, which the kernel never takes.
    """
    if call.backend == "chunkwise" or (call.backend == "auto" and call.device.type != "cuda"):
        return chunkwise
    reason = _cuda_unsupported_reason(call)
    if reason is not None and call.backend == "cuda":
        raise UserError(f"backend='cuda' cannot run this: {reason}")
    expected = call.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    if reason is not None and expected:
        warn_once(reason)
    empty = call.inputs[0].numel() == 0  # the chunkwise form handles empty inputs
    return chunkwise if reason is not None or empty else cuda()


def _cuda_unsupported_reason(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"the tensors are on {call.device.type}"
    return cuda().unsupported_reason(call)


@functools.cache
def cuda() -> Backend:
    """The CUDA backend, imported when a CUDA tensor first arrives."""
    return importlib.import_module("lingpt.kernels.linear_attention.cuda")


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(f"linear_attention runs on the slower chunkwise backend: {reason}", stacklevel=2)


def linear_attention_flops(B: int, N: int, H: int, D: int, causal: bool = True) -> int:
    """FLOPs of the forward pass: the matrix products of the chunkwise form, of causal ones the causal half.

    Per token and head 4·D² across chunks (q̂·S, and k̂vᵀ into S), and 4·C·D / 2 within chunks of C = 64
    tokens (q̂·k̂ and the weights times v, half of them masked). The backward pass counts twice that: two
    products for each, without recomputation.
    """
    within = 2 * min(N, chunkwise.CHUNK) * D if causal else 0
    return B * N * H * (4 * D * D + within)


def _forward(call: Call) -> custom_op.Outputs:
    call = call.unpacked()
    o, stats, state = choose(call).forward(call)
    return o, stats, *(state or _NO_STATE)


def _backward(given: Call, saved: custom_op.Outputs, gradients: custom_op.Outputs) -> custom_op.Outputs:
    call, (o, stats, *parts), (do, *dparts) = given.unpacked(), saved, gradients
    assert o is not None and stats is not None
    outputs = Outputs(o, stats, LinearAttentionState(*parts) if call.return_state else None)  # type: ignore[arg-type]
    d_outputs = OutputGradients(torch.zeros_like(o) if do is None else do, _whole_state(call, dparts))
    tensors = {name: x for name in _INPUTS if (x := getattr(given, name)) is not None}
    d = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in tensors.items()}
    if given.gate_bias is not None:
        dqkv, d_gate, rest = split_projection(d["projected"], *call.shape[2:])
        out = dqkv.unbind(2)
    else:
        out = tuple(d.values()) if call.qkv is None else d["qkv"].unbind(2)
    found = choose(call).backward(call, outputs, d_outputs, out)
    d_log_decay, d_bias = found.token_log_decay, None
    if given.gate_bias is not None:
        assert call.token_log_decay is not None and d_log_decay is not None
        d_sum = -torch.expm1(call.token_log_decay) * d_log_decay  # the derivative of ln σ is 1 − σ
        d_gate.copy_(d_sum)
        rest.zero_()
        d_log_decay, d_bias = None, d_sum.sum((0, 1))
    by_input = (d.get(name) for name in _INPUTS)
    return *by_input, found.a, found.b, d_log_decay, d_bias, *(found.initial_state or _NO_STATE)


def _whole_state(call: Call, dparts: list[Tensor | None]) -> LinearAttentionState | None:
    """The gradient of the final state, with all four parts; None if it has no gradient."""
    if not call.return_state or all(x is None for x in dparts):
        return None
    B, _, H, D = call.shape
    given = call.inputs[0]
    zeros = (given.new_zeros(shape, dtype=state_dtype(call.dtype)) for shape in state_shapes(B, H, D))
    return LinearAttentionState(*(zero if x is None else x for x, zero in zip(dparts, zeros, strict=True)))


def _fake_forward(call: Call) -> custom_op.Outputs:
    call = call.unpacked()
    (B, N, H, D), given = call.shape, call.inputs[0]
    stats = given.new_empty(3, B, H, N, dtype=state_dtype(call.dtype))
    state = (stats.new_empty(shape) for shape in state_shapes(B, H, D)) if call.return_state else _NO_STATE
    return given.new_empty(B, N, H, D), stats, *state


def _flops(shapes: Any) -> int:
    if shapes.projected:
        (B, N, _), (H,), D = shapes.projected, shapes.gate_bias, shapes.head_size
    else:
        B, N, *_, H, D = shapes.qkv or shapes.q
    return linear_attention_flops(B, N, H, D, shapes.causal)


attend = custom_op.CustomOp(
    "linear_attention",
    Call,
    forward=_forward,
    fake_forward=_fake_forward,
    backward=_backward,
    flops=_flops,
    gradients_of=(*_INPUTS, "a", "b", "token_log_decay", "gate_bias", "S", "z", "c", "n"),
    outputs=("o", "stats", "S", "z", "c", "n"),
    saved=("o", "stats", "S", "z", "c", "n"),
    constant=("stats",),
).register()
