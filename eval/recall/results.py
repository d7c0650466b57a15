"""MQAR's results: their file, the table and the figure, each attention at its best learning rate (arXiv
2312.06635, figure 4)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lingpt.common.errors import UserError
from lingpt.common.files import read_bytes
from lingpt.common.format import join_distinct
from lingpt.eval.recall.mqar import Trained, Trial
from lingpt.eval.scores import DASH, percent
from lingpt.eval.tables import Table, save_tables
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_formats, style_axes
from lingpt.plots.palette import line_styles

RESULTS = "mqar.json"


@dataclass(frozen=True)
class _File:
    results: tuple[Trained, ...]


_FILE = TypeAdapter(_File)


def read_known(path: Path, trials: Sequence[Trial]) -> tuple[list[Trained], dict[str, Trained]]:
    """The file's results: those of other trials, and those of `trials` by key. UserError if it is damaged."""
    if not path.exists():
        return [], {}
    try:
        found = _FILE.validate_json(read_bytes(path), strict=True).results
    except ValidationError as error:
        raise UserError(f"{path} is damaged: remove it") from error
    asked = {trial.key: asdict(trial).items() for trial in trials}
    known = {key: one for key, trial in asked.items() for one in found if trial <= asdict(one).items()}
    return [result for result in found if result not in known.values()], known


def best(results: Sequence[Trained], attention: str, width: int, pairs: int) -> Trained | None:
    """The result with the best learning rate; None if there is none."""
    found = [r for r in results if (r.attention, r.width, r.pairs) == (attention, width, pairs)]
    return max(found, key=lambda r: r.accuracy, default=None)


def settings(results: Sequence[Trained]) -> tuple[list[str], list[int], list[int]]:
    """The attentions (in their order), widths and numbers of pairs that have results."""
    widths, pairs = sorted({r.width for r in results}), sorted({r.pairs for r in results})
    return list(dict.fromkeys(r.attention for r in results)), widths, pairs


def mqar_table(results: Sequence[Trained]) -> Table:
    """One row per attention, one column for each width and number of pairs."""
    attentions, widths, pairs = settings(results)
    columns = [(width, count) for count in pairs for width in widths]
    rows = []
    for name in attentions:
        found = [best(results, name, width, count) for width, count in columns]
        cells = (f"{percent(f.accuracy, f.accuracy_stderr)} ({f.rate:g})" if f else DASH for f in found)
        rows.append([name, *cells])
    rows.append(["A guess among the values", *(f"{100 / count:.2f}" for _, count in columns)])
    head = ["Attention", *(f"{count} pairs, width {width}" for width, count in columns)]
    notes = [
        "Accuracy in per cent of queries ± one standard error, the best of the rates "
        f"{_rates(results)} (in brackets). {_setting(results)}"
    ]
    if lacking := _lacking(results):
        notes.append(lacking)
    return Table("Associative recall (MQAR)", head, rows, notes)


def _rates(results: Sequence[Trained]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({r.rate for r in results}))


def _lacking(results: Sequence[Trained]) -> str:
    """A sentence that names the cells with results for only some of the rates, and these; else nothing."""
    cells: dict[str, list[Trained]] = {}
    for r in results:
        cells.setdefault(f"{r.attention} at {r.pairs} pairs, width {r.width}", []).append(r)
    every = _rates(results)
    some = [f"{name}: {rates}" for name, found in cells.items() if (rates := _rates(found)) != every]
    return f"Of fewer rates, as the others have no result: {'; '.join(some)}." if some else ""


def _setting(results: Sequence[Trained]) -> str:
    first = results[0]
    return (
        f"{first.layers} layers, {first.heads} heads, vocabulary {first.vocabulary:,}, sequences of eight "
        f"times the pairs, at most {first.steps:,} steps of {first.batch_size} sequences, none twice; one "
        "seed. short_conv: a convolution of width 4 over q, k and v."
    )


def save_mqar(results: Sequence[Trained], folder: Path) -> list[Path]:
    """Writes mqar-table.md and .tex, and the figure mqar.png and .pdf."""
    return [*save_tables([mqar_table(results)], folder, "mqar-table"), *_draw(results, folder)]


def _draw(results: Sequence[Trained], folder: Path) -> list[Path]:
    attentions, widths, pairs = settings(results)
    legend = 1.0 + 0.07 * max(map(len, attentions))  # inches
    figure = new_figure(legend + 3.0 * len(pairs), 3.6)
    panels = figure.subplots(1, len(pairs), sharex=True, sharey=True, squeeze=False)[0]
    styles = dict(zip(attentions, line_styles(attentions), strict=True))
    for panel, count in zip(panels, pairs, strict=True):
        for name in attentions:
            found = [r for width in widths if (r := best(results, name, width, count))]
            x, y = [r.width for r in found], [100 * r.accuracy for r in found]
            panel.plot(x, y, label=name, markersize=4.5, linewidth=1.5, **styles[name])
        _style_panel(panel, count, widths)
    panels[0].set_ylabel("accuracy (%)")
    legend_beside(figure, *panels[0].get_legend_handles_labels())
    text = (
        f"Accuracy by the best of the rates {_rates(results)}. Dashed grey: a guess among the sequence's "
        f"values. {_setting(results)}"
    )
    cards = join_distinct(r.device for r in results)
    add_caption(figure, " ".join(filter(None, [text, f"{cards}." if cards else "", _lacking(results)])))
    return save_formats(figure, folder, "mqar")


def _style_panel(panel: Any, pairs: int, widths: Sequence[int]) -> None:
    panel.axhline(100 / pairs, color="0.5", linestyle=(0, (4, 3)), linewidth=0.9)
    panel.set_title(f"{pairs} pairs", loc="left", fontsize=10)
    panel.set_xlabel("width")
    panel.set_xscale("log", base=2)
    panel.set_xticks(widths, labels=[str(width) for width in widths])
    panel.set_ylim(-3, 103)
    style_axes(panel)
