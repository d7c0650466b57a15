"""Figures of what evaluation measures: the loss by position."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lingpt.common.palette import colours
from lingpt.common.run_folder import attention_label
from lingpt.eval.tables import save_figure

DASHES = ("-", "--", ":", "-.")  # further rows of the same attention
_SEED = re.compile(r"-seed\d+$")


def draw_positions(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """positions.png and .svg: the loss by position of every run, a panel a text; nothing where none was
    measured.

    Runs that differ in their seed (`…-seed0`, `…-seed1`) are one line, their mean. A group of positions is
    drawn at its end. The dashed line is the training length.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    entries = [
        (result["checkpoint"], entry)
        for result in results
        for entry in result["scores"].values()
        if entry["task"] == "loss_by_position"
    ]
    names = list(dict.fromkeys(entry["texts"] for _, entry in entries))
    if not names:
        return []
    figure = Figure(figsize=(1.2 + 3.9 * len(names), 3.6), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    colour = colours(sorted({attention_label(about["attention"]) for about, _ in entries}))
    for panel, name in zip(panels, names, strict=True):
        drawn = [(about, entry) for about, entry in entries if entry["texts"] == name]
        seen: dict[str, int] = {}
        for row, (attention, lines) in _mean_over_seeds(drawn).items():
            turn = seen[attention] = seen.get(attention, -1) + 1
            style = {"color": colour[attention], "linestyle": DASHES[turn % len(DASHES)], "linewidth": 1.5}
            panel.plot(list(lines), list(lines.values()), marker="o", markersize=3, label=row, **style)
        for length in sorted({entry["train_length"] for _, entry in drawn}):
            panel.axvline(length, color="0.5", linestyle=(0, (4, 3)), linewidth=0.9)
        ticks = sorted({g["to"] for _, entry in drawn for g in entry["positions"]})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.tick_params(axis="x", labelrotation=45)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("position (tokens)")
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss (nats per token)")
    panels[-1].legend(frameon=False, fontsize=8)
    paths = [folder / "positions.png", folder / "positions.svg"]
    for path in paths:
        save_figure(figure, path)
    return paths


def _mean_over_seeds(drawn: Sequence[tuple[Any, Any]]) -> dict[str, tuple[str, dict[int, float]]]:
    """Run, without its seed → (attention, position → mean loss)."""
    groups: dict[str, list[tuple[str, dict[int, float]]]] = {}
    for about, entry in drawn:
        losses = {group["to"]: group["loss"] for group in entry["positions"]}
        row = _SEED.sub("", about["run"])
        groups.setdefault(row, []).append((attention_label(about["attention"]), losses))
    return {
        row: (found[0][0], {to: fmean(losses[to] for _, losses in found) for to in found[0][1]})
        for row, found in groups.items()
    }
