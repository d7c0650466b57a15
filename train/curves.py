"""Loss curves of several runs in one picture, and how long each took to a loss: the paper's figure 5.

Drawn from `metrics.jsonl` (and `config.yaml` for the names) alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.errors import UserError, skipping_sick, unknown
from lingpt.common.files import replacing, write_errors
from lingpt.common.palette import colours
from lingpt.common.run_folder import CONFIG, METRICS, attention_label, read_metrics, read_model

SPIKE_WINDOW, SPIKE_SPREADS, LEAST_SPIKE = 50, 8.0, 0.1  # steps; spreads, and nats, above their median
DASHES = ("-", "--", ":", "-.")  # further runs of the same attention
N_TARGETS = 5


@dataclass
class Curve:
    """A run's numbers: `train` and `val` are arrays of (step, train_time, loss), one row a point.

    skipped: the steps that changed nothing, since they were not finite; (step, train_time).
    """

    name: str
    model: str
    attention: str
    train: np.ndarray
    val: np.ndarray
    skipped: np.ndarray


def read_curve(run_folder: str | Path) -> Curve:
    """A run's losses. Raises UserError where the folder holds none, or its recipe is damaged."""
    folder = Path(run_folder)
    points: dict[str, list[tuple[float, ...]]] = {"train": [], "val": []}
    skipped: list[tuple[float, float]] = []
    for line in read_metrics(folder):
        if line.get("kind") in ("train", "val"):
            point = [line.get(key) for key in ("step", "train_time", "loss")]
            numbers = tuple(x for x in point if isinstance(x, int | float) and math.isfinite(x))
            if len(numbers) == len(point):
                points[line["kind"]].append(numbers)
        if line.get("skipped") is True and type(line.get("train_time")) in (int, float):
            skipped.append((line["step"], line["train_time"]))
    if not points["train"] and not points["val"]:
        raise UserError(f"no losses in {folder}: it is no run folder, or its {METRICS} is empty")
    model, attention = read_model(folder) if (folder / CONFIG).exists() else ("", folder.name)
    arrays = {kind: np.array(rows, dtype=float).reshape(-1, 3) for kind, rows in points.items()}
    arrays["skipped"] = np.array(skipped, dtype=float).reshape(-1, 2)
    return Curve(folder.name, model, attention_label(attention), **arrays)


def read_curves(run_folders: Sequence[str | Path]) -> list[Curve]:
    """The losses of the runs that have any; the others are named on stderr. UserError where none has."""
    if not run_folders:
        raise UserError("no runs to draw: name their folders, such as runs/demo-ours runs/demo-softmax")
    return skipping_sick(read_curve, run_folders)


def draw_curves(
    run_folders: Sequence[str | Path], out_png: str | Path, baseline: str | None = None
) -> list[dict[str, Any]]:
    """Draws loss against wall-clock and against step into `out_png`; returns the table of `time_to_loss`.

    baseline: the run, or its attention, that the times are relative to; by default the first.
    """
    curves = read_curves(run_folders)
    base = _find(curves, baseline) if baseline else 0
    draw(curves, Path(out_png))
    return time_to_loss(curves, base)


def _find(curves: list[Curve], name: str) -> int:
    """The index of the run that `name` means: by its label in the table, its name, or its folder's path."""
    known = labels(curves)
    for names in (known, [curve.name for curve in curves]):
        if names.count(Path(name).name) == 1:
            return names.index(Path(name).name)
    raise unknown("baseline", name, known)


