"""The tables of the suites other than Table 2; `suites.py` measures what they show."""

from collections.abc import Sequence
from pathlib import Path

from lingpt.common.format import with_error
from lingpt.eval.benchmarks import DIFFERENCE_NOTE, HEAD, about_run, benchmark_table, perplexity
from lingpt.eval.comparison import (
    MajoritySetup,
    comparison_notes,
    document_differences,
    label,
    pair_with_softmax,
    paired_difference,
    run_name,
    seeds_note,
)
from lingpt.eval.figures import draw_positions
from lingpt.eval.scores import DASH, Result, Score, signed_difference, text_key
from lingpt.eval.suites import COMMONSENSE, SUITES
from lingpt.eval.tables import Table, save_tables

TO_SOFTMAX_NOTE = (
    "To softmax: minus softmax's of the same model on the same documents, ± one standard error of the paired "
    "difference over documents and, of several seeds, over these."
)
COMMONSENSE_NOTE = (
    "Accuracy in per cent ± one standard error (OpenBookQA and HellaSwag: length-normalised), zero-shot; "
    "LAMBADA's last word is right where greedy decoding gives it, its perplexity is per word, "
    "with no chance level (a uniform guess: the size of the vocabulary, for each token of the word)."
)


def suite_tables(results: Sequence[Result], suites: Sequence[str] = tuple(SUITES)) -> list[Table]:
    """The tables of those of `suites` (except Table 2) that have been measured."""
    tables = []
    if "commonsense" in suites:
        tables.append(benchmark_table("Commonsense", COMMONSENSE, results, COMMONSENSE_NOTE))
    if "language" in suites:
        tables += [_bits_table(results), _position_table(results), _position_differences_table(results)]
    if "recall" in suites:
        tables.append(_recall_table(results))
    return [table for table in tables if table.rows]


def save_suites(results: Sequence[Result], folder: Path, suites: Sequence[str] = tuple(SUITES)) -> list[Path]:
    """Writes suites.md, .tex and .png, and the figure `positions`, if there is something to show."""
    if not (tables := suite_tables(results, suites)):
        return []
    figures = draw_positions(results, folder) if "language" in suites else []
    return [*save_tables(tables, folder, "suites"), *figures]


def score_table(results: Sequence[Result]) -> Table:
    """Every score of every checkpoint."""
    rows = []
    for result in sorted(results, key=lambda result: label(result.checkpoint)):
        for key, score in result.scores.items():
            shares = [score.percent(metric) for metric in ("acc", "acc_norm", "contains")]
            cells = [*shares, perplexity(score), str(score.documents)]
            rows.append([result.checkpoint.form, run_name(result), key, *cells])
    head = ["Attention", "Run", "Task", "acc", "acc_norm", "contains", "perplexity", "Documents"]
    return Table("", head, rows)


def _bits_table(results: Sequence[Result]) -> Table:
    """Bits per byte of each text, and those of `xz`."""
    majority = MajoritySetup(results)
    measured = [result for result in results if result.of_task("bits_per_byte")]
    rows = [[result.checkpoint.form, *about_run(result)] for result in measured]
    xz, head, compared = ["xz -9", "", "", ""], list(HEAD), list[Result]()
    for name in _texts_of(results, "bits_per_byte"):
        key = text_key("bits_per_byte", name)
        scores = [result.scores.get(key) for result in measured]
        less = [_bits_to_softmax(result, results, key) for result in measured]
        for row, score in zip(rows, scores, strict=True):
            row.append(DASH if score is None else score.number("bits_per_byte", ".3f") + majority.mark(score))
        head.append(name)
        xz.append(next(score.number("xz_bits_per_byte", ".3f") for score in scores if score))
        if set(less) - {DASH}:
            for row, cell in zip(rows, less, strict=True):
                row.append(cell)
            head.append("to softmax")
            xz.append("")
            compared += [
                r for r, cell in zip(measured, less, strict=True) if cell != DASH and r not in compared
            ]
    notes = ["Bits per UTF-8 byte of held-out text, ± one standard error over documents; xz for comparison."]
    notes += [TO_SOFTMAX_NOTE] if compared else []
    notes += seeds_note(results, "documents") + _odd_notes(results, majority, "bits_per_byte")
    notes += comparison_notes([result for result in measured if result in compared], results)
    return Table("Bits per byte", head, [*rows, xz] if rows else [], notes)


