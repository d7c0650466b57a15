"""The processes of a machine watch each other: where one dies, the others end within seconds, with one line.

A process that waits for a dead one waits for as long as the process group's timeout (NCCL), or fails with a
traceback of its own (gloo). The main process, which Lightning starts the others from, sees them end; the
others, and those of torchrun, see their parent go. (Lightning's own observer kills the main process with
SIGKILL, and so without a word.) Tasks of SLURM have nobody to watch: `srun --kill-on-bad-exit=1` ends them.

One that does not go on is found by counting: PyTorch counts the collectives that a process has come to, and
where one has waited too long in its last, another that has come to fewer keeps it waiting. One that has come
to as many, and has been stopped there (SIGSTOP), is found by its silence. Where all are at work, for however
long, nothing ends: the counts are the same, and none is silent.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.distributed import Store

from lingpt.common import STARTED

EVERY = 0.5  # seconds between looks at parent and children
GRACE = 5.0  # seconds for a process to end by itself, and say why
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "recvValue",
    "Connection was likely closed",
    "remote process exit",  # NCCL's
)
_MAIN = "LINGPT_MAIN_PID"  # in the environment of the processes that the main process starts
GOES_ON = "the run ends, and the same command goes on from its newest checkpoint"


def connection_lost(error: BaseException) -> bool:
    """Whether `error` is what a process gets that waits for one that has died, or came on top of that."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
        return True
    return error.__context__ is not None and connection_lost(error.__context__)


def failure(error: BaseException, rank: int, world_size: int) -> str:
    """The line on NCCL or gloo that has failed in this process, which no other one need see."""
    lines = str(error).splitlines() or [type(error).__name__]
    if "Last error:" in lines[:-1]:  # NCCL's own word on it
        lines[0] += f": {lines[lines.index('Last error:') + 1].strip()}"
    return f"{_who(rank, world_size)}: the communication failed: {lines[0]}; NCCL_DEBUG=INFO says more"


def lost(rank: int, world_size: int) -> str:
    """The line of a process that waited for one that died; the launcher says which, on that one's machine."""
    return (
        f"{_who(rank, world_size)}: the connection to another process is lost, it has ended or does not "
        f"answer: {GOES_ON}"
    )


def _who(rank: int, world_size: int) -> str:
    return f"process {rank} of {world_size} (on {socket.gethostname()})"


def late(rank: int, world_size: int, where: str, seconds: float) -> str:
    """The line on the process that the others have waited for."""
    return (
        f"process {rank} of {world_size} ({where}) has kept the others waiting for {seconds / 60:.3g} min "
        f"(--train.timeout_minutes): {GOES_ON}"
    )


class Heartbeat(NamedTuple):
    """What a process says of itself: that it runs (`number` grows), and how far it is.

    collectives: how many it has come to; -1 where it has not begun to say.
    """

    collectives: int = -1
    number: int = 0
    where: str = "not heard of since the start"


def _interval(seconds: float) -> float:
    """Between two heartbeats, where others may be waited for for `seconds`."""
    return min(EVERY * 10, seconds / 10)


