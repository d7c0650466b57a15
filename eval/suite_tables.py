"""The tables of the suites other than Table 2; `suites.py` measures what they show."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lingpt.common.format import with_error
from lingpt.common.run_folder import attention_label
from lingpt.eval.benchmarks import DIFFERENCE_NOTE, HEAD, about_run, benchmark_table, perplexity
from lingpt.eval.comparison import (
    Marks,
    comparison_notes,
    document_differences,
    mark_notes,
    pair_with_softmax,
    paired_difference,
    run_name,
    seeds_note,
)
from lingpt.eval.figures import draw_positions
from lingpt.eval.scores import DASH, Result, Score, measure_key, signed_difference
from lingpt.eval.suites import COMMONSENSE, RETRIEVAL, SUITES
from lingpt.eval.tables import Table, save_tables

Pair = tuple[Score, Score]
TO_SOFTMAX = "to softmax"
TO_SOFTMAX_NOTE = (
    "To softmax: minus softmax's of the same model on the same documents, ± one standard error of the paired "
    "difference over documents and, of several seeds, over these."
)
BITS_NOTE = "Bits per UTF-8 byte of held-out text, ± one standard error over documents; xz for comparison."
POSITION_NOTE = (
    "Nats per token at the positions up to each length (from the one before it on); trained at {} tokens. "
    "Beyond that a model that extrapolates does not get worse. ± one standard error over the documents, the "
    "same ones at all positions. Unigram: the tokens' frequencies in the text, all that can be known without "
    "their order."
)
WITHIN_NOTE = (
    "Nats per token after up to so many tokens of its own document (more than in the column before), each "
    "document by itself, with nothing before it; only long ones reach the last columns. ± one standard error "
    "over documents."
)
RECALL = "recall_phrases"
RECALL_NOTE = (
    "A phrase of a long text is asked for again at its end, by the eight words that stood before it: chosen "
    "among four phrases of the text (a guess: 25); the same without the text; given by greedy decoding."
)
COMMONSENSE_NOTE = (
    "Accuracy in per cent ± one standard error (HellaSwag, ARC-C and OpenBookQA: length-normalised), "
    "zero-shot. LAMBADA's last word is right where greedy decoding gives it. Perplexities are per word; they "
    "have no chance level and are not in the average."
)
RETRIEVAL_NOTE = (
    "The answer stands in the prompt; per cent of greedy continuations that contain it, ± one standard error."
)
NEEDLE_NOTE = (
    "Per cent of seven-digit numbers that greedy decoding gives, ± one standard error: each stands once in a "
    "text of this many tokens and is asked for at its end."
)


def suite_tables(results: Sequence[Result], suites: Sequence[str] = tuple(SUITES)) -> list[Table]:
    """The tables of those of `suites` (except Table 2) that have been measured."""
    tables = []
    if "commonsense" in suites:
        tables.append(benchmark_table("Commonsense", COMMONSENSE, results, COMMONSENSE_NOTE, average=True))
    if "retrieval" in suites:
        tables.append(benchmark_table("Retrieval", RETRIEVAL, results, RETRIEVAL_NOTE, average=True))
    if "needle" in suites:
        tables.append(_needle_table(results))
    if "language" in suites:
        tables += [_bits_table(results), *_position_tables(results), _within_table(results)]
    if "recall" in suites:
        tables.append(_recall_table(results))
    return [table for table in tables if table.rows]


def save_suites(results: Sequence[Result], folder: Path, suites: Sequence[str] = tuple(SUITES)) -> list[Path]:
    """Writes suites.md and .tex, and the figures of the losses by position, if there is something to show."""
    if not (tables := suite_tables(results, suites)):
        return []
    figures = draw_positions(results, folder) if "language" in suites else []
    return [*save_tables(tables, folder, "suites"), *figures]


def score_table(results: Sequence[Result]) -> Table:
    """Every accuracy and perplexity of every checkpoint, but for phrases recalled, which have a table."""
    rows = []
    for result in sorted(results, key=lambda result: attention_label(result.checkpoint.attention)):
        for key, score in result.scores.items():
            shares = [score.percent(metric) for metric in ("acc", "acc_norm", "contains")]
            cells = [*shares, perplexity(score)]
            if score.task != RECALL and any(cell != DASH for cell in cells):
                rows.append([result.checkpoint.form, run_name(result), key, *cells, str(score.documents)])
    head = ["Attention", "Run", "Task", "acc", "acc_norm", "contains", "perplexity", "Documents"]
    return Table("", head, rows)


def _needle_table(results: Sequence[Result]) -> Table:
    """The share of needles found, by the length of the text."""
    found = [(result, {score.max_length: score for score in result.of_task("needle")}) for result in results]
    found = [(result, scores) for result, scores in found if scores]
    lengths = sorted({length for _, scores in found for length in scores if length})
    rows = [
        [
            *(result.checkpoint.form, *about_run(result)),
            *(scores[length].percent("exact") if length in scores else DASH for length in lengths),
        ]
        for result, scores in found
    ]
    head = [*HEAD, *(f"{length:,} tokens" for length in lengths)]
    return Table("Needle in a haystack", head, rows, [NEEDLE_NOTE, *seeds_note(results)])


def _text_table(
    title: str,
    measure: str,
    results: Sequence[Result],
    columns: Callable[[Score, Pair | None], dict[str, str]],
    note: str,
    softmax_note: str,
    over: str = "documents",
) -> Table:
    """A row for each run and text. Columns and rows without a number are left out.

    columns: heading → cell, of a score and the pair with softmax's, if there is one; `TO_SOFTMAX` and all of
    a table without `note` are differences, which `softmax_note` explains. over: what errors are over.
    """
    found, marks = list[tuple[Result, Score, dict[str, str]]](), Marks(results)
    for result in results:
        for score in result.of_task(measure):
            pair = pair_with_softmax(result, results, measure_key(measure, score.texts or ""))
            found.append((result, score, columns(score, pair)))
    found = [(result, score, cells) for result, score, cells in found if set(cells.values()) - {DASH}]
    head = [h for h in (found[0][2] if found else ()) if any(cells[h] != DASH for *_, cells in found)]
    rows = [
        [
            *(result.checkpoint.form, run_name(result), score.texts or DASH),
            *(f"{score.documents}{marks.of(score)}", *(cells[heading] for heading in head)),
        ]
        for result, score, cells in found
    ]
    compared = [result for result, _, cells in found if not note or cells.get(TO_SOFTMAX, DASH) != DASH]
    notes = [note, *seeds_note(results, over)] if note else []
    notes += [softmax_note, *comparison_notes(compared, results)] if compared else []
    return Table(
        title, ["Mechanism", "Run", "Text", over.capitalize(), *head], rows, notes + mark_notes(rows)
    )


def _bits_table(results: Sequence[Result]) -> Table:
    """Bits per byte of each text, and those of `xz`."""

    def columns(score: Score, pair: Pair | None) -> dict[str, str]:
        less = document_differences(*pair) if pair else None
        return {
            "bits per byte": score.number("bits_per_byte", ".3f"),
            "xz -9": score.number("xz_bits_per_byte", ".3f"),
            TO_SOFTMAX: signed_difference(less[0] if less else None, decimals=3),
        }

    return _text_table("Bits per byte", "bits_per_byte", results, columns, BITS_NOTE, TO_SOFTMAX_NOTE)


def _position_tables(results: Sequence[Result]) -> list[Table]:
    """Nats per token by position, groups of positions as columns; and minus softmax's."""
    scores = [score for result in results for score in result.of_task("loss_by_position")]
    ends = _ends(scores)

    def losses(score: Score, pair: Pair | None) -> dict[str, str]:
        unigram = {"unigram": DASH if score.unigram is None else f"{score.unigram:.3f}"}
        return unigram | _losses(score, ends)

    def differences(score: Score, pair: Pair | None) -> dict[str, str]:
        less = (document_differences(*pair) if pair else None) or []
        cells = {g.to: signed_difference(x, 3) for g, x in zip(score.positions, less, strict=False)}
        return {f"≤ {end:,}": cells.get(end, DASH) for end in ends}

    lengths = " and ".join(sorted({f"{score.train_length:,}" for score in scores if score.train_length}))
    note, task = POSITION_NOTE.format(lengths), "loss_by_position"
    return [
        _text_table("Loss by position", task, results, losses, note, TO_SOFTMAX_NOTE),
        _text_table("Loss by position, minus softmax's", task, results, differences, "", TO_SOFTMAX_NOTE),
    ]


