"""Two checkpoints on the same questions: the difference of their accuracies and its interval.

A difference between two accuracies is known better than either: questions that both get right, or both
wrong, say nothing about it. What counts are those that one alone gets right.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from lingpt.eval.results import unpack_bits

RESAMPLES = 10_000


class Difference(NamedTuple):
    """Accuracy of the first less that of the second, and its 95 % interval."""

    mean: float
    low: float
    high: float
    questions: int


class SeedDifference(NamedTuple):
    """Mean accuracy of a row's seeds less that of another's, and its standard error; None where one of the
    rows has a single seed."""

    mean: float
    stderr: float | None
    questions: int


def paired_difference(
    a: dict[str, Any], b: dict[str, Any], metric: str = "acc"
) -> Difference | SeedDifference | None:
    """Of two entries of `evaluate`'s scores, or of `mean_scores`; None where they were not asked the same
    questions, or do not say which they answered."""
    if a.get("prompts") != b.get("prompts") or a["documents"] != b["documents"]:
        return None
    packed = [entry.get("correct", {}).get(metric) for entry in (a, b)]
    if None in packed:
        return None
    of_runs = [bits if isinstance(bits, list) else [bits] for bits in packed]
    first, second = (np.stack([unpack_bits(bits, a["documents"]) for bits in runs]) for runs in of_runs)
    return bootstrap(first[0], second[0]) if len(first) == len(second) == 1 else over_seeds(first, second)


def over_seeds(first: np.ndarray, second: np.ndarray) -> SeedDifference:
    """`first`, `second`: bool `[seeds, questions]`.

    Two variances are added: over the questions, of the difference at each; over the seeds, of each row's
    accuracies (Welch).
    """
    each, error = first.mean(0) - second.mean(0), None
    if len(first) > 1 and len(second) > 1:
        of_seeds = sum(bits.mean(1).var(ddof=1) / len(bits) for bits in (first, second))
        error = math.sqrt(each.var() / len(each) + of_seeds)
    return SeedDifference(float(each.mean()), error, len(each))


def bootstrap(first: np.ndarray, second: np.ndarray, resamples: int = RESAMPLES) -> Difference:
    """The percentile bootstrap over questions, from a fixed seed; `first`, `second`: bool `[questions]`.

    A question's difference is −1, 0 or 1, so that a resample of the questions is a multinomial draw of three
    counts.
    """
    n = len(first)
    up, down = int((first & ~second).sum()), int((~first & second).sum())
    draws = np.random.default_rng(0).multinomial(n, [up / n, down / n, 1 - (up + down) / n], size=resamples)
    low, high = np.percentile((draws[:, 0] - draws[:, 1]) / n, [2.5, 97.5])
    return Difference((up - down) / n, float(low), float(high), n)
