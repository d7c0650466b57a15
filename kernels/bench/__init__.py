"""Our kernels against their peers, as data: peers and shapes by name, one runner, JSON, plots from it."""

from lingpt.kernels.bench.bars import bars_table
from lingpt.kernels.bench.measure import Row
from lingpt.kernels.bench.peers import DEFAULT_PEERS, PEERS, Peer
from lingpt.kernels.bench.plots import draw
from lingpt.kernels.bench.record import RECORD, staleness
from lingpt.kernels.bench.runner import Results, run_bench
from lingpt.kernels.bench.shapes import SWEEPS, Shape
from lingpt.kernels.bench.warm import warm_up

__all__ = [
    "DEFAULT_PEERS",
    "PEERS",
    "RECORD",
    "SWEEPS",
    "Peer",
    "Results",
    "Row",
    "Shape",
    "bars_table",
    "draw",
    "run_bench",
    "staleness",
    "warm_up",
]
