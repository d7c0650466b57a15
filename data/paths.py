"""Paths as a user gives them."""

import os
from pathlib import Path

from lingpt.common.errors import UserError


def expand(path: str | os.PathLike) -> Path:
    """`path` with its `~` expanded. UserError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UserError(f"{path}: this machine knows no home folder {user}: write the path out") from None
