"""Which scores of one column cannot be compared: they are of other questions, or of prompts cut to another
length."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "†"


def prompt_setup(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for comparable scores: the same prompts, cut to the same length if any was cut."""
    return entry.get("prompts"), _length(entry)


class MajoritySetup:
    """The prompt setup that most rows of each column have (of two equally common ones, the first row's).

    Part of a benchmark, which tables mark with a * already, is compared with the same part of it.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        setups: dict[Any, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        for result in results:
            for entry in result["scores"].values():
                setups[_column(entry)][prompt_setup(entry)] += 1
        self._setups = {column: counts.most_common(1)[0][0] for column, counts in setups.items()}

    def mark(self, entry: dict[str, Any] | None) -> str:
        """`†` for a score with another setup."""
        return MARK if entry and prompt_setup(entry) != self._setups[_column(entry)] else ""

    def notes(self, entries: Iterable[tuple[str, dict[str, Any] | None]]) -> list[str]:
        """What is marked of these named entries, and why; nothing where none is."""
        odd = [f"{name} ({self._difference(entry)})" for name, entry in entries if entry and self.mark(entry)]
        return [f"{MARK} not comparable with the rest of the column: {'; '.join(odd)}."] if odd else []

    def _difference(self, entry: dict[str, Any]) -> str:
        """`prompts cut to 512 tokens`, `other questions`: how its setup differs."""
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
    """Tokens that decide a score: of a text those read at once, else those that prompts were cut to."""
    if "train_length" in entry:  # the loss by position has groups up to it
        return entry["train_length"]
    return entry.get("max_length") if "texts" in entry or entry.get("cut_prompts") else None
