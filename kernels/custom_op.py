"""Operators of torch.library with an analytical backward, made from plain functions of one call object.

A call object is a NamedTuple: tensors first (`Tensor` or `Tensor | None`), then numbers, flags and strings.
Its annotations are the operator's schema: a new argument is a new field, without counting positions.

    attend = CustomOp("linear_attention", Call, forward=…, backward=…, …).register()
    o, stats, *state = attend(call)

registers lingpt::linear_attention_fwd and lingpt::linear_attention_bwd: their computation, shapes (for the
compiler), FLOPs (an operator without a formula counts as zero, so MFU would be wrong) and autograd.

Autograd is not `torch.library.register_autograd`'s, which spends 50 µs per call on a schema's defaults, and a
call that nothing observes skips the dispatcher: for short sequences that takes as long as the launches. Both
use private names of PyTorch. If a release lacks one, the public interface is used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

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

C = TypeVar("C", bound=tuple)  # the call object, a NamedTuple
Outputs = tuple[Tensor | None, ...]  # None for outputs that were not requested

_NUMBERS = {kind: kind.__name__ for kind in (float, int, bool, str)}
_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?"} | _NUMBERS
# The types of an operator's arguments, excluding subclasses that override torch functions.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), *_NUMBERS}
_library = torch.library.Library("lingpt", "FRAGMENT")


@dataclass(frozen=True)
class CustomOp(Generic[C]):
    """The parts of an operator.

    forward: call → outputs.
    fake_forward: the same on tensors without data.
    backward: (call, saved outputs, gradient or None of each differentiable output) → a gradient for each
        field in `gradients_of`, or None.
    flops: FLOPs of forward, from a call with shapes instead of tensors; backward counts twice that.
    outputs: the names of the outputs; `saved` (the first few) are kept for backward, `constant` have no
        gradient.
    """

    name: str
    call_type: type[C]
    forward: Callable[[C], Outputs]
    fake_forward: Callable[[C], Outputs]
    backward: Callable[[C, Outputs, Outputs], Outputs]
    flops: Callable[[Any], int]
    gradients_of: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...] = ()  # None (in a graph, empty) if not requested
    constant: tuple[str, ...] = ()

    def register(self) -> Callable[[C], tuple[Any, ...]]:
        """Registers the operator; returns the function that calls it."""
        kinds = get_type_hints(self.call_type)
        arguments = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in kinds.items())
        # The final state has the same names as the initial one, and Inductor rejects duplicate argument
        # names.
        rest = [f"saved_{name}" for name in self.saved]
        rest += [f"d{name}" for name in self.outputs if name not in self.constant]
        more = "".join(f", Tensor? {name}" for name in rest)

        def call_of(args: Sequence[Any]) -> C:
            return self.call_type(*args[: len(kinds)])

        def run_backward(*args: Any) -> tuple[Tensor, ...]:
            saved, gradients = args[len(kinds) :][: len(self.saved)], args[len(kinds) + len(self.saved) :]
            return _filled(self.backward(call_of(args), saved, gradients))

        def fake_backward(*args: Any) -> tuple[Tensor, ...]:
            inputs = [getattr(call_of(args), name) for name in self.gradients_of]
            return _filled(None if x is None else x.new_empty(x.shape) for x in inputs)

        forward = _define(
            f"{self.name}_fwd({arguments})",
            len(self.outputs),
            run=lambda *args: _filled(self.forward(call_of(args))),
            fake=lambda *args: _filled(self.fake_forward(call_of(args))),
            flops=lambda *args, **_: self.flops(call_of(args)),
        )
        backward = _define(
            f"{self.name}_bwd({arguments}{more})",
            len(self.gradients_of),
            run=run_backward,
            fake=fake_backward,
            flops=lambda *args, **_: 2 * self.flops(call_of(args)),
        )
        return _register_autograd(self, forward, backward)


def _define(
    signature: str, outputs: int, run: Callable, fake: Callable, flops: Callable
) -> torch._ops.OpOverload:
    """Defines an operator that returns so many tensors, except its autograd."""
    name = signature.partition("(")[0]
    _library.define(f"{signature} -> ({', '.join(['Tensor'] * outputs)})")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lingpt::{name}", fake, lib=_library)
    operator = getattr(torch.ops.lingpt, name)
    register_flop_formula(operator)(flops)
    return operator.default


def _filled(results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Replaces outputs that were not requested by empty tensors: an operator can return only tensors."""
    results = tuple(results)
    first = next(x for x in results if x is not None)
    return tuple(first.new_empty(0) if x is None else x for x in results)


