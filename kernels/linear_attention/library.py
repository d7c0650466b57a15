"""Linear attention as operators of torch.library: shapes for the compiler, an analytical backward, FLOPs.

    lingpt::linear_attention_{fwd,bwd}        (q, k, v, ...)
    lingpt::linear_attention_qkv_{fwd,bwd}    (qkv, cos, sin, ...), the fused projection; one dqkv

Both pairs have the functions below in common: three tensors `inputs`, then the `Settings`. `attend` and
`attend_qkv` call them for op.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lingpt.kernels.linear_attention import chunkwise, dispatch
from lingpt.kernels.linear_attention.common import LinearAttentionState, state_dtype, state_shapes


class Settings(NamedTuple):
    """What both pairs take besides their three tensors, in the schema's order and types."""

    b: Tensor | None  # [H], or None for
    b_number: float  # a number: a tensor made of it would be a copy to the GPU in every call
    log_decay: Tensor | None
    S: Tensor | None
    z: Tensor | None
    c: Tensor | None
    n: Tensor | None
    normalize_qk: bool
    causal: bool
    return_state: bool
    backend: str

    @property
    def coefficient(self) -> float | Tensor:
        return self.b_number if self.b is None else self.b

    @property
    def initial_state(self) -> LinearAttentionState | None:
        return _state(self.S, self.z, self.c, self.n)


Inputs = tuple[Tensor, Tensor, Tensor]  # q, k, v; or qkv [B, N, 3, H, D], cos, sin

SETTINGS_SCHEMA = (
    "Tensor? b, float b_number, Tensor? log_decay, Tensor? S, Tensor? z, Tensor? c, Tensor? n, "
    "bool normalize_qk, bool causal, bool return_state, str backend"
)
SAVED_SCHEMA = "Tensor o, Tensor stats, Tensor do, Tensor? dS, Tensor? dz, Tensor? dc, Tensor? dn"


def _state(*parts: Tensor | None) -> LinearAttentionState | None:
    return None if parts[0] is None else LinearAttentionState(*parts)


def _split(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """q, k, v, cos and sin of either pair."""
    return (*inputs[0].unbind(2), *inputs[1:]) if inputs[0].ndim == 5 else (*inputs, None, None)


def _forward(inputs: Inputs, s: Settings) -> tuple[Tensor | None, ...]:
    """o, stats and the four parts of the final state; None where it was not asked for."""
    q, k, v, cos, sin = _split(inputs)
    o, stats, state = dispatch.forward(
        q, k, v, s.coefficient, s.log_decay, cos, sin, s.initial_state,
        s.normalize_qk, s.causal, s.return_state, s.backend,
    )  # fmt: skip
    return o, stats, *(state if s.return_state else (None,) * 4)


def _gradients(
    inputs: Inputs, s: Settings, o: Tensor, stats: Tensor, do: Tensor, dstate: LinearAttentionState | None
) -> tuple[Tensor | None, ...]:
    """Of the inputs, of b and of the four parts of the initial state; None where nothing was asked for."""
    q, k, v, cos, sin = _split(inputs)
    gradients = _like_inputs(inputs)
    out = gradients if cos is None else gradients[0].unbind(2)
    db, dinitial = dispatch.backward(
        q, k, v, s.coefficient, s.log_decay, cos, sin, o, stats, s.initial_state, do, dstate,
        s.normalize_qk, s.causal, out, s.backend,
    )  # fmt: skip
    return *gradients, None if s.b is None else db, *((None,) * 4 if s.S is None else dinitial)


def _like_inputs(inputs: Inputs) -> list[Tensor]:
    """Contiguous buffers for the gradients: three, or one for a packed input (cos and sin have none)."""
    x = inputs[:1] if inputs[0].ndim == 5 else inputs
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x]


# The operators: flat arguments, and nothing but tensors as results.


def _forward_operator(*args):
    return _filled(*_forward(args[:3], Settings(*args[3:])))


def _backward_operator(*args):
    return _filled(*_gradients(args[:3], Settings(*args[3:-7]), *args[-7:-4], _state(*args[-4:])))


def _fake_forward(*args):
    q, s = _split(args[:3])[0], Settings(*args[3:])
    B, N, H, D = q.shape
    o, stats = q.new_empty(B, N, H, D), q.new_empty(3, B, H, N, dtype=state_dtype(q.dtype))
    shapes = state_shapes(B, H, D)
    return _filled(o, stats, *(stats.new_empty(x) if s.return_state else None for x in shapes))


def _fake_backward(*args):
    s = Settings(*args[3:-7])
    others = (None if x is None else x.new_empty(x.shape) for x in (s.b, *s[3:7]))
    return _filled(*_like_inputs(args[:3]), *others)


