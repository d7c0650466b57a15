"""Draws loss curves of several runs in one figure: against time, tokens and steps (the paper's figure 5)."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.format import join_distinct
from lingpt.plots.curves import (
    Curve,
    different_texts,
    find_curve,
    hardware_label,
    labels,
    mean_over_seeds,
    read_curves,
    shortest_ends,
    smooth,
    spikes,
    time_to_loss,
)
from lingpt.plots.figures import add_caption, figure_paths, new_figure, save_figure, style_axes, verbatim
from lingpt.plots.palette import MARKERS, line_styles

SHORT_LEGEND = 1.8  # inches beside the panels, for which the figure has room
HANDLE = 4.0  # length of a legend's lines in font sizes, enough to show dashes beside the marker
STEP, TIME, LOSS, TOKENS = range(4)  # columns of a curve's points
TIME_UNITS = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
TOKEN_UNITS = {"billion tokens": 1e9, "million tokens": 1e6, "thousand tokens": 1e3, "tokens": 1.0}
DRAWN_POINTS = 200  # of a line: an average has no more detail, and all steps are megabytes of vectors


def draw_curves(
    run_folders: Sequence[str | Path],
    out: str | Path,
    baseline: str | None = None,
    formats: Sequence[str] = (),
    val: str | None = None,
) -> list[dict[str, Any]]:
    """Draws loss against time, tokens and steps into `out`; returns the table of `time_to_loss`, of the runs
    that were validated on the baseline's text.

    Runs that differ only in their seed are one curve, their mean, with a band from the lowest to the highest.

    Args:
        baseline: the run, or its attention, that times are relative to; by default the first.
        formats: also write the figure next to `out` with these suffixes, such as `svg`, `pdf`.
        val: which of `--data.val_sources` the validation losses are of; by default the runs' own validation.

    Raises UserError, before anything is read, for a folder as `out` and for an unknown format.
    """
    paths = figure_paths(Path(out), formats)
    curves = mean_over_seeds(read_curves(run_folders, val))
    base = find_curve(curves, baseline) if baseline else 0
    if differ := different_texts(curves):
        print(differ, file=sys.stderr)
    figure = draw(curves)
    for path in paths:
        save_figure(figure, path)
    alike = [i for i, curve in enumerate(curves) if curve.text in ("", curves[base].text)]
    known = labels(curves)
    return time_to_loss([curves[i] for i in alike], alike.index(base), [known[i] for i in alike])


def draw(curves: list[Curve], timed: bool = True) -> Any:
    """The matplotlib figure.

    timed: false leaves out the time panel, for runs whose times are not comparable.
    """
    figure = new_figure(12, 4.6)
    unit, seconds = _unit(max(_last(c, TIME) for c in curves), TIME_UNITS)
    tokens, size = _unit(max(_last(c, TOKENS) for c in curves), TOKEN_UNITS)
    axes = [(TIME, seconds, f"training time ({unit})"), (TOKENS, size, tokens), (STEP, 1, "step")]
    axes = axes if timed else axes[1:]
    panels = figure.subplots(1, len(axes), sharey=True)
    for panel, (column, scale, name) in zip(panels, axes, strict=True):
        _draw_all(panel, curves, column, scale)
        if column == STEP:
            panel.xaxis.set_major_formatter("{x:,.10g}")
        panel.set_xlabel(name)
        style_axes(panel)
        panel.set_xlim(left=0)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].ticklabel_format(axis="y", useOffset=False)  # 1e−6+1.084e1 over a loss that hardly changes
    _add_inset(panels[0], curves, *axes[0][:2])
    title = join_distinct(sorted({c.model for c in curves}))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", parse_math=False)
    _legend(figure, panels[-1], len(curves))
    add_caption(figure, caption(curves))
    return figure


def _legend(figure, panel, rows: int) -> None:
    """Adds the legend in the last panel, sorted by the losses in it; next to the panel if it would cover the
    curves, in a figure that is wider if the names are long."""
    font: dict[str, Any] = {"frameon": False, "fontsize": 9 if rows < 7 else 7.5, "handlelength": HANDLE}
    font |= {"title": "last validation loss", "title_fontsize": font["fontsize"], "alignment": "right"}
    legend = verbatim(panel.legend(loc="upper right", **font))
    width = legend.get_window_extent().width
    if width < 0.75 * panel.get_window_extent().width and rows < 6:
        return
    legend.remove()
    figure.set_figwidth(figure.get_figwidth() + max(0.0, width / figure.dpi - SHORT_LEGEND))
    verbatim(figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", **font))


def caption(curves: Sequence[Curve]) -> str:
    """The caption, in two or three lines: what is plotted, the data and its length, the hardware."""
    known = labels(curves)
    without = [label for label, c in zip(known, curves, strict=True) if not len(c.train)]
    lines = "validation" if len(without) == len(curves) else "training loss, centred average"
    if without and lines != "validation":
        lines += f" (of {join_distinct(without)} validation)"
    marks = [f"Lines: {lines}", "open markers: validation"]
    for count in sorted({c.runs for c in curves if c.runs > 1}):
        means = [label for label, c in zip(known, curves, strict=True) if c.runs == count]
        which = "" if len(means) == len(curves) else f"{', '.join(means)}: "
        marks.append(f"{which}mean of {count} seeds, band from the lowest to the highest")
    if any(len(spikes(c.train[:, LOSS])) for c in curves if c.runs == 1):
        marks.append("▾ loss spike")
    if any(len(c.skipped) for c in curves):
        marks.append("× step skipped")
    data = [_texts(curves)]
    if length := join_distinct(c.config.get("data", {}).get("seq_len") for c in curves):
        data.append(f"N = {length} tokens")
    if batch := join_distinct(_batch(c) for c in curves):
        data.append(f"{batch} tokens a step")
    hardware = join_distinct(_machine(c) for c in curves)
    text = "; ".join(marks) + "."
    if differ := different_texts(curves):
        text = f"{differ}.\n{text}"
    about = "; ".join(filter(None, [*data, hardware]))
    return f"{text}\n{about}." if about else text


def _texts(curves: Sequence[Curve]) -> str:
    """The texts' names, with parent folders if two have the same name; a text that was moved counts once."""
    found: dict[str, Path] = {}
    for curve in curves:
        if source := curve.config.get("data", {}).get("source"):
            found.setdefault(curve.fingerprint or str(source), Path(str(source)))
    return join_distinct(shortest_ends(list(found.values())))


