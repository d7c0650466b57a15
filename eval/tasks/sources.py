"""Reads benchmark splits from local JSONL, in the fields of their hub versions, as `sources.yaml` maps them.

Rows are read line by line into memory (MMLU is 7.5 MB): no cache folder, no lock, no network, and a bad line
is named by file and number.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.errors import UserError


@dataclass(frozen=True)
class SplitFile:
    """One split of a data set: its file in `EVAL_DATA` and its official number of rows."""

    file: str
    rows: int


@dataclass(frozen=True)
class Source:
    """A hub data set as local files, and lm-eval's folder of the tasks on it.

    `select` is the field that names the hub configuration, if any.
    """

    tasks: str
    fields: tuple[str, ...]
    splits: dict[str, SplitFile]
    select: str | None = None


@cache
def sources() -> dict[str, Source]:
    """Every data set that `EVAL_DATA` can stand in for, by `path` or `path/name` on the hub."""
    text = (resources.files("lingpt.eval.tasks") / "sources.yaml").read_text(encoding="utf-8")
    return {
        name: Source(
            tasks=entry["tasks"],
            fields=tuple(entry["fields"]),
            splits={split: SplitFile(**value) for split, value in entry["splits"].items()},
            select=entry.get("select"),
        )
        for name, entry in yaml.safe_load(text).items()
    }


def find_source(path: str, name: str | None) -> Source | None:
    """The local source of the hub data set `path` with configuration `name`."""
    return sources().get(f"{path}/{name}") or sources().get(path)


def split_file(folder: Path, source: Source, split: str) -> Path:
    """The file of a split; UserError where it does not exist."""
    file = folder / source.splits[split].file
    if not file.is_file():
        raise UserError(
            f"{folder} has no {file.name} (the {split} split): put it there, or leave EVAL_DATA unset"
        )
    return file


def read_split(folder: Path, source: Source, split: str, name: str | None) -> list[dict[str, Any]]:
    """Rows of `split`, of the configuration `name` where several share a file; UserError where one is bad."""
    file = split_file(folder, source, split)
    rows = read_rows(file, source.fields)
    if source.select is not None:
        rows = [row for row in rows if row[source.select] == name]
        if not rows:
            raise UserError(f"{file} has no row whose {source.select} is {name!r}")
    return list(rows)


def read_rows(file: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Every row of a file, checked to have `fields`; read once while the file stays as it is."""
    stat = file.stat()
    return _read(file, fields, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _read(file: Path, fields: Sequence[str], mtime: int, size: int) -> list[dict[str, Any]]:
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file}:{number}: not JSON ({error.msg}); the file may be cut off"
                ) from error
            missing = [field for field in fields if not isinstance(row, dict) or row.get(field) is None]
            if missing:
                raise UserError(f"{file}:{number}: no {missing[0]!r}; a line needs {', '.join(fields)}")
            rows.append(row)
    if not rows:
        raise UserError(f"{file} is empty")
    return rows


def file_hash(file: Path) -> str:
    """SHA-256 of a data file, so that a score records what it was measured on."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
