"""Signals that end a run: it finishes its step, saves, and ends; a second Ctrl-C ends it at once."""

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

from lingpt.common.files import discard
from lingpt.common.parent import STOP_SIGNALS, signals_to
from lingpt.train.console import print_rank0

SAME_REQUEST = 1.0  # seconds: a launcher forwards a signal that the terminal has already sent to all


@dataclass
class Stop:
    """Whether the run is to end.

    requested: this process got a signal. agreed: all processes know of it and end at the same step, as one
    that left alone would leave the others waiting. Neither is ever reset. number: the signal.
    """

    requested: bool = False
    agreed: bool = False
    number: int = 0

    def agree(self, numbers: Iterable[int]) -> None:
        """Every process calls it with the `number` of each, once they know that one got a signal."""
        self.agreed, self.number = True, max(numbers)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Inside the block, a signal of `STOP_SIGNALS` sets `requested`, and a second Ctrl-C interrupts as usual.

    The other signals only request a stop, however often they come: schedulers have SIGKILL for the rest, and
    a second signal would kill the save that the first one requested. A signal that is ignored stays ignored,
    as in background jobs of shell scripts and with nohup.
    """
    stop, since = Stop(), 0.0

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal since
        again = stop.requested and number == signal.SIGINT
        if again and time.monotonic() - since > SAME_REQUEST:
            raise KeyboardInterrupt
        if not stop.requested:
            stop.requested, stop.number, since = True, number, time.monotonic()
            leave_closed_terminal()
            # The handler may have interrupted a write to the same stream, which is not reentrant.
            with contextlib.suppress(RuntimeError):
                print_rank0(
                    "stopping: the step is finished and saved first; Ctrl-C once more to leave at once"
                )

    with signals_to(request, [n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]):
        yield stop


def leave_closed_terminal() -> None:
    """Redirects output to /dev/null if the terminal is closed, as a write error would end the run unsaved."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                discard(stream)
