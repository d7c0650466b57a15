"""UserError for errors that a user can fix, Interrupted for signals, and helpers for one-line messages."""

import difflib
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class UserError(ValueError):
    """A mistake of the user or of the machine: one line that says what is wrong and how to fix it.

    The command line prints the line; every other exception is a bug and keeps its traceback.
    """


INTERRUPTED = "interrupted; nothing was left half-written"


class Interrupted(KeyboardInterrupt):
    """A signal ended the command. The message is the line to show; 128 + `number` is the exit code."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


def name_on_stderr(reason: str) -> None:
    """Prints on stderr what is left out, and why."""
    print(f"left out: {reason}", file=sys.stderr)


def skip_failing(
    function: Callable[[T], R], items: Iterable[T], left_out: Callable[[str], None] = name_on_stderr
) -> list[R]:
    """`function` of each item. The message of a UserError goes to `left_out`, and the item is skipped.

    If all items fail, the first error is raised.
    """
    results, errors = [], []
    for item in items:
        try:
            results.append(function(item))
        except UserError as error:
            errors.append(error)
    if errors and not results:
        raise errors[0]
    for reason in dict.fromkeys(map(str, errors)):
        left_out(reason)
    return results


def by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line `a, b: reason` for each reason of these (name, reason): names that share one are in one line."""
    names: dict[str, dict[str, None]] = {}  # as an ordered set
    for name, reason in reasons:
        names.setdefault(reason, {})[name] = None
    return [f"{', '.join(named)}: {reason}" for reason, named in names.items()]


def first_line(error: BaseException) -> str:
    """The first line of the error's message, up to 200 characters; its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def one_line(error: BaseException, limit: int = 200) -> str:
    """The error's whole message on one line; its type if the message is empty."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def nearest(word: str, known: Collection[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`; empty if none is near.

    A group that they share (`train.`) makes them no nearer.
    """
    word = str(word)
    group = word[: word.rfind(".") + 1]
    own = {name.removeprefix(group): name for name in known if name.startswith(group)}
    others = {name: name for name in known if not name.startswith(group)}
    for asked, names in ((word.removeprefix(group), own), (word, others)):
        if match := difflib.get_close_matches(asked, names, n=1, cutoff=0.5):
            return f" (did you mean {names[match[0]]!r}?)"
    return ""


def unknown(kind: str, name: str, known: Collection[str]) -> UserError:
    """The error for a name that is not among the known ones: the nearest of them, and all."""
    return UserError(f"unknown {kind} {name!r}{nearest(name, known)}: use one of: {', '.join(known)}")


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises `unknown` for the first of the names that is not among the known ones."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
