"""The error that a user can mend, and the nearest name to one that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


class ModelError(ValueError):
    """A user's mistake about models: one line that says what is wrong and how to mend it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ModelError:
    """The error for a name that is in no registry: says the nearest one, and which there are."""
    known = list(known)
    nearest = get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"use one of: {', '.join(known)}"
    return ModelError(f"unknown {kind} {name!r}: {hint}")