def _within_table(results: Sequence[Result]) -> Table:
    """Nats per token by the number of the document's tokens before it."""
    ends = _ends([score for result in results for score in result.of_task("loss_within_documents")])

    def losses(score: Score, pair: Pair | None) -> dict[str, str]:
        return {"all": score.number("loss", ".3f")} | _losses(score, ends)

    task = "loss_within_documents"
    return _text_table("Loss within documents", task, results, losses, WITHIN_NOTE, TO_SOFTMAX_NOTE)


def _ends(scores: Sequence[Score]) -> list[int]:
    return sorted({group.to for score in scores for group in score.positions})


def _losses(score: Score, ends: Sequence[int]) -> dict[str, str]:
    """The cells with the loss of each group of positions."""
    cells = {group.to: with_error(group.loss, group.stderr, ".3f") for group in score.positions}
    return {f"≤ {end:,}": cells.get(end, DASH) for end in ends}


def _recall_table(results: Sequence[Result]) -> Table:
    def columns(score: Score, pair: Pair | None) -> dict[str, str]:
        less = paired_difference(*pair) if pair else None
        return {
            "right of four": score.percent("acc"),
            "without the text": score.percent("acc_alone"),
            "word for word": score.percent("exact"),
            TO_SOFTMAX: less.points() if less else DASH,
        }

    notes = RECALL_NOTE, DIFFERENCE_NOTE
    return _text_table("Recall of phrases", RECALL, results, columns, *notes, over="questions")
