"""Compares results: means over seeds, paired differences, and marks on what is not comparable.

Runs that differ only in their seed are one row: means with standard errors.

The difference between two accuracies is known better than either: questions that both get right, or both
wrong, do not change it; only those count that just one gets right. The same holds for documents that are hard
for both models. So differences to softmax are paired: over the same questions, or the same documents.

A score of other questions than most of its column, or with prompts cut to another length, is marked.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from lingpt.common.run_folder import attention_label, without_seed
from lingpt.eval.scores import Positions, Result, Score, signed_difference, unpack_bits

RESAMPLES = 10_000
PART, OTHER = "*", "†"
MARK_NOTES = {
    PART: f"{PART} not the whole benchmark: --limit, or a file with fewer rows than the official split.",
    OTHER: f"{OTHER} not comparable with the rest of the column: other questions, or cut to another length.",
}
# q is an upper bound of the mean's error over questions, since all seeds had the same questions.
SEEDS_NOTE = (
    "Of n seeds: their mean ± √(s²/n + q²), s the standard deviation over the seeds, q the mean of their "
    "errors over {}."
)

# ---------------------------------------------------------------------- means over seeds


def mean_scores(results: Sequence[Result]) -> list[Result]:
    """Combines the runs `…-seed0`, `…-seed1`, … at the same step into one result, in order of the first run.

    Scores that not all of a row's runs have, on the same questions, are in further results: means over the
    runs that have them, or a run's own.
    """
    rows: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        about = result.checkpoint
        row = without_seed(about.run)
        # Seeds of a row are in the same folder of runs; a run without a seed in its name stays alone.
        where = about.path if row == about.run else about.path.partition(about.run)[0]
        key = row, where, about.model, about.form, about.step, about.tokens, about.seq_len
        rows.setdefault(key, []).append(result)
    return [result for (row, *_), runs in rows.items() for result in _combined(row, runs)]


def _combined(row: str, runs: list[Result]) -> list[Result]:
    """The results of a row: one for each set of runs with scores in common, the largest set first."""
    if len(runs) == 1:
        return runs
    keys_of: dict[tuple[int, ...], list[str]] = {}  # indices of runs → the scores that these have in common
    for key in dict.fromkeys(key for result in runs for key in result.scores):
        asked: dict[tuple[Any, ...], list[int]] = {}
        for i, result in enumerate(runs):
            if score := result.scores.get(key):
                asked.setdefault((score.documents, score.prompts, len(score.positions)), []).append(i)
        for members in asked.values():
            keys_of.setdefault(tuple(members), []).append(key)
    found = [_mean(row, [runs[i] for i in members], keys) for members, keys in keys_of.items()]
    return sorted(found, key=lambda result: len(result.seeds), reverse=True) or [_mean(row, runs, [])]


def _mean(row: str, runs: list[Result], keys: Sequence[str]) -> Result:
    """The mean of the runs' scores `keys`; of a single run these scores themselves."""
    if len(runs) == 1:
        return replace(runs[0], scores={key: runs[0].scores[key] for key in keys})
    scores = {key: _mean_score([run.scores[key] for run in runs]) for key in keys}
    about = replace(runs[0].checkpoint, run=row, path="", weights="", seed=None)
    return Result(checkpoint=about, scores=scores, runs=tuple(runs))


def _mean_score(scores: list[Score]) -> Score:
    first, metrics = scores[0], dict[str, float | None]()
    for name in (name for name in first.metrics if not name.endswith("_stderr")):
        values = [score.metrics.get(name) for score in scores]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            errors = [score.metrics.get(f"{name}_stderr") for score in scores]
            metrics[name], metrics[f"{name}_stderr"] = mean_and_error(known, errors)
    columns = zip(*(score.positions for score in scores), strict=True)
    positions = tuple(_mean_positions(groups) for groups in columns)
    return replace(first, metrics=metrics, positions=positions, runs=tuple(scores))


def _mean_positions(groups: Sequence[Positions]) -> Positions:
    losses = [group.loss for group in groups]
    mean, error = mean_and_error(losses, [group.stderr for group in groups])
    return Positions(to=groups[0].to, loss=mean, stderr=error, lowest=min(losses), highest=max(losses))


def mean_and_error(values: Sequence[float], errors: Sequence[float | None]) -> tuple[float, float | None]:
    """The mean over seeds and its standard error as in `SEEDS_NOTE`, None if a run's own is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(values):
        return fmean(values), None
    return fmean(values), math.hypot(np.std(values, ddof=1) / math.sqrt(len(values)), fmean(known))


def seeds_note(results: Sequence[Result], over: str = "questions") -> list[str]:
    """A note on the errors of means, if there are means; `over`: what a run's own error is taken over."""
    return [SEEDS_NOTE.format(over)] if any(result.runs for result in results) else []


