"""The paths that a user gives: `~` written out, and what cannot be reached as one line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lingpt.common.errors import UserError


def expand(path: str | os.PathLike) -> Path:
    """`path` with its `~` written out. UserError where that is nobody's folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UserError(f"{path}: this machine knows no home folder {user}: write the path out") from None


@contextlib.contextmanager
def reading(source: str | os.PathLike) -> Iterator[None]:
    """Makes the system's refusal to list or to look at `source` a line for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {source} ({reason}): make it readable, or give another path") from None
