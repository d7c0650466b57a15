"""Paired differences of two checkpoints: of accuracies on the same questions, with an interval; of losses on
the same documents, with a standard error.

The difference between two accuracies is known better than either: questions that both get right, or both
wrong, do not change it; only those count that just one gets right. The same holds for documents that are hard
for both models.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lingpt.eval.results import unpack_bits

RESAMPLES = 10_000


class Difference(NamedTuple):
    """Accuracy of the first minus that of the second, with its 95 % interval."""

    mean: float
    low: float
    high: float
    questions: int


class SeedDifference(NamedTuple):
    """Mean accuracy over a row's seeds minus that of another row, with its standard error; the error is None
    if one of the rows has a single seed, or there is a single question."""

    mean: float
    stderr: float | None
    questions: int


def paired_difference(a: dict[str, Any], b: dict[str, Any]) -> Difference | SeedDifference | None:
    """The difference in accuracy of two entries of `evaluate`'s scores or of `mean_scores`; None if their
    questions differ, or if they do not record which were answered correctly."""
    if a.get("prompts") != b.get("prompts") or a["documents"] != b["documents"]:
        return None
    packed = [entry.get("correct", {}).get("acc") for entry in (a, b)]
    if None in packed:
        return None
    of_runs = [bits if isinstance(bits, list) else [bits] for bits in packed]
    first, second = (np.stack([unpack_bits(bits, a["documents"]) for bits in runs]) for runs in of_runs)
    return bootstrap(first[0], second[0]) if len(first) == len(second) == 1 else over_seeds(first, second)


def over_seeds(first: np.ndarray, second: np.ndarray) -> SeedDifference:
    """The difference of two rows; `first`, `second`: bool `[seeds, questions]`.

    Its variance is the sum of that over the questions (of the difference at each) and that over the seeds (of
    each row's accuracies, Welch).
    """
    each, error = first.mean(0) - second.mean(0), None
    if min(len(first), len(second), len(each)) > 1:
        of_seeds = sum(bits.mean(1).var(ddof=1) / len(bits) for bits in (first, second))
        error = math.sqrt(each.var(ddof=1) / len(each) + of_seeds)
    return SeedDifference(float(each.mean()), error, len(each))


def bootstrap(first: np.ndarray, second: np.ndarray) -> Difference:
    """The percentile bootstrap over questions, from a fixed seed; `first`, `second`: bool `[questions]`.

    A question's difference is −1, 0 or 1, so that a resample of the questions is a multinomial draw of three
    counts.
    """
    n = len(first)
    up, down = int((first & ~second).sum()), int((~first & second).sum())
    draws = np.random.default_rng(0).multinomial(n, [up / n, down / n, 1 - (up + down) / n], size=RESAMPLES)
    low, high = np.percentile((draws[:, 0] - draws[:, 1]) / n, [2.5, 97.5])
    return Difference((up - down) / n, float(low), float(high), n)


def bits_difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float | None] | None:
    """Bits per byte of `a` minus those of `b`, with the standard error of `ratio_difference`; None if they
    are not of the same documents, or not recorded per document."""
    if (pair := _per_document(a, b)) is None:
        return None
    first, second = (np.array([run["nats"] for run in runs]) / math.log(2) for runs in pair)
    return ratio_difference(first, second, pair[0][0]["bytes"])


def position_differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[float, float | None]] | None:
    """The same as `bits_difference`, for the loss of each group of positions."""
    ends = [[group["to"] for group in entry["positions"]] for entry in (a, b)]
    if ends[0] != ends[1] or (pair := _per_document(a, b)) is None:
        return None
    first, second = (np.array([run["losses"] for run in runs]) for runs in pair)
    sizes = [1] * a["documents"]
    return [ratio_difference(first[:, i], second[:, i], sizes) for i in range(len(ends[0]))]


def _per_document(a: dict[str, Any], b: dict[str, Any]) -> list[list[dict[str, Any]]] | None:
    """For each entry, the values per document of each of its runs; None as for `bits_difference`."""
    if a.get("prompts") != b.get("prompts") or a["documents"] != b["documents"]:
        return None
    if not all("per_document" in entry for entry in (a, b)):  # scored by an older version
        return None
    kept = [entry["per_document"] for entry in (a, b)]
    return [runs if isinstance(runs, list) else [runs] for runs in kept]


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
