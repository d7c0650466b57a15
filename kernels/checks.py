"""Checks of arguments that the operators share. UserError, in one line, for what does not fit."""

from __future__ import annotations

import numbers
import reprlib

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lingpt.common.errors import UserError

NUMBERS = (int, float, numbers.Real)  # the last one, of NumPy for instance, takes the longest to check


def check_are_tensors(**given: object) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise UserError(f"{name} must be a tensor; got {shown(x)}")


def check_flags(**given: object) -> None:
    for name, x in given.items():
        if not isinstance(x, bool):
            raise UserError(f"{name} must be True or False; got {shown(x)}")


def check_cu_seqlens(cu_seqlens: object, like: Tensor) -> None:
    """like: a tensor on the device where they must be."""
    check_are_tensors(cu_seqlens=cu_seqlens)
    assert isinstance(cu_seqlens, Tensor)
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0] or not integers:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise UserError(f"cu_seqlens must be int32 or int64 [sequences + 1]; got {got}")
    if cu_seqlens.device != like.device:
        raise UserError(f"cu_seqlens must be on {like.device}; got {cu_seqlens.device}")


def refuse_forward_mode(message: str, *tensors: Tensor | None) -> None:
    """Raises RuntimeError with the message if a tensor is of forward mode: operators that have a backward
    pass alone drop its tangents."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(message)


def shown(x: object) -> str:
    """The beginning of its `repr`, in one line."""
    return " ".join(reprlib.repr(x).split())
