"""Linear attention as a torch.library operator: `attend(call)` returns o, stats and the final state.

    lingpt::linear_attention_fwd, lingpt::linear_attention_bwd

The schema comes from `Call`; both passes are those of the backend that `choose` takes: the first of CUDA's
that can serve the call, else the chunkwise form. torch.compile does not trace that choice. The other two
forms, reference and recurrent, are differentiated by autograd and are called by interface.py.

Autograd is not `torch.library.register_autograd`'s, which spends 50 µs per call on a schema's defaults, and a
call that nothing observes skips the dispatcher: for short sequences that takes as long as the launches. Both
use private names of PyTorch. If a release lacks one, the public interface is used.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.custom_op import LIBRARY, define, filled
from lingpt.kernels.linear_attention import chunkwise
from lingpt.kernels.linear_attention.call import (
    Call,
    Exchange,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
    split_projection,
    state_shapes,
)
from lingpt.kernels.numerics import first_tokens, state_dtype

try:
    from torch import _is_functional_tensor
    from torch._C import (
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
        _is_tracing,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import is_legacy_batchedtensor

    HAS_SHORTCUTS = True
except ImportError:
    HAS_SHORTCUTS = False

Results = tuple[Tensor | None, ...]  # of an operator; None for what was not requested

_NO_STATE = (None,) * 4
_OUTPUTS = ("o", "stats", "S", "z", "c", "n")
_INPUTS = ("projected", "qkv", "q", "k", "v")  # a call has `projected`, `qkv`, or q, k and v
_GRADIENTS_OF = (*_INPUTS, "a", "b", "token_log_decay", "gate_bias", "S", "z", "c", "n")


class Backend(Protocol):
    """A module that computes both passes of a call."""

    FALLBACK: str  # where a call that tensor cores do not take runs, and how much slower; "" of tensor cores

    def unsupported_reason(self, call: Call) -> str | None:
        """Why the backend cannot serve this call, in words for a user; None if it can."""

    def forward(self, call: Call, exchange: Exchange | None = None) -> Outputs:
        """exchange: gives the initial state; the call has none, but asks for the final one."""

    def backward(
        self,
        call: Call,
        saved: Outputs,
        gradients: OutputGradients,
        out: tuple[Tensor, ...],
        exchange: Exchange | None = None,
    ) -> InputGradients:
        """Writes dq, dk and dv into `out` (last dimension contiguous); returns the other gradients.

        exchange: gives the final state's gradient; that of the initial state then means nothing.
        """


def choose(call: Call) -> Backend:
    """The backend for `call.backend` "cuda", "chunkwise" or "auto".

    "cuda" and "auto" take the first CUDA backend that can serve the call: tensor cores, those with a
    change to the call, fp32. If there is none, "cuda" raises UserError, and "auto" takes chunkwise. Whoever
    could expect faster is warned, once per reason: not about fp32 on the kernel in fp32, nor about float64,
    which no kernel takes, unless autocast promises 16 bits.
    """
    if call.backend == "chunkwise" or (call.backend == "auto" and call.device.type != "cuda"):
        return chunkwise
    if call.inputs[0].numel() == 0 and call.device.type == "cuda":
        return chunkwise  # the only one that handles empty inputs
    backends: tuple[Backend, ...] = (*cuda_backends(), chunkwise)
    reason = None
    for backend in backends:
        refusal = backend.unsupported_reason(call)
        if refusal is None:
            break
        reason = refusal
    if backend is chunkwise and call.backend == "cuda":
        raise UserError(f"backend='cuda' cannot run this: {reason}")
    own = torch.float64 if backend is chunkwise else torch.float32
    if reason and backend.FALLBACK and (call.dtype != own or torch.is_autocast_enabled("cuda")):
        warn_once(backend.FALLBACK, reason)
    return backend


@functools.cache
def cuda_backends() -> tuple[Backend, ...]:
    """The CUDA backends, imported when a CUDA tensor first arrives."""
    return importlib.import_module("lingpt.kernels.linear_attention.cuda").BACKENDS


@functools.cache
def warn_once(where: str, reason: str) -> None:
    """Warns that `linear_attention` runs `where`, such as "in fp32, …", and why."""
    warnings.warn(f"linear_attention runs {where}: {reason}", stacklevel=2)


def linear_attention_flops(B: int, N: int, H: int, D: int, causal: bool = True) -> int:
    """FLOPs of the forward pass: the matrix products of the chunkwise form, of causal ones the causal half.

    Per token and head 4·D² across chunks (q̂·S, and k̂vᵀ into S), and 4·C·D / 2 within chunks of C = 64
    tokens (q̂·k̂ and the weights times v, half of them masked). The backward pass counts twice that: two
    products for each, without recomputation.
    """
    within = 2 * min(N, chunkwise.CHUNK) * D if causal else 0
    return B * N * H * (4 * D * D + within)


def _forward(call: Call, exchange: Exchange | None = None) -> Results:
    call = call.unpacked()
    o, stats, state = choose(call).forward(call, exchange)
    return o, stats, *(state or _NO_STATE)


def _backward(given: Call, saved: Results, gradients: Results, exchange: Exchange | None = None) -> Results:
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
    found = choose(call).backward(call, outputs, d_outputs, out, exchange)
    d_log_decay, d_bias = found.token_log_decay, None
    if given.cu_seqlens is not None and d_log_decay is not None:
        d_log_decay = d_log_decay.masked_fill(first_tokens(given.cu_seqlens, *call.shape[:2])[..., None], 0)
    if given.gate_bias is not None:
        assert call.token_log_decay is not None and d_log_decay is not None
        d_sum = -torch.expm1(call.token_log_decay) * d_log_decay  # the derivative of ln σ is 1 − σ
        d_gate.copy_(d_sum)
        rest.zero_()
        d_log_decay, d_bias = None, d_sum.sum((0, 1))
    elif given.token_log_decay is None:  # only resets
        d_log_decay = None
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


def _fake_forward(call: Call) -> Results:
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


# The registration: the schema, shapes for the compiler, FLOPs and autograd.

_KINDS = get_type_hints(Call)
_NUMBERS = {kind: kind.__name__ for kind in (float, int, bool, str)}
_SCHEMA_TYPES = {Tensor | None: "Tensor?"} | _NUMBERS
_N_TENSORS = sum(kind not in _NUMBERS for kind in _KINDS.values())  # the first fields
# The types of the operator's arguments, excluding subclasses that override torch functions.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), *_NUMBERS}


def _call_of(args: Sequence[Any]) -> Call:
    return Call(*args[: len(_KINDS)])


def _run_backward(*args: Any) -> tuple[Tensor, ...]:
    rest = args[len(_KINDS) :]
    return filled(_backward(_call_of(args), rest[: len(_OUTPUTS)], rest[len(_OUTPUTS) :]))


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    inputs = [getattr(_call_of(args), name) for name in _GRADIENTS_OF]
    return filled(None if x is None else x.new_empty(x.shape) for x in inputs)


_arguments = [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in _KINDS.items()]
_forward_op = define(
    "linear_attention_fwd",
    _arguments,
    len(_OUTPUTS),
    run=lambda *args: filled(_forward(_call_of(args))),
    fake=lambda *args: filled(_fake_forward(_call_of(args))),
    flops=lambda *args, **_: _flops(_call_of(args)),
)
# The final state has the same names as the initial one, and Inductor rejects duplicate argument names.
_saved = [f"Tensor? saved_{name}" for name in _OUTPUTS]
_d_outputs = [f"Tensor? d{name}" for name in _OUTPUTS if name != "stats"]
_backward_op = define(
    "linear_attention_bwd",
    [*_arguments, *_saved, *_d_outputs],
    len(_GRADIENTS_OF),
    run=_run_backward,
    fake=_fake_backward,
    flops=lambda *args, **_: 2 * _flops(_call_of(args)),
)


def _save(ctx: Any, inputs: tuple, output: Results) -> None:
    ctx.save_for_backward(*inputs[:_N_TENSORS], *output)
    ctx.values = inputs[_N_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor | None, _dstats: None, *dstate: Tensor | None) -> Results:
    tensors, gradients = ctx.saved_tensors, (do, *dstate)
    call, saved = Call(*tensors[:_N_TENSORS], *ctx.values), tensors[_N_TENSORS:]
    observed = torch.is_grad_enabled() or not _is_unobserved((*gradients, tensors[0], *saved))
    # Gradients of a batch of losses (`is_grads_batched`) are a vmap that `_is_unobserved` does not see.
    if observed or any(x is not None and is_legacy_batchedtensor(x) for x in gradients):
        results = _backward_op(*call, *saved, *gradients)
    else:
        results = _backward(call, saved, gradients)
    found = dict(zip(_GRADIENTS_OF, results, strict=True))
    return tuple(None if x is None else found.get(name) for name, x in zip(_KINDS, call, strict=True))


def _refuse_second(ctx: Any, *_: Any) -> None:
    raise RuntimeError("linear_attention has no second derivative; backend='reference' has")


def _refuse_transform(ctx: Any, *_: Any) -> None:
    what = "neither forward mode nor torch.func's derivatives"
    raise RuntimeError(f"linear_attention has {what}; backend='reference' has")


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, direct: bool, *args: Any) -> Results:
        if direct:
            outputs = _forward(Call(*args))
        else:
            with _AutoDispatchBelowAutograd():
                outputs = _forward_op(*args)
        _save(ctx, args, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Results:
        return None, *_differentiate(ctx, *d_outputs)

    jvp = staticmethod(_refuse_transform)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with _AutoDispatchBelowAutograd():
            return _backward_op(*args)

    backward = staticmethod(_refuse_second)


def _forward_autograd(*args: Any) -> tuple[Tensor, ...]:
    if _are_functorch_transforms_active():  # torch.func's, except vmap, which is already resolved
        _refuse_transform(None)
    return filled(_Forward.apply(_is_unobserved(args), *args))


if HAS_SHORTCUTS:
    LIBRARY.impl("linear_attention_fwd", _forward_autograd, "Autograd")
    LIBRARY.impl("linear_attention_bwd", _Backward.apply, "Autograd")
else:
    torch.library.register_autograd(_forward_op.name(), _differentiate, setup_context=_save, lib=LIBRARY)
    torch.library.register_autograd(_backward_op.name(), _refuse_second, lib=LIBRARY)


def attend(call: Call) -> tuple[Any, ...]:
    """Calls the operator; if nothing observes it, only the autograd function, without the dispatcher, which
    gives None for outputs that were not requested."""
    # is_compiling() first: the compiler knows its value and does not trace the rest.
    if torch.compiler.is_compiling() or not _is_plain(call):
        return _forward_op(*call)
    return _Forward.apply(True, *call)


def attend_in_pieces(call: Call, context: Context) -> Tensor:
    """o of this rank's piece of the sequences; the call has no state, and is this piece's.

    Each pass computes first the piece's own state, or its adjoint, which the other ranks need, and then the
    rest from what the others gave.
    """
    return torch.compiler.disable(_Pieces.apply)(context, *call)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, *args: Any) -> Tensor:
        call = Call(*args)._replace(return_state=True)
        before = _Scan(context.state_before, decay := _decay_of_all_tokens(call))
        output: Any = _forward(call, before)
        call = call._replace(**before.found._asdict())
        ctx.save_for_backward(decay, *call[:_N_TENSORS], *output)
        ctx.context, ctx.values = context, call[_N_TENSORS:]
        return output[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Results:
        decay, *tensors = ctx.saved_tensors
        call, saved = Call(*tensors[:_N_TENSORS], *ctx.values), tuple(tensors[_N_TENSORS:])
        found = _backward(call, saved, (do, *_NO_STATE), _Scan(ctx.context.adjoint_after, decay))[:-4]
        of = dict(zip(_GRADIENTS_OF, found, strict=False))
        return None, *(None if x is None else of.get(name) for name, x in zip(_KINDS, call, strict=True))


class _Scan:
    """The exchange of a pass: from this piece's own state to what the scan over all ranks' finds, which is
    kept as `found`. States are one tensor there, [B, H, D² + 2D + 1]."""

    def __init__(self, scan: Callable[[Tensor, Tensor], Tensor], decay: Tensor) -> None:
        self._scan, self._decay = scan, decay

    def __call__(self, own: LinearAttentionState) -> LinearAttentionState:
        flat = torch.cat([x.flatten(2) if x.ndim > 2 else x.unsqueeze(2) for x in own], 2)
        parts = self._scan(flat, self._decay).split([x.shape[2:].numel() for x in own], 2)
        pairs = zip(parts, own, strict=True)
        self.found = LinearAttentionState(*(part.reshape(x.shape) for part, x in pairs))
        return self.found


def _decay_of_all_tokens(call: Call) -> Tensor:
    """By how much the tokens of a call decay what was before them, [B, H]."""
    call = call.unpacked()
    B, N, H, _ = call.shape
    dtype = state_dtype(call.dtype)
    if call.token_log_decay is not None:
        return call.token_log_decay.double().sum(1).exp().to(dtype)
    if call.head_log_decay is not None:
        return (call.head_log_decay.double() * N).exp().to(dtype).expand(B, H)
    return call.inputs[0].new_ones(B, H, dtype=dtype)


def _is_plain(call: Call) -> bool:
    """Whether the call may do without the dispatcher."""
    if not HAS_SHORTCUTS or _len_torch_function_stack() or _profiler_enabled() or _is_tracing():
        return False
    return _is_unobserved(call)


def _is_unobserved(args: Sequence[Any]) -> bool:
    """Whether all tensors are real, and no mode or transform that observes operators is active (a FLOP
    counter, a tracer, vmap). Autograd may be active."""
    if not HAS_SHORTCUTS:
        return False
    tensors = (x for x in args if isinstance(x, Tensor))
    real = _PLAIN_TYPES.issuperset(map(type, args)) and not (first := next(tensors)).is_meta
    observed = _len_torch_dispatch_stack() or _are_functorch_transforms_active()
    return real and not observed and not _is_functional_tensor(first)
