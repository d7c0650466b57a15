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
def file_lock(path: Path, before_waiting: Callable[[], None] | None = None) -> Iterator[Lock]:
    """Holds the lock of the file `path`, which is created if it is missing. The system releases the lock when
    the process ends, however it ends.

    before_waiting: called if another process holds the lock, before waiting for it. Without it, a held lock
    is a BlockingIOError.

    Some network file systems support no locks: the block then runs without one, and `unsupported` says why.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
    try:
        yield Lock(file, _acquire(file, before_waiting))
    finally:
        os.close(file)


def _acquire(file: int, before_waiting: Callable[[], None] | None) -> str | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if before_waiting is None:
            raise
        before_waiting()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        return error.strerror or str(error)
    return None