def _bits_to_softmax(result: Result, results: Sequence[Result], key: str) -> str:
    pair = pair_with_softmax(result, results, key)
    less = document_differences(*pair) if pair else None
    return signed_difference(less[0] if less else None, decimals=3)


def _position_table(results: Sequence[Result]) -> Table:
    """Nats per token by position: one table for all texts, groups of positions as columns."""
    found = [(result, score) for result in results for score in result.of_task("loss_by_position")]
    ends = sorted({group.to for _, score in found for group in score.positions})
    rows, majority = [], MajoritySetup(results)
    for result, score in found:
        losses = {group.to: with_error(group.loss, group.stderr, ".3f") for group in score.positions}
        cells = [losses.get(end, DASH) for end in ends]
        documents = str(score.documents) + majority.mark(score)
        rows.append([result.checkpoint.form, run_name(result), str(score.texts), documents, *cells])
    rows += _unigram_rows(found, len(ends))
    lengths = sorted({f"{score.train_length:,}" for _, score in found})
    notes = [
        f"Nats per token at the positions up to each length (from the one before it on); trained at "
        f"{' and '.join(lengths)} tokens. Beyond that a model that extrapolates does not get worse. ± one "
        "standard error over the documents, the same ones at all positions. Unigram: the tokens' frequencies "
        "in the text, all that can be known without their order."
    ]
    notes += seeds_note(results, "documents") + _odd_notes(results, majority, "loss_by_position")
    return Table("Loss by position", _position_head(ends), rows, notes)


def _position_head(ends: Sequence[int]) -> list[str]:
    return ["Mechanism", "Run", "Text", "Documents", *(f"≤ {end:,}" for end in ends)]


def _unigram_rows(found: Sequence[tuple[Result, Score]], columns: int) -> list[list[str]]:
    """The unigram's row of each text; several where tokenizers differ, with the runs that each is of."""
    runs: dict[str, dict[str, dict[str, None]]] = {}  # text → loss → the runs
    for result, score in found:
        if score.unigram:
            losses = runs.setdefault(str(score.texts), {})
            losses.setdefault(f"{score.unigram:.3f}", {})[result.checkpoint.run] = None
    return [
        ["Unigram", ", ".join(names) if len(losses) > 1 else "", text, "", *[loss] * columns]
        for text, losses in runs.items()
        for loss, names in losses.items()
    ]


def _position_differences_table(results: Sequence[Result]) -> Table:
    """Differences to softmax per group of positions."""
    found = []
    for result in results:
        for name in _texts_of([result], "loss_by_position"):
            pair = pair_with_softmax(result, results, text_key("loss_by_position", name))
            if pair and (less := document_differences(*pair)):
                ends = [group.to for group in pair[0].positions]
                cells = {end: signed_difference(x, decimals=3) for end, x in zip(ends, less, strict=True)}
                found.append((result, name, str(pair[0].documents), cells))
    ends = sorted({end for *_, cells in found for end in cells})
    rows = [
        [result.checkpoint.form, run_name(result), name, documents, *(cells.get(end, DASH) for end in ends)]
        for result, name, documents, cells in found
    ]
    compared = [r for r in results if any(r is one for one, *_ in found)]
    notes = [TO_SOFTMAX_NOTE, *comparison_notes(compared, results)]
    return Table("Loss by position, minus softmax's", _position_head(ends), rows, notes)


def _recall_table(results: Sequence[Result]) -> Table:
    rows, compared, majority = [], list[Result](), MajoritySetup(results)
    for result in results:
        for score in result.of_task("recall_phrases"):
            pair = pair_with_softmax(result, results, text_key("recall_phrases", str(score.texts)))
            less = paired_difference(*pair) if pair else None
            questions = str(score.documents) + majority.mark(score)
            about = [result.checkpoint.form, run_name(result), str(score.texts), questions]
            cells = [score.percent(metric) for metric in ("acc", "acc_alone", "exact")]
            rows.append([*about, *cells, less.points() if less else DASH])
            if less and result not in compared:
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


def _odd_notes(results: Sequence[Result], majority: MajoritySetup, measure: str) -> list[str]:
    """The notes on the † of this measure."""
    return majority.notes(
        (f"{score.texts} of {result.checkpoint.run}", score)
        for result in results
        for score in result.of_task(measure)
    )


def _texts_of(results: Sequence[Result], measure: str) -> list[str]:
    return list(dict.fromkeys(str(s.texts) for result in results for s in result.of_task(measure)))
