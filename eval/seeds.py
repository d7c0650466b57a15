"""Combines the scores of runs that differ only in their seed into one result: means with standard errors."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from lingpt.common.run_folder import without_seed

# q is an upper bound of the mean's error over questions, since all seeds had the same questions.
NOTE = (
    "Of n seeds: their mean ± √(s²/n + q²), s the standard deviation over the seeds, q the mean of their "
    "errors over {}."
)


def mean_scores(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combines the runs `…-seed0`, `…-seed1`, … at the same step into one result, in order of the first run.

    A result is as `evaluate` returns it, with means for `metrics` and `positions`, which also get `lowest`
    and `highest`; `correct`, `per_document` and the checkpoint's `seed` become lists with one item per run.
    Scores that not all of a row's runs have, on the same questions, are in further results: means over the
    runs that have them, or a run's own.
    """
    return [result for row, group in _groups(results) for result in _combined(row, group)]


def _combined(row: str, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of a row: one for each set of runs with scores in common, the largest set first."""
    if len(group) == 1:
        return group
    keys_of: dict[tuple[int, ...], list[str]] = {}  # indices of runs → the scores that these have in common
    for key in dict.fromkeys(key for result in group for key in result["scores"]):
        asked: dict[tuple[Any, ...], list[int]] = {}
        for i, result in enumerate(group):
            if key in result["scores"]:
                asked.setdefault(_asked(result["scores"][key]), []).append(i)
        for members in asked.values():
            keys_of.setdefault(tuple(members), []).append(key)
    found = [_mean(row, [group[i] for i in members], keys) for members, keys in keys_of.items()]
    return sorted(found, key=seeds, reverse=True) or [_mean(row, group, [])]


def _groups(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Groups the results by row: (row, the results of its seeds)."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        about = result["checkpoint"]
        row = without_seed(about["run"])
        path = str(about.get("path"))
        # Seeds of a row are in the same folder of runs; a run without a seed in its name stays alone.
        where = path if row == about["run"] else path.partition(about["run"])[0]
        trained = tuple(about.get(key) for key in ("model", "form", "step", "tokens", "seq_len"))
        groups.setdefault((row, where, *trained), []).append(result)
    return [(key[0], group) for key, group in groups.items()]


def _asked(entry: dict[str, Any]) -> tuple[Any, ...]:
    """A key, equal for entries of the same questions."""
    return entry.get("documents"), entry.get("prompts"), len(entry.get("positions", ()))


def seeds(result: dict[str, Any]) -> int:
    """The number of seeds that `result` is the mean of."""
    return len(seed_list(result))


def seed_list(result: dict[str, Any]) -> list[Any]:
    """The seeds that `result` is the mean of."""
    seed = result["checkpoint"].get("seed")
    return seed if isinstance(seed, list) else [seed]


def shared_seeds(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    """The seeds that both results have."""
    return [seed for seed in seed_list(one) if seed in seed_list(other)]


def with_shared_seed(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepares two results for a paired comparison. If exactly one of them is a single seed that the other
    has, too, the other is reduced to that seed's `correct` and `per_document`, so that seeds are paired;
    otherwise both are returned unchanged."""
    shared = shared_seeds(one, other)
    if not shared or 1 not in (seeds(one), seeds(other)):
        return one, other
    return _of_seed(one, shared[0]), _of_seed(other, shared[0])


def _of_seed(result: dict[str, Any], seed: Any) -> dict[str, Any]:
    if seeds(result) == 1:
        return result
    i = seed_list(result).index(seed)
    scores = {}
    for key, entry in result["scores"].items():
        scores[key] = entry | {"correct": {m: runs[i] for m, runs in entry.get("correct", {}).items()}}
        if "per_document" in entry:
            scores[key]["per_document"] = entry["per_document"][i]
    return result | {"scores": scores}


def seeds_note(results: Sequence[dict[str, Any]], over: str = "questions") -> list[str]:
    """A note on the errors of means, if there are means; `over`: what a run's own error is taken over."""
    return [NOTE.format(over)] if any(seeds(result) > 1 for result in results) else []


def mean_and_error(values: Sequence[float], errors: Sequence[float | None]) -> tuple[float, float | None]:
    """The mean over seeds and its standard error as in `NOTE`, None if a run's own error is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(values):
        return fmean(values), None
    return fmean(values), math.hypot(stdev(values) / math.sqrt(len(values)), fmean(known))


def _mean(row: str, group: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """The mean of the runs' scores `keys`; of a single run these scores themselves."""
    if len(group) == 1:
        return group[0] | {"scores": {key: group[0]["scores"][key] for key in keys}}
    abouts = [result["checkpoint"] for result in group]
    same = {key: value for key, value in abouts[0].items() if all(a.get(key) == value for a in abouts)}
    scores = {key: _mean_entry([result["scores"][key] for result in group]) for key in keys}
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
    losses = [e["per_document"] for e in entries if "per_document" in e]
    entry.pop("per_document", None)
    if len(losses) == len(entries):
        entry["per_document"] = losses
    if "positions" in first:
        columns = zip(*(e["positions"] for e in entries), strict=True)
        entry["positions"] = [_mean_group(groups) for groups in columns]
    return entry


def _mean_group(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of one group of positions."""
    losses = [group["loss"] for group in groups]
    mean, error = mean_and_error(losses, [group.get("stderr") for group in groups])
    return groups[0] | {"loss": mean, "stderr": error, "lowest": min(losses), "highest": max(losses)}
