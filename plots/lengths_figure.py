"""The lengths of a corpus's documents as a picture."""

from pathlib import Path

import numpy as np

from lingpt.plots.figures import add_caption, new_figure, save_figure, style_axes
from lingpt.plots.palette import COLOURS


def draw_lengths(counts: np.ndarray, borders: np.ndarray, name: str, caption: str, out: Path) -> None:
    """Draws documents over their length in tokens, on a logarithmic axis, into `out`."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    axes.stairs(counts, borders, fill=True, color=COLOURS["ours-decay"], alpha=0.85)
    axes.set_xscale("log", base=2)
    low, high = np.log2(borders[[0, -1]])
    axes.set_xlim(2 ** np.floor(low), 2 ** np.ceil(high))  # two ticks or more, however alike the lengths
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("documents")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    style_axes(axes)
    figure.suptitle(name, x=0.01, ha="left", fontsize=11, fontweight="bold", parse_math=False)
    add_caption(figure, caption)
    save_figure(figure, out)
