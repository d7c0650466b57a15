"""Tables, written in three forms: for the terminal, in Markdown and in LaTeX (booktabs)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lingpt.common.files import write_errors, write_text

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "−": r"$-$", "×": r"$\times$", "–": "--", "≥": r"$\ge$", "≤": r"$\le$", "<": r"$<$", ">": r"$>$",
    "√": r"$\surd$", "²": r"$^2$", "†": r"$\dagger$",
})  # fmt: skip


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
        # In Markdown a note that begins with the mark * would be an item of a list.
        notes = "  \n".join(self.notes).replace("*", r"\*") if markdown else "\n".join(self.notes)
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
    return text.translate(_LATEX)


def save_tables(tables: Sequence[Table], folder: Path, name: str) -> list[Path]:
    """Writes `<name>.md` and `.tex` into `folder`; returns their paths."""
    paths = [folder / f"{name}.{kind}" for kind in ("md", "tex")]
    with write_errors(folder):
        write_text(paths[0], "\n\n".join(table.section() for table in tables) + "\n")
        write_text(paths[1], "\n\n".join(table.latex() for table in tables) + "\n")
    return paths
