"""Loss curves of runs, their mean over seeds, and the time to reach a loss.

They are read from `metrics.jsonl`, `config.yaml` and `environment.json` of the runs; `curve_figure.py` draws
them.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.errors import UserError, skip_failing, unknown
from lingpt.common.options import options_of
from lingpt.common.run_folder import (
    CONFIG,
    METRICS,
    attention_label,
    read_config,
    read_environment,
    read_metrics,
    read_model,
    without_seed,
)
from lingpt.models import attention_form
from lingpt.models.architecture import Architecture

SPIKE_WINDOW, SPIKE_SPREADS, LEAST_SPIKE = 50, 8.0, 0.1  # steps; spreads, and nats, above the window's median
N_TARGETS = 5
# Keys that may differ between runs that count as equal except for their seed.
_MAY_DIFFER = {
    "train": {
        "seed", "name", "out_dir", "devices", "save_minutes", "keep_best", "timeout_minutes", "eval_interval",
        "save_interval", "keep_checkpoints", "log_interval", "resume", "wandb", "wandb_project",
        "wandb_group", "sample_tokens", "profile", "dry_run",
    },
    "data": {"cache_dir", "num_workers"},
}  # fmt: skip
# Keys of the model that are no options of an attention.
_ARCHITECTURE = {"attention", *options_of(Architecture)}


@dataclass
class Curve:
    """A run's curve, or the mean of runs that differ only in their seed.

    form: the attention with its options, by which a line has its look.
    label: the form, or the name of a study's row; used in legend and tables if it distinguishes the curves.
    train, val: float64 [points, 4] of (step, train_time, loss, tokens), in seconds and nats per token.
    skipped: the steps skipped as they were not finite; [points, 2] of (step, train_time).
    config, hardware: from the run's recipe and record; empty if there is none.
    fingerprint: of the data, from the record; empty if it does not say.
    text: what identifies the tokens that are validated on; curves with another are not comparable.
    runs: number of runs in the mean; `lowest` and `highest` are then the bounds of the losses at each point.
    folder: the run's absolute path; of a mean, the first run's.
    """

    name: str
    model: str
    attention: str
    form: str
    label: str
    train: np.ndarray
    val: np.ndarray
    skipped: np.ndarray
    config: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    text: str = ""
    runs: int = 1
    lowest: dict[str, np.ndarray] = field(default_factory=dict)
    highest: dict[str, np.ndarray] = field(default_factory=dict)
    folder: Path = Path()


def read_curve(run_folder: str | Path, val: str | None = None) -> Curve:
    """A run's curve. Raises UserError if the folder has no losses, or its recipe is damaged.

    val: which of the run's `--data.val_sources` the validation losses are of; by default its own validation.
    """
    # Unlike `resolve`, `abspath` keeps the names of symbolic links, which the user knows.
    folder, path = Path(run_folder), Path(os.path.abspath(run_folder))
    train, validated, skipped = _read_points(folder, val)
    recorded = (folder / CONFIG).exists()
    model, attention = read_model(folder) if recorded else ("", path.name)
    config = read_config(folder) if recorded else {}
    if config.get("train", {}).get("teacher") and len(validated):
        train = train[:0]  # distances to the teacher, not losses of the next token
    name, form = attention_label(attention), attention_form(attention, config.get("model", {}))
    data, hardware = read_environment(folder, "data"), read_environment(folder, "hardware")
    fingerprint = str(data.get("fingerprint", ""))
    about = (path.name, model, name, form, form)
    text = _text(data, config, val)
    return Curve(*about, train, validated, skipped, config, hardware, fingerprint, text, folder=path)


def _read_points(folder: Path, val: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays `train`, `val` and `skipped` of a run's `Curve`; UserError if it has no losses."""
    points: dict[str, dict[float, tuple[float, ...]]] = {"train": {}, "val": {}}  # the last line of each step
    skipped: list[tuple[float, float]] = []
    for line in read_metrics(folder):
        if val and line["kind"] == "val":
            losses = line.get("losses")
            line = {**line, "loss": losses.get(val) if isinstance(losses, dict) else None}
        if line["kind"] in ("train", "val"):
            point = [line.get(key) for key in ("step", "train_time", "loss")]
            numbers = tuple(x for x in point if isinstance(x, int | float) and math.isfinite(x))
            if len(numbers) == len(point):
                tokens = line.get("tokens")
                points[line["kind"]][numbers[0]] = (*numbers, tokens if type(tokens) is int else math.nan)
        if line.get("skipped") is True and type(line.get("train_time")) in (int, float):
            skipped.append((line["step"], line["train_time"]))
    if val and not points["val"]:
        raise UserError(f"{folder} was not validated on {val!r}: its --data.val_sources have other names")
    if not points["train"] and not points["val"]:
        raise UserError(f"no losses in {folder}: it is not a run folder, or its {METRICS} is empty")
    train, validated = (np.array(sorted(rows.values())).reshape(-1, 4) for rows in points.values())
    return train, validated, np.array(skipped, dtype=float).reshape(-1, 2)


