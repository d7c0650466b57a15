"""What a run prints."""

import os
import pty
import select
import threading

import pytest
from tqdm import tqdm

from lingpt.train.console import print_rank0, progress_bar


class Interrupted:
    """A lock; Ctrl-C comes while it is taken."""

    def acquire(self) -> None:
        raise KeyboardInterrupt

    def release(self) -> None:
        raise RuntimeError("cannot release un-acquired lock")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_an_interrupt_while_a_line_waits_to_be_printed_is_an_interrupt():
    """Guards: exit code 1 and a traceback for Ctrl-C in the first moments of a run."""
    lock = tqdm.get_lock()
    assert isinstance(lock, type(threading.RLock())), "a lock of processes starts one"
    tqdm.set_lock(Interrupted())
    try:
        with pytest.raises(KeyboardInterrupt):
            print_rank0("a line")
    finally:
        tqdm.set_lock(lock)


def test_a_terminal_without_a_size_has_a_bar(monkeypatch):
    """As that of `script`, or of a container: 0 rows and columns. Guards: a run without a bar there."""
    terminal, end = pty.openpty()
    with open(end, "w") as screen:
        monkeypatch.setattr("sys.stderr", screen)
        for _ in progress_bar(range(3)):
            pass
        screen.flush()
        shown = ""  # a terminal passes it on in pieces
        while "3/3" not in shown and select.select([terminal], [], [], 10)[0]:
            shown += os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert "3/3" in shown
