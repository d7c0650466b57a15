"""Operators of PyTorch, `lingpt::…`, that cost a call little host time: `torch.library.custom_op` takes 40 µs
more, which is as long as several launches."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("lingpt", "FRAGMENT")


def define(
    name: str, arguments: Sequence[str], outputs: int, run: Callable, fake: Callable, flops: Callable
) -> torch._ops.OpOverload:
    """Defines an operator that returns so many tensors, without its autograd. arguments: "Tensor? x", ….

    An operator without a formula of FLOPs counts as zero, so MFU would be wrong.
    """
    LIBRARY.define(f"{name}({', '.join(arguments)}) -> ({', '.join(['Tensor'] * outputs)})")
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lingpt::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.lingpt, name)
    register_flop_formula(operator)(flops)
    return operator.default


def filled(results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Replaces outputs that were not requested by empty tensors: an operator can return only tensors."""
    results = tuple(results)
    first = next(x for x in results if x is not None)
    return tuple(first.new_empty(0) if x is None else x for x in results)
