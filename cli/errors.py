"""A mistake on the command line, and the word that was probably meant."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """A command line that cannot be understood."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, or nothing where none is near."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