def _batch(curve: Curve) -> int | None:
    size = curve.config.get("train", {}).get("global_batch_size")
    length = curve.config.get("data", {}).get("seq_len")
    return size * length if size and length else None


def _machine(curve: Curve) -> str | None:
    found = hardware_label(curve.hardware)
    return f"{found} a run, {curve.hardware.get('precision')}" if found else None


def _draw_all(panel, curves: list[Curve], column: int, scale: float) -> None:
    """Draws the curves against a column of their points, from the highest last validation loss to the lowest:
    the legend has them in the order of their ends."""
    looks = zip(line_styles([curve.form for curve in curves]), labels(curves), curves, strict=True)
    last = {id(c): float(c.val[-1, LOSS]) if len(c.val) else math.inf for c in curves}
    for style, label, curve in sorted(looks, key=lambda look: (-last[id(look[2])], look[1])):
        _draw(panel, curve, column, scale, style, label)


def _draw(panel, curve: Curve, column: int, scale: float, look: dict[str, Any], label: str) -> None:
    colour = look["color"]
    style = {"color": colour, "linestyle": look["linestyle"], "linewidth": 1.6}
    # Another row of an attention often ends where the first one does: hollow markers keep that one visible.
    face = "white" if look["marker"] == MARKERS[0] else "none"
    point = {"marker": look["marker"], "markersize": 5, "markerfacecolor": face, "markeredgewidth": 1.4}
    if len(curve.train):
        x, shown = curve.train[:, column] / scale, _shown(len(curve.train))
        if curve.runs == 1:
            noise = _extremes(curve.train[:, LOSS])
            panel.plot(x[noise], curve.train[noise, LOSS], color=colour, alpha=0.15, linewidth=0.7)
        panel.plot(x[shown], smooth(curve.train[:, LOSS])[shown], **style)
    for kind in curve.lowest:
        x = getattr(curve, kind)[:, column] / scale
        shown = _shown(len(x))
        bounds = curve.lowest[kind][shown], curve.highest[kind][shown]
        panel.fill_between(x[shown], *bounds, color=colour, alpha=0.2, linewidth=0)
    # Marked on the panel's upper edge, as a spike's loss may be outside of it.
    if column in (STEP, TIME):
        spiky = curve.train[spikes(curve.train[:, LOSS])] if curve.runs == 1 else curve.train[:0]
        for marker, found in (("v", spiky), ("x", curve.skipped)):
            edge = {"transform": panel.get_xaxis_transform(), "linestyle": "", "color": colour}
            if len(found):
                y = np.full(len(found), 0.985)
                panel.plot(found[:, column] / scale, y, marker=marker, markersize=4, **edge)
    own_line = {} if not len(curve.train) else {"linewidth": 0}
    panel.plot(curve.val[:, column] / scale, curve.val[:, LOSS], **style | point | own_line)
    final = f"  {curve.val[-1, LOSS]:.3f}" if len(curve.val) else ""
    panel.plot([], [], **style, **point, label=label + final)


