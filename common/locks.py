"""A lock on a file, which keeps other processes out for as long as this one holds it."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Lock(NamedTuple):
    """file: the descriptor of the locked file. unsupported: why it is not locked; None if it is."""

    file: int
    unsupported: str | None


@contextlib.contextmanager
def file_lock(
    path: Path, blocking: bool = True, before_waiting: Callable[[], None] | None = None
) -> Iterator[Lock]:
    """Holds the lock of the file `path`, which is created if it is missing, with its folder. The system
    releases the lock when the process ends, however it ends. Only its holder may remove the file.

    blocking: wait while another process holds the lock; otherwise a held lock is a BlockingIOError.
    before_waiting: called before waiting, if that is needed.

    Some network file systems support no locks: the block then runs without one, and `unsupported` says why.
    """
    while True:
        file = _open(path)
        try:
            unsupported = _acquire(file, blocking, before_waiting)
            if _is_at(file, path):
                yield Lock(file, unsupported)
                return
        finally:
            os.close(file)


def _open(path: Path, attempts: int = 10) -> int:
    """The opened file; created, with its folder, as often as another process removes these meanwhile."""
    # NFS locks only what is open for writing. A link is not followed: its target is not ours to write.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except (FileNotFoundError, FileExistsError):
        if attempts == 1:
            raise
        return _open(path, attempts - 1)


def _acquire(file: int, blocking: bool, before_waiting: Callable[[], None] | None) -> str | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not blocking:
            raise
        if before_waiting:
            before_waiting()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_at(file: int, path: Path) -> bool:
    """Whether `file` still is the one at `path`: its last holder may have removed or moved it since we opened
    it, and others would then lock another file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
