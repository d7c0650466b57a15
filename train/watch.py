"""The processes of a machine watch each other: where one dies, the others end within seconds, with one line.

A process that waits for a dead one waits for as long as the process group's timeout (NCCL), or fails with a
traceback of its own (gloo). The main process, which Lightning starts the others from, sees them end; the
others, and those of torchrun, see their parent go. (Lightning's own observer kills the main process with
SIGKILL, and so without a word.) Tasks of SLURM have nobody to watch: `srun --kill-on-bad-exit=1` ends them.

One that lives and does not go on is found by counting: every process counts how often it has come to a point
where all meet, and where others have waited there for too long, the one that is behind is named: by rank
zero, or by rank one where zero is behind.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import Store

EVERY = 0.5  # seconds between looks
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
    return f"{_who(rank, world_size)}: the connection to another process is lost, it has ended: {GOES_ON}"


def _who(rank: int, world_size: int) -> str:
    return f"process {rank} of {world_size} (on {socket.gethostname()})"


class Watch:
    """Watches this process's parent, where it is one of several, and then its children, if it starts any."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self._stopped = threading.Event()
        self._died: str | None = None
        self._entered = 0
        self._parent, self._has_parent = os.getppid(), "LOCAL_RANK" in os.environ
        if self._has_parent:
            threading.Thread(target=self._watch_parent, name="watch-parent", daemon=True).start()

    @contextlib.contextmanager
    def launched_by(self, launcher: Any) -> Iterator[None]:
        """Around a launch: watches the processes that Lightning's `launcher` starts, from their start on.

        They are taken from its list, within the seconds after which its own observer would look there.
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
        try:
            yield
        finally:
            over.set()
            taken.wait()

    def enter_collective(self) -> None:
        """This process has come to a point where it may wait for the others."""
        self._entered += 1

    def limit_waits(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        """From here on ends a process that has waited for another one for `seconds`; one of them says which.

        store: of all processes.
        """
        watch = threading.Thread(
            target=self._watch_others, args=(store, rank, world_size, seconds), name="watch-all", daemon=True
        )
        watch.start()

    def stop(self) -> None:
        """From here on everyone may end."""
        self._stopped.set()

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
                    print_stderr(f"the main process (pid {self._parent}) has died: {GOES_ON}")
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
                        print_stderr(self._died)
                        self.end_children()
                        self._exit(2)
                    return

    def _watch_others(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        entered, since = -1, time.monotonic()
        while not self._stopped.wait(min(EVERY * 10, seconds / 10)):
            if self._entered != entered:
                entered, since = self._entered, time.monotonic()
            try:
                store.set(f"lingpt/{rank}", f"{entered} {socket.gethostname()}")
                if time.monotonic() - since < seconds:
                    continue
                states = [_state(store, other) for other in range(world_size)]
            except RuntimeError:  # the store is gone, and with it the process that keeps it
                # The main thread may be about to say so, or wait in vain.
                if not self._stopped.wait(GRACE):
                    if os.environ.get("LOCAL_RANK", "0") == "0":
                        print_stderr(lost(rank, world_size))
                    self._exit(1)
                return
            counts = [count for count, _ in states]
            if len(set(counts)) == 1:  # at work, all of them: one that waits is ahead of another
                continue
            late = counts.index(min(counts))
            speaks = rank == 0
            if rank == 1 and late == 0:  # a frozen process says nothing of itself
                speaks = not self._stopped.wait(GRACE / 2)
            if not speaks:
                self.leave()
            else:
                print_stderr(
                    f"process {late} of {world_size} ({states[late][1]}) has kept the others waiting for "
                    f"{seconds / 60:.3g} min (--train.timeout_minutes): {GOES_ON}"
                )
                self.end_children()
                self._exit(2)
            return

    def _exit(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # the main thread waits in a collective, deaf to everything


def _state(store: Store, rank: int) -> tuple[int, str]:
    """How often a process has come to where all meet, and where it runs; -1 where it has not begun to say."""
    key = f"lingpt/{rank}"
    if not store.check([key]):  # to get it would wait for it
        return -1, "not heard of since the start"
    count, host = store.get(key).decode().split()
    return int(count), f"on {host}"


def _ending(code: int) -> str:
    return (
        f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    )


def print_stderr(line: str) -> None:
    print(f"lingpt: {line}", file=sys.stderr, flush=True)
