"""A benchmark's results as rows in a JSON file: each cell is tried once, and a failure is a row, too.

The base of `results.py` here and of the benchmarks of whole models (`lingpt.bench`).
"""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from lingpt.common.errors import UserError, first_line
from lingpt.common.files import read_json_object, write_errors, write_json


@dataclass
class BenchRow:
    """The measurement of one cell, or why there is none.

    status: "ok", "oom", "refused" (a kernel or a package is missing), "error", or "skipped" (the budget was
    spent), each with its `reason`.
    """

    KEY: ClassVar[tuple[str, ...]]  # the fields that name the cell

    status: str = field(default="ok", kw_only=True)
    reason: str = field(default="", kw_only=True)

    @property
    def cell(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.KEY)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The row that `BenchResults.as_dict` wrote; keys that are not fields are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


R = TypeVar("R", bound=BenchRow)


@dataclass
class BenchResults(Generic[R]):
    """The environment of a benchmark and a row for each cell; a subclass may add fields of the whole run."""

    ROW: ClassVar[type[BenchRow]]
    COMMAND: ClassVar[str]  # the command that writes the file

    environment: dict[str, Any]
    rows: list[R] = field(default_factory=list)

    def row(self, *cell: Any) -> R | None:
        return next((row for row in self.rows if row.cell == cell), None)

    def is_done(self, *cell: Any) -> bool:
        """Whether this cell was tried, with any outcome; skipped cells may be tried again."""
        row = self.row(*cell)
        return row is not None and row.status != "skipped"

    def put(self, row: R) -> None:
        """Adds the row, or replaces the earlier one of its cell."""
        earlier = self.row(*row.cell)
        index = len(self.rows) if earlier is None else self.rows.index(earlier)
        self.rows[index : index + 1] = [row]

    def as_dict(self, row: R) -> dict[str, Any]:
        """The row as it stands in the file."""
        return asdict(row)

    def save(self, path: Path) -> None:
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        with write_errors(path):
            write_json(path, head | {"rows": list(map(self.as_dict, self.rows))})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads results; UserError if there is no such file, or it does not hold results of this kind."""
        if not path.exists():
            raise UserError(f"no results at {path}: run `{cls.COMMAND}` first")
        found = read_json_object(path)
        known = {field.name for field in fields(cls)}
        try:
            head = {key: value for key, value in found.items() if key in known}
            rows = [cls.ROW.from_dict(row) for row in found["rows"]]
            return cls(**(head | {"environment": dict(found["environment"]), "rows": rows}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{path} holds no results of `{cls.COMMAND}` ({error!r}): move it away"
            ) from error


def attempt(row: R, work: Callable[[], R], device: torch.device) -> R:
    """The row that `work` returns; if it fails, this row with the status and the reason."""
    try:
        row = work()
    except torch.OutOfMemoryError:
        row = replace(row, status="oom", reason="out of memory")
    except UserError as error:
        row = replace(row, status="refused", reason=str(error))
    except Exception as error:  # a cell that fails is a row, not the end of the benchmark
        row = replace(row, status="error", reason=f"{type(error).__name__}: {first_line(error)}")
    if device.type == "cuda":
        gc.collect()  # a model and its wrappers refer to each other
        torch.cuda.empty_cache()
    return row


def skipped(row: R, reason: str) -> R:
    """The row of a cell that was left out; a later benchmark may measure it."""
    return replace(row, status="skipped", reason=reason)


def budget_spent(budget: float) -> str:
    """The reason for skipping once the budget, in seconds, is spent."""
    return f"the budget of {budget:.0f} s is spent"
