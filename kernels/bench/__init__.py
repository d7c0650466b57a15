"""Benchmarks our kernels against the baselines: named implementations and shapes, one runner, JSON, plots."""

from lingpt.kernels.bench.implementations import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS, Implementation
from lingpt.kernels.bench.plots import draw
from lingpt.kernels.bench.record import staleness
from lingpt.kernels.bench.results import Results, Row
from lingpt.kernels.bench.runner import run_bench
from lingpt.kernels.bench.shapes import SWEEPS, Shape
from lingpt.kernels.bench.targets import targets_table
from lingpt.kernels.bench.warm import warm_up

__all__ = [
    "DEFAULT_IMPLEMENTATIONS",
    "IMPLEMENTATIONS",
    "SWEEPS",
    "Implementation",
    "Results",
    "Row",
    "Shape",
    "draw",
    "run_bench",
    "staleness",
    "targets_table",
    "warm_up",
]
