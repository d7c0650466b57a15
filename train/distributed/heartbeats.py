"""Finds the process that keeps the others waiting.

Hangs: every process publishes its collective sequence number as a heartbeat. A process that has waited longer
than the timeout blames the rank with a lower number, or one whose heartbeat has stopped (SIGSTOP). If all
numbers are equal and all beat, nothing ends.
"""

import json
import socket
import sys
import threading
import traceback
from typing import NamedTuple

from torch.distributed import Store

from lingpt.train.distributed.failures import straggler_message


class Heartbeat(NamedTuple):
    """A process's heartbeat: shows that it runs (`number` grows), and how far it is.

    collectives: how many it has reached; -1 before the first report.
    """

    collectives: int = -1
    number: int = 0
    where: str = "not heard of since the start"


class Heartbeats:
    """The heartbeats of a run's processes, in their `store`, from which each finds the one that is late.

    seconds: how long one waits for another, counted in heartbeats: a process that was itself stopped, with
    all others (Ctrl-Z), has not waited.
    """

    _ENDS = "lingpt/ends"  # set once a process has reported who is late

    def __init__(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        self._store, self.rank, self.world_size, self.seconds = store, rank, world_size, seconds
        self._own, self._waited = Heartbeat(), 0.0
        self._before: list[Heartbeat] = []

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(5.0, self.seconds / 10)

    def beat(self, collectives: int) -> str | None:
        """To be called every `interval`: None if the run goes on; else the message to print, empty if another
        process prints it.

        collectives: how many this process has reached. Raises RuntimeError if the store is gone.
        """
        self._waited = self._waited + self.interval if collectives == self._own.collectives else 0.0
        self._own = Heartbeat(collectives, self._own.number + 1, _where())
        self._store.set(f"lingpt/{self.rank}", json.dumps(self._own))
        if self._waited < self.seconds / 10:  # far from the timeout: no need to read the others
            self._before = []
            return None
        if self._store.check([self._ENDS]):
            return ""
        if not self._before:
            self._before = self._read_all()
        if self._waited < self.seconds:
            return None
        now = self._read_all()
        rank = self._straggler(now)
        if rank is None:
            self._before, self._waited = now, self.seconds / 10
            return None
        speaks = self._store.add(self._ENDS, 1) == 1  # the first one speaks: any other may be the late one
        return straggler_message(rank, self.world_size, now[rank].where, self.seconds) if speaks else ""

    def _straggler(self, now: list[Heartbeat]) -> int | None:
        """The rank that this process waits for; None if all are at work."""
        for rank, heartbeat in enumerate(now):
            if heartbeat == self._before[rank]:  # silent; a rank that is behind may be waiting for it
                return rank
        counts = [heartbeat.collectives for heartbeat in now]
        return counts.index(min(counts)) if self._own.collectives > min(counts) else None

    def _read_all(self) -> list[Heartbeat]:
        return [self._read(f"lingpt/{rank}") for rank in range(self.world_size)]

    def _read(self, key: str) -> Heartbeat:
        known = self._store.check([key])  # `get` would wait for the key
        return Heartbeat(*json.loads(self._store.get(key))) if known else Heartbeat()


def _where() -> str:
    """This process's machine and the function its main thread is in, if possible one of LinGPT's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [at for at, _ in traceback.walk_stack(frame)]
    names = [f"{at.f_globals.get('__name__')}.{at.f_code.co_qualname}" for at in stack]
    ours = [name for name in names if name.startswith("lingpt.")]
    return f"on {socket.gethostname()}, in {(ours or names)[0]}"
