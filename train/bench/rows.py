"""What the benchmarks of whole models share: rows in a JSON file, each tried once, and whence they come."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from lingpt.common.errors import UserError, first_line
from lingpt.common.files import read_json_object, write_errors, write_json
from lingpt.kernels.bench.environment import check_same
from lingpt.train.environment import git_revision, package_hash


@dataclass
class BenchRow:
    """What was measured in one cell, or why not.

    status: "ok", "oom", "refused" (a kernel or a package that is not there), "error", or "skipped" (the time
    was over), each with its `reason`.
    """

    KEY: ClassVar[tuple[str, ...]]  # the fields that name the cell

    status: str = field(default="ok", kw_only=True)
    reason: str = field(default="", kw_only=True)

    @property
    def cell(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.KEY)


R = TypeVar("R", bound=BenchRow)


@dataclass
class BenchResults(Generic[R]):
    """Where it ran, and a row for each cell."""

    ROW: ClassVar[type[BenchRow]]
    COMMAND: ClassVar[str]  # that writes the file

    environment: dict[str, Any]
    rows: list[R] = field(default_factory=list)

    def row(self, *cell: Any) -> R | None:
        return next((row for row in self.rows if row.cell == cell), None)

    def is_done(self, *cell: Any) -> bool:
        """Whether it was tried, with whatever outcome; what was skipped may be tried again."""
        row = self.row(*cell)
        return row is not None and row.status != "skipped"

    def put(self, row: R) -> None:
        """Adds the row, or replaces the earlier one of its cell."""
        earlier = self.row(*row.cell)
        index = len(self.rows) if earlier is None else self.rows.index(earlier)
        self.rows[index : index + 1] = [row]

    def as_dict(self, row: R) -> dict[str, Any]:
        """What the file holds of a row."""
        return asdict(row)

    def save(self, path: Path) -> None:
        with write_errors(path):
            write_json(path, {"environment": self.environment, "rows": list(map(self.as_dict, self.rows))})

    @classmethod
    def load(cls, path: Path) -> Self:
        """UserError where it is not such a file."""
        known = {field.name for field in fields(cls.ROW)}
        try:
            found = read_json_object(path)
            rows = [cls.ROW(**{k: v for k, v in row.items() if k in known}) for row in found["rows"]]
            return cls(dict(found["environment"]), rows)  # type: ignore[arg-type]
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} holds no results of `{cls.COMMAND}` ({error!r})") from error

    @classmethod
    def begin(cls, here: dict[str, Any], save_to: Path | None, append: bool) -> Self:
        """New results of this code and of the environment `here`; with `append` those of `save_to`, if any.

        UserError where these are of another card, other versions or other code.
        """
        here = here | {"source": package_hash()}
        there = save_to if append and save_to and save_to.is_file() else None
        # The commit stands beside the hash for the reader: another one may have the same code.
        results = cls.load(there) if there else cls(here | {"git": git_revision()})
        check_same(save_to, results.environment, here)
        return results


def attempt(row: R, work: Callable[[], R], device: torch.device) -> R:
    """What `work` makes of the row; the row with its status and reason where that fails."""
    try:
        row = work()
    except torch.OutOfMemoryError:
        row = replace(row, status="oom", reason="out of memory")
    except UserError as error:
        row = replace(row, status="refused", reason=str(error))
    except Exception as error:  # one that cannot do this is a row, not the end of the benchmark
        row = replace(row, status="error", reason=f"{type(error).__name__}: {first_line(error)}")
    if device.type == "cuda":
        gc.collect()  # a model and its wrappers refer to each other
        torch.cuda.empty_cache()
    return row


def skipped(row: R, budget: float) -> R:
    """The row of a cell that the budget, in seconds, left out."""
    return replace(row, status="skipped", reason=f"the budget of {budget:.0f} s is spent")


def made_on(environment: dict[str, Any]) -> str:
    """`NVIDIA H200, bf16-mixed, torch 2.11.0, …; commit 5123394, 2026-11-22`, for the head of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['card']}, {environment['precision']}, {versions}; "
        f"{_code(environment)}{environment['date']}"
    )


def _code(environment: dict[str, Any]) -> str:
    """`commit 5123394, `; nothing for results of before it was recorded."""
    if git := environment.get("git"):
        return f"commit {git['revision'][:7]}{' with changes' if git['dirty'] else ''}, "
    source = environment.get("source")  # the hash of what is installed, where there is no git
    return f"source {source}, " if source else ""


def markdown(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    """A table; of a line with fewer cells than columns the rest stays empty."""
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(line)} |{' |' * (len(columns) - len(line))}\n" for line in lines)


def number(value: float | None, format: str) -> str:
    """The value, or a dash where it is not known."""
    return "–" if value is None else f"{value:{format}}"
