"""Writing to disk so that nothing half-written ever passes for whole."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lingpt.common.errors import UserError


def default_cache_dir() -> Path:
    """`$LINGPT_CACHE`, else `~/.cache/lingpt`."""
    return Path(os.environ.get("LINGPT_CACHE") or "~/.cache/lingpt").expanduser()


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Around writing in `folder`: a full, read-only or failing disk becomes one `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror or error}), and nothing half-written was kept: "
            "free some space, or choose another place with --data.cache_dir or LINGPT_CACHE"
        ) from None


def write_aside(path: Path, content: bytes) -> None:
    """Writes a small file whole or not at all. Raises `UserError` where the disk does not let it."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                sync(file)
            os.chmod(aside, 0o644)  # mkstemp's 0600 would hide it from other users of a shared cache
            os.replace(aside, path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise


def sync(file: BinaryIO) -> None:
    """Brings the content to the disk, before a rename says that it is there."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Brings the folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
