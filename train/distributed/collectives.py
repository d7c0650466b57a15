"""Collectives on Python objects, in the default process group or in another."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lingpt.common.errors import UserError

T = TypeVar("T")


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of `group` (by default the default group), by rank."""
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """The results of `function()` on every rank of `group`, by rank; the first UserError is raised on all."""
    outcome: T | UserError
    try:
        outcome = function()
    except UserError as error:
        outcome = error
    results: list[T] = []
    for other in all_gather_object(outcome, group):
        if isinstance(other, UserError):
            raise other
        results.append(other)
    return results
