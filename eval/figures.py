"""The figure of the loss by position."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lingpt.common.run_folder import without_seed
from lingpt.eval.seeds import mean_scores
from lingpt.plots.figures import add_caption, new_figure, save_formats, style_axes
from lingpt.plots.palette import line_styles


def draw_positions(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws positions.png and .pdf: the loss by position of every run, one panel per text; draws
    nothing if none was measured.

    Runs that differ only in their seed (`…-seed0`, `…-seed1`) are one line, their mean. A group of positions
    is drawn at its end. The dashed line is the training length.
    """
    from matplotlib.ticker import NullLocator

    found = [
        (result["checkpoint"], entries)
        for result in mean_scores(results)
        if (entries := [e for e in result["scores"].values() if e["task"] == "loss_by_position"])
    ]
    names = list(dict.fromkeys(entry["texts"] for _, entries in found for entry in entries))
    if not names:
        return []
    labels, legend = _labels([about["run"] for about, _ in found]), {}
    width = 1.2 + 3.9 * len(names) + 0.7 + 0.07 * max(map(len, labels))  # inches: the panels and the legend
    figure = new_figure(width, 3.6)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    styles = line_styles([about["form"] for about, _ in found])
    for panel, name in zip(panels, names, strict=True):
        drawn = [
            (i, entry) for i, (_, entries) in enumerate(found) for entry in entries if entry["texts"] == name
        ]
        for i, entry in drawn:
            groups, style = entry["positions"], styles[i]
            ends, losses = ([group[key] for group in groups] for key in ("to", "loss"))
            (legend[i],) = panel.plot(ends, losses, markersize=4, linewidth=1.5, label=labels[i], **style)
            if "lowest" in groups[0]:
                bounds = ([group[bound] for group in groups] for bound in ("lowest", "highest"))
                panel.fill_between(ends, *bounds, color=style["color"], alpha=0.2, linewidth=0)
        for length in sorted({entry["train_length"] for _, entry in drawn}):
            panel.axvline(length, color="0.5", linestyle=(0, (4, 3)), linewidth=0.9)
        ticks = sorted({g["to"] for _, entry in drawn for g in entry["positions"]})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.tick_params(axis="x", labelrotation=45)
        panel.set_title(name, loc="left", fontsize=10, parse_math=False)
        panel.set_xlabel("position (tokens)")
        style_axes(panel)
    panels[0].set_ylabel("loss (nats per token)")
    lines = [legend[i] for i in sorted(legend)]
    key = figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize=8, handlelength=4)
    for text in key.get_texts():
        text.set_parse_math(False)  # a $ in a name begins no formula
    add_caption(figure, caption([(about, entry) for about, entries in found for entry in entries]))
    return save_formats(figure, folder, "positions")


def _labels(runs: Sequence[str]) -> list[str]:
    """The name of each run's row; the run's own name if several lines are of one row."""
    rows = [without_seed(run) for run in runs]
    return [row if rows.count(row) == 1 else run for row, run in zip(rows, runs, strict=True)]


def caption(entries: Sequence[tuple[Any, Any]]) -> str:
    """The caption: models, training length, number of documents, devices."""

    def each(values: Iterable[Any]) -> str:
        found = dict.fromkeys(value for value in values if value)
        return " and ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in found)

    lengths = each(entry["train_length"] for _, entry in entries)
    names = dict.fromkeys(entry["texts"] for _, entry in entries)
    texts = {name: each(e["documents"] for _, e in entries if e["texts"] == name) for name in names}
    parts = [
        each(about.get("model") for about, _ in entries),
        f"dashed: the training length, {lengths} tokens",
        "documents: " + ", ".join(f"{count} of {name}" for name, count in texts.items()),
        each(entry.get("device") for _, entry in entries),
    ]
    if any("lowest" in group for _, entry in entries for group in entry["positions"]):
        parts.append("mean over seeds, band from the lowest to the highest")
    return "; ".join(filter(None, parts)) + "."
