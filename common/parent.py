"""Lets a child process end with the one that started it, however that one ends."""

import ctypes
import os
import signal
import sys

_PARENT = "LINGPT_PARENT"  # in a child's environment, the process that it ends with
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def ends_with_this_process() -> dict[str, str]:
    """What a child's environment needs for its `end_with_parent`."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """If the parent asked for it, this process gets a SIGTERM when the parent has died, even by SIGKILL.

    Its own children do not inherit that. Only Linux has it, and takes the end of the thread that started this
    process for the parent's: start children in a thread that stays.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it had died before
        signal.raise_signal(signal.SIGTERM)
