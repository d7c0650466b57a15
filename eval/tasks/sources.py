"""Reads benchmark splits from local JSONL, in the fields of their hub versions, as `sources.yaml` maps them.

Rows are read line by line into memory (MMLU is 7.5 MB): no cache folder, no lock, no network, and an error
names the file and the line.
"""

import json
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.errors import UserError
from lingpt.common.files import read_bytes

WITHOUT = "leave out --data (and EVAL_DATA) to take it from the hub"


def _texts(value: Any, counts: Container[int] = range(2, 1000)) -> bool:
    return isinstance(value, list) and len(value) in counts and all(isinstance(text, str) for text in value)


def _labelled(value: Any) -> bool:
    if not isinstance(value, dict) or not (_texts(value.get("text")) and _texts(value.get("label"))):
        return False
    return len(value["text"]) == len(value["label"])


# Kinds of a field: a test of its value (and its row, whose earlier fields have passed), and the kind in
# words.
KINDS: dict[str, tuple[Callable[[Any, dict[str, Any]], bool], str]] = {
    "text": (lambda value, row: isinstance(value, str), "a string"),
    "words": (
        lambda value, row: isinstance(value, str) and len(value.split()) > 1,
        "a string of two or more words",
    ),
    "text with a blank": (lambda value, row: isinstance(value, str) and "_" in value, "a string with a _"),
    "three texts": (lambda value, row: _texts(value, (3,)), "a list of three strings"),
    "four texts": (lambda value, row: _texts(value, (4,)), "a list of four strings"),
    "labelled texts": (
        lambda value, row: _labelled(value),
        '{"text": […], "label": […]}, two or more of each',
    ),
    "label of choices": (lambda value, row: value in row["choices"]["label"], "one of the choices' labels"),
    "index of choices": (
        lambda value, row: type(value) is int and 0 <= value < len(row["choices"]),
        "the number of a choice, the first one's 0",
    ),
    "texts of answers": (
        lambda value, row: isinstance(value, dict) and _texts(value.get("text"), range(1000)),
        '{"text": […]}, a list of strings',
    ),
    "cause or effect": (lambda value, row: value in ("cause", "effect"), '"cause" or "effect"'),
    "0, 1, 2 or 3": (lambda value, row: value in ("0", "1", "2", "3"), 'a string of "0" to "3"'),
    "0 or 1": (lambda value, row: type(value) is int and value in (0, 1), "0 or 1"),
    "1 or 2": (lambda value, row: value in ("1", "2"), 'the string "1" or "2"'),
}


def _one_question(row: dict[str, Any]) -> dict[str, Any]:
    """SIQA with context and question in one text, split at the last space: the stock prompt joins the two
    with a space, so any split gives the same prompt."""
    context, _, question = row["question"].rpartition(" ")
    answers = dict(zip(("answerA", "answerB", "answerC"), row["choices"], strict=True))
    return {"context": context, "question": question, **answers, "label": str(row["label"] + 1)}


READERS: dict[str | None, Callable[[dict[str, Any]], dict[str, Any]]] = {
    None: lambda row: row,
    "one_question": _one_question,
}


@dataclass(frozen=True)
class SplitFile:
    """One split of a data set: its file in `EVAL_DATA` and its official number of rows."""

    file: str
    rows: int


@dataclass(frozen=True)
class Source:
    """A hub data set as local files, and lm-eval's folder of the tasks on it.

    `fields`: the fields of a row, each of one of `KINDS`; a field follows those that its kind looks at.
    `task`: the task's name, where the files do not begin with it.
    `select` is the field that names the hub configuration, if any; `reader` is one of `READERS`.
    """

    tasks: str
    fields: dict[str, str]
    splits: dict[str, SplitFile]
    select: str | None = None
    reader: str | None = None
    task: str | None = None


@cache
def sources() -> dict[str, Source]:
    """Every data set that `EVAL_DATA` can replace, by `path` or `path/name` on the hub."""
    text = (resources.files("lingpt.eval.tasks") / "sources.yaml").read_text(encoding="utf-8")
    found = {}
    for name, entry in yaml.safe_load(text).items():
        splits = {split: SplitFile(**value) for split, value in entry.pop("splits").items()}
        found[name] = Source(splits=splits, **entry)
    return found


def official_questions(task: str) -> int | None:
    """The number of questions of lm-eval's `task`; None if it is not known."""
    for source in sources().values():
        split = source.splits.get("test") or source.splits["validation"]
        if source.task == task or split.file.startswith(f"{task}_"):
            return split.rows
    return None


def find_source(path: str, name: str | None) -> Source | None:
    """The local source of the hub data set `path` with configuration `name`."""
    return sources().get(f"{path}/{name}") or sources().get(path)


def benchmark_folder(given: str | None) -> Path | None:
    """The folder of local files: the given one, or the environment's; None to use the hub."""
    folder = given or os.environ.get("EVAL_DATA")
    return Path(folder) if folder else None


def check_folder(folder: Path) -> None:
    """Raises UserError if the folder of local files does not exist."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder} (--data, or EVAL_DATA)")


def split_file(folder: Path, source: Source, split: str) -> Path:
    """The file of a split; UserError if it does not exist."""
    file = folder / source.splits[split].file
    if not file.is_file():
        raise UserError(f"{folder} has no {file.name} (the {split} split): put it there, or {WITHOUT}")
    return file


def read_split(folder: Path, source: Source, split: str, name: str | None) -> list[dict[str, Any]]:
    """Rows of `split`, of the configuration `name` if several share a file; UserError if one is invalid."""
    file = split_file(folder, source, split)
    rows = read_rows(file, source.fields)
    if source.select is not None:
        rows = [row for row in rows if row[source.select] == name]
        if not rows:
            raise UserError(f"{file} has no row whose {source.select} is {name!r}")
    return [READERS[source.reader](row) for row in rows]


def read_rows(file: Path, fields: dict[str, str]) -> list[dict[str, Any]]:
    """`fields` of every row of a file, checked to be of their kinds; cached while the file is unchanged.

    UserError, naming file and line, if a row does not.
    """
    stat = file.stat()
    return _read(file, tuple(fields.items()), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _read(file: Path, fields: tuple[tuple[str, str], ...], mtime: int, size: int) -> list[dict[str, Any]]:
    lines = read_bytes(file).split(b"\n")
    named = enumerate(lines, start=1)
    rows = [_row(line, f"{file}:{number}", dict(fields)) for number, line in named if line.strip()]
    if not rows:
        raise UserError(f"{file} is empty")
    return rows


def _row(line: bytes, where: str, fields: dict[str, str]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half a surrogate pair, which is no text: mend the line") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise UserError(f"{where}: not JSON ({reason}); the file may be cut off") from error
    for field, kind in fields.items():
        value = row.get(field) if isinstance(row, dict) else None
        if value is None:
            raise UserError(f"{where}: no {field!r}; a line needs {', '.join(fields)}")
        fits, words = KINDS[kind]
        if not fits(value, row):
            shown = json.dumps(value, ensure_ascii=False)[:40]
            raise UserError(f"{where}: {field!r} is {shown}; it must be {words}")
    return {field: row[field] for field in fields}  # other fields may be of any types, which Arrow refuses
