"""Two checkpoints on the same questions: the difference of their accuracies and its interval.

A difference between two accuracies is known better than either: questions that both get right, or both
wrong, say nothing about it. What counts are those that one alone gets right.
"""

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


def paired_difference(a: dict[str, Any], b: dict[str, Any], metric: str = "acc") -> Difference | None:
    """Of two entries of `evaluate`'s scores; None where they were not asked the same questions, or do not say
    which they answered."""
    if a.get("prompts") != b.get("prompts") or a["documents"] != b["documents"]:
        return None
    packed = [entry.get("correct", {}).get(metric) for entry in (a, b)]
    if None in packed:
        return None
    first, second = (unpack_bits(bits, a["documents"]) for bits in packed)
    return bootstrap(first, second)


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