def _text(data: dict[str, Any], config: dict[str, Any], val: str | None) -> str:
    """What identifies the validation text of a run, from its record; the data's fingerprint where the record
    has no more, empty if it has none. val: of `read_curve`."""
    if val:
        named = data.get("val_sources")
        return str(
            [named.get(val) if isinstance(named, dict) else None, config.get("train", {}).get("eval_tokens")]
        )
    split, settings = data.get("val"), config.get("train")
    if not isinstance(split, dict) or settings is None:
        return str(data.get("fingerprint", ""))
    counts = [split.get(key) for key in ("documents", "bytes", "tokens")]
    return str([data.get("tokenizer_hash"), *counts, settings.get("eval_tokens")])


def different_texts(curves: Sequence[Curve]) -> str | None:
    """The message on runs that were validated on different texts; None if none is known to be."""
    by_text: dict[str, list[str]] = {}
    for label, curve in zip(labels(curves), curves, strict=True):
        by_text.setdefault(curve.text, []).append(label)
    groups = [", ".join(names) for text, names in by_text.items() if text]
    if len(groups) < 2:
        return None
    return f"not comparable, as the validation texts differ: {' | '.join(groups)}"


def find_runs(given: Sequence[str | Path], root: Path = Path("runs")) -> list[Path]:
    """The folders of the runs to draw, each once. A folder of runs, such as a study's, stands for its runs;
    if some have seeds in their names, for these alone, without a study's short runs of other learning rates.

    By default the runs in `root`, or those of the one study in it. Raises UserError if it has several studies
    and no other run: runs of different studies are drawn together only where they are named.
    """
    if not given:
        studies = sorted({path.parent.parent for path in root.glob(f"study-*/*/{METRICS}")})
        runs = sorted(path.parent for path in root.glob(f"*/{METRICS}"))
        names = ", ".join(map(str, studies))
        if not runs and len(studies) > 1:
            raise UserError(f"{root} has several studies: name one, lingpt curves {studies[0]} (of {names})")
        if runs and studies:
            print(f"not drawn: the runs of {names}; to draw them, name the folder", file=sys.stderr)
        given = runs or studies
    return list(dict.fromkeys(run for folder in given for run in _runs_in(Path(folder))))


def _runs_in(folder: Path) -> list[Path]:
    if (folder / METRICS).exists():
        return [folder]
    runs = sorted(path.parent for path in folder.glob(f"*/{METRICS}"))
    seeds = [run for run in runs if without_seed(run.name) != run.name]
    return seeds or runs or [folder]


def read_curves(run_folders: Sequence[str | Path], val: str | None) -> list[Curve]:
    """The curves of the runs that have losses; the others are named on stderr. UserError if none has."""
    if not run_folders:
        raise UserError("no runs to draw: name their folders, such as runs/demo-ours runs/demo-softmax")
    return skip_failing(lambda folder: read_curve(folder, val), run_folders)


