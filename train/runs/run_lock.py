"""A lock that lets only one process at a time train in a run's folder."""

import contextlib
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Self

from lingpt.common.errors import UserError
from lingpt.common.files import write_errors
from lingpt.common.locks import file_lock
from lingpt.common.run_folder import LOCK, check_links
from lingpt.train.console import print_rank0


class RunLock:
    """A lock on a run's folder; the system releases it when the process ends, however it ends.

    As a context manager it is released at the end. In other processes than rank zero it is never acquired.

    option: the option that names another folder.
    """

    def __init__(self, folder: Path, option: str = "--train.name") -> None:
        self.folder, self.option = folder, option
        self._held: contextlib.ExitStack | None = None
        self._file = -1

    def acquire(self) -> None:
        """Creates the folder and takes its lock; releases the lock of a folder that was moved since.

        UserError, with the holder, if another process holds it; or if a link leads out of the folder.
        """
        path, held = self.folder / LOCK, contextlib.ExitStack()
        check_links(self.folder)
        with write_errors(self.folder, "free some space, or choose another place with --train.out_dir"):
            try:
                lock = held.enter_context(file_lock(path, blocking=False))
            except BlockingIOError:
                raise UserError(
                    f"{self.folder} is in use by {_read_holder(path)}: wait until it has ended, or choose "
                    f"another {self.option}"
                ) from None
        if lock.unsupported:
            print_rank0(
                f"{self.folder}: its file system knows no locks ({lock.unsupported}); start no second run "
                "there"
            )
        self.release()
        self._held, self._file = held, lock.file
        with contextlib.suppress(OSError):  # then others cannot see the holder
            _write_holder(lock.file)

    @property
    def is_lost(self) -> bool:
        """Whether the folder was deleted, or moved and its name used again: what is there is not this run's.

        False while nothing is there, as when its disk has gone for a while.
        """
        if self._held is None:
            return False
        try:
            own = os.fstat(self._file)
            return own.st_nlink == 0 or not os.path.samestat(own, os.stat(self.folder / LOCK))
        except OSError:
            return False

    def check(self) -> None:
        """Raises UserError if the folder `is_lost`."""
        if self.is_lost:
            raise UserError(
                f"{self.folder} was deleted or moved while its run trained, and is not this run's any more: "
                "the run ends, and nothing more is written there"
            )

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is None:
            return
        if self.is_lost:
            return self.release()
        with contextlib.suppress(OSError):
            if os.listdir(self.folder) == [LOCK]:  # failed before it began: free the name
                (self.folder / LOCK).unlink()
        self.release()
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()


def _write_holder(file: int) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _read_holder(path: Path) -> str:
    for _ in range(10):  # a holder that has just begun writes a moment after it has the lock
        try:
            holder = json.loads(path.read_bytes())
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.05)
    return "another process"
