"""The processes of a machine watch each other: if one dies, the others end within seconds, with one message.

A process that waits for a dead one would wait until the process group's timeout (NCCL), or fail with its own
traceback (gloo). The main process, from which Lightning starts the others, sees them end; the others, and
those of torchrun, see their parent end. (Lightning's own observer kills the main process with SIGKILL, so
without a message.) Tasks of SLURM have no such parent: `srun --kill-on-bad-exit=1` ends them.

A process that hangs is found by all others through heartbeats (train/distributed/heartbeats.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lingpt.common import STARTED
from lingpt.common.errors import INTERRUPTED
from lingpt.common.parent import STOP_SIGNALS, signals_wait_in_children
from lingpt.train.console import print_stderr
from lingpt.train.distributed.failures import RESUME_HINT, lost_message, straggler_message
from lingpt.train.distributed.heartbeats import Heartbeats

POLL_SECONDS = 0.5  # seconds between checks of parent and children
GRACE = 5.0  # seconds for a process to end by itself, and say why
_MAIN = "LINGPT_MAIN_PID"  # environment variable of the processes that the main process starts


class Watch:
    """Watches this process's parent, if it is one of several, and its children, if it starts any."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self._stopped = threading.Event()
        self._died: str | None = None
        self.interrupted: int | None = None  # the signal that ended a child before it could agree on it
        self._report_lock, self._reported = threading.Lock(), False
        self._counting = threading.Lock()
        self._parent = _parent()
        self._has_parent = "LOCAL_RANK" in os.environ
        if self._has_parent:
            threading.Thread(target=self._watch_parent, name="watch-parent", daemon=True).start()

    @contextlib.contextmanager
    def launched_by(self, launcher: Any) -> Iterator[None]:
        """Wraps a launch: watches the processes that Lightning's `launcher` starts, from their start on.

        They are removed from its list before its own observer first looks there. If the launch fails, they
        are ended: one that is still importing would wait for this process in vain.
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
        os.environ[_MAIN] = str(os.getpid())  # inherited by the processes started now
        try:
            with signals_wait_in_children():
                yield
            failed = False
        finally:
            del os.environ[_MAIN]
            over.set()
            taken.wait()
            if failed:
                self.end_children()

    def start_straggler_detection(
        self, heartbeats: Heartbeats, collectives: Callable[[], int], speaks: bool
    ) -> None:
        """From now on, ends this process if it waits too long for another one; one process reports which.

        collectives: gives the number of collectives this process has reached. speaks: whether it prints for
        its machine if the store, by which processes agree, is gone.
        """
        self._heartbeats, self._collectives, self._speaks = heartbeats, collectives, speaks
        threading.Thread(target=self._watch_heartbeats, name="watch-heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Stops watching: processes may end from now on, and `collectives` is not called any more."""
        with self._counting:
            self._stopped.set()

    def report_once(self, line: str) -> None:
        """Prints why the run ends, only once; with an empty line, another process prints it."""
        with self._report_lock:
            if line and not self._reported:
                with contextlib.suppress(OSError):  # nobody reads it, or its disk is full
                    print_stderr(line)
            self._reported = True

    def first_death_message(self) -> str | None:
        """The message on the first process that died, if one dies within `GRACE` seconds; else None."""
        until = time.monotonic() + GRACE
        while self.children and not self._died and time.monotonic() < until:
            time.sleep(0.05)
        return self._died

    def end_children(self) -> None:
        self.stop()
        for child in self.children:
            child.kill()

    def leave(self, line: str) -> None:
        """Prints `line` (`report_once`) and ends this process, after giving its parent time to say why.

        torchrun sends SIGTERM as soon as another process has died: this process then ends at once, and the
        signal is not reported as an interruption.
        """
        signals: list[int] = []  # not an Event: the handler may interrupt the code that holds its lock
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.append(number))
        if line:  # else the thread that watches the parent may still have to say that it has died
            self.report_once(line)
        until = time.monotonic() + GRACE
        while self._has_parent and not signals and time.monotonic() < until:
            time.sleep(0.05)
        self._exit(1)

    def _watch_parent(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if os.getppid() != self._parent:
                speaker = "0" if "TORCHELASTIC_RUN_ID" in os.environ else "1"  # Lightning's 0 was the parent
                if os.environ["LOCAL_RANK"] == speaker:
                    self.report_once(f"the main process (pid {self._parent}) has died: {RESUME_HINT}")
                self._exit(1)

    def _watch_children(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            for number, child in enumerate(self.children, start=1):
                if child.poll():
                    who = f"process {number} of {len(self.children) + 1} (pid {child.pid})"
                    # A process that exited with 2 has printed what the user must change.
                    way = RESUME_HINT if child.returncode != 2 else "the run ends"
                    self.interrupted = _stop_signal(child.returncode)
                    self._died = f"{who} {_ending_message(child.returncode)}: {way}"
                    # The main thread may be about to end with its own message, or wait in vain.
                    if not self._stopped.wait(GRACE):
                        self.report_once(INTERRUPTED if self.interrupted else self._died)
                        self.end_children()
                        self._exit(128 + self.interrupted if self.interrupted else 2)
                    return

    def _watch_heartbeats(self) -> None:
        heartbeats = self._heartbeats
        while not self._stopped.wait(heartbeats.interval):
            if (count := self._count()) is None:
                return
            answered = threading.Event()
            threading.Thread(
                target=self._limit_answer, args=(answered,), name="watch-store", daemon=True
            ).start()
            try:
                line = heartbeats.beat(count)
            except RuntimeError:  # the store is gone, with the process that hosts it
                # The main thread may be about to say so, or wait in vain.
                if not self._stopped.wait(GRACE):
                    lost = lost_message(heartbeats.rank, heartbeats.world_size)
                    self.report_once(lost if self._speaks else "")
                    self._exit(1)
                return
            finally:
                answered.set()
            if line is not None:
                return self._end(line)

    def _limit_answer(self, answered: threading.Event) -> None:
        """Ends a run that makes no progress while its store does not answer, as its process was stopped."""
        heartbeats, count, still = self._heartbeats, None, 0.0
        while still < 0.9 * heartbeats.seconds:  # the store is read only after a tenth of it
            if answered.wait(heartbeats.interval):
                return
            before, count = count, self._count()
            if count is None:
                return
            still = still + heartbeats.interval if count == before else 0.0
        where = f"on {os.environ.get('MASTER_ADDR')}, which does not answer"
        speaks = self._speaks or heartbeats.rank == 1  # rank zero is stopped and cannot speak
        self._end(straggler_message(0, heartbeats.world_size, where, heartbeats.seconds) if speaks else "")

    def _count(self) -> int | None:
        """The number of collectives; None after `stop`, when nobody counts them any more."""
        with self._counting:
            return None if self._stopped.is_set() else self._collectives()

    def _end(self, line: str) -> None:
        """Prints why the run ends, and ends this process and its children."""
        self.report_once(line)
        if self.children:
            self.end_children()
            return self._exit(2)
        time.sleep(GRACE)  # lets the others see that it was reported
        self._exit(1)

    def _exit(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)  # the main thread is blocked in a collective


def _parent() -> int:
    """The pid of the process that started this one, which may have died since; else of its current parent."""
    if main := os.environ.pop(_MAIN, None):
        return int(main)
    pid, parent = STARTED  # of another process if this one was forked since
    return parent if "TORCHELASTIC_RUN_ID" in os.environ and pid == os.getpid() else os.getppid()


def _stop_signal(code: int) -> int | None:
    """The signal that asked a process to end, by its exit code; None if it ended otherwise. (A run that has
    begun ends with 0 for it, as all processes agree on that.)"""
    number = -code if code < 0 else code - 128
    return number if number in STOP_SIGNALS else None


def _ending_message(code: int) -> str:
    return (
        f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    )
