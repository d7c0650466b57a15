"""Precision and order of sums in the PyTorch forms, whatever precision a training run allows elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, and of computation in the PyTorch forms: fp32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """Computes fp32 products in fp32: no autocast, no TF32 (CUDA), no bf16 (oneDNN), whatever the caller
    allows.

    These products contain the sums over a long sequence, and training runs often allow TF32 for speed.
    """
    if device.type == "meta":  # computes nothing, and has no autocast
        yield
        return
    with torch.autocast(device.type, enabled=False):
        if torch.compiler.is_compiling():  # a graph cannot change the backends' precision
            yield
            return
        backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
        matmul = backend.matmul
        before = matmul.fp32_precision
        if before != "ieee":
            matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            if before != "ieee":
                matmul.fp32_precision = before


def reverse_running_sum(x: Tensor, dim: int) -> Tensor:
    """Σ_{j≥i} x_j along `dim`, with x's shape and floating-point dtype, in which it is summed."""
    return x.flip(dim).cumsum(dim).flip(dim)