# ---------------------------------------------------------------------- paired differences


@dataclass(frozen=True)
class Difference:
    """An accuracy minus another: of two runs with its 95 % `interval`; of several seeds with its standard
    error, None if one of the rows has a single seed, or there is a single question."""

    mean: float
    questions: int
    stderr: float | None = None
    interval: tuple[float, float] | None = None

    def points(self) -> str:
        """In percentage points: `+0.53 [−0.42, +1.47]`, or `+0.53 ± 0.40`.

        An interval or error of 0 says nothing (a single question, or no run alone is right): left out.
        """
        error = 100 * self.stderr if self.stderr else None
        text = signed_difference((100 * self.mean, error), decimals=2)
        if self.interval is None or self.interval[0] == self.interval[1]:
            return text
        low, high = (signed_difference((100 * bound, None), decimals=2) for bound in self.interval)
        return f"{text} [{low}, {high}]"


def paired_difference(a: Score, b: Score) -> Difference | None:
    """The difference in accuracy; None if the questions differ, or it is not known which were answered
    correctly."""
    metric = "acc" if "acc" in a.correct else "contains"
    if not _same_questions(a, b) or not all(metric in one.correct for one in (*a.by_seed, *b.by_seed)):
        return None
    first, second = (
        np.stack([unpack_bits(one.correct[metric], a.documents) for one in score.by_seed]) for score in (a, b)
    )
    return bootstrap(first[0], second[0]) if len(first) == len(second) == 1 else over_seeds(first, second)


def _same_questions(a: Score, b: Score) -> bool:
    return (a.prompts, a.documents) == (b.prompts, b.documents)


def over_seeds(first: np.ndarray, second: np.ndarray) -> Difference:
    """The difference of two rows; `first`, `second`: bool `[seeds, questions]`.

    Its variance is the sum of that over the questions (of the difference at each) and that over the seeds (of
    each row's accuracies, Welch).
    """
    each, error = first.mean(0) - second.mean(0), None
    if min(len(first), len(second), len(each)) > 1:
        of_seeds = sum(bits.mean(1).var(ddof=1) / len(bits) for bits in (first, second))
        error = math.sqrt(each.var(ddof=1) / len(each) + of_seeds)
    return Difference(float(each.mean()), len(each), stderr=error)


def bootstrap(first: np.ndarray, second: np.ndarray) -> Difference:
    """The percentile bootstrap over questions, from a fixed seed; `first`, `second`: bool `[questions]`.

    A question's difference is −1, 0 or 1, so that a resample of the questions is a multinomial draw of three
    counts.
    """
    n = len(first)
    up, down = int((first & ~second).sum()), int((~first & second).sum())
    draws = np.random.default_rng(0).multinomial(n, [up / n, down / n, 1 - (up + down) / n], size=RESAMPLES)
    low, high = np.percentile((draws[:, 0] - draws[:, 1]) / n, [2.5, 97.5])
    return Difference((up - down) / n, n, interval=(float(low), float(high)))


def document_differences(a: Score, b: Score) -> list[tuple[float, float | None]] | None:
    """Bits per byte of `a` minus those of `b`, or the losses of each group of positions, each with the error
    of `ratio_difference`; None if they are not of the same documents, or not known per document."""
    values = [one.per_document for one in (*a.by_seed, *b.by_seed)]
    known = [value for value in values if value]
    ends = [[group.to for group in score.positions] for score in (a, b)]
    if not _same_questions(a, b) or len(known) < len(values) or ends[0] != ends[1]:
        return None
    groups = np.stack([value.values() for value in known], axis=1)  # [groups, seeds, documents]
    count, sizes = len(a.by_seed), known[0].sizes()
    return [ratio_difference(group[:count], group[count:], sizes) for group in groups]


def ratio_difference(
    first: np.ndarray, second: np.ndarray, sizes: Sequence[int]
) -> tuple[float, float | None]:
    """Σ first / Σ sizes − Σ second / Σ sizes, with its standard error, paired over the items; with several
    seeds, variances are added as in `over_seeds`. `first`, `second`: `[seeds, items]`."""
    mean, error = ratio((first.mean(0) - second.mean(0)).tolist(), sizes)
    seeds = len(first), len(second)
    if error is None or seeds == (1, 1):
        return mean, error
    if 1 in seeds:
        return mean, None
    of_seeds = sum(totals.sum(1).var(ddof=1) / len(totals) for totals in (first, second))
    return mean, math.sqrt(error**2 + of_seeds / sum(sizes) ** 2)


def ratio(totals: Sequence[float], sizes: Sequence[int]) -> tuple[float, float | None]:
    """Σ totals / Σ sizes, with its standard error over the items (linearised); None for a single item."""
    n, value = len(totals), sum(totals) / sum(sizes)
    if n < 2:
        return value, None
    squares = sum((total - value * size) ** 2 for total, size in zip(totals, sizes, strict=True))
    return value, math.sqrt(n / (n - 1) * squares) / sum(sizes)


