"""The results of `lingpt bench`: their JSON file and table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.shapes import Shape
from lingpt.bench.results import BenchResults, BenchRow, made_on, markdown, number

DIRECTIONS = ("forward", "backward")
COLUMNS = (
    "shape", "implementation", "ms", "replayed, ms", "× ours", "× lower bound", "memory, U", "error",
)  # fmt: skip


@dataclass
class Row(BenchRow):
    """One implementation at one shape. Times are in ms, memory is in U (one [B, N, H, D] tensor).

    status: "ok" (forward only if `reason` says why there is no backward pass); "wrong" (timed once, but its
    result is not its function's: ratios do not use it), or one of BenchRow's.
    """

    KEY: ClassVar[tuple[str, ...]] = ("implementation", "shape")

    implementation: str
    shape: Shape
    dtype: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None  # forward and backward, one after the other
    forward_graph_ms: float | None = None  # replayed from a CUDA graph
    backward_graph_ms: float | None = None
    graph_reason: str = ""  # why there is no replay time
    forward_memory: float | None = None  # peak beyond the inputs and do
    both_memory: float | None = None
    repeats: int = 0  # runs per time and round
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS of o and of each gradient
    tolerance: float = 0.0

    def is_correct(self, field: str) -> bool:
        """Whether what `field` timed was correct: a wrong gradient does not invalidate a forward time."""
        if getattr(self, field) is None:
            return False
        if self.status == "wrong" and field.startswith("forward"):
            return self.errors.get("o", float("inf")) <= self.tolerance
        return self.status == "ok"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict(values | {"shape": Shape(**values["shape"])})


@dataclass
class Results(BenchResults[Row]):
    """One run: its environment, the memory bandwidth, and a row for each implementation and shape."""

    ROW = Row
    COMMAND = "lingpt bench"
    NAME = "results"

    copy_bandwidth: float = field(kw_only=True)  # bytes per second, read plus written
    # implementation → direction → bytes, from the GPU's counters
    bytes_moved: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def new(cls, here: dict[str, Any], device: torch.device) -> Self:
        size = 1 << 30 if device.type == "cuda" else 1 << 24
        return cls(here, copy_bandwidth=Clock(device).copy_bandwidth(size))

    def correct_row(self, implementation: str, shape: Shape, field: str = "both_ms") -> Row | None:
        """The cell's row, if what `field` timed is correct (by default forward and backward)."""
        row = self.row(implementation, shape)
        return row if row is not None and row.is_correct(field) else None

    def lower_bound_ms(self, shape: Shape, units: int) -> float:
        """The time of moving `units` × U at the copy bandwidth."""
        return units * shape.unit_bytes() / self.copy_bandwidth * 1e3

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"shape": row.shape._asdict()}

    def table(self) -> str:
        """A line for each row; what runs nowhere is listed below with its reason."""
        head = (
            f"# Kernels\n\n{made_on(self.environment)}, kernels {self.environment['source_hash']}.\n\n"
            "Forward / backward, of eager calls and of replayed CUDA graphs; medians, the L2 cache flushed. "
            "× ours: eager, within a round. Lower bound: the least possible memory traffic at the speed of a "
            f"copy, here {self.copy_bandwidth / 1e12:.3g} TB/s. Memory: the peak beyond the inputs, of "
            "forward and of both passes; U is one tensor [B, N, H, D]. Error: the largest relative RMS, "
            "against float64.\n\n"
        )
        ran = {row.implementation for row in self.rows if row.status != "skipped"}
        lines = [self._cells(row) for row in self.rows if row.implementation in ran]
        absent = {row.implementation: row.failure for row in self.rows if row.implementation not in ran}
        below = "".join(f"\n- {name}: {reason}" for name, reason in absent.items())
        return head + markdown(COLUMNS, lines) + (f"{below}\n" if below else "")

    def _cells(self, row: Row) -> list[str]:
        cells = [str(row.shape), row.implementation]
        if row.forward_ms is None:
            return [*cells, row.failure]
        ours = self.row("ours", row.shape)
        eager, replayed, ratios, bounds = [], [], [], []
        for direction, units in zip(DIRECTIONS, IMPLEMENTATIONS[row.implementation].min_traffic, strict=True):
            field = f"{direction}_ms"
            ms, correct = getattr(row, field), row.is_correct(field)
            eager.append(ms)
            replayed.append(getattr(row, f"{direction}_graph_ms"))
            bounds.append(ms / self.lower_bound_ms(row.shape, units) if correct else None)
            comparable = correct and ours is not None and ours.is_correct(field)
            ratios.append(self.ratio(row, ours, field) if comparable else None)
        note = row.failure or row.reason
        return [
            *cells,
            _pair(eager, ".3f") + (f", {note}" if note else ""),
            row.graph_reason or _pair(replayed, ".3f"),
            _pair(ratios, ".2f"),
            _pair(bounds, ".2f"),
            _pair([row.forward_memory, row.both_memory], ".2f"),
            number(max(row.errors.values(), default=None), ".1e"),
        ]

    def draw(self, folder: Path) -> list[Path]:
        from lingpt.bench.kernels.plots import draw

        return draw(self, folder)


def _pair(values: list[float | None], format: str) -> str:
    return " / ".join(number(value, format) for value in values) if any(values) else "–"
