"""The one class of errors that a user can fix, and the nearest name to one that does not exist."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user or of the machine: one line that says what is wrong and how to fix it.

    The command line prints the line; every other exception is a bug and keeps its traceback.
    """


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, or nothing where none is near."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {match[0]!r}?)" if match else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no registry."""
    return UserError(f"unknown {kind} {name!r}: {suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the known name nearest to `name`, or all of them where none is near."""
    known = list(known)
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    return f"did you mean {match[0]!r}?" if match else f"use one of: {', '.join(known)}"
