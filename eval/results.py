"""Scores on disk: `runs/<name>/eval/step-XXXXXXXX.json`, one entry a task, merged and written atomically."""

import json
import os
from pathlib import Path
from typing import Any

from lingpt.eval.runs import Checkpoint


def results_path(checkpoint: Checkpoint) -> Path:
    return checkpoint.run / "eval" / f"step-{checkpoint.step:08d}.json"


def task_key(task: str, num_fewshot: int, limit: int | None = None) -> str:
    """`arc_easy (0-shot)`, or `arc_easy (0-shot, first 100)`: a limited score never replaces a full one."""
    return f"{task} ({num_fewshot}-shot{f', first {limit}' if limit else ''})"


def load_results(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of this checkpoint: `{"checkpoint": {…}, "scores": {key: entry}}`.

    Scores of other weights that once stood at the same step (a run started anew) are left out.
    """
    about = {
        "run": checkpoint.run.name,
        "path": str(checkpoint.folder),
        "model": checkpoint.model,
        "attention": checkpoint.attention
        if isinstance(checkpoint.attention, str)
        else list(checkpoint.attention),
        "step": checkpoint.step,
        "weights": checkpoint.weights,
    }
    try:
        known = json.loads(results_path(checkpoint).read_text(encoding="utf-8"))
        same = known["checkpoint"]["weights"] == checkpoint.weights
        scores = known["scores"] if same else {}
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours: nothing is known
        scores = {}
    return {"checkpoint": about, "scores": scores}


def add_score(checkpoint: Checkpoint, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Merges one entry into the file (written aside, then renamed) and returns everything known."""
    results = load_results(checkpoint)
    results["scores"][key] = entry
    path = results_path(checkpoint)
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return results
