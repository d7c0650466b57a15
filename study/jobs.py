"""Runs child processes of the `lingpt` command in parallel: one per card, or one over all cards.

A job that fails does not end the others. One that fails without a user error (a card died, a process was
killed) is retried once, on another card if there is one, for which it waits. A signal, or the end of the
time, stops the children as Ctrl-C would, and waits until they have saved. If this process is killed, they
save and end, too.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lingpt.common.errors import UserError
from lingpt.common.parent import ends_with_this_process, signals_to

COMMAND = (sys.executable, "-P", "-m", "lingpt.cli.main")
POLL, STATUS = 0.2, 60.0  # seconds between polls, and between status lines
USER_ERROR = 2  # exit code
# Messages of `train` and `eval` about a card that CUDA no longer sees: elsewhere a user error, but not here.
# The second is the beginning of `find_device`'s "device 'cuda:0': …", whatever the card's number.
CARD_GONE = ("no CUDA device", "device 'cuda")
Gpus = tuple[int, ...]  # the GPUs that a job runs on; () is the CPU
GRACE = 600.0  # seconds that a stopped child has to save
ERROR_PREFIX = "lingpt: "  # before an error that LinGPT explains
SHOWN = 300  # characters shown of a last line that is not ours
MOST_PROCESSES = 1024  # on the CPU
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*:")  # the error's line in a traceback


@dataclass(frozen=True)
class Slot:
    """A place for a job: GPUs by number, or none (a CPU)."""

    name: str
    gpus: Gpus = ()

    def environment(self) -> dict[str, str]:
        if not self.gpus:
            return dict(os.environ)
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = allowed.split(",") if allowed else None
        visible = [names[gpu] if names else str(gpu) for gpu in self.gpus]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)}


@dataclass
class Job:
    """One command: `arguments` of `lingpt`, its output in `log`; `status` describes its progress (by default
    the last line of its output)."""

    name: str
    arguments: list[str]
    log: Path
    status: Callable[[], str] | None = None
    failed_on: Gpus | None = None  # where its first attempt crashed
    begin: int = 0  # where this attempt's output begins in the log

    def progress(self) -> str:
        return self.last_line() if self.status is None else self.status()

    def last_line(self) -> str:
        """Why this attempt ended, by its output: the last error that LinGPT explains, whole, as its end says
        how to mend it; else the error of a traceback, as after PyTorch's errors come hints and the place;
        else the last line. Of what is not ours the first `SHOWN` characters.
        """
        text = self.log.read_bytes()[self.begin :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            return ""
        if ours := [line for line in lines if line.startswith(ERROR_PREFIX)]:
            return ours[-1].removeprefix(ERROR_PREFIX)
        if "Traceback (most recent call last):" in lines:
            lines = [line for line in lines if _ERROR.match(line)] or lines
        return lines[-1] if len(lines[-1]) <= SHOWN else f"{lines[-1][:SHOWN]}…"


@dataclass(frozen=True)
class Failure:
    """A job that failed, and why. log: the file of its output; None if it was not started."""

    job: str
    reason: str
    log: Path | None = None

    def why(self, folder: Path | None = None) -> str:
        """The reason and, in brackets, the log, by its path in `folder`."""
        log = self.log.relative_to(folder) if self.log and folder else self.log
        return self.reason + (f" ({log})" if log else "")


class Stopped(Exception):
    """The time is up; the children have saved and ended. `failures`: the jobs that had failed by then."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("the time is over")
        self.failures = failures


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    deadline: float | None = None,
    report: Callable[[str], None] = print,
) -> list[Failure]:
    """Runs all jobs, one per slot at a time; returns those that failed, with the reason.

    deadline: in `time.monotonic()`; when it is reached, running jobs are stopped and `Stopped` is raised.
    """
    work = _Work(list(jobs), list(slots), report)
    last_status = time.monotonic()
    try:
        while work.waiting or work.running:
            work.start_what_can()
            time.sleep(POLL)
            work.handle_ends()
            if deadline is not None and time.monotonic() >= deadline:
                raise Stopped(work.failures)
            if work.running and time.monotonic() - last_status >= STATUS:
                last_status = time.monotonic()
                report(" · ".join(f"{one.job.name} {one.job.progress()}".strip() for one in work.running))
    finally:
        if work.running:
            with contextlib.suppress(OSError):  # the terminal may be gone; the children must be stopped
                report(f"stopping: waits until {', '.join(one.job.name for one in work.running)} has saved")
        _stop(work.running)
    return work.failures


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen
    started: float = field(default_factory=time.monotonic)


