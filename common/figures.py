"""How a matplotlib figure is written: whole, as fit for a paper, and the same bytes for the same picture."""

from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import replacing, write_errors

# Type 3 fonts, matplotlib's own choice in a PDF, are refused by many publishers; names in an SVG are random.
STYLE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "lingpt"}
UNDATED = {"svg": {"Date": None}, "svgz": {"Date": None}, "pdf": {"CreationDate": None}}


def figure_format(figure, out: Path, option: str = "") -> str:
    """The format that the suffix of `out` names, PNG where it has none; UserError for one that is none."""
    kind = out.suffix[1:].lower() or "png"
    if kind not in (known := figure.canvas.get_supported_filetypes()):
        end = f"end {option} in" if option else "end it in"
        raise UserError(f"cannot draw a .{kind}: {end} one of .{', .'.join(sorted(known))}")
    return kind


def save_figure(figure, out: Path) -> None:
    """Writes a figure whole or not at all. UserError for a format that is none."""
    from matplotlib import rc_context

    kind = figure_format(figure, out)
    with write_errors(out), replacing(out) as temporary, rc_context(STYLE):
        figure.savefig(temporary, format=kind, metadata=UNDATED.get(kind))
