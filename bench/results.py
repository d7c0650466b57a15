"""What all benchmarks share: rows in a JSON file, how they are measured in rounds, and their report.

Hosts and clocks drift, by 5 % up to a factor of two within a minute. So what is compared takes turns, in
rounds: a time is the median over the rounds, a ratio is taken within a round, and a bad minute does not
affect one row only. A cell that fails is a row with the reason.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from lingpt.bench.environment import environment
from lingpt.common.errors import UserError, check_known, first_line
from lingpt.common.files import read_json_object, write_errors, write_json, write_text
from lingpt.plots.figures import style_axes


@dataclass
class BenchRow:
    """The measurement of one cell, or why there is none. A time is the median of `by_round`.

    status: "ok", "oom", "refused" (a kernel or a package is missing), "error", or "skipped" (left out), each
    with its `reason`. If a later round fails, the row gets its status and keeps the times of earlier ones.
    """

    KEY: ClassVar[tuple[str, ...]]  # the fields that name the cell

    status: str = field(default="ok", kw_only=True)
    reason: str = field(default="", kw_only=True)
    session: str = field(default="", kw_only=True)  # start time of the command that measured it
    by_round: dict[str, list[float]] = field(default_factory=dict, kw_only=True)  # field → ms in each round

    @property
    def cell(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.KEY)

    @property
    def failure(self) -> str:
        """`oom: out of memory`; empty for a row that is ok."""
        return "" if self.status == "ok" else f"{self.status}: {self.reason}"

    def add_round(self, **times: float) -> None:
        """Adds the times (ms) of another round, by field; the fields become the medians."""
        for name, ms in times.items():
            self.by_round.setdefault(name, []).append(ms)
            setattr(self, name, statistics.median(self.by_round[name]))

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
    NAME: ClassVar[str]  # of the JSON file and the table

    environment: dict[str, Any]
    rows: list[R] = field(default_factory=list)

    @classmethod
    def begin(cls, device: torch.device, precision: str, save_to: Path | None, append: bool) -> Self:
        """New results for this machine and code; with `append`, those in `save_to`, if there are any.

        UserError if these are of another card, other versions or other code.
        """
        here = environment(device) | {"precision": precision}
        if not (append and save_to and save_to.is_file()):
            return cls.new(here, device)
        results = cls.load(save_to)
        compared = set(here) - {"date", "git"}  # another commit may have the same code
        if other := [key for key in here if key in compared and results.environment.get(key) != here[key]]:
            raise UserError(f"{save_to} is of another {', '.join(other)}: measure again, without --append")
        return results

    @classmethod
    def new(cls, here: dict[str, Any], device: torch.device) -> Self:
        return cls(here)

    def row(self, *cell: Any) -> R | None:
        return next((row for row in self.rows if row.cell == cell), None)

    def is_done(self, *cell: Any) -> bool:
        """Whether this cell was tried, with any outcome; skipped cells may be tried again."""
        row = self.row(*cell)
        return row is not None and row.status != "skipped"

    def put(self, row: R) -> None:
        """Adds the row, or replaces the earlier one of its cell."""
        for index, earlier in enumerate(self.rows):
            if earlier.cell == row.cell:
                self.rows[index] = row
                return
        self.rows.append(row)

    def ratio(self, row: R | None, than: R | None, field: str = "ms") -> float | None:
        """The row's time over that of `than`: the median of the rounds' ratios.

        None if one of the two was not measured, or in another session: no round has both.
        """
        if row is None or than is None or row.session != than.session:
            return None
        rounds = list(zip(row.by_round.get(field, ()), than.by_round.get(field, ()), strict=False))
        return statistics.median(a / b for a, b in rounds) if rounds else None

    def table(self) -> str:
        """The rows as Markdown, with the conditions of the measurement."""
        raise NotImplementedError

    def draw(self, folder: Path) -> list[Path]:
        """Draws the figures, as far as they were measured; returns their paths."""
        raise NotImplementedError

    def report(self, folder: Path) -> None:
        """Prints the table and writes it and the figures beside the JSON file."""
        table, path = self.table(), folder / f"{self.NAME}.md"
        with write_errors(path):
            write_text(path, table)
        print(table)
        written = [folder / f"{self.NAME}.json", path, *self.draw(folder)]
        print("\n".join(f"wrote {path}" for path in written))

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


class Skipped(Exception):
    """Raised while a row is measured: why it is left out."""


class Session(Generic[R]):
    """One call of a benchmark: gives rows turns until the budget (seconds) is spent, and saves after each."""

    def __init__(
        self, results: BenchResults[R], device: torch.device, budget: float, save_to: Path | None
    ) -> None:
        self.results, self.device, self.budget, self.save_to = results, device, budget, save_to
        self.deadline = time.perf_counter() + budget
        self.name = datetime.now().astimezone().isoformat()

    def turn(self, row: R, measure: Callable[[R], None]) -> bool:
        """Has `measure` fill the row, or its next round; what it raises becomes the row's status and reason.

        False if it had no turn: a later round of a row that has failed, or beyond the budget.
        """
        late, later_round = time.perf_counter() > self.deadline, row.session == self.name
        if later_round and (late or row.status != "ok"):
            return False
        row.session = self.name
        try:
            if late:
                raise Skipped(f"the budget of {self.budget:.0f} s is spent")
            measure(row)
        except Skipped as reason:
            row.status, row.reason = "skipped", str(reason)
        except torch.OutOfMemoryError:
            row.status, row.reason = "oom", "out of memory"
        except UserError as error:
            row.status, row.reason = "refused", str(error)
        except Exception as error:  # a cell that fails is a row, not the end of the benchmark
            row.status, row.reason = "error", f"{type(error).__name__}: {first_line(error)}"
        self.results.put(row)
        if self.save_to is not None:
            self.results.save(self.save_to)
        if self.device.type == "cuda":
            gc.collect()  # a model and its wrappers refer to each other
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # after an illegal access a process cannot use the GPU again
                raise UserError(
                    f"{row.reason}: this process has lost the GPU; run it again with --append true"
                ) from error
        return not late


def chosen(what: str, names: Iterable[str], known: Collection[str], default: Iterable[str]) -> list[str]:
    """The names without duplicates, `default` if there are none; UserError for one that is not `known`."""
    names = list(dict.fromkeys(names))
    check_known(what, names, known)
    return names or list(default)


def made_on(environment: dict[str, Any]) -> str:
    """The head of a table: `NVIDIA H200, bf16-mixed, torch 2.11.0, …; commit 5123394, 2026-11-22`."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    if git := environment.get("git"):
        code = f"commit {git['revision'][:7]}{' with changes' if git['dirty'] else ''}, "
    else:  # the hash of the installed code, without git
        code = f"source {environment['source']}, " if "source" in environment else ""
    return f"{environment['card']}, {environment['precision']}, {versions}; {code}{environment['date']}"


