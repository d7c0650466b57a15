"""The tables of the suites other than Table 2; `suites.py` measures what they show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.files import write_errors, write_text
from lingpt.common.format import with_error
from lingpt.eval.comparability import MajoritySetup
from lingpt.eval.figures import draw_positions
from lingpt.eval.paired import bits_difference, paired_difference, position_differences
from lingpt.eval.results import DASH, percent, signed_difference, text_key
from lingpt.eval.seeds import seeds_note
from lingpt.eval.suites import COMMONSENSE, SUITES, Benchmark
from lingpt.eval.table2 import (
    DIFFERENCE_NOTE,
    best_entry,
    column_notes,
    comparison_notes,
    entries_with_softmax,
    form,
    marks,
    run_cells,
    signed_points,
)
from lingpt.eval.tables import Table, draw_tables

TO_SOFTMAX_NOTE = (
    "To softmax: minus softmax's of the same model on the same documents, ± one standard error of the paired "
    "difference over documents and, of several seeds, over these."
)


def suite_tables(results: Sequence[dict[str, Any]], suites: Sequence[str] = SUITES) -> list[Table]:
    """The tables of those of `suites` (except Table 2) that have been measured."""
    makers = {
        "commonsense": (_commonsense_table,),
        "language": (_bits_table, _position_table, _position_differences_table),
        "recall": (_recall_table,),
    }
    tables = [make(results) for suite, parts in makers.items() if suite in suites for make in parts]
    return [table for table in tables if table.rows]


def save_suites(
    results: Sequence[dict[str, Any]], folder: Path, suites: Sequence[str] = SUITES
) -> list[Path]:
    """Writes suites.md, .tex and .png, and the figure `positions`, if there is something to show."""
    tables = suite_tables(results, suites)
    if not tables:
        return []
    paths = [folder / f"suites.{kind}" for kind in ("md", "tex", "png")]
    markdown = "\n\n".join(table.section() for table in tables)
    with write_errors(folder):
        write_text(paths[0], markdown + "\n")
        write_text(paths[1], "\n\n".join(table.latex() for table in tables) + "\n")
    draw_tables(tables, paths[2])
    return paths + (draw_positions(results, folder) if "language" in suites else [])


def _commonsense_table(results: Sequence[dict[str, Any]]) -> Table:
    majority = MajoritySetup(results)
    rows, columns = [], [b for b in COMMONSENSE if any(_benchmark(r, b, majority) != DASH for r in results)]
    for result in results:
        cells = [_benchmark(result, benchmark, majority) for benchmark in columns]
        if set(cells) - {DASH}:
            rows.append([form(result), *run_cells(result), *cells])
    if rows:
        rows.append(["Chance", "", "", "", *(benchmark.chance for benchmark in columns)])
    head = ["Mechanism", "Run", "Parameters", "Tokens", *(benchmark.heading for benchmark in columns)]
    notes = [
        "Accuracy in per cent ± one standard error (OpenBookQA and HellaSwag: length-normalised), zero-shot; "
        "LAMBADA's last word is right where greedy decoding gives it, its perplexity is per word, "
        "with no chance level (a uniform guess: the size of the vocabulary, for each token of the word)."
    ]
    notes += seeds_note(results)
    notes += column_notes(results, majority, [(b.heading, b.task, 0) for b in columns])
    return Table("Commonsense", head, rows, notes)


def _benchmark(result: dict[str, Any], benchmark: Benchmark, majority: MajoritySetup) -> str:
    entry = best_entry(result["scores"], benchmark.task, 0)
    if entry is None or entry["metrics"].get(benchmark.metric) is None:
        return DASH
    if benchmark.metric.startswith("acc"):
        return percent(entry["metrics"], benchmark.metric) + marks(entry, majority)
    value, error = entry["metrics"][benchmark.metric], entry["metrics"].get(f"{benchmark.metric}_stderr")
    # Never 7.03e+04, nor 31 digits.
    value_format, error_format = (",.0f", ",.0f") if 100 <= value < 1e6 else (".3g", ".2g")
    return with_error(value, error or None, value_format, error_format) + marks(entry, majority)


def _bits_table(results: Sequence[dict[str, Any]]) -> Table:
    """Bits per byte of each text, and those of `xz`."""
    names, majority = _texts_of(results, "bits_per_byte"), MajoritySetup(results)
    measured = [r for r in results if any(text_key("bits_per_byte", name) in r["scores"] for name in names)]
    rows = [[form(result), *run_cells(result)] for result in measured]
    xz, head = ["xz -9", "", "", ""], ["Mechanism", "Run", "Parameters", "Tokens"]
    notes = ["Bits per UTF-8 byte of held-out text, ± one standard error over documents; xz for comparison."]
    compared: set[int] = set()  # indices of `measured` that have a difference
    for name in names:
        key = text_key("bits_per_byte", name)
        entries = [result["scores"].get(key) for result in measured]
        pairs = [pair_with_softmax(result, results, key) for result in measured]
        less = [signed_difference(bits_difference(*p) if p else None, decimals=3) for p in pairs]
        shown = bool(set(less) - {DASH})
        compared |= {i for i, cell in enumerate(less) if cell != DASH}
        for row, entry, cell in zip(rows, entries, less, strict=True):
            bits = _bits(entry) + majority.mark(entry)
            row += [bits, cell] if shown else [bits]
        known = next(entry["metrics"]["xz_bits_per_byte"] for entry in entries if entry)
        xz += [f"{known:.3f}", ""] if shown else [f"{known:.3f}"]
        head += [name, "to softmax"] if shown else [name]
    notes += [TO_SOFTMAX_NOTE] if compared else []
    notes += seeds_note(results, "documents") + _odd_notes(results, majority, "bits_per_byte")
    notes += comparison_notes([measured[i] for i in sorted(compared)], results)
    return Table("Bits per byte", head, [*rows, xz] if rows else [], notes)


def _bits(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return DASH
    value, error = entry["metrics"]["bits_per_byte"], entry["metrics"].get("bits_per_byte_stderr")
    return with_error(value, error or None, ".3f")


def _position_table(results: Sequence[dict[str, Any]]) -> Table:
    """Nats per token by position: one table for all texts, groups of positions as columns."""
    found = [
        (result, entry)
        for result in results
        for entry in result["scores"].values()
        if entry["task"] == "loss_by_position"
    ]
    ends = sorted({group["to"] for _, entry in found for group in entry["positions"]})
    rows, majority = [], MajoritySetup(results)
    for result, entry in found:
        losses = {g["to"]: with_error(g["loss"], g.get("stderr"), ".3f") for g in entry["positions"]}
        cells = [losses.get(end, DASH) for end in ends]
        documents = str(entry["documents"]) + majority.mark(entry)
        rows.append([form(result), run_cells(result)[0], entry["texts"], documents, *cells])
    rows += _unigram_rows(found, len(ends))
    lengths = sorted({f"{entry['train_length']:,}" for _, entry in found})
    notes = [
        f"Nats per token at the positions up to each length (from the one before it on); trained at "
        f"{' and '.join(lengths)} tokens. Beyond that a model that extrapolates does not get worse. ± one "
        "standard error over the documents, the same ones at all positions. Unigram: the tokens' frequencies "
        "in the text, all that can be known without their order."
    ]
    head = ["Mechanism", "Run", "Text", "Documents", *(f"≤ {end:,}" for end in ends)]
    notes += seeds_note(results, "documents") + _odd_notes(results, majority, "loss_by_position")
    return Table("Loss by position", head, rows, notes)


def _unigram_rows(found: Sequence[tuple[dict[str, Any], dict[str, Any]]], columns: int) -> list[list[str]]:
    """The unigram's row of each text; several where tokenizers differ, with the runs that each is of."""
    runs: dict[str, dict[str, dict[str, None]]] = {}  # text → loss → the runs
    for result, entry in found:
        if entry.get("unigram"):
            losses = runs.setdefault(entry["texts"], {})
            losses.setdefault(f"{entry['unigram']:.3f}", {})[result["checkpoint"]["run"]] = None
    return [
        ["Unigram", ", ".join(names) if len(losses) > 1 else "", text, "", *[loss] * columns]
        for text, losses in runs.items()
        for loss, names in losses.items()
    ]