def draw(curves: list[Curve], out: Path) -> None:
    """Draws loss against wall-clock and against step into `out`: UserError for a format that is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no global state, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    unit, seconds = _time_unit(max(_last(c, 1) for c in curves))
    for panel, column, scale in ((panels[0], 1, seconds), (panels[1], 0, 1)):
        for (colour, dash), label, curve in zip(_styles(curves), labels(curves), curves, strict=True):
            _draw(panel, curve, column, scale, colour, dash, label)
    panels[0].set_xlabel(f"training time ({unit})")
    panels[0].set_ylabel("loss (nats per token)")
    panels[1].set_xlabel("step")
    panels[1].legend(
        frameon=False,
        title=_legend_title(curves),
        alignment="left",
        title_fontsize=9,
    )
    _limits(panels[0], curves)
    for panel in panels:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(left=0)
    models = sorted({c.model for c in curves if c.model})
    figure.suptitle(" and ".join(models), x=0.01, ha="left", fontsize=11, fontweight="bold")
    if (kind := out.suffix[1:].lower() or "png") not in (known := figure.canvas.get_supported_filetypes()):
        raise UserError(f"cannot draw a .{kind}: end --out in one of .{', .'.join(sorted(known))}")
    with write_errors(out), replacing(out) as temporary:
        figure.savefig(temporary, format=kind)


def _draw(panel, curve: Curve, column: int, scale: float, colour: str, dash: str, label: str) -> None:
    style = {"color": colour, "linestyle": dash, "linewidth": 1.6}
    point = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "markeredgewidth": 1.4}
    if len(curve.train):
        x = curve.train[:, column] / scale
        panel.plot(x, curve.train[:, 2], color=colour, alpha=0.15, linewidth=0.7)
        panel.plot(x, smooth(curve.train[:, 2]), **style)
    # On the panel's upper edge: a spike's loss may lie outside.
    for marker, x in (("v", curve.train[spikes(curve.train[:, 2])]), ("x", curve.skipped)):
        edge = {"transform": panel.get_xaxis_transform(), "linestyle": "", "color": colour}
        if len(x):
            panel.plot(x[:, column] / scale, np.full(len(x), 0.985), marker=marker, markersize=4, **edge)
    own_line = {} if not len(curve.train) else {"linewidth": 0}
    panel.plot(curve.val[:, column] / scale, curve.val[:, 2], **style | point | own_line)
    final = f"  {curve.val[-1, 2]:.3f}" if len(curve.val) else ""
    panel.plot([], [], **style, **point, label=label + final)


def spikes(loss: np.ndarray) -> np.ndarray:
    """Indices of the losses far above those of the steps before: 8 spreads over their median.

    The spread is the median distance from the median, scaled to a normal distribution's deviation.
    """
    if len(loss) <= SPIKE_WINDOW:
        return np.empty(0, dtype=int)
    before = np.lib.stride_tricks.sliding_window_view(loss[:-1], SPIKE_WINDOW)
    median = np.median(before, axis=1)
    spread = 1.4826 * np.median(np.abs(before - median[:, None]), axis=1)
    bound = median + np.maximum(SPIKE_SPREADS * spread, LEAST_SPIKE)
    return SPIKE_WINDOW + np.flatnonzero(loss[SPIKE_WINDOW:] > bound)


def smooth(loss: np.ndarray) -> np.ndarray:
    """Centred moving average over 1/50 of the curve; at the ends, over the part of the window that is there.

    Centred, it does not lag: an average of the past alone would lie above a falling loss.
    """
    window = np.ones(1 + 2 * (len(loss) // 100))
    return np.convolve(loss, window, "same") / np.convolve(np.ones(len(loss)), window, "same")


def labels(curves: list[Curve]) -> list[str]:
    """The attention's name where it tells the runs apart, else the run's."""
    attentions = [c.attention for c in curves]
    one_model = len({c.model for c in curves}) == 1
    return attentions if one_model and len(set(attentions)) == len(curves) else [c.name for c in curves]


def _styles(curves: list[Curve]) -> list[tuple[str, str]]:
    colour = colours(sorted({c.attention for c in curves}))
    seen: dict[str, int] = {}
    styles = []
    for curve in curves:
        turn = seen[curve.attention] = seen.get(curve.attention, -1) + 1
        styles.append((colour[curve.attention], DASHES[turn % len(DASHES)]))
    return styles


def _legend_title(curves: list[Curve]) -> str:
    spiky = any(len(spikes(curve.train[:, 2])) for curve in curves)
    skipped = any(len(curve.skipped) for curve in curves)
    parts = ["○ validation, its last value", "— training, smoothed"]
    return "   ".join(parts + ["▾ loss spike"] * spiky + ["× step skipped"] * skipped)


def _limits(panel, curves: list[Curve]) -> None:
    """Leaves the first fall out of the picture: what matters is below the loss at a tenth of the run."""
    tops, bottoms = [], []
    for c in curves:
        loss = smooth(c.train[:, 2]) if len(c.train) else c.val[:, 2]
        tops.append(loss[len(loss) // 10])
        bottoms.append(min(loss.min(), c.val[:, 2].min() if len(c.val) else math.inf))
    room = max(max(tops) - min(bottoms), 0.1)
    panel.set_ylim(min(bottoms) - 0.05 * room, max(tops) + 0.05 * room)


def _time_unit(longest: float) -> tuple[str, float]:
    return next(
        ((u, s) for u, s in (("hours", 3600.0), ("minutes", 60.0)) if longest >= 2 * s), ("seconds", 1.0)
    )


def _last(curve: Curve, column: int) -> float:
    return max(float(points[-1, column]) for points in (curve.train, curve.val) if len(points))


def time_to_loss(curves: list[Curve], baseline: int = 0) -> list[dict[str, Any]]:
    """When each run first reached the losses that all of them reach: `{loss, runs: {label: …}}`.

    On validation losses where every run has two or more, else on the smoothed training losses; linear between
    points. A run's entry is {time, step, ratio}.
    `ratio` is the time over that of the run number `baseline`: below 1 is faster.
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
                    label: {"time": time, "step": step, "ratio": time / base if base else None}
                    for label, (step, time) in zip(labels(curves), reached, strict=True)
                },
            }
        )
    return rows


def _targets(low: float, high: float) -> list[float]:
    """Losses, two decimals, evenly from near `high` down to the lowest that all reach."""
    lowest = math.ceil(low * 100) / 100
    if lowest > high:
        return []
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
        return "time to loss: too few points that all runs share"
    names = list(rows[0]["runs"])
    width = max(24, *(len(name) + 2 for name in names))
    lines = [f"time to loss (seconds of training, step, × {baseline}'s time)"]
    lines.append(f"{'loss':>7}" + "".join(f"{name:>{width}}" for name in names))
    for row in rows:
        cells = []
        for name in names:
            run = row["runs"][name]
            ratio = f" {run['ratio']:5.2f}×" if run["ratio"] is not None else ""
            cells.append(f"{run['time']:8.1f} s {run['step']:6.0f}{ratio}")
        lines.append(f"{row['loss']:7.2f}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)