def _register_autograd(
    op: CustomOp[C], forward: torch._ops.OpOverload, backward: torch._ops.OpOverload
) -> Callable[[C], tuple[Any, ...]]:
    """Registers the autograd functions; returns how to call `op`."""
    kinds = get_type_hints(op.call_type)
    n_tensors, n_saved = sum(kind in (Tensor, Tensor | None) for kind in kinds.values()), len(op.saved)
    gradient_index = [op.gradients_of.index(name) if name in op.gradients_of else None for name in kinds]
    constant = [op.outputs.index(name) for name in op.constant]
    differentiable = [i for i, name in enumerate(op.outputs) if name not in op.constant]

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:n_tensors], *output[:n_saved])
        ctx.values = inputs[n_tensors:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output[i] for i in constant))

    def differentiate(ctx, *d_outputs):
        tensors = ctx.saved_tensors
        call, saved = op.call_type(*tensors[:n_tensors], *ctx.values), tensors[n_tensors:]
        d_outputs = tuple(d_outputs[i] for i in differentiable)
        observed = torch.is_grad_enabled() or not _is_unobserved((*d_outputs, tensors[0], *saved))
        # Gradients of a batch of losses (`is_grads_batched`) are a vmap that `_is_unobserved` does not see.
        if observed or any(x is not None and is_legacy_batchedtensor(x) for x in d_outputs):
            gradients = backward(*call, *saved, *d_outputs)
        else:
            gradients = op.backward(call, saved, d_outputs)
        by_field = (None if i is None else gradients[i] for i in gradient_index)
        return tuple(None if x is None else g for x, g in zip(call, by_field, strict=True))

    def refuse(ctx, *_):
        raise RuntimeError(f"{op.name} has no second derivative; backend='reference' has")

    def refuse_transform(ctx, *_):
        what = "neither forward mode nor torch.func's derivatives"
        raise RuntimeError(f"{op.name} has {what}; backend='reference' has")

    if not HAS_SHORTCUTS:
        torch.library.register_autograd(forward.name(), differentiate, setup_context=save, lib=_library)
        torch.library.register_autograd(backward.name(), refuse, lib=_library)
        return lambda call: forward(*call)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, direct: bool, *args):
            if direct:
                outputs = op.forward(op.call_type(*args))
            else:
                with _AutoDispatchBelowAutograd():
                    outputs = forward(*args)
            save(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx, *d_outputs):
            return None, *differentiate(ctx, *d_outputs)

        jvp = staticmethod(refuse_transform)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with _AutoDispatchBelowAutograd():
                return backward(*args)

        backward = staticmethod(refuse)

    def forward_autograd(*args):
        if _are_functorch_transforms_active():  # torch.func's, except vmap, which is already resolved
            refuse_transform(None)
        return _filled(Forward.apply(_is_unobserved(args), *args))

    _library.impl(f"{op.name}_fwd", forward_autograd, "Autograd")
    _library.impl(f"{op.name}_bwd", Backward.apply, "Autograd")

    def run(call: C) -> tuple[Any, ...]:
        """Calls the operator; if nothing observes it, only the autograd function, without the dispatcher,
        which gives None for outputs that were not requested."""
        # is_compiling() first: the compiler knows its value and does not trace the rest.
        if torch.compiler.is_compiling() or not _is_plain_call(call):
            return forward(*call)
        return Forward.apply(True, *call)

    return run


def _is_plain_call(args: Sequence[Any]) -> bool:
    """Whether an operator may be called without the dispatcher, as nothing observes the call."""
    observed = _len_torch_function_stack() or _profiler_enabled() or _is_tracing()  # by torch.jit
    return not observed and _is_unobserved(args)


def _is_unobserved(args: Sequence[Any]) -> bool:
    """Whether all tensors are real, and no mode or transform that observes operators is active (a FLOP
    counter, a tracer, vmap). Autograd may be active."""
    if not HAS_SHORTCUTS:
        return False
    tensors = (x for x in args if isinstance(x, Tensor))
    real = _PLAIN_TYPES.issuperset(map(type, args)) and not (first := next(tensors)).is_meta
    observed = _len_torch_dispatch_stack() or _are_functorch_transforms_active()
    return real and not observed and not _is_functional_tensor(first)
