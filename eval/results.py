"""Scores on disk: `runs/<name>/eval/step-XXXXXXXX.json`, one entry a task, merged and written atomically."""

from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_json, write_errors, write_json
from lingpt.common.run_folder import scores_file
from lingpt.eval.runs import Checkpoint

DASH = "–"  # what was not evaluated, in tables


def results_path(checkpoint: Checkpoint) -> Path:
    return scores_file(checkpoint.run, checkpoint.step)


def task_key(task: str, num_fewshot: int, limit: int | None = None) -> str:
    """`arc_easy (0-shot)`, or `arc_easy (0-shot, first 100)`: a limited score never replaces a full one."""
    return f"{task} ({num_fewshot}-shot{f', first {limit}' if limit else ''})"


def percent(metrics: dict[str, float | None], metric: str) -> str:
    """`25.10 ± 0.88`: an accuracy and its standard error in per cent; `–` where it was not computed."""
    value, error = metrics.get(metric), metrics.get(f"{metric}_stderr")
    if value is None:
        return DASH
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error is not None else "")


def load_results(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of this checkpoint: `{"checkpoint": {…}, "scores": {key: entry}}`.

    Scores of other weights that once stood at the same step (of a run started from scratch) are left out.
    """
    attention = checkpoint.attention
    about = {
        "run": checkpoint.run.name,
        "path": str(checkpoint.folder),
        "model": checkpoint.model,
        "attention": attention if isinstance(attention, str) else list(attention),
        "step": checkpoint.step,
        "weights": checkpoint.weights,
    }
    try:
        known = read_json(results_path(checkpoint))
        same = known["checkpoint"]["weights"] == checkpoint.weights
        scores = known["scores"] if same else {}
    except (UserError, KeyError, TypeError):  # no such file, or not ours: nothing is known
        scores = {}
    return {"checkpoint": about, "scores": scores}


def add_score(checkpoint: Checkpoint, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Merges one entry into the file and returns everything known."""
    results = load_results(checkpoint)
    results["scores"][key] = entry
    path = results_path(checkpoint)
    with write_errors(path):
        write_json(path, results, indent=2)
    return results