def markdown(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    """A Markdown table; lines with fewer cells than columns are padded with empty ones. A cell has no `|`."""
    table = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for line in lines:
        cells = " | ".join(cell.replace("|", "/") for cell in line)
        table += f"| {cells} |{' |' * (len(columns) - len(line))}\n"
    return table


def in_k(n: int) -> str:
    """A length as a tick of an axis: `8k`, `300k`, `512`."""
    size = next((size for size in (1024, 1000) if n % size == 0), 1)
    return f"{n // size}k" if size > 1 else str(n)


def length_axis(panel: Any, lengths: Sequence[int], **settings: Any) -> None:
    """Styles a panel over lengths: a logarithmic axis with a tick at each."""
    panel.set(xscale="log", **settings)
    panel.set_xticks(lengths, list(map(in_k, lengths)))
    panel.minorticks_off()
    style_axes(panel)


def missing(drawn: Iterable[float | None]) -> str:
    """A caption's sentence if one of the values that a figure draws is not known; else nothing."""
    why = "A point is missing where a measurement failed or was left out: the table says why."
    return why if None in drawn else ""


def number(value: float | None, format: str, unit: float = 1.0) -> str:
    """The value in the unit, formatted; a dash if it is not known."""
    return "–" if value is None or math.isnan(value) else f"{value / unit:{format}}"
