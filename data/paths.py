"""The paths that a user gives."""

import os
from pathlib import Path

from lingpt.common.errors import UserError


def expand(path: str | os.PathLike) -> Path:
    """`path` with its `~` written out. UserError where that is nobody's folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UserError(f"{path}: this machine knows no home folder {user}: write the path out") from None
