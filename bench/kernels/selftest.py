"""A quick check of the CUDA kernels on this machine's GPU, against float64: `lingpt kernels test`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lingpt.bench.kernels.call import BenchCall, nan_first, relative_errors
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.shapes import Shape

SHAPES = tuple(Shape(2, N, 3, D) for D in (64, 128) for N in (1, 63, 64, 257, 2048))
DTYPES = (torch.bfloat16, torch.float16)
OURS = ("ours", "ours-decay", "ours-packed")


class Check(NamedTuple):
    """One call of one form of the operator: its worst relative RMS error, over o and the gradients."""

    name: str
    shape: Shape
    dtype: torch.dtype
    worst: float
    limit: float
    reason: str  # why it could not run

    @property
    def passed(self) -> bool:
        return not self.reason and self.worst <= self.limit


def self_test(names: tuple[str, ...] = OURS, device: str = "cuda") -> list[Check]:
    """Checks forward and backward of each implementation at short, odd and chunk-sized lengths."""
    cells = [(name, dtype, shape) for name in names for dtype in DTYPES for shape in SHAPES]
    return [_check(name, shape, dtype, torch.device(device)) for name, dtype, shape in cells]


def _check(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Check:
    implementation = IMPLEMENTATIONS[name]
    if reason := implementation.unsupported_reason(shape, dtype, device):
        return Check(name, shape, dtype, math.nan, implementation.tolerance, reason)
    call = BenchCall(implementation, shape, dtype, device)
    call.both()
    # dq and dk of a single token are zero, so their relative error is meaningless
    errors = relative_errors(call)
    known = [error for key, error in errors.items() if shape.N > 1 or key in ("o", "dv")]
    worst = max(known, key=nan_first)
    return Check(name, shape, dtype, worst, implementation.tolerance, "")
