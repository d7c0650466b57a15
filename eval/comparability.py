"""Marks scores that are not comparable with the rest of their column: other questions, or prompts cut to
another length."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "†"


def prompt_setup(entry: dict[str, Any]) -> tuple[Any, ...]:
    """A key, equal for comparable scores: the same prompts, cut to the same length if any was cut."""
    return entry.get("prompts"), _length(entry)


class MajoritySetup:
    """The prompt setup of most rows of each column (of two equally common ones, the first row's).

    A part of a benchmark, which tables mark with a * already, is compared with the same part only.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        setups: dict[Any, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        for result in results:
            for entry in result["scores"].values():
                setups[_column(entry)][prompt_setup(entry)] += 1
        self._setups = {column: counts.most_common(1)[0][0] for column, counts in setups.items()}

    def mark(self, entry: dict[str, Any] | None) -> str:
        """`†` for a score with another setup, else nothing."""
        return MARK if entry and prompt_setup(entry) != self._setups[_column(entry)] else ""

    def notes(self, entries: Iterable[tuple[str, dict[str, Any] | None]]) -> list[str]:
        """A note that names the marked entries and says why they are; no note if none is."""
        odd = [f"{name} ({self._difference(entry)})" for name, entry in entries if entry and self.mark(entry)]
        return [f"{MARK} not comparable with the rest of the column: {'; '.join(odd)}."] if odd else []

    def _difference(self, entry: dict[str, Any]) -> str:
        """How the entry's setup differs: `prompts cut to 512 tokens`, `other questions`."""
        prompts, majority_length = self._setups[_column(entry)]
        length, of_text, found = _length(entry), "texts" in entry, []
        if length != majority_length and length is None:
            found.append("no prompt cut")
        elif length != majority_length:
            found.append(f"{length:,} tokens a piece" if of_text else f"prompts cut to {length:,} tokens")
        if entry.get("prompts") != prompts:
            found.append("other pieces" if of_text else "other questions")
        return ", ".join(found)


def _column(entry: dict[str, Any]) -> tuple[Any, ...]:
    part = "whole" if entry.get("complete", True) else entry["documents"]
    return entry["task"], entry["num_fewshot"], entry.get("texts"), part


def _length(entry: dict[str, Any]) -> int | None:
    """The length in tokens that a score depends on: of the pieces of a text, or that prompts were cut to."""
    if "train_length" in entry:  # the loss by position has groups up to it
        return entry["train_length"]
    return entry.get("max_length") if "texts" in entry or entry.get("cut_prompts") else None
