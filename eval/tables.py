"""Tables, written in four forms: for the terminal, in Markdown, in LaTeX (booktabs), and as a picture."""

import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lingpt.common.files import write_errors, write_text
from lingpt.plots.figures import new_figure, save_figure

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "−": r"$-$", "×": r"$\times$", "–": "--", "≥": r"$\ge$", "≤": r"$\le$", "<": r"$<$", ">": r"$>$",
    "√": r"$\surd$", "²": r"$^2$", "†": r"$\dagger$",
}  # fmt: skip


@dataclass
class Table:
    """Cells as they are printed, one heading per column, and the notes below them."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def body(self, markdown: bool = False) -> str:
        """The cells only, in columns."""
        lines = [self.head, *self.rows]
        if markdown:
            lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.head))]
        text = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in lines]
        text.insert(1, ["-" * width for width in widths])
        if markdown:
            return "\n".join(f"| {' | '.join(line)} |" for line in text)
        return "\n".join("  ".join(line).rstrip() for line in text)

    def text(self, markdown: bool = False) -> str:
        """The cells and the notes."""
        notes = ("\n" if not markdown else "  \n").join(self.notes)
        return self.body(markdown) + (f"\n\n{notes}" if notes else "")

    def section(self) -> str:
        """A Markdown section: the title, then the table."""
        return f"## {self.title}\n\n{self.text(markdown=True)}"

    def latex(self) -> str:
        """A `table` for a document with `\\usepackage{booktabs}`."""
        columns = "l" + "r" * (len(self.head) - 1)
        if len(self.head) > 1 and not any(character.isdigit() for character in self.rows[0][1][:1]):
            columns = "ll" + columns[2:]
        rows = [" & ".join(map(latex_escape, row)) + r" \\" for row in self.rows]
        notes = [rf"\\[2pt] {{\footnotesize {latex_escape(note)}}}" for note in self.notes]
        return "\n".join(
            [
                r"\begin{table}", r"\centering", rf"\caption{{{latex_escape(self.title)}}}", r"\small",
                rf"\begin{{tabular}}{{{columns}}}", r"\toprule",
                " & ".join(map(latex_escape, self.head)) + r" \\", r"\midrule",
                *rows, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table}",
            ]
        )  # fmt: skip


def latex_escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def save_tables(tables: Sequence[Table], folder: Path, name: str) -> list[Path]:
    """Writes `<name>.md`, `.tex` and `.png` into `folder`; returns their paths."""
    paths = [folder / f"{name}.{kind}" for kind in ("md", "tex", "png")]
    with write_errors(folder):
        write_text(paths[0], "\n\n".join(table.section() for table in tables) + "\n")
        write_text(paths[1], "\n\n".join(table.latex() for table in tables) + "\n")
    draw_tables(tables, paths[2])
    return paths


def draw_tables(tables: Sequence[Table], out: Path) -> None:
    """The tables below each other as one picture; the suffix of `out` names its format."""
    row, size = 0.2, 8.0  # inches per line; font size in points
    widths = [[max(len(line[i]) for line in (t.head, *t.rows)) for i in range(len(t.head))] for t in tables]
    width = max(6.0, 0.068 * max(sum(w) + 3 * len(w) for w in widths))
    notes = [[part for note in t.notes for part in textwrap.wrap(note, int(width / 0.062))] for t in tables]
    height = sum(row * (len(t.rows) + len(n) + 4.3) for t, n in zip(tables, notes, strict=True))
    figure = new_figure(width + 0.2, height, layout=None)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.1, width + 0.1)
    axes.set_ylim(height, 0)
    axes.axis("off")
    write = functools.partial(axes.text, va="center", parse_math=False)  # a $ in a name begins no formula
    y = 0.0
    for table, cells, lines in zip(tables, widths, notes, strict=True):
        y += 1.2 * row
        write(0, y, table.title, fontsize=size + 1, fontweight="bold")
        scale = width / (sum(cells) + 3 * len(cells))
        starts = [scale * (sum(cells[:i]) + 3 * i) for i in range(len(cells))]
        for thickness, offset in ((1.2, 0.7), (0.6, 1.8)):
            axes.plot([0, width], [y + offset * row] * 2, color="black", linewidth=thickness)
        for number, line in enumerate([table.head, *table.rows]):
            y += (1.25 if number < 2 else 1.0) * row
            for x, cell in zip(starts, line, strict=True):
                write(x, y, cell, fontsize=size)
        y += 0.7 * row
        axes.plot([0, width], [y, y], color="black", linewidth=1.2)
        for note in lines:
            y += row
            write(0, y, note, fontsize=size - 1, color="0.3")
        y += 0.6 * row
    save_figure(figure, out)
