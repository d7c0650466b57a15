"""What the benchmarks of whole models share: the source that results are of, and their tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from lingpt.bench.environment import check_same
from lingpt.bench.rows import BenchResults, BenchRow
from lingpt.train.runs.environment import git_revision, package_hash

R = TypeVar("R", bound=BenchRow)


@dataclass
class ModelBenchResults(BenchResults[R]):
    """Results that also record the source they are of: the hash of the package, and the commit."""

    @classmethod
    def begin(cls, here: dict[str, Any], save_to: Path | None, append: bool) -> Self:
        """New results for this code and the environment `here`; with `append`, those in `save_to`, if any.

        UserError if these are of another card, other versions or other code.
        """
        here = here | {"source": package_hash()}
        there = save_to if append and save_to and save_to.is_file() else None
        # The commit is recorded for the reader only: another commit may have the same code.
        results = cls.load(there) if there else cls(here | {"git": git_revision()})
        check_same(save_to, results.environment, here)
        return results


def made_on(environment: dict[str, Any]) -> str:
    """The head of a table: `NVIDIA H200, bf16-mixed, torch 2.11.0, …; commit 5123394, 2026-11-22`."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['card']}, {environment['precision']}, {versions}; "
        f"{_code(environment)}{environment['date']}"
    )


def _code(environment: dict[str, Any]) -> str:
    """`commit 5123394, `; empty for old results without it."""
    if git := environment.get("git"):
        return f"commit {git['revision'][:7]}{' with changes' if git['dirty'] else ''}, "
    source = environment.get("source")  # the hash of the installed code, without git
    return f"source {source}, " if source else ""


def markdown(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    """A Markdown table; lines with fewer cells than columns are padded with empty ones."""
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(line)} |{' |' * (len(columns) - len(line))}\n" for line in lines)


def number(value: float | None, format: str) -> str:
    """The value, formatted; a dash if it is not known."""
    return "–" if value is None else f"{value:{format}}"
