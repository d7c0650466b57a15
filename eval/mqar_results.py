"""MQAR's results: their file, the table and the figure, each attention at its best learning rate (arXiv
2312.06635, figure 4)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, write_errors, write_text
from lingpt.eval.mqar import Trial
from lingpt.eval.scores import DASH, percent
from lingpt.eval.tables import Table, draw_tables
from lingpt.plots.figures import add_caption, new_figure, save_formats, style_axes
from lingpt.plots.palette import line_styles

RESULTS = "mqar.json"


def read_known(path: Path, trials: list[Trial]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The file's results: those of other trials, and those of `trials` by key. UserError if it is damaged."""
    if not path.exists():
        return [], {}
    try:
        found = read_json_object(path)["results"]
        same = [(t, r) for t in trials for r in found if asdict(t).items() <= r.items() and "accuracy" in r]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: remove it") from error
    others = [result for result in found if all(result is not known for _, known in same)]
    return others, {trial.key: result for trial, result in same}


def best(results: Sequence[dict[str, Any]], attention: str, width: int, pairs: int) -> dict[str, Any] | None:
    """The result with the best learning rate; None if there is none."""
    found = [r for r in results if (r["attention"], r["width"], r["pairs"]) == (attention, width, pairs)]
    return max(found, key=lambda r: r["accuracy"], default=None)


def settings(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[int], list[int]]:
    """The attentions (in their order), widths and numbers of pairs that have results."""
    widths, pairs = (sorted({r[key] for r in results}) for key in ("width", "pairs"))
    return list(dict.fromkeys(r["attention"] for r in results)), widths, pairs


def mqar_table(results: Sequence[dict[str, Any]]) -> Table:
    """One row per attention, one column for each width and number of pairs."""
    attentions, widths, pairs = settings(results)
    columns = [(width, count) for count in pairs for width in widths]
    rows = []
    for name in attentions:
        found = [best(results, name, width, count) for width, count in columns]
        cells = (DASH if f is None else f"{percent(f['accuracy'], f['accuracy_stderr'])} ({f['rate']:g})" for f in found)
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


def _rates(results: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({r["rate"] for r in results}))


def _lacking(results: Sequence[dict[str, Any]]) -> str:
    """A sentence that names the cells with results for only some of the rates, and these; else nothing."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        name = f"{r['attention']} at {r['pairs']} pairs, width {r['width']}"
        cells.setdefault(name, []).append(r)
    every = _rates(results)
    some = [f"{name}: {rates}" for name, found in cells.items() if (rates := _rates(found)) != every]
    return f"Of fewer rates, as the others have no result: {'; '.join(some)}." if some else ""


def _setting(results: Sequence[dict[str, Any]]) -> str:
    first = results[0]
    return (
        f"{first['layers']} layers, {first['heads']} heads, vocabulary {first['vocabulary']:,}, sequences of "
        f"eight times the pairs, at most {first['steps']:,} steps of {first['batch_size']} sequences, none "
        "twice; one seed. short_conv: a convolution of width 4 over q, k and v."
    )


def save_mqar(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes mqar.md, mqar.tex, mqar-table.png and the figure mqar.png and .pdf."""
    table = mqar_table(results)
    paths = [folder / name for name in ("mqar.md", "mqar.tex", "mqar-table.png")]
    with write_errors(folder):
        write_text(paths[0], table.text(markdown=True) + "\n")
        write_text(paths[1], table.latex() + "\n")
    draw_tables([table], paths[2])
    return paths + _draw(results, folder)


def _draw(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    attentions, widths, pairs = settings(results)
    legend = 1.0 + 0.07 * max(map(len, attentions))  # inches
    figure = new_figure(legend + 3.0 * len(pairs), 3.6)
    panels = figure.subplots(1, len(pairs), sharex=True, sharey=True, squeeze=False)[0]
    styles = dict(zip(attentions, line_styles(attentions), strict=True))
    for panel, count in zip(panels, pairs, strict=True):
        for name in attentions:
            found = [(width, r) for width in widths if (r := best(results, name, width, count))]
            y = [100 * r["accuracy"] for _, r in found]
            size = {"markersize": 4.5, "linewidth": 1.5}
            panel.plot([width for width, _ in found], y, label=name, **styles[name], **size)
        panel.axhline(100 / count, color="0.5", linestyle=(0, (4, 3)), linewidth=0.9)
        panel.set_title(f"{count} pairs", loc="left", fontsize=10)
        panel.set_xlabel("width")
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, labels=[str(width) for width in widths])
        panel.set_ylim(-3, 103)
        style_axes(panel)
    panels[0].set_ylabel("accuracy (%)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8, handlelength=4)
    guess = "Dashed grey: a guess among the sequence's values."
    cards = " and ".join(dict.fromkeys(r["device"] for r in results if r.get("device")))
    made_on = f" {cards}." if cards else ""
    text = f"Accuracy by the best of the rates {_rates(results)}. {guess} {_setting(results)}{made_on}"
    add_caption(figure, " ".join(filter(None, [text, _lacking(results)])))
    return save_formats(figure, folder, "mqar")
