"""The device that a user names, what it is called in results, and the dtype to compute in."""

import os

import torch

from lingpt.common.errors import UserError, check_known, first_line

DTYPES = ("float32", "bfloat16", "float16", "float64")


def find_device(name: str, instead: str = "auto") -> torch.device:
    """The device called `name`; `auto` is the first GPU, or the CPU. UserError, with what to use `instead`,
    if it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
        device = torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"device {name!r}: {first_line(error)}; use --device {instead}") from error
    if device.type == "cpu" and device.index is not None:
        raise UserError(f"device {name!r}: the CPU has no number; use --device cpu")
    return device


def available_cores() -> int:
    """CPU cores that this process may use: fewer than the machine has under taskset, cpusets or SLURM."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def named_dtype(name: str) -> torch.dtype:
    """The dtype called `name`; UserError if it is none of DTYPES."""
    check_known("dtype", [name], DTYPES)
    return getattr(torch, name)


def decoding_dtype(name: str | None, device: torch.device) -> torch.dtype | None:
    """The dtype to generate text in: the named one (UserError as above); else, on a GPU that has bf16 (Ampere
    or later), bf16, which halves the bytes read per token; else None, the checkpoint's own."""
    if name is not None:
        return named_dtype(name)
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else None


def device_name(device: torch.device) -> str:
    """The device's name in results: the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
