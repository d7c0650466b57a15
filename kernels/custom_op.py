"""Operators of torch.library with an analytical backward, made from plain functions of one call object.

A call object is a NamedTuple: tensors first (`Tensor` or `Tensor | None`), then numbers, flags and strings.
Its annotations are the operator's schema: a new argument is a new field, without counting positions.

    attend = CustomOp("linear_attention", Call, forward=…, backward=…, …).register()
    o, stats, *state = attend(call)

registers lingpt::linear_attention_fwd and lingpt::linear_attention_bwd: their computation, shapes (for the
compiler), FLOPs (an operator without a formula counts as zero, so MFU would be wrong) and autograd.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lingpt.kernels.torch_internals import (
    HAS_SHORTCUTS,
    below_autograd,
    is_batched,
    is_plain_call,
    is_unobserved,
    transforms_active,
)

C = TypeVar("C", bound=tuple)  # the call object, a NamedTuple
Outputs = tuple[Tensor | None, ...]  # None for outputs that were not requested

_NUMBERS = {kind: kind.__name__ for kind in (float, int, bool, str)}
_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?"} | _NUMBERS
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
        forward_name, backward_name = f"{self.name}_fwd", f"{self.name}_bwd"
        fields = get_type_hints(self.call_type)
        arguments = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in fields.items())
        # The final state has the same names as the initial one, and Inductor rejects duplicate argument
        # names.
        saved = "".join(f", Tensor? saved_{name}" for name in self.saved)
        gradients = "".join(f", Tensor? d{name}" for name in self._differentiable)
        _library.define(f"{forward_name}({arguments}) -> ({_tensors(self.outputs)})")
        _library.define(f"{backward_name}({arguments}{saved}{gradients}) -> ({_tensors(self.gradients_of)})")
        _library.impl(forward_name, self._run_forward, "CompositeExplicitAutograd")
        _library.impl(backward_name, self._run_backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lingpt::{forward_name}", self._fake_forward, lib=_library)
        torch.library.register_fake(f"lingpt::{backward_name}", self._fake_backward, lib=_library)
        forward, backward = (getattr(torch.ops.lingpt, name) for name in (forward_name, backward_name))
        register_flop_formula(forward)(lambda *args, **_: self.flops(self._call(args)))
        register_flop_formula(backward)(lambda *args, **_: 2 * self.flops(self._call(args)))
        return _register_autograd(self, forward.default, backward.default)

    @property
    def _differentiable(self) -> list[str]:
        return [name for name in self.outputs if name not in self.constant]

    def _call(self, args: tuple) -> C:
        return self.call_type(*args[: len(self.call_type._fields)])  # type: ignore[attr-defined]

    def _run_forward(self, *args: Any) -> tuple[Tensor, ...]:
        return _filled(self.forward(self._call(args)))

    def _run_backward(self, *args: Any) -> tuple[Tensor, ...]:
        call = self._call(args)
        rest = args[len(call) :]
        return _filled(self.backward(call, rest[: len(self.saved)], rest[len(self.saved) :]))

    def _fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        return _filled(self.fake_forward(self._call(args)))

    def _fake_backward(self, *args: Any) -> tuple[Tensor, ...]:
        call = self._call(args)
        inputs = [getattr(call, name) for name in self.gradients_of]
        return _filled([None if x is None else x.new_empty(x.shape) for x in inputs])


def _tensors(names: tuple[str, ...]) -> str:
    return ", ".join(["Tensor"] * len(names))


def _filled(results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Replaces outputs that were not requested by empty tensors: an operator can return only tensors."""
    results = tuple(results)
    first = next(x for x in results if x is not None)
    return tuple(first.new_empty(0) if x is None else x for x in results)


def _register_autograd(
    op: CustomOp[C], forward: torch._ops.OpOverload, backward: torch._ops.OpOverload
) -> Callable[[C], tuple[Any, ...]]:
    """Registers own autograd functions, to save host time (torch_internals.py); returns how to call `op`."""
    fields = op.call_type._fields  # type: ignore[attr-defined]
    n_tensors = sum(kind in (Tensor, Tensor | None) for kind in get_type_hints(op.call_type).values())
    n_saved, constant = len(op.saved), [op.outputs.index(name) for name in op.constant]
    gradient_index = [op.gradients_of.index(name) if name in op.gradients_of else None for name in fields]
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
        observed = torch.is_grad_enabled() or not is_unobserved((*d_outputs, tensors[0], *saved))
        if not observed and not is_batched(d_outputs):
            gradients = op.backward(call, saved, d_outputs)
        else:
            gradients = backward(*call, *saved, *d_outputs)
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
                with below_autograd():
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
            with below_autograd():
                return backward(*args)

        backward = staticmethod(refuse)

    def forward_autograd(*args):
        if transforms_active():  # torch.func's, except vmap, which is already resolved
            refuse_transform(None)
        return _filled(Forward.apply(is_unobserved(args), *args))

    _library.impl(f"{op.name}_fwd", forward_autograd, "Autograd")
    _library.impl(f"{op.name}_bwd", Backward.apply, "Autograd")

    def run(call: C) -> tuple[Any, ...]:
        """Calls the operator; if nothing observes it, only the autograd function, without the dispatcher,
        which gives None for outputs that were not requested."""
        # is_compiling() first: the compiler knows its value and does not trace the rest.
        if torch.compiler.is_compiling() or not is_plain_call(call):
            return forward(*call)
        return Forward.apply(True, *call)

    return run
