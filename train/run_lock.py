"""One process at a time trains in a run's folder."""

import contextlib
import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Self

from lingpt.common.errors import UserError
from lingpt.common.files import write_errors
from lingpt.common.run_folder import LOCK
from lingpt.train.console import print_rank0


class RunLock:
    """A lock on a run's folder; the system takes it from a process that dies, however it dies.

    As a context manager it is given back at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._handle = folder, -1

    def acquire(self) -> None:
        """Makes the folder and takes its lock; the lock of a folder that was moved since is given back.

        UserError, saying who holds it, where another process does.
        """
        with write_errors(self.folder, "free some space, or choose another place with --train.out_dir"):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _read_holder(handle)
            os.close(handle)
            raise UserError(
                f"{self.folder} is in use by {who}: wait until it has ended, or choose another --train.name"
            ) from None
        except OSError as error:
            reason = error.strerror
            print_rank0(
                f"{self.folder}: its file system knows no locks ({reason}); start no second run there"
            )
        self.release()
        self._handle = handle
        with contextlib.suppress(OSError):  # whoever reads it learns less
            _write_holder(handle)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        held = self._handle >= 0
        self.release()
        with contextlib.suppress(OSError):
            if held and os.listdir(self.folder) == [LOCK]:  # refused before it began: the name is free
                (self.folder / LOCK).unlink()
                self.folder.rmdir()


def _write_holder(handle: int) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def _read_holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
