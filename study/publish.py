"""Publishes a study's folder: the page, its tables and figures, and of each run what these were made from;
without weights, in little space, and without paths of the machine."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from lingpt.common.files import read_json, read_text, read_yaml, write_errors, write_text
from lingpt.common.run_folder import CONFIG, ENVIRONMENT, EVAL, METRICS
from lingpt.study.config import STUDY
from lingpt.study.losses import CURVES, SUMMARY
from lingpt.study.page import MARKER, MQAR, PAGE, POSITIONS, check_page, save_page
from lingpt.study.portable import portable
from lingpt.study.runs import StudyRun

FILES = (STUDY, SUMMARY, f"{CURVES}.png", *POSITIONS, "table2.md", "table2.json", "suites.md")
MQAR_FILES = (MQAR, "mqar/mqar.json", "mqar/mqar.png")
POINTS = 150  # training losses of a run; `curves` averages over 1/50 of a run, three of them


def publish_study(
    folder: Path, target: Path, rate_runs: Sequence[StudyRun], runs: Sequence[StudyRun]
) -> Path:
    """Copies the study to `target`, with `portable` paths; a person's text on a page that is there is kept.

    `lingpt study` resumes from such a copy, without training or scoring again what is done. Raises UserError
    if a file is damaged, or if `target` cannot be written or has another README.
    """
    check_page(target)
    copied = [folder / name for name in (*FILES, *MQAR_FILES)]
    for run in (*rate_runs, *runs):
        copied += [
            run.folder / CONFIG,
            run.folder / ENVIRONMENT,
            *sorted((run.folder / EVAL).glob("step-*.json")),
        ]
    trees = {path: _READ[path.suffix](path) for path in copied if path.suffix in _READ and path.is_file()}
    with write_errors(target):
        for path in copied:
            copy = target / path.relative_to(folder)
            if path in trees:
                write_text(copy, _WRITE[path.suffix](portable(trees[path])))
            elif path.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            elif path.name in FILES:  # of an earlier page
                copy.unlink(missing_ok=True)
        for run in (*rate_runs, *runs):
            if run.started:
                lines = thin(run.metrics, 0 if run in rate_runs else POINTS)
                text = "".join(_dump_json(line) for line in lines)
                write_text(target / run.folder.relative_to(folder) / METRICS, text)
        if (folder / PAGE).exists():
            above, _, below = read_text(folder / PAGE).partition(MARKER)
            paths = sorted({text for tree in trees.values() for text in _paths(tree)}, key=len, reverse=True)
            save_page(target / PAGE, _without(paths, above), _without(paths, below))
    return target


def thin(lines: Sequence[dict[str, Any]], points: int) -> list[dict[str, Any]]:
    """A run's metrics with at most so many training losses, each the mean of its part of the run, at the
    step in the middle; validations, skipped steps and divergence as they are."""
    train = {line["step"]: line for line in lines if line["kind"] == "train" and _has_loss(line)}
    parts = np.array_split(sorted(train), min(points, len(train))) if points and train else []
    kept = [_mean_line([train[step] for step in part.tolist()]) for part in parts]
    others = [line for line in lines if line["kind"] != "train" or not _has_loss(line)]
    return sorted([*kept, *others], key=lambda line: line["step"])


def _has_loss(line: dict[str, Any]) -> bool:
    return isinstance(line.get("loss"), int | float)


def _mean_line(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    middle = lines[len(lines) // 2]
    keys = "step", "tokens", "train_time", "tokens_per_second", "mfu", "peak_memory"
    digits = {"train_time": 3, "mfu": 4}
    kept = {key: round(middle[key], digits.get(key)) for key in keys if middle.get(key) is not None}
    return {"kind": "train", **kept, "loss": round(fmean(line["loss"] for line in lines), 4)}


def _paths(tree: Any) -> Iterator[str]:
    """The strings of a file that `portable` shortens."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _paths(value)
    elif isinstance(tree, str) and tree.startswith("/"):
        yield tree


def _without(paths: Sequence[str], text: str) -> str:
    """The text with these paths (longest first) shortened."""
    for path in paths:
        short = str(portable(path)).replace("\\", r"\\")
        text = re.sub(rf"(?<![\w./~-]){re.escape(path)}(?![\w-])", short, text)
    return text


def _dump_yaml(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _dump_json(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n"


_READ = {".json": read_json, ".yaml": read_yaml}
_WRITE = {".json": _dump_json, ".yaml": _dump_yaml}