def _filled(first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Empty tensors in place of what was not asked for."""
    dtype = state_dtype(first.dtype)
    return first, *(first.new_empty(0, dtype=dtype) if x is None else x for x in others)


# FLOPs, for torch.utils.flop_counter: without a formula an operator counts as nothing, and MFU lies.


def linear_attention_flops(B: int, N: int, H: int, D: int, causal: bool = True) -> int:
    """FLOPs of the forward pass: the matrix products of the chunkwise form, causal ones counted once.

    Per token and head 4·D² across chunks (q̂·S, and k̂vᵀ into S), and 4·C·D / 2 within chunks of C = 64 tokens
    (q̂·k̂ and the weights times v, half of them behind the mask). The backward pass counts twice that: two
    products for each, and nothing for what is computed again.
    """
    within = 2 * min(N, chunkwise.CHUNK) * D if causal else 0
    return B * N * H * (4 * D * D + within)


def _forward_flops(x_shape, *args, **kwargs) -> int:
    B, N, H, D = (*x_shape[:2], *x_shape[-2:])
    return linear_attention_flops(B, N, H, D, Settings(*args[2 : 2 + len(Settings._fields)]).causal)


def _backward_flops(*args, **kwargs) -> int:
    return 2 * _forward_flops(*args)


# Registration.

_library = torch.library.Library("lingpt", "FRAGMENT")


def _define(name: str, inputs: str, n_gradients: int) -> Callable:
    """Defines `name`_fwd, and `name`_bwd, which returns gradients of the first inputs, b and the state.

    Returns the way to call `name`_fwd from Python.
    """
    forward, backward = f"{name}_fwd", f"{name}_bwd"
    _library.define(f"{forward}({inputs}, {SETTINGS_SCHEMA}) -> ({_tensors(2 + 4)})")
    _library.define(
        f"{backward}({inputs}, {SETTINGS_SCHEMA}, {SAVED_SCHEMA}) -> ({_tensors(n_gradients + 1 + 4)})"
    )
    _library.impl(forward, _forward_operator, "CompositeExplicitAutograd")
    _library.impl(backward, _backward_operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lingpt::{forward}", _fake_forward, lib=_library)
    torch.library.register_fake(f"lingpt::{backward}", _fake_backward, lib=_library)
    operators = getattr(torch.ops.lingpt, forward), getattr(torch.ops.lingpt, backward)
    register_flop_formula(operators[0])(_forward_flops)
    register_flop_formula(operators[1])(_backward_flops)
    return _define_autograd(forward, backward, *(operator.default for operator in operators))


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _define_autograd(forward_name: str, backward_name: str, forward, backward) -> Callable:
    """Autograd, saving the inputs, o and stats.

    By functions of our own: torch.library.register_autograd spends 50 µs a call on a schema's defaults.
    """

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, direct: bool, *args):
            inputs, s = args[:3], Settings(*args[3:])
            if direct:
                results = _forward(inputs, s)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    results = forward(*args)
            ctx.save_for_backward(*inputs, s.b, *s[2:7], *results[:2])
            ctx.b_number, ctx.options = s.b_number, s[7:]
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(results[1])
            return results

        @staticmethod
        def backward(ctx, do, _, *dstate):
            *inputs, b, log_decay, S, z, c, n, o, stats = ctx.saved_tensors
            s = Settings(b, ctx.b_number, log_decay, S, z, c, n, *ctx.options)
            do = torch.zeros_like(o) if do is None else do
            dstate = _complete(dstate, o) if s.return_state else None
            if _nobody_listens(do) and not torch.is_grad_enabled():
                gradients = _gradients(inputs, s, o, stats, do, dstate)
            else:
                gradients = backward(*inputs, *s, o, stats, do, *(dstate or (None,) * 4))
            *dx, db, dS, dz, dc, dn = gradients
            dx += [None] * (3 - len(dx))  # cos and sin
            dinitial = (None,) * 4 if S is None else (dS, dz, dc, dn)
            return None, *dx, None if b is None else db, None, None, *dinitial, None, None, None, None

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with torch._C._AutoDispatchBelowAutograd():
                return backward(*args)

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError("linear attention has no second derivative; backend='reference' has")

    def forward_autograd(*args):
        return _filled(*Forward.apply(_nobody_listens(*args), *args))

    _library.impl(forward_name, forward_autograd, "Autograd")
    _library.impl(backward_name, Backward.apply, "Autograd")

    def attend(inputs: Inputs, settings: Settings) -> tuple[Tensor | None, ...]:
        """The operator; where nobody would see it, autograd alone, and None for a state not asked for."""
        # The compiler's question first: it knows the answer and never traces the rest.
        if torch.compiler.is_compiling() or not _plain_eager(*inputs, *settings):
            return forward(*inputs, *settings)
        return Forward.apply(True, *inputs, *settings)

    return attend


def _plain_eager(*args) -> bool:
    """Whether nobody would see an operator that is called with `args`: it costs the host several µs."""
    observed = (
        torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()
        or torch._C._is_tracing()  # by torch.jit
    )
    return not observed and _nobody_listens(*args)


# The types of the schema, without those that override what torch does.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), float, bool, str}


def _nobody_listens(*args) -> bool:
    """Whether going through the dispatcher once more would only cost time: real tensors, and no mode or
    transform that wants to see the operator (a FLOP counter, a tracer, vmap).
    """
    real = _PLAIN_TYPES.issuperset(map(type, args)) and not args[0].is_meta
    observed = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return real and not observed and not torch._is_functional_tensor(args[0])


def _complete(dstate: tuple[Tensor | None, ...], o: Tensor) -> LinearAttentionState | None:
    """The final state's gradient: all four parts or none."""
    if all(x is None for x in dstate):
        return None
    B, _, H, D = o.shape
    pairs = zip(dstate, state_shapes(B, H, D), strict=True)
    dtype = state_dtype(o.dtype)
    return LinearAttentionState(*(o.new_zeros(shape, dtype=dtype) if x is None else x for x, shape in pairs))


attend = _define("linear_attention", "Tensor q, Tensor k, Tensor v", n_gradients=3)
attend_qkv = _define("linear_attention_qkv", "Tensor qkv, Tensor cos, Tensor sin", n_gradients=1)
