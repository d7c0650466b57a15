"""The scores of runs that differ in their seed alone as one result: means, and their standard errors."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from lingpt.common.run_folder import without_seed

# q is the most that the mean's error over questions can be, since all seeds had the same ones.
NOTE = (
    "Of n seeds: their mean ± √(s²/n + q²), s the standard deviation over the seeds, q the mean of their "
    "errors over questions."
)


def mean_scores(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for the runs `…-seed0`, `…-seed1`, … at the same step, in the order of the first of each.

    It is what `evaluate` returns, with means for `metrics` and `positions`, which also get `lowest` and
    `highest`; in `correct` and in the checkpoint's `seed` there is a list with an item for each run. A score
    that not all of them have, on the same questions, is left out.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        about = result["checkpoint"]
        row = without_seed(about["run"])
        path = str(about.get("path"))
        # In the same folder of runs; one whose name says no seed is alone.
        where = path if row == about["run"] else path.partition(about["run"])[0]
        trained = tuple(about.get(key) for key in ("model", "form", "step", "tokens", "seq_len"))
        groups.setdefault((row, where, *trained), []).append(result)
    return [_mean(key[0], group) if len(group) > 1 else group[0] for key, group in groups.items()]


def seeds(result: dict[str, Any]) -> int:
    """How many seeds it is the mean of."""
    seed = result["checkpoint"].get("seed")
    return len(seed) if isinstance(seed, list) else 1


def seeds_note(results: Sequence[dict[str, Any]]) -> list[str]:
    """What the errors of means are, where there are any."""
    return [NOTE] if any(seeds(result) > 1 for result in results) else []


def mean_and_error(values: Sequence[float], errors: Sequence[float | None]) -> tuple[float, float | None]:
    """The mean over seeds and its standard error as in `NOTE`; None where a run's own error is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(values):
        return fmean(values), None
    return fmean(values), math.hypot(stdev(values) / math.sqrt(len(values)), fmean(known))


def _mean(row: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    abouts = [result["checkpoint"] for result in group]
    same = {key: value for key, value in abouts[0].items() if all(a.get(key) == value for a in abouts)}
    scores = {}
    for key in group[0]["scores"]:
        entries = [result["scores"].get(key, {}) for result in group]
        asked = [(e.get("documents"), e.get("prompts"), len(e.get("positions", ()))) for e in entries]
        if len(set(asked)) == 1:
            scores[key] = _mean_entry(entries)
    return {"checkpoint": same | {"run": row, "seed": [a.get("seed") for a in abouts]}, "scores": scores}


def _mean_entry(entries: list[dict[str, Any]]) -> dict[str, Any]:
    first, metrics = entries[0], dict[str, float | None]()
    for name in (name for name in first["metrics"] if not name.endswith("_stderr")):
        values, errors = ([e["metrics"].get(n) for e in entries] for n in (name, f"{name}_stderr"))
        if None not in values:
            metrics[name], metrics[f"{name}_stderr"] = mean_and_error(values, errors)
    entry = first | {"metrics": metrics}
    if "correct" in first:
        kept = [metric for metric in first["correct"] if all(metric in e.get("correct", {}) for e in entries)]
        entry["correct"] = {metric: [e["correct"][metric] for e in entries] for metric in kept}
    if "positions" in first:
        columns = zip(*(e["positions"] for e in entries), strict=True)
        entry["positions"] = [_mean_group(groups) for groups in columns]
    return entry


def _mean_group(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one group of positions."""
    losses = [group["loss"] for group in groups]
    mean, error = mean_and_error(losses, [group.get("stderr") for group in groups])
    return groups[0] | {"loss": mean, "stderr": error, "lowest": min(losses), "highest": max(losses)}
