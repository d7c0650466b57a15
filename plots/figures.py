"""Creates and writes matplotlib figures: atomically, ready for a paper, and the same bytes for the same
picture."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import replacing, write_errors

# Type 3 fonts, matplotlib's own choice in a PDF, are refused by many publishers; names in an SVG are random.
STYLE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "lingpt"}
FORMATS = ("png", "pdf")  # of every published figure: for pages and for papers; an SVG is many times larger
KNOWN_FORMATS = ("eps", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff", "webp")
PANEL = 2.5  # least inches of a panel beside a legend, with its labels
UNDATED = {"svg": {"Date": None}, "svgz": {"Date": None}, "pdf": {"CreationDate": None}}


def new_figure(width: float, height: float, dpi: int = 100) -> Any:
    """A matplotlib figure of this size in inches, independent of pyplot's windows and global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Any) -> None:
    """Adds a light grid and removes the frame at the top and on the right."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def legend_beside(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds a legend to the right of the panels, with lines long enough to show dashes beside the marker; the
    figure gets wider if long names would leave a panel less than PANEL."""
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "handlelength": 4}
    legend = verbatim(figure.legend(handles, labels, loc="outside right upper", **style))
    columns = figure.axes[0].get_gridspec().ncols
    least = legend.get_window_extent().width / figure.dpi + columns * PANEL
    figure.set_figwidth(max(figure.get_figwidth(), least))


def verbatim(legend: Any) -> Any:
    """The legend, in which a `$` in a name begins no formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def add_caption(figure: Any, text: str) -> None:
    """Adds a caption under a figure with the constrained layout, each line of `text` wrapped to its width."""
    lines = [textwrap.fill(line, int(15 * figure.get_figwidth())) for line in text.splitlines()]
    figure.supxlabel("\n".join(lines), fontsize=7.5, color="0.25", x=0.01, ha="left", parse_math=False)


def figure_format(out: Path, option: str = "") -> str:
    """The format named by the suffix of `out`, PNG if it has none; UserError for an unknown format."""
    kind = out.suffix[1:].lower() or "png"
    if kind not in KNOWN_FORMATS:
        end = f"end {option} in" if option else "end it in"
        raise UserError(f"cannot draw a .{kind}: {end} one of .{', .'.join(KNOWN_FORMATS)}")
    return kind


def figure_paths(out: Path, formats: Sequence[str]) -> list[Path]:
    """`out`, as given by `--out`, and the same with each suffix of `--formats`; UserError if one of them
    cannot be a figure."""
    if os.path.isdir(out):  # unlike `is_dir`, of a name that is too long, too
        raise UserError(f"--out {out} is a folder: name a file, such as {out / 'curves.png'}")
    figure_format(out, "--out")
    kinds = [kind.removeprefix(".") for kind in formats]
    for kind in kinds:
        if kind.lower() not in KNOWN_FORMATS:
            raise UserError(f"cannot draw a {kind!r}: give --formats of {', '.join(KNOWN_FORMATS)}")
    return list(dict.fromkeys([out, *(out.with_suffix(f".{kind}") for kind in kinds)]))


def save_figure(figure, out: Path) -> None:
    """Writes a figure whole or not at all. UserError for an unknown format."""
    from matplotlib import rc_context

    kind = figure_format(out)
    with write_errors(out), replacing(out) as temporary, rc_context(STYLE):
        figure.savefig(temporary, format=kind, metadata=UNDATED.get(kind))
        if kind == "png":
            _reduce_colours(temporary)


def _reduce_colours(png: Path) -> None:
    """To 128, which halves the file and shows in no figure."""
    from PIL import Image

    with Image.open(png) as image:
        few = image.convert("RGB").quantize(128)
    few.save(png, format="png", optimize=True)


def save_formats(figure, folder: Path, name: str) -> list[Path]:
    """Writes `<folder>/<name>.<format>` in each of `FORMATS`, as `save_figure` does; returns their paths."""
    paths = [folder / f"{name}.{kind}" for kind in FORMATS]
    for path in paths:
        save_figure(figure, path)
    return paths


def save_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes each figure by its name as `save_formats` does; None, of what was not measured, is left out."""
    drawn = [save_formats(figure, folder, name) for name, figure in figures.items() if figure is not None]
    return [path for paths in drawn for path in paths]
