"""Figures of what evaluation measures: the loss by position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.palette import colours
from lingpt.common.run_folder import attention_label
from lingpt.eval.tables import save_figure


def draw_positions(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """positions.png and .svg: the loss by position of every run, a panel a text; nothing where none was
    measured.

    A group of positions is drawn at its end. The dashed line is the training length.
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
    one_run_each = len({about["run"] for about, _ in entries}) == len(colour)
    for panel, name in zip(panels, names, strict=True):
        drawn = [(about, entry) for about, entry in entries if entry["texts"] == name]
        seen: dict[str, int] = {}
        for about, entry in drawn:
            label, groups = attention_label(about["attention"]), entry["positions"]
            turn = seen[label] = seen.get(label, -1) + 1
            x, y = [g["to"] for g in groups], [g["loss"] for g in groups]
            style = {"color": colour[label], "linestyle": ("-", "--", ":", "-.")[turn % 4], "linewidth": 1.5}
            panel.plot(x, y, marker="o", markersize=3, label=label if one_run_each else about["run"], **style)
            if all(g["stderr"] is not None for g in groups):
                low, high = ([g["loss"] + sign * g["stderr"] for g in groups] for sign in (-1, 1))
                panel.fill_between(x, low, high, color=colour[label], alpha=0.12, linewidth=0)
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
