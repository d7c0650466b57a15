"""In which precision and order the PyTorch forms compute, whatever a training run allows around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in, and what the PyTorch forms compute in: fp32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32: no autocast, no TF32 (CUDA), no bf16 (oneDNN), whatever the caller allows.

    The sums over a long sequence live in these products, and a training run commonly allows TF32 for speed.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    matmul = backend.matmul
    before = matmul.fp32_precision
    if before != "ieee":
        matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before != "ieee":
            matmul.fp32_precision = before


def running_sum(x: Tensor, dim: int) -> Tensor:
    """`x.cumsum(dim)`, also on CUDA with deterministic algorithms, where PyTorch raises an error."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return running_sum_by_products(x, dim)
    return x.cumsum(dim)


def reverse_running_sum(x: Tensor, dim: int) -> Tensor:
    """Σ_{j≥i} x_j, by `running_sum`."""
    return running_sum(x.flip(dim), dim).flip(dim)


def running_sum_by_products(x: Tensor, dim: int, block: int = 128) -> Tensor:
    """The same from products with a triangle of ones, and a running sum of the blocks' totals."""
    x = x.movedim(dim, -1)
    blocks = F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    sums = blocks @ torch.ones(block, block, dtype=x.dtype, device=x.device).triu()
    if blocks.shape[-2] > 1:
        totals = running_sum_by_products(sums[..., -1], -1, block)
        sums = sums + F.pad(totals[..., :-1], (1, 0)).unsqueeze(-1)
    return sums.flatten(-2)[..., : x.shape[-1]].movedim(-1, dim)
