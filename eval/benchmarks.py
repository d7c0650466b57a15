"""Tables of benchmarks: a row a run, a column a benchmark; and the paired differences to softmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lingpt.common.format import scaled_count, with_error
from lingpt.eval.comparison import (
    MARK_NOTES,
    OTHER,
    PART,
    Marks,
    comparison_notes,
    mark_notes,
    pair_with_softmax,
    paired_difference,
    prompt_setup,
    run_name,
    seeds_note,
)
from lingpt.eval.scores import DASH, Result, Score, is_share, task_key
from lingpt.eval.tables import Table

PERPLEXITIES = ("perplexity", "word_perplexity")  # lm-eval's names
HEAD = ["Mechanism", "Run", "Parameters", "Tokens"]
DIFFERENCE_NOTE = (
    "Difference: accuracy minus softmax's of the same model, in points, over the same questions, with the "
    "[95 % interval] of a paired bootstrap or, of several seeds, ± a standard error over questions, paired, "
    "and seeds."
)
DIFFERENCE_MARKS = MARK_NOTES | {
    OTHER: f"{OTHER} of the two runs one had its prompts cut to another length, or not at all."
}


@dataclass(frozen=True)
class Column:
    """A benchmark: lm-eval's task, the number of examples, the metric, and the chance level in per cent."""

    heading: str
    task: str
    shots: int = 0
    metric: str = "acc"
    chance: str = "0"

    def find(self, result: Result) -> tuple[str, Score] | None:
        """The key and score on the whole benchmark, else on the largest part of it that was evaluated."""
        found = [
            (key, score)
            for key, score in result.scores.items()
            if (score.task, score.num_fewshot) == (self.task, self.shots)
        ]
        whole = task_key(self.task, self.shots)
        return max(found, key=lambda item: (item[0] == whole, item[1].documents), default=None)

    def score(self, result: Result) -> Score | None:
        found = self.find(result)
        return found[1] if found else None

    def cell(self, result: Result, marks: Marks) -> str:
        score = self.score(result)
        if score is None or score.metrics.get(self.metric) is None:
            return DASH
        text = score.percent(self.metric) if is_share(self.metric) else perplexity(score, self.metric)
        return text + marks.of(score)


def perplexity(score: Score, metric: str | None = None) -> str:
    """A perplexity (by default the one that the score has) and its standard error; never 7.03e+04, nor 31
    digits."""
    metric = metric or next((name for name in PERPLEXITIES if name in score.metrics), "perplexity")
    value, error = score.metrics.get(metric), score.metrics.get(f"{metric}_stderr")
    if value is None:
        return DASH
    spec, error_spec = (",.0f", ",.0f") if 100 <= value < 1e6 else (".3g", ".2g")
    return with_error(value, error or None, spec, error_spec)


def about_run(result: Result) -> list[str]:
    """The run's name and step, its parameters and its tokens."""
    about = result.checkpoint
    counts = (DASH if n is None else scaled_count(n) for n in (about.parameters, about.tokens))
    return [run_name(result), *counts]


def benchmark_table(
    title: str, columns: Sequence[Column], results: Sequence[Result], note: str, average: bool = False
) -> Table:
    """A row for each result with a score, and chance. average: add the mean of the columns in per cent."""
    marks, shares = Marks(results), [c for c in columns if is_share(c.metric)]
    columns = [c for c in columns if any(c.cell(r, marks) != DASH for r in results)]
    shown = [r for r in results if any(c.cell(r, marks) != DASH for c in columns)]
    rows = [run_row(result, columns, marks) for result in shown]
    head = [*HEAD, *(column.heading for column in columns)]
    if rows:
        rows.append(chance_row(columns))
    if rows and average:
        head.append("Average")
        means = [average_cell(columns, result) for result in shown]
        if missing := [c.heading for c in shares if c not in columns]:
            note += f" Not measured, and not in the average: {', '.join(missing)}."
        rows = [[*row, mean] for row, mean in zip(rows, [*means, ""], strict=True)]
    notes = [note, *seeds_note(results), *mark_notes(rows), *cut_notes(columns, results)]
    return Table(title, head, rows, notes)


def run_row(result: Result, columns: Sequence[Column], marks: Marks) -> list[str]:
    cells = (column.cell(result, marks) for column in columns)
    return [result.checkpoint.form, *about_run(result), *cells]


def chance_row(columns: Sequence[Column]) -> list[str]:
    return ["Chance", "", "", "", *(column.chance for column in columns)]


def average_cell(columns: Sequence[Column], result: Result) -> str:
    """The mean of the columns that are in per cent; – unless the result has all of them."""
    found = [(c.score(result), c.metric) for c in columns if is_share(c.metric)]
    values = [score.metrics.get(metric) for score, metric in found if score]
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.2f}" if known and len(known) == len(found) else DASH


def difference_table(columns: Sequence[Column], results: Sequence[Result]) -> Table:
    """The accuracies minus softmax's."""
    rows, compared = [], []
    for result in results:
        cells = [_difference_cell(column, result, results) for column in columns]
        if set(cells) != {DASH}:
            rows.append([result.checkpoint.form, run_name(result), *cells])
            compared.append(result)
    notes = [DIFFERENCE_NOTE, *comparison_notes(compared, results), *mark_notes(rows, DIFFERENCE_MARKS)]
    head = ["Mechanism", "Run", *(column.heading for column in columns)]
    return Table("Paired differences to softmax", head, rows, notes)


def _difference_cell(column: Column, result: Result, results: Sequence[Result]) -> str:
    """The difference to softmax, with the marks of `DIFFERENCE_MARKS`."""
    found = column.find(result)
    pair = pair_with_softmax(result, results, found[0]) if found else None
    difference = paired_difference(*pair) if pair else None
    if pair is None or difference is None:
        return DASH
    part = "" if pair[0].complete else PART
    other = "" if prompt_setup(pair[0]) == prompt_setup(pair[1]) else OTHER
    return difference.points() + part + other


def cut_notes(columns: Sequence[Column], results: Sequence[Result]) -> list[str]:
    """A note for each benchmark with prompts that did not fit: how many of how many."""
    headings: dict[tuple[str, int], Column] = {}  # a benchmark's first column: it may have several
    for column in columns:
        headings.setdefault((column.task, column.shots), column)
    found: dict[str, dict[str, None]] = {}
    for column in headings.values():
        for score in (column.score(result) for result in results):
            if score and score.cut_prompts and score.max_length:
                text = f"{score.cut_prompts:,} of {score.documents:,} prompts at {score.max_length:,} tokens"
                found.setdefault(column.heading, {})[text] = None
    return [f"{heading}: {'; '.join(texts)} were cut on the left to fit." for heading, texts in found.items()]