class _Work:
    """Jobs that wait and run, and idle slots."""

    def __init__(self, jobs: list[Job], slots: list[Slot], report: Callable[[str], None]) -> None:
        self.waiting, self.idle, self.running = jobs, slots, list[_Running]()
        self.report, self.failures = report, list[Failure]()
        self.cards = {slot.gpus for slot in slots}

    def start_what_can(self) -> None:
        """Starts on each idle slot the first waiting job that its card suits. A job that cannot be started,
        as its log cannot be written, has failed."""
        for slot in list(self.idle):
            job = next((job for job in self.waiting if self._suits(slot.gpus, job)), None)
            if job is None:
                continue
            self.waiting.remove(job)
            self.report(f"{job.name}: starts on {slot.name}")
            try:
                with _signals_held():  # an exception within `Popen` would lose the child
                    self.running.append(_start(job, slot))
            except OSError as error:
                self._failed(job, f"cannot be started ({error})")
            else:
                self.idle.remove(slot)

    def _suits(self, gpus: Gpus, job: Job) -> bool:
        """Whether the job may start on `gpus`: not where it has crashed, if there are others."""
        return gpus != job.failed_on or self.cards == {gpus}

    def handle_ends(self) -> None:
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            self.idle.append(one.slot)
            self._ended(one)

    def _ended(self, one: _Running) -> None:
        """Reports the end of a job; one that is retried waits again."""
        job, gpus, code = one.job, one.slot.gpus, one.process.returncode
        if code == 0:
            self.report(f"{job.name}: done after {(time.monotonic() - one.started) / 60:.1f} min")
            return
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else ""
        reason = ended or job.last_line() or f"exit code {code}"
        gone = bool(gpus) and any(words in reason for words in CARD_GONE)
        if (code == USER_ERROR and not gone) or job.failed_on is not None:
            self._failed(job, reason)
            return
        job.failed_on = gpus
        self.report(f"{job.name}: failed on {one.slot.name} ({reason}); it is tried once more")
        self.waiting.append(job)

    def _failed(self, job: Job, reason: str) -> None:
        self.report(f"{job.name}: failed: {reason} ({job.log})")
        self.failures.append(Failure(job.name, reason, job.log))


def _start(job: Job, slot: Slot) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.begin = job.log.stat().st_size if job.log.exists() else 0
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            [*COMMAND, *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=slot.environment() | ends_with_this_process(),
            start_new_session=True,  # Ctrl-C goes to the parent only, which stops the children
        )
    return _Running(job, slot, process)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back Python's signal handlers until the block has ended. Only the main thread has any."""
    came = list[tuple[int, FrameType | None]]()
    here = threading.current_thread() is threading.main_thread()
    numbers: list[int] = [*signal.valid_signals()] if here else []
    handlers = {n: handler for n in numbers if callable(handler := signal.getsignal(n))}
    try:
        with signals_to(lambda *signalled: came.append(signalled), handlers):
            yield
    finally:
        for number, frame in came:
            handlers[number](number, frame)


def _stop(running: Sequence[_Running]) -> None:
    """Ends running jobs: by SIGTERM, on which training saves, then, after `GRACE`, by SIGKILL."""
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()
    until = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def find_slots(devices: int | None, each: int | None, sharing: int = 1) -> list[Slot]:
    """The slots on `devices` GPUs (by default all), with `each` GPUs per job (by default all).

    `sharing` jobs share the same GPUs. Without a GPU, `devices` processes on the CPU, by default one.
    UserError if there are not enough GPUs.
    """
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices is not None and devices < 1:
        raise UserError(f"--devices {devices}: give at least 1")
    if there and devices is not None and devices > there:
        raise UserError(f"--devices {devices}, but this machine has {there} GPUs")
    if not there and devices is not None and devices > MOST_PROCESSES:
        raise UserError(f"--devices {devices} processes without a GPU: give at most {MOST_PROCESSES:,}")
    if not there:
        return [Slot(f"CPU process {i}") for i in range(devices or 1)]
    return gpu_slots(devices or there, each, sharing)


def gpu_slots(count: int, each: int | None, sharing: int = 1) -> list[Slot]:
    """`find_slots` on `count` GPUs; those left over get no slot."""
    each = count if each is None else min(each, count)
    groups = [tuple(range(start, start + each)) for start in range(0, count - each + 1, each)]
    slots = [Slot(f"GPU {', '.join(map(str, group))}", group) for group in groups]
    if sharing == 1:
        return slots
    # The first place on each card, then the second on each, so that few jobs are spread over the cards.
    places = range(1, sharing + 1)
    return [Slot(f"{slot.name}, place {place}", slot.gpus) for place in places for slot in slots]


def scoring_slots(slots: Sequence[Slot], cards: int, runs: int) -> Sequence[Slot]:
    """The slots for scoring `runs` runs: if there are more cards, several share the questions of each run."""
    each = cards // runs
    return gpu_slots(cards, each) if each > len(slots[0].gpus) else slots