# ---------------------------------------------------------------------- with softmax


def softmax_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The softmax run of the same model to compare with: the `baseline` that a study names, else softmax
    without options, else any; of several, one with scores of the same tasks, and the most in common of seed,
    tokens and length. None if there is none, or it is `result` itself."""
    about = result.checkpoint

    def likeness(other: Result) -> tuple[bool, bool, bool, int]:
        its = other.checkpoint
        same = (about.tokens == its.tokens) + (about.seq_len == its.seq_len) + bool(_shared(result, other))
        comparable = bool(result.scores.keys() & other.scores.keys())
        return its.baseline, its.form == "softmax", comparable, same

    same_model = [r for r in results if r.checkpoint.model == about.model]
    softmax = [r for r in same_model if attention_label(r.checkpoint.attention) == "softmax"]
    found = max(softmax, key=likeness, default=None)
    return None if found is result else found


def pair_with_softmax(result: Result, results: Sequence[Result], key: str) -> tuple[Score, Score] | None:
    """The scores `key` of the run and of its softmax run; None if there is no pair.

    If exactly one of the rows is a single seed that the other has, too, the other is reduced to that seed.
    """
    softmax = softmax_of(result, results)
    if softmax is None or key not in result.scores or key not in softmax.scores:
        return None
    shared = _shared(result, softmax)
    if shared and 1 in (len(result.seeds), len(softmax.seeds)):
        a, b = (one.scores[key].by_seed[one.seeds.index(shared[0])] for one in (result, softmax))
        return a, b
    return result.scores[key], softmax.scores[key]


def _shared(one: Result, other: Result) -> list[int | None]:
    """The seeds that both results have."""
    return [seed for seed in one.seeds if seed in other.seeds]


def comparison_notes(compared: Sequence[Result], results: Sequence[Result]) -> list[str]:
    """Notes on which softmax run of `results` each run is compared with, and whether its seed, number of
    tokens or length differs. compared: the runs with a difference in the table."""
    found: dict[str, list[str]] = {}
    for result in compared:
        if (softmax := softmax_of(result, results)) is None:
            continue
        one, other, shared = result.checkpoint, softmax.checkpoint, _shared(result, softmax)
        differs = ["seed"] if not shared else []
        differs += ["number of tokens"] if one.tokens != other.tokens else []
        differs += ["length"] if one.seq_len != other.seq_len else []
        about = f" (of another {' and '.join(differs)})" if differs else ""
        numbers = len(result.seeds), len(softmax.seeds)
        if shared and min(numbers) == 1 < max(numbers):
            about += f" (its seed {shared[0]} alone)"
        found.setdefault(run_name(softmax), []).append(one.run + about)
    # A run is compared once for each of its texts, and named once.
    return [f"Compared with {name}: {', '.join(dict.fromkeys(runs))}." for name, runs in found.items()]


def run_name(result: Result) -> str:
    """`pythia-70m-ours, step 960`, without a step of a model folder; and the number of seeds if several."""
    about = result.checkpoint
    name = f"{about.run}, step {about.step}" if about.step else about.run
    return name + (f", {len(result.seeds)} seeds" if result.runs else "")


# ---------------------------------------------------------------------- comparable prompts


def prompt_setup(score: Score) -> tuple[str | None, int | None]:
    """A key, equal for comparable scores: the same prompts, cut to the same length if any was cut."""
    length = score.max_length if score.texts or score.cut_prompts else None
    return score.prompts, score.train_length or length


class Marks:
    """Marks scores: * of a part of the benchmark, † of another prompt setup than most rows of the column (of
    two equally common ones, the first row's). Parts are compared with the same part only."""

    def __init__(self, results: Sequence[Result]) -> None:
        setups: dict[Any, Counter[tuple[str | None, int | None]]] = defaultdict(Counter)
        for result in results:
            for score in result.scores.values():
                setups[self._column(score)][prompt_setup(score)] += 1
        self._setups = {column: counts.most_common(1)[0][0] for column, counts in setups.items()}

    def of(self, score: Score) -> str:
        usual = prompt_setup(score) == self._setups[self._column(score)]
        return ("" if score.complete else PART) + ("" if usual else OTHER)

    @staticmethod
    def _column(score: Score) -> tuple[Any, ...]:
        part = None if score.complete else score.documents
        return score.task, score.num_fewshot, score.texts, part


def mark_notes(rows: Iterable[Sequence[str]], notes: dict[str, str] = MARK_NOTES) -> list[str]:
    """The notes on the marks that end a cell of these rows."""
    ends = {mark for row in rows for cell in row for mark in cell[-2:]}
    return [note for mark, note in notes.items() if mark in ends]