def mean_over_seeds(curves: Sequence[Curve]) -> list[Curve]:
    """One curve per group of runs that differ only in their seed, in the order of each group's first run.

    A group with two runs of the same seed (before and after a change of the code, for example) stays separate
    runs. So do runs that have no logged step in common.
    """
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(_but_for_the_seed(curve), []).append(curve)
    found: list[Curve] = []
    for group in groups.values():
        seeds = {str(curve.config["train"]["seed"]) for curve in group} if len(group) > 1 else set()
        mean = _mean(group) if len(seeds) == len(group) else None
        found += [mean] if mean is not None and len(mean.train) + len(mean.val) > 0 else group
    return found


def hardware_label(hardware: dict[str, Any]) -> str | None:
    """The cards that times and speeds are of, as `2 × NVIDIA H200`; None if the record does not say."""
    name = hardware.get("name")
    return f"{hardware.get('world_size', 1)} × {name}" if name else None


def _but_for_the_seed(curve: Curve) -> str:
    """A key, equal for runs of one recipe, data and hardware, whatever their seed; a run without a recorded
    seed gets its own key.

    If the records have the data's fingerprint, its path is ignored. The attention's options are compared by
    the form; another that is off or has no value counts as missing, as it may be newer than the run.
    """
    if "seed" not in curve.config.get("train", {}):
        return f"{curve.name} {id(curve)}"
    config = {
        part: {key: x for key, x in values.items() if x and key not in _MAY_DIFFER.get(part, ())}
        for part, values in curve.config.items()
        if isinstance(values, dict) and not (part == "data" and curve.fingerprint)
    }
    config["model"] = {key: x for key, x in config.get("model", {}).items() if key in _ARCHITECTURE}
    same = [config, curve.form, curve.fingerprint, hardware_label(curve.hardware)]
    return json.dumps(same, sort_keys=True, default=str)


def _mean(group: list[Curve]) -> Curve:
    """The mean of times and losses at the steps that all runs have, with the bounds of the losses."""
    first = group[0]
    means, lowest, highest = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for kind in ("train", "val"):
        tables = [getattr(curve, kind) for curve in group]
        steps = set.intersection(*(set(table[:, 0]) for table in tables))
        stack = np.stack([table[np.isin(table[:, 0], list(steps))] for table in tables])
        means[kind] = stack.mean(0)
        smoothed = np.stack([smooth(rows) if kind == "train" else rows for rows in stack[:, :, 2]])
        lowest[kind], highest[kind] = smoothed.min(0), smoothed.max(0)
    return replace(
        first,
        name=without_seed(first.name),
        train=means["train"],
        val=means["val"],
        skipped=np.concatenate([curve.skipped for curve in group]),
        runs=len(group),
        lowest=lowest,
        highest=highest,
    )


def find_curve(curves: Sequence[Curve], name: str) -> int:
    """The index of the run called `name`: its label in the table, its name, its folder's path, or its
    attention."""
    known = labels(curves)
    candidates: list[tuple[list[Any], Any]] = [
        (known, name),
        ([curve.folder for curve in curves], Path(os.path.abspath(name))),
        ([curve.name for curve in curves], name),
        ([curve.attention for curve in curves], name),
    ]
    for names, wanted in candidates:
        if names.count(wanted) == 1:
            return names.index(wanted)
    raise unknown("baseline", name, known)


def spikes(loss: np.ndarray) -> np.ndarray:
    """Indices of losses far above those of the preceding steps: 8 spreads above their median.

    The spread is the median absolute deviation, scaled to a normal distribution's standard deviation.
    """
    if len(loss) <= SPIKE_WINDOW:
        return np.empty(0, dtype=int)
    before = np.lib.stride_tricks.sliding_window_view(loss[:-1], SPIKE_WINDOW)
    median = np.median(before, axis=1)
    spread = 1.4826 * np.median(np.abs(before - median[:, None]), axis=1)
    bound = median + np.maximum(SPIKE_SPREADS * spread, LEAST_SPIKE)
    return SPIKE_WINDOW + np.flatnonzero(loss[SPIKE_WINDOW:] > bound)


