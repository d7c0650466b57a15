"""Benchmarks our kernels against the baselines: named implementations and shapes, one runner, JSON, plots."""

from lingpt.bench.kernels.implementations import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS, Implementation
from lingpt.bench.kernels.plots import draw
from lingpt.bench.kernels.results import Results, Row
from lingpt.bench.kernels.runner import run_bench
from lingpt.bench.kernels.shapes import SWEEPS, Shape
from lingpt.bench.kernels.targets import targets_table
from lingpt.bench.kernels.warm import warm_up
from lingpt.bench.record import staleness

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
