"""Ctrl-C and SIGTERM: asked once, a run finishes its step and saves; asked twice, it ends at once."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from lingpt.train.parallel import print_rank0


@dataclass
class Stop:
    """Whether the run is to end.

    requested: a signal has come to this process. agreed: all processes know of it and end at the same step;
    one that left on its own request would leave the others waiting for it.
    """

    requested: bool = False
    agreed: bool = False


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """While inside, the first SIGINT or SIGTERM sets `requested`; a second one acts as it always does.

    A signal that is ignored stays ignored: shells start a script's background jobs that way.
    """
    stop = Stop()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        restore()
        print_rank0("stopping: the step is finished and saved first; once more to leave at once")

    try:
        for number in handlers:
            signal.signal(number, request)
        yield stop
    finally:
        restore()
