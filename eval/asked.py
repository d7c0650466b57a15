"""Scores of one column that were not asked alike: other questions, or the same ones cut to another length."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "†"


def way(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for scores that were asked alike: the same prompts, cut to the same length if any was cut."""
    return entry.get("prompts"), _length(entry)


class Usual:
    """How most rows of each column were asked (of two ways as usual, the first row's).

    Part of a benchmark, which tables mark with a * already, is compared with the same part of it.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        ways: dict[Any, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        for result in results:
            for entry in result["scores"].values():
                ways[_column(entry)][way(entry)] += 1
        self._ways = {column: counts.most_common(1)[0][0] for column, counts in ways.items()}

    def mark(self, entry: dict[str, Any] | None) -> str:
        """`†` for a score that was asked otherwise."""
        return MARK if entry and way(entry) != self._ways[_column(entry)] else ""

    def notes(self, entries: Iterable[tuple[str, dict[str, Any] | None]]) -> list[str]:
        """What is marked of these named entries, and why; nothing where none is."""
        odd = [f"{name} ({self._how(entry)})" for name, entry in entries if entry and self.mark(entry)]
        return [f"{MARK} asked otherwise than most of the column: {'; '.join(odd)}."] if odd else []

    def _how(self, entry: dict[str, Any]) -> str:
        """`prompts cut to 512 tokens`, `other questions`: wherein it is not as usual."""
        prompts, usual = self._ways[_column(entry)]
        length, of_text, how = _length(entry), "texts" in entry, []
        if length != usual and length is None:
            how.append("no prompt cut")
        elif length != usual:
            how.append(f"{length:,} tokens a piece" if of_text else f"prompts cut to {length:,} tokens")
        if entry.get("prompts") != prompts:
            how.append("other pieces" if of_text else "other questions")
        return ", ".join(how)


def _column(entry: dict[str, Any]) -> tuple[Any, ...]:
    part = "whole" if entry.get("complete", True) else entry["documents"]
    return entry["task"], entry["num_fewshot"], entry.get("texts"), part


def _length(entry: dict[str, Any]) -> int | None:
    """Tokens that decide a score: of a text those read at once, else those that prompts were cut to."""
    if "train_length" in entry:  # the loss by position has groups up to it
        return entry["train_length"]
    return entry.get("max_length") if "texts" in entry or entry.get("cut_prompts") else None
