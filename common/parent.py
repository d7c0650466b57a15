"""Signal handlers for the length of a block; and a child process that ends with the one that started it, and
takes no signal before it can."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

# Ctrl-C; what schedulers send before they kill (such as SLURM's --signal=USR1); and a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PARENT = "LINGPT_PARENT"  # in a child's environment, the process that it ends with
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], object], numbers: Iterable[int]) -> Iterator[None]:
    """Within the block `handler` handles these signals; after it their earlier handlers do."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ends_with_this_process() -> dict[str, str]:
    """What a child's environment needs for its `end_with_parent`."""
    return {_PARENT: str(os.getpid())}


@contextlib.contextmanager
def signals_wait_in_children() -> Iterator[None]:
    """Children that this thread starts in the block take no signal that asks them to end before they are
    ready for it (`end_with_parent`). Another thread must run, which then takes this process's own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """If the parent asked for it, this process gets a SIGTERM when the parent has died, even by SIGKILL.

    Signals that have waited for this process (`signals_wait_in_children`) come now: its handlers are there.

    Its own children do not inherit that. Only Linux has it, and takes the end of the thread that started this
    process for the parent's: start children in a thread that stays.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it had died before
        signal.raise_signal(signal.SIGTERM)