def _position_differences_table(results: Sequence[dict[str, Any]]) -> Table:
    """Differences to softmax per group of positions; needs losses per document, which old files lack."""
    found = []
    for result in results:
        for name in _texts_of([result], "loss_by_position"):
            key = text_key("loss_by_position", name)
            pair = pair_with_softmax(result, results, key)
            if pair and (less := position_differences(*pair)):
                ends = [group["to"] for group in pair[0]["positions"]]
                cells = {end: signed_difference(x, decimals=3) for end, x in zip(ends, less, strict=True)}
                found.append((result, name, str(pair[0]["documents"]), cells))
    ends = sorted({end for *_, cells in found for end in cells})
    rows = [
        [form(result), run_cells(result)[0], name, documents, *(cells.get(end, DASH) for end in ends)]
        for result, name, documents, cells in found
    ]
    head = ["Mechanism", "Run", "Text", "Documents", *(f"≤ {end:,}" for end in ends)]
    compared = [r for r in results if any(r is one for one, *_ in found)]
    notes = [TO_SOFTMAX_NOTE, *comparison_notes(compared, results)]
    return Table("Loss by position, minus softmax's", head, rows, notes)


def _recall_table(results: Sequence[dict[str, Any]]) -> Table:
    names, rows, compared, majority = _texts_of(results, "recall_phrases"), [], [], MajoritySetup(results)
    for result in results:
        for name in names:
            key = text_key("recall_phrases", name)
            if entry := result["scores"].get(key):
                cells = [percent(entry["metrics"], metric) for metric in ("acc", "acc_alone", "exact")]
                pair = pair_with_softmax(result, results, key)
                less = signed_points(paired_difference(*pair) if pair else None)
                questions = str(entry["documents"]) + majority.mark(entry)
                about = [form(result), run_cells(result)[0], name, questions]
                rows.append([*about, *cells, less])
                if less != DASH and result not in compared:
                    compared.append(result)
    if rows:
        rows.append(["Chance", "", "", "", "25", "25", "0", ""])
    head = ["Mechanism", "Run", "Text", "Questions", "right of four", "without the text", "word for word"]
    notes = [
        "A phrase of a long text is asked for again at its end, by the eight words that stood before it: "
        "chosen among four phrases of the text; the same without the text; given by greedy decoding."
    ]
    if compared:
        head.append("to softmax")
        notes += [DIFFERENCE_NOTE, *comparison_notes(compared, results)]
    else:
        rows = [row[:-1] for row in rows]
    notes += seeds_note(results) + _odd_notes(results, majority, "recall_phrases")
    return Table("Recall of phrases", head, rows, notes)


def _odd_notes(results: Sequence[dict[str, Any]], majority: MajoritySetup, measure: str) -> list[str]:
    """The notes on the † of this measure."""
    return majority.notes(
        (f"{entry['texts']} of {result['checkpoint']['run']}", entry)
        for result in results
        for entry in result["scores"].values()
        if entry["task"] == measure
    )


def pair_with_softmax(
    result: dict[str, Any], results: Sequence[dict[str, Any]], key: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The scores `key` of the run and of the softmax run to compare with; None if there is no pair."""
    return entries_with_softmax(result, results, lambda scores: scores.get(key))


def _texts_of(results: Sequence[dict[str, Any]], measure: str) -> list[str]:
    entries = [entry for result in results for entry in result["scores"].values()]
    return list(dict.fromkeys(entry["texts"] for entry in entries if entry["task"] == measure))
