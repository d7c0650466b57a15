"""Scores on disk: `runs/<name>/eval/step-XXXXXXXX.json`, an entry per task, merged and written atomically."""

import base64
import math
import sys
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, set_aside, write_errors, write_json
from lingpt.common.format import with_error
from lingpt.common.json_values import is_positive_int, what_is_wrong
from lingpt.common.locks import file_lock
from lingpt.common.run_folder import EVAL, scores_file
from lingpt.eval.runs import Checkpoint

DASH = "–"  # in tables, for what was not evaluated


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number_or_none, value.values()))


# What tables and figures read of a result file.
_RESULTS = {
    "checkpoint": {
        "run": str,
        "step": int,
        "attention": str | list,
        "parameters": int | None,
        "tokens": int | None,
    },
    "scores": dict,
}
_SCORE = {
    "task": str,
    "num_fewshot": int,
    "documents": is_positive_int,
    "complete": bool,
    "metrics": _is_metrics,
    "cut_prompts": int | None,
    "max_length": int | None,
    "unigram": int | float | None,
    "prompts": str | None,
}
_GROUP = {"to": int, "loss": _is_number, "stderr": _is_number_or_none}  # a group of positions
_OF_TASK: dict[str, dict[str, Any]] = {
    "bits_per_byte": {
        "texts": str,
        "metrics": {"bits_per_byte": _is_number, "xz_bits_per_byte": _is_number},
    },
    "loss_by_position": {"texts": str, "train_length": int, "positions": [_GROUP]},
    "recall_phrases": {"texts": str},
}


def results_path(checkpoint: Checkpoint) -> Path:
    return scores_file(checkpoint.run, checkpoint.step)


def task_key(task: str, num_fewshot: int, limit: int | None = None) -> str:
    """The score's key, `arc_easy (0-shot)` or `arc_easy (0-shot, first 100)`: a limited one never replaces a
    full one."""
    return f"{task} ({num_fewshot}-shot{f', first {limit}' if limit else ''})"


def text_key(measure: str, text: str) -> str:
    """The score's key, `bits_per_byte (novels)`."""
    return f"{measure} ({text})"


def percent(metrics: dict[str, float | None], metric: str) -> str:
    """An accuracy and its standard error in per cent, as `25.10 ± 0.88`; `–` if it was not computed.

    With none or all answers right the formula's error is a meaningless 0, which is left out.
    """
    value, error = metrics.get(metric), metrics.get(f"{metric}_stderr")
    if value is None:
        return DASH
    return with_error(100 * value, 100 * error if error else None, ".2f")


def signed_difference(difference: tuple[float, float | None] | None, decimals: int) -> str:
    """A difference and its standard error, if it has one, as `+0.044 ± 0.003`; `–` if there is none."""
    return DASH if difference is None else with_error(*difference, f"+.{decimals}f")


def pack_bits(bits: Sequence[bool]) -> str:
    """Bits as base64, eight per byte: 14,042 questions in 2.3 kB."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode()


def unpack_bits(packed: str, count: int) -> np.ndarray:
    """The inverse of `pack_bits`: bool `[count]`. UserError if `packed` is not valid."""
    try:
        bits = np.unpackbits(np.frombuffer(base64.b64decode(packed), dtype=np.uint8))[:count].astype(bool)
    except (ValueError, TypeError) as error:
        raise UserError(f"the answers in a result file are damaged ({error}): give --redo") from error
    if len(bits) < count:
        raise UserError(f"a result file has {len(bits)} answers to {count} questions: give --redo")
    return bits


def load_results(checkpoint: Checkpoint) -> dict[str, Any]:
    """All scores of this checkpoint: `{"checkpoint": {…}, "scores": {key: entry}}`.

    Scores of other weights at the same step (before the run was restarted from scratch) are left out. A
    damaged file is renamed to `damaged-…` and named on stderr.
    """
    attention = checkpoint.attention
    about = {
        "run": checkpoint.run.name,
        "path": str(checkpoint.folder),
        "model": checkpoint.model,
        "attention": attention if isinstance(attention, str) else list(attention),
        "form": checkpoint.form,
        "step": checkpoint.step,
        "weights": checkpoint.weights,
        **checkpoint.facts,
    }
    return {"checkpoint": about, "scores": _known_scores(checkpoint)}


def read_results(path: Path) -> dict[str, Any]:
    """Reads a file of `add_score`. UserError, naming the file, if tables cannot be made of it."""
    try:
        found = read_json_object(path)
        wrong = what_is_wrong(found, _RESULTS)
        if wrong := wrong or next(filter(None, starmap(_wrong_score, found["scores"].items())), None):
            raise UserError(wrong)
    except UserError as error:
        reason = str(error).replace(str(path), "it")
        raise UserError(
            f"{path} is damaged, or of another version: `lingpt eval` scores again ({reason})"
        ) from error
    return found


def _wrong_score(key: str, entry: Any) -> str | None:
    """What is wrong with a field of this score that tables or figures read; None if nothing is."""
    if wrong := what_is_wrong(entry, _SCORE, key) or what_is_wrong(
        entry, _OF_TASK.get(entry["task"], {}), key
    ):
        return wrong
    if entry.get("positions") == []:
        return f"{key}.positions is []"
    try:
        for packed in entry.get("correct", {}).values():
            unpack_bits(packed, entry["documents"])
    except (UserError, AttributeError):
        return f"{key}.correct has no answer to each question"
    if "per_document" in entry and not _has_documents(entry):
        return f"{key}.per_document has no number for each document"
    return None


def _has_documents(entry: dict[str, Any]) -> bool:
    """Whether `per_document` has a number for each of its documents."""
    values, count = entry["per_document"], entry["documents"]
    if not isinstance(values, dict):
        return False
    if entry["task"] == "loss_by_position":
        lists = values.get("losses")
        if not isinstance(lists, list) or len(lists) != len(entry["positions"]):
            return False
    else:
        lists = [values.get("nats"), values.get("bytes")]
    return all(
        isinstance(numbers, list)
        and len(numbers) == count
        and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        for numbers in lists
    )


def _known_scores(checkpoint: Checkpoint) -> dict[str, Any]:
    path = results_path(checkpoint)
    if not path.exists():
        return {}
    try:
        known = read_results(path)
    except UserError:
        with write_errors(path):
            aside = set_aside(path, "damaged")
        print(
            f"{path} is damaged; it is kept as {aside.name}, and its scores are computed again",
            file=sys.stderr,
        )
        return {}
    return known["scores"] if known["checkpoint"].get("weights") == checkpoint.weights else {}


def add_score(checkpoint: Checkpoint, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Merges one entry into the file, one process at a time, and returns all scores.

    A score of part of a benchmark (a file with fewer rows) does not replace one of the whole.
    """
    path = results_path(checkpoint)
    lock = checkpoint.run / f".{EVAL}.lock"  # the run's own is held by its training
    with write_errors(path), file_lock(lock):
        results = load_results(checkpoint)
        known = results["scores"].get(key)
        if not known or not known["complete"] or entry["complete"]:
            results["scores"][key] = entry
            write_json(path, results, indent=2)
    return results
