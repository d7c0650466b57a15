"""The results of a benchmark run, and their JSON file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lingpt.bench.kernels.shapes import Shape
from lingpt.bench.rows import BenchResults, BenchRow

Cell = tuple[str, Shape]  # an implementation's name, and the shape it runs at

OLD_FIELDS = {"peer": "implementation", "beside": "ratio_to_base", "graph": "graph_reason"}  # old: new


@dataclass
class Row(BenchRow):
    """One implementation at one shape. Times are in ms: the median of a round's runs, and over several rounds
    the median of these medians. Memory is in U (one [B, N, H, D] tensor).

    status: "ok" (forward only if `reason` says why there is no backward pass); "wrong" (timed, but its result
    is not its function's: ratios do not use it), or one of BenchRow's.
    """

    KEY: ClassVar[tuple[str, ...]] = ("implementation", "shape")

    implementation: str
    shape: Shape
    dtype: str
    session: str = ""  # start time of the call of run_bench that measured it; unknown in older files
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None  # forward and backward, one after the other
    forward_graph_ms: float | None = None  # replayed from a CUDA graph
    backward_graph_ms: float | None = None
    graph_reason: str = ""  # why there is no replay time
    forward_memory: float | None = None  # peak beyond the inputs and do
    both_memory: float | None = None
    forward_flops: int = 0
    repeats: int = 0  # runs per time and round
    rounds: int = 0  # rounds in the times; 0: not timed
    by_round: dict[str, list[float]] = field(default_factory=dict)  # the times of each round, if several
    # Forward and backward: replay time over that of the base (graphs.base_of), both replayed interleaved.
    ratio_to_base: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS of o and of each gradient
    tolerance: float = 0.0

    def is_correct(self, field: str) -> bool:
        """Whether what `field` timed was correct: a wrong gradient does not invalidate a forward time."""
        forward = field.startswith("forward")
        if self.status == "wrong" and forward:
            return self.errors.get("o", float("inf")) <= self.tolerance
        return self.status == "ok" and (forward or self.backward_ms is not None)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        values = {OLD_FIELDS.get(name, name): value for name, value in values.items()}
        before_rounds = {"rounds": int(values["both_ms"] is not None)}  # even older files: one, if timed
        return super().from_dict(before_rounds | values | {"shape": Shape(**values["shape"])})


@dataclass
class Results(BenchResults[Row]):
    """One run: its environment, the memory bandwidth, and a row for each implementation and shape."""

    ROW = Row
    COMMAND = "lingpt bench"

    copy_bandwidth: float = field(kw_only=True)  # bytes per second, read plus written
    # implementation → direction → bytes, from the GPU's counters
    bytes_moved: dict[str, dict[str, float]] = field(default_factory=dict)
    empty_node_ms: list[float] = field(default_factory=list)  # an empty autograd node: forward, backward

    def correct_row(self, implementation: str, shape: Shape, field: str = "both_ms") -> Row | None:
        """The cell's row, if what `field` timed is correct (by default forward and backward)."""
        row = self.row(implementation, shape)
        return row if row is not None and row.is_correct(field) else None

    def floor_ms(self, shape: Shape, units: int) -> float:
        """The time of moving `units` × U at the copy bandwidth."""
        return units * shape.unit_bytes() / self.copy_bandwidth * 1e3

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"shape": row.shape._asdict()}
