"""Linear attention as operators of torch.library: shapes for the compiler, an analytical backward, FLOPs.

    lingpt::linear_attention_{fwd,bwd}        (q, k, v, ...)
    lingpt::linear_attention_qkv_{fwd,bwd}    (qkv, cos, sin, ...), the fused projection; one dqkv

Both pairs have the functions below in common: three tensors x, then the `Settings`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lingpt.kernels.linear import chunkwise, dispatch
from lingpt.kernels.linear.common import LinearAttentionState, state_dtype, state_shapes


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


SETTINGS_SCHEMA = (
    "Tensor? b, float b_number, Tensor? log_decay, Tensor? S, Tensor? z, Tensor? c, Tensor? n, "
    "bool normalize_qk, bool causal, bool return_state, str backend"
)
SAVED_SCHEMA = "Tensor o, Tensor stats, Tensor do, Tensor? dS, Tensor? dz, Tensor? dc, Tensor? dn"


def _state(*parts: Tensor | None) -> LinearAttentionState | None:
    return None if parts[0] is None else LinearAttentionState(*parts)


def _split(x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    """q, k, v, cos and sin of either pair."""
    return (*x[0].unbind(2), x[1], x[2]) if x[0].ndim == 5 else (*x, None, None)


def _forward(*args):
    q, k, v, cos, sin = _split(args[:3])
    s = Settings(*args[3:])
    o, stats, state = dispatch.forward(
        q, k, v, s.coefficient, s.log_decay, cos, sin, s.initial_state,
        s.normalize_qk, s.causal, s.return_state, s.backend,
    )  # fmt: skip
    return o, stats, *(state if s.return_state else _nothing(q, 4))


def _gradients(*args):
    """Of the inputs, of b and of the four parts of the initial state; None where nothing was asked for."""
    q, k, v, cos, sin = _split(args[:3])
    s, (o, stats, do, *dstate) = Settings(*args[3:-7]), args[-7:]
    gradients = _like_inputs(args[:3])
    db, dinitial = dispatch.backward(
        q, k, v, s.coefficient, s.log_decay, cos, sin, o, stats, s.initial_state, do, _state(*dstate),
        s.normalize_qk, s.causal, _split((*gradients, cos, sin))[:3], s.backend,
    )  # fmt: skip
    return *gradients, None if s.b is None else db, *((None,) * 4 if s.S is None else dinitial)


def _backward(*args):
    q = _split(args[:3])[0]
    return tuple(_nothing(q, 1)[0] if x is None else x for x in _gradients(*args))


def _like_inputs(x: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Contiguous buffers for the gradients: three, or one for a packed input (cos and sin have none)."""
    return [t.new_empty(t.shape) for t in (x[:1] if x[0].ndim == 5 else x)]


def _nothing(q: Tensor, count: int) -> list[Tensor]:
    """Empty tensors in place of what was not asked for: an operator's results are tensors."""
    return [q.new_empty(0, dtype=state_dtype(q.dtype)) for _ in range(count)]


def _fake_forward(*args):
    q, s = _split(args[:3])[0], Settings(*args[3:])
    B, N, H, D = q.shape
    o, stats = q.new_empty(B, N, H, D), q.new_empty(3, B, H, N, dtype=state_dtype(q.dtype))
    state = (stats.new_empty(shape) for shape in state_shapes(B, H, D)) if s.return_state else _nothing(q, 4)
    return o, stats, *state


def _fake_backward(*args):
    q, s = _split(args[:3])[0], Settings(*args[3:-7])
    db, dinitial = (_nothing(q, 1) if s.b is None else [s.b]), (_nothing(q, 4) if s.S is None else s[3:7])
    return *_like_inputs(args[:3]), *(x.new_empty(x.shape) for x in (*db, *dinitial))


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


def _define(name: str, inputs: str, n_gradients: int) -> None:
    """Defines `name`_fwd, and `name`_bwd, which returns gradients of the first inputs, b and the state."""
    forward, backward = f"{name}_fwd", f"{name}_bwd"
    _library.define(f"{forward}({inputs}, {SETTINGS_SCHEMA}) -> ({_tensors(2 + 4)})")
    _library.define(
        f"{backward}({inputs}, {SETTINGS_SCHEMA}, {SAVED_SCHEMA}) -> ({_tensors(n_gradients + 1 + 4)})"
    )
    _library.impl(forward, _forward, "CompositeExplicitAutograd")
    _library.impl(backward, _backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lingpt::{forward}", _fake_forward, lib=_library)
    torch.library.register_fake(f"lingpt::{backward}", _fake_backward, lib=_library)
    operators = getattr(torch.ops.lingpt, forward), getattr(torch.ops.lingpt, backward)
    register_flop_formula(operators[0])(_forward_flops)
    register_flop_formula(operators[1])(_backward_flops)
    _define_autograd(forward, backward, *(operator.default for operator in operators))


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _define_autograd(forward_name: str, backward_name: str, forward, backward) -> None:
    """Autograd, saving the inputs, o and stats.

    By functions of our own: torch.library.register_autograd spends 50 µs a call on a schema's defaults.
    """

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            if _nobody_listens(args[0]):
                results = _forward(*args)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    results = forward(*args)
            s = Settings(*args[3:])
            ctx.save_for_backward(*args[:3], s.b, *s[2:7], *results[:2])
            ctx.settings = s._replace(b=None, log_decay=None, S=None, z=None, c=None, n=None)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(results[1])
            return results

        @staticmethod
        def backward(ctx, do, _, *dstate):
            *x, b, log_decay, S, z, c, n, o, stats = ctx.saved_tensors
            s = ctx.settings._replace(b=b, log_decay=log_decay, S=S, z=z, c=c, n=n)
            do = torch.zeros_like(o) if do is None else do
            run = _gradients if _nobody_listens(do) and not torch.is_grad_enabled() else backward
            *dx, db, dS, dz, dc, dn = run(*x, *s, o, stats, do, *_complete(dstate, o, s.return_state))
            dx += [None] * (3 - len(dx))  # cos and sin
            dinitial = (None,) * 4 if S is None else (dS, dz, dc, dn)
            return *dx, None if b is None else db, None, None, *dinitial, None, None, None, None

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with torch._C._AutoDispatchBelowAutograd():
                return backward(*args)

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError("linear attention has no second derivative; backend='reference' has")

    _library.impl(forward_name, Forward.apply, "Autograd")
    _library.impl(backward_name, Backward.apply, "Autograd")


def _nobody_listens(x: Tensor) -> bool:
    """Whether going through the dispatcher once more would only cost time: real tensors, and no mode that
    wants to see the operator (a FLOP counter, a tracer).
    """
    real = type(x) is Tensor and not x.is_meta and not torch._is_functional_tensor(x)
    return real and not torch._C._len_torch_dispatch_stack()


def _complete(dstate, o: Tensor, returned: bool) -> tuple[Tensor | None, ...]:
    """The final state's gradient: all four parts or none. What stood in for a state not returned has none."""
    if not returned or all(x is None for x in dstate):
        return (None,) * 4
    B, _, H, D = o.shape
    shapes = state_shapes(B, H, D)
    pairs = zip(dstate, shapes, strict=True)
    return tuple(o.new_zeros(shape, dtype=state_dtype(o.dtype)) if x is None else x for x, shape in pairs)


_define("linear_attention", "Tensor q, Tensor k, Tensor v", n_gradients=3)
_define("linear_attention_qkv", "Tensor qkv, Tensor cos, Tensor sin", n_gradients=1)
