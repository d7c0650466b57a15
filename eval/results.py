"""Scores on disk: `runs/<name>/eval/step-XXXXXXXX.json`, one entry a task, merged and written atomically."""

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.errors import UserError
from lingpt.common.files import read_json, set_aside, write_errors, write_json
from lingpt.common.run_folder import scores_file
from lingpt.eval.runs import Checkpoint

DASH = "–"  # what was not evaluated, in tables


def results_path(checkpoint: Checkpoint) -> Path:
    return scores_file(checkpoint.run, checkpoint.step)


def task_key(task: str, num_fewshot: int, limit: int | None = None) -> str:
    """`arc_easy (0-shot)`, or `arc_easy (0-shot, first 100)`: a limited score never replaces a full one."""
    return f"{task} ({num_fewshot}-shot{f', first {limit}' if limit else ''})"


def percent(metrics: dict[str, float | None], metric: str) -> str:
    """`25.10 ± 0.88`: an accuracy and its standard error in per cent; `–` where it was not computed.

    Of none right, or all, the formula's error is 0, which says nothing, and is left out.
    """
    value, error = metrics.get(metric), metrics.get(f"{metric}_stderr")
    if value is None:
        return DASH
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error else "")


def pack_bits(bits: Sequence[bool]) -> str:
    """Bits as base64, eight a byte: a benchmark of 14,042 questions in 2.3 kB."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode()


def unpack_bits(packed: str, count: int) -> np.ndarray:
    """The inverse: bool `[count]`. UserError where `packed` is none."""
    try:
        return np.unpackbits(np.frombuffer(base64.b64decode(packed), dtype=np.uint8))[:count].astype(bool)
    except (ValueError, TypeError) as error:
        raise UserError(f"the answers in a result file are damaged ({error}): give --redo") from error


def load_results(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of this checkpoint: `{"checkpoint": {…}, "scores": {key: entry}}`.

    Scores of other weights that once stood at the same step (of a run started from scratch) are left out. A
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


def _known_scores(checkpoint: Checkpoint) -> dict[str, Any]:
    path = results_path(checkpoint)
    if not path.exists():
        return {}
    try:
        known = read_json(path)
        weights, scores = known["checkpoint"]["weights"], known["scores"]
        if not all(isinstance(entry["metrics"], dict) and entry["data"] for entry in scores.values()):
            raise KeyError("metrics")
    except (UserError, KeyError, TypeError, AttributeError):
        with write_errors(path):
            aside = set_aside(path, "damaged")
        print(
            f"{path} is damaged; it is kept as {aside.name}, and its scores are computed again",
            file=sys.stderr,
        )
        return {}
    return scores if weights == checkpoint.weights else {}


def add_score(checkpoint: Checkpoint, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Merges one entry into the file and returns everything known."""
    results = load_results(checkpoint)
    results["scores"][key] = entry
    path = results_path(checkpoint)
    with write_errors(path):
        write_json(path, results, indent=2)
    return results