def smooth(loss: np.ndarray) -> np.ndarray:
    """Centred moving average over 1/50 of the curve; the window is truncated at the ends.

    It is centred so that it does not lag: an average over the past would be above a falling loss.
    """
    if not len(loss):
        return loss
    window = np.ones(1 + 2 * (len(loss) // 100))
    return np.convolve(loss, window, "same") / np.convolve(np.ones(len(loss)), window, "same")


def labels(curves: Sequence[Curve]) -> list[str]:
    """Labels of the curves: the attention with its options if that distinguishes the runs, else the runs'
    names, with parent folders if a name repeats."""
    found = [c.label for c in curves]
    one_model = len({c.model for c in curves}) == 1
    if one_model and len(set(found)) == len(curves):
        return found
    named = [c.folder.parent / c.name for c in curves]
    # Means of one folder with equal names are distinguished by the first run of each.
    return shortest_ends(
        [c.folder if named.count(path) > 1 else path for c, path in zip(curves, named, strict=True)]
    )


def shortest_ends(paths: Sequence[Path]) -> list[str]:
    """The shortest suffix of each path that no other path has."""

    def end(path: Path, depth: int) -> str:
        return str(Path(*path.parts[-depth:]))

    found = []
    for path in paths:
        others = set(paths) - {path}
        depths = range(1, len(path.parts) + 1)
        alone = (d for d in depths if all(end(path, d) != end(other, d) for other in others))
        found.append(end(path, next(alone, len(path.parts))))
    return found


def time_to_loss(
    curves: Sequence[Curve], baseline: int = 0, names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """When each run first reached losses that all of them reach: `{loss, runs: {name: …}}`, by default their
    labels.

    Uses validation losses if every run has at least two, else smoothed training losses; linear between
    points. A run's entry is {time, step, ratio}; `ratio` is its time divided by that of run number
    `baseline`: below 1 is faster.
    """
    measured = all(len(c.val) >= 2 for c in curves)
    tables = [c.val if measured else c.train for c in curves]
    if any(len(points) < 2 for points in tables):
        return []
    if not measured:
        tables = [np.column_stack([points[:, :2], smooth(points[:, 2])]) for points in tables]
    low, high = max(p[:, 2].min() for p in tables), min(p[0, 2] for p in tables)
    rows = []
    for loss in _targets(low, high):
        reached = [_first_reach(points, loss) for points in tables]
        base = reached[baseline][1]
        rows.append(
            {
                "loss": loss,
                "runs": {
                    name: {"time": time, "step": step, "ratio": time / base if base else None}
                    for name, (step, time) in zip(names or labels(curves), reached, strict=True)
                },
            }
        )
    return rows


def _targets(low: float, high: float) -> list[float]:
    """Evenly spaced losses, rounded to two decimals, from near `high` down to `low`."""
    lowest = math.ceil(low * 100) / 100
    found = [round(lowest + (high - lowest) * i / N_TARGETS, 2) for i in range(N_TARGETS)]
    return sorted({loss for loss in found if low <= loss <= high}, reverse=True)


def _first_reach(points: np.ndarray, loss: float) -> tuple[float, float]:
    """(step, time) at which the piecewise linear curve first comes down to `loss`."""
    i = int(np.argmax(points[:, 2] <= loss))
    if i == 0:
        return float(points[0, 0]), float(points[0, 1])
    before, after = points[i - 1], points[i]
    part = (before[2] - loss) / (before[2] - after[2])
    step, time = before[:2] + part * (after[:2] - before[:2])
    return float(step), float(time)


def format_table(rows: list[dict[str, Any]], baseline: str = "the first run") -> str:
    """The table of `time_to_loss` as text; `baseline` says in words what the ratios are relative to."""
    if not rows:
        return "time to loss: the runs have no loss in common, or one has fewer than two points"
    names = list(rows[0]["runs"])
    widths = {name: max(24, len(name) + 2) for name in names}
    lines = [f"time to loss (seconds of training, step, × {baseline}'s time)"]
    lines.append(f"{'loss':>7}" + "".join(f"{name:>{widths[name]}}" for name in names))
    for row in rows:
        line = f"{row['loss']:7.2f}"
        for name, width in widths.items():
            run = row["runs"][name]
            ratio = f" {run['ratio']:5.2f}×" if run["ratio"] is not None else ""
            line += f"{run['time']:8.1f} s {run['step']:6.0f}{ratio}".rjust(width)
        lines.append(line)
    return "\n".join(lines)