class Heartbeats:
    """Those of a run's processes, in their `store`: who is where, and who is late.

    seconds: how long one waits for another. Counted in heartbeats: one that was stopped itself, with all
    others (Ctrl-Z), has not waited.
    """

    _ENDS = "lingpt/ends"  # where a process has said who is late

    def __init__(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        self._store, self.rank, self.world_size, self.seconds = store, rank, world_size, seconds
        self._own, self._waited = Heartbeat(), 0.0
        self._before: list[Heartbeat] = []

    def beat(self, collectives: int) -> str | None:
        """Every `_interval`: None where the run goes on; else the line to say, empty where another says it.

        collectives: how many this process has come to. Raises RuntimeError where the store is gone.
        """
        self._waited = self._waited + _interval(self.seconds) if collectives == self._own.collectives else 0.0
        self._own = Heartbeat(collectives, self._own.number + 1, _where())
        self._store.set(f"lingpt/{self.rank}", json.dumps(self._own))
        if self._waited < self.seconds / 10:  # far from late: the others need not be read
            self._before = []
            return None
        if self._store.check([self._ENDS]):
            return ""
        if not self._before:
            self._before = self._read_all()
        if self._waited < self.seconds:
            return None
        now = self._read_all()
        rank = self._late(now)
        if rank is None:
            self._before, self._waited = now, self.seconds / 10
            return None
        speaks = self._store.add(self._ENDS, 1) == 1  # whoever is first: any other may be the late one
        return late(rank, self.world_size, now[rank].where, self.seconds) if speaks else ""

    def _late(self, now: list[Heartbeat]) -> int | None:
        """Which process this one waits for; None where all are at work."""
        for rank, heartbeat in enumerate(now):
            if heartbeat == self._before[rank]:  # silent: one that is behind may itself wait for it
                return rank
        counts = [heartbeat.collectives for heartbeat in now]
        return counts.index(min(counts)) if self._own.collectives > min(counts) else None

    def _read_all(self) -> list[Heartbeat]:
        return [self._read(f"lingpt/{rank}") for rank in range(self.world_size)]

    def _read(self, key: str) -> Heartbeat:
        known = self._store.check([key])  # to get it would wait for it
        return Heartbeat(*json.loads(self._store.get(key))) if known else Heartbeat()


class Watch:
    """Watches this process's parent, where it is one of several, and then its children, if it starts any."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self._stopped = threading.Event()
        self._died: str | None = None
        self._saying, self._said = threading.Lock(), False
        self._counting = threading.Lock()
        self._parent = _parent()
        self._has_parent = "LOCAL_RANK" in os.environ
        if self._has_parent:
            threading.Thread(target=self._watch_parent, name="watch-parent", daemon=True).start()

    @contextlib.contextmanager
    def launched_by(self, launcher: Any) -> Iterator[None]:
        """Around a launch: watches the processes that Lightning's `launcher` starts, from their start on.

        They are taken from its list, within the seconds after which its own observer would look there. Where
        the launch fails they end with it: one that is still importing would wait for this one in vain.
        """
        launched, count = getattr(launcher, "procs", []), getattr(launcher, "num_processes", 1) - 1
        over, taken = threading.Event(), threading.Event()

        def take() -> None:
            while len(launched) < count and not over.wait(0.05):
                pass
            self.children, launched[:] = list(launched), []
            taken.set()
            if self.children:
                self._watch_children()

        threading.Thread(target=take, name="watch-children", daemon=True).start()
        failed = True
        os.environ[_MAIN] = str(os.getpid())  # which those that are started now inherit
        try:
            yield
            failed = False
        finally:
            del os.environ[_MAIN]
            over.set()
            taken.wait()
            if failed:
                self.end_children()

    def limit_waits(self, heartbeats: Heartbeats, collectives: Callable[[], int], speaks: bool) -> None:
        """From here on ends a process that waits for another one for too long; one of them says which.

        collectives: how many this process has come to. speaks: for its machine, where the store that
        they would agree in is gone.
        """
        args = (heartbeats, collectives, speaks)
        threading.Thread(
            target=self._watch_heartbeats, args=args, name="watch-heartbeats", daemon=True
        ).start()

    def stop(self) -> None:
        """From here on everyone may end, and `collectives` is not called any more."""
        with self._counting:
            self._stopped.set()

    def say(self, line: str) -> None:
        """Prints why the run ends, once; an empty line: another process says it."""
        with self._saying:
            if line and not self._said:
                print_stderr(line)
            self._said = True

    def who_died(self, wait: float = GRACE) -> str | None:
        """The line on the first process that died, if one does within `wait` seconds."""
        until = time.monotonic() + wait
        while self.children and not self._died and time.monotonic() < until:
            time.sleep(0.05)
        return self._died

    def end_children(self) -> None:
        self.stop()
        for child in self.children:
            child.kill()

    def leave(self) -> None:
        """Ends a process that cannot go on, in silence, once its parent has had the time to say why."""
        with contextlib.suppress(KeyboardInterrupt):  # torchrun's SIGTERM, since another has died
            time.sleep(GRACE if self._has_parent else 0)
        self._exit(1)

    def _watch_parent(self) -> None:
        while not self._stopped.wait(EVERY):
            if os.getppid() != self._parent:
                speaker = "0" if "TORCHELASTIC_RUN_ID" in os.environ else "1"  # Lightning's 0 was the parent
                if os.environ["LOCAL_RANK"] == speaker:
                    self.say(f"the main process (pid {self._parent}) has died: {GOES_ON}")
                self._exit(1)

    def _watch_children(self) -> None:
        while not self._stopped.wait(EVERY):
            for number, child in enumerate(self.children, start=1):
                if child.poll():
                    who = f"process {number} of {len(self.children) + 1} (pid {child.pid})"
                    # One that ended with 2 has said what is to be changed.
                    way = GOES_ON if child.returncode != 2 else "the run ends"
                    self._died = f"{who} {_ending(child.returncode)}: {way}"
                    # The main thread may be about to end with a line of its own, or wait in vain.
                    if not self._stopped.wait(GRACE):
                        self.say(self._died)
                        self.end_children()
                        self._exit(2)
                    return

    def _watch_heartbeats(self, heartbeats: Heartbeats, collectives: Callable[[], int], speaks: bool) -> None:
        while not self._stopped.wait(_interval(heartbeats.seconds)):
            if (count := self._count(collectives)) is None:
                return
            answered = threading.Event()
            args = (answered, heartbeats, collectives, speaks)
            threading.Thread(target=self._limit_answer, args=args, name="watch-store", daemon=True).start()
            try:
                line = heartbeats.beat(count)
            except RuntimeError:  # the store is gone, and with it the process that keeps it
                # The main thread may be about to say so, or wait in vain.
                if not self._stopped.wait(GRACE):
                    self.say(lost(heartbeats.rank, heartbeats.world_size) if speaks else "")
                    self._exit(1)
                return
            finally:
                answered.set()
            if line is not None:
                return self._end(line)

    def _limit_answer(
        self, answered: threading.Event, heartbeats: Heartbeats, collectives: Callable[[], int], speaks: bool
    ) -> None:
        """Ends a run that stands still while its store does not answer: one that is stopped never does."""
        count, still = None, 0.0
        while still < 0.9 * heartbeats.seconds:  # others are asked from a tenth of it on
            if answered.wait(_interval(heartbeats.seconds)):
                return
            before, count = count, self._count(collectives)
            if count is None:
                return
            still = still + _interval(heartbeats.seconds) if count == before else 0.0
        where = f"on {os.environ.get('MASTER_ADDR')}, which does not answer"
        speaks = speaks or heartbeats.rank == 1  # beside rank zero, which is stopped
        self._end(late(0, heartbeats.world_size, where, heartbeats.seconds) if speaks else "")

    def _count(self, collectives: Callable[[], int]) -> int | None:
        """What `collectives` says; None once everyone may end, when it may not be called any more."""
        with self._counting:
            return None if self._stopped.is_set() else collectives()

    def _end(self, line: str) -> None:
        """Says why the run ends, and ends this process and those that it has started."""
        self.say(line)
        if self.children:
            self.end_children()
            return self._exit(2)
        time.sleep(GRACE)  # the others hear that it is said
        self._exit(1)

    def _exit(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # the main thread waits in a collective, deaf to everything


def _parent() -> int:
    """Who started this process, or is its parent now: the one that did may have died while it imported."""
    if main := os.environ.pop(_MAIN, None):
        return int(main)
    pid, parent = STARTED  # another process's in one that has been forked since
    return parent if "TORCHELASTIC_RUN_ID" in os.environ and pid == os.getpid() else os.getppid()


def _where() -> str:
    """This process's machine, and the function in which its main thread is: of ours, if it is in any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [at for at, _ in traceback.walk_stack(frame)]
    names = [f"{at.f_globals.get('__name__')}.{at.f_code.co_qualname}" for at in stack]
    ours = [name for name in names if name.startswith("lingpt.")]
    return f"on {socket.gethostname()}, in {(ours or names)[0]}"


def _ending(code: int) -> str:
    return (
        f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    )


def print_stderr(line: str) -> None:
    print(f"lingpt: {line}", file=sys.stderr, flush=True)