def _shown(points: int) -> np.ndarray:
    """Indices of the points that are drawn: all, or `DRAWN_POINTS` at equal distances with both ends."""
    return np.linspace(0, points - 1, min(points, DRAWN_POINTS)).round().astype(int)


def _extremes(loss: np.ndarray) -> np.ndarray:
    """Indices of the lowest and the highest loss in each of `DRAWN_POINTS` parts of the curve."""
    parts = np.array_split(np.arange(len(loss)), min(len(loss), DRAWN_POINTS))
    return np.unique([part[find(loss[part])] for part in parts for find in (np.argmin, np.argmax)])


def _add_inset(panel, curves: list[Curve], column: int, scale: float) -> None:
    """Shows the losses below that at a quarter of the run larger, in a part of the panel that no curve
    crosses, if the first fall leaves them little room."""
    tops, bottoms = [], []
    for c in curves:
        loss = smooth(c.train[:, LOSS]) if len(c.train) else c.val[:, LOSS]
        tops.append(loss[len(loss) // 4])
        bottoms.append(min(loss.min(), c.val[:, LOSS].min() if len(c.val) else math.inf))
    top, bottom = max(tops), min(bottoms)
    low, high = panel.get_ylim()
    if top - bottom > (high - low) / 3:
        return
    room = 0.05 * max(top - bottom, 0.1)
    inset = panel.inset_axes([0.4, 0.42, 0.58, 0.54])
    _draw_all(inset, curves, column, scale)
    longest = panel.get_xlim()[1]
    inset.set(xlim=(longest / 4, longest), ylim=(bottom - room, top + room))
    inset.tick_params(labelsize=7)
    style_axes(inset)


def _unit(most: float, units: dict[str, float]) -> tuple[str, float]:
    """The largest unit of which there are two or more, else the last; and its size."""
    return next(((name, size) for name, size in units.items() if most >= 2 * size), [*units.items()][-1])


def _last(curve: Curve, column: int) -> float:
    last = [float(points[-1, column]) for points in (curve.train, curve.val) if len(points)]
    return max((x for x in last if not math.isnan(x)), default=0.0)
