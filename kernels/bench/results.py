"""What a run of the benchmark found, and the JSON file that keeps it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, write_json
from lingpt.kernels.bench.shapes import Shape

Cell = tuple[str, Shape]  # an implementation's name, and the shape it runs at

OLD_FIELDS = {"peer": "implementation", "beside": "ratio_to_base", "graph": "graph_reason"}  # in older files


@dataclass
class Row:
    """One implementation at one shape. Times are in ms: the median of a round's runs, and over several rounds
    the median of theirs. Memory is in U (one [B, N, H, D] tensor).

    status: "ok" (forward alone where `reason` tells of no backward pass); "wrong" (timed, but its result is
    not its function's: no ratio is drawn from it); "oom"; "skipped" (`reason` says why); "error".
    """

    implementation: str
    shape: Shape
    dtype: str
    session: str = ""  # when the call of run_bench began that measured it; unknown in older files
    status: str = "ok"
    reason: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None  # forward and backward, one after the other
    forward_graph_ms: float | None = None  # replayed from a CUDA graph
    backward_graph_ms: float | None = None
    graph_reason: str = ""  # why there is no replay
    forward_memory: float | None = None  # peak beyond the inputs and do
    both_memory: float | None = None
    forward_flops: int = 0
    repeats: int = 0  # runs of each time in a round
    rounds: int = 0  # that went into the times; 0: not timed
    by_round: dict[str, list[float]] = field(default_factory=dict)  # the times of each, if several
    # Forward and backward: replay time over that of the base (graphs.base_of), both replayed interleaved.
    ratio_to_base: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS of o and of each gradient
    tolerance: float = 0.0

    @property
    def cell(self) -> Cell:
        return self.implementation, self.shape

    def is_correct(self, field: str) -> bool:
        """Whether what `field` timed is its function: a wrong gradient does not invalidate a forward time."""
        forward = field.startswith("forward")
        if self.status == "wrong" and forward:
            return self.errors.get("o", float("inf")) <= self.tolerance
        return self.status == "ok" and (forward or self.backward_ms is not None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": self.shape._asdict()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Row:
        fields = {OLD_FIELDS.get(name, name): value for name, value in fields.items()}
        before_rounds = {"rounds": int(fields["both_ms"] is not None)}  # still older files: one, if timed
        return cls(**(before_rounds | fields | {"shape": Shape(**fields["shape"])}))


@dataclass
class Results:
    """One run: where it ran, the memory bandwidth there, and a row for each implementation and shape."""

    environment: dict[str, Any]
    copy_bandwidth: float  # bytes a second, read and written both counted
    rows: list[Row] = field(default_factory=list)
    # implementation → direction → bytes, by the GPU's counters
    bytes_moved: dict[str, dict[str, float]] = field(default_factory=dict)
    empty_node_ms: list[float] = field(default_factory=list)  # autograd doing nothing: forward, backward

    def row(self, implementation: str, shape: Shape, field: str = "both_ms") -> Row | None:
        """Its row at this shape, if what `field` timed is correct (by default forward and backward)."""
        cell = implementation, shape
        return next((row for row in self.rows if row.cell == cell and row.is_correct(field)), None)

    def floor_ms(self, shape: Shape, units: int) -> float:
        """The time of moving `units` × U at the copy bandwidth."""
        return units * shape.unit_bytes() / self.copy_bandwidth * 1e3

    def is_done(self, implementation: str, shape: Shape) -> bool:
        """Whether this cell was tried, with whatever outcome; what was skipped may be tried again."""
        return any(row.cell == (implementation, shape) and row.status != "skipped" for row in self.rows)

    def put(self, row: Row) -> None:
        """Adds the row, or replaces the earlier one of its cell."""
        index = next((i for i, r in enumerate(self.rows) if r.cell == row.cell), len(self.rows))
        self.rows[index : index + 1] = [row]

    def save(self, path: Path) -> None:
        head = {
            "environment": self.environment,
            "copy_bandwidth": self.copy_bandwidth,
            "bytes_moved": self.bytes_moved,
            "empty_node_ms": self.empty_node_ms,
        }
        write_json(path, head | {"rows": [row.as_dict() for row in self.rows]})

    @classmethod
    def load(cls, path: Path) -> Results:
        """UserError where there are none, or the file is damaged."""
        if not path.exists():
            raise UserError(f"no results at {path}: run `lingpt bench` first")
        fields = read_json_object(path)
        try:
            return cls(**(fields | {"rows": [Row.from_dict(row) for row in fields["rows"]]}))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no results of `lingpt bench`: move it away") from error
