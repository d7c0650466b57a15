"""Child processes of the real command, side by side: one a card, or one over all cards.

A job that fails does not end the others. One that fails for no reason of its user's (a card that died, a
process that was killed) is tried once more, on another card where there is one; a card on which two jobs in a
row failed so is given up while there are others. A signal, or the end of the time, stops the children as
Ctrl-C would, and waits until they have saved.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lingpt.common.errors import UserError

COMMAND = (sys.executable, "-P", "-m", "lingpt.cli.main")
POLL, STATUS = 0.2, 60.0  # seconds between looks, and between lines on what is running
USER_ERROR = 2  # exit code
GRACE = 600.0  # seconds that a stopped child has to save


@dataclass(frozen=True)
class Slot:
    """What a job runs on: GPUs by number, or nothing in particular (a CPU)."""

    name: str
    gpus: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        if not self.gpus:
            return dict(os.environ)
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = allowed.split(",") if allowed else None
        visible = [names[gpu] if names else str(gpu) for gpu in self.gpus]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)}


@dataclass
class Job:
    """One command: `arguments` of `lingpt`, its output in `log`; `status` says how far it is.

    interrupt: when it is true the job is stopped, as by a signal, and started again.
    """

    name: str
    arguments: list[str]
    log: Path
    status: Callable[[], str] = lambda: ""
    interrupt: Callable[[], bool] | None = None
    attempts: int = 0


@dataclass(frozen=True)
class Failure:
    job: str
    reason: str


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen
    started: float = field(default_factory=time.monotonic)
    interrupted: bool = False


class Stopped(Exception):
    """The time is over: the children have saved and ended."""


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    deadline: float | None = None,
    report: Callable[[str], None] = print,
) -> list[Failure]:
    """Runs all jobs, each on a slot of its own while it runs; returns those that failed, with the reason.

    deadline: of `time.monotonic()`; when it is reached, what runs is stopped and `Stopped` is raised.
    """
    waiting, idle, running = deque(jobs), deque(slots), list[_Running]()
    failed_in_a_row: dict[Slot, int] = dict.fromkeys(slots, 0)
    failures: list[Failure] = []
    last_status = time.monotonic()
    try:
        while waiting or running:
            while waiting and idle:
                running.append(_start(waiting.popleft(), idle.popleft(), report))
            time.sleep(POLL)
            for one in [one for one in running if one.process.poll() is not None or _to_stop(one)]:
                running.remove(one)
                minutes, code = (time.monotonic() - one.started) / 60, one.process.returncode
                if one.interrupted:
                    report(f"{one.job.name}: stopped {one.job.status()}, and goes on")
                    waiting.appendleft(one.job)
                elif code == 0:
                    failed_in_a_row[one.slot] = 0
                    report(f"{one.job.name}: done after {minutes:.1f} min")
                else:
                    _failed(one, code, waiting, failed_in_a_row, failures, report)
                if failed_in_a_row[one.slot] < 2 or not (idle or running):
                    idle.append(one.slot)
                else:
                    report(f"{one.slot.name} is given up: two jobs in a row failed on it")
            if deadline is not None and time.monotonic() >= deadline:
                raise Stopped
            if time.monotonic() - last_status >= STATUS:
                last_status = time.monotonic()
                report(" · ".join(f"{one.job.name}{_with_space(one.job.status())}" for one in running))
    finally:
        _stop(running)
    return failures


def _to_stop(one: _Running) -> bool:
    """Stops a job that is to be interrupted, and waits for its end; whether it was."""
    if one.job.interrupt is None or not one.job.interrupt():
        return False
    one.job.interrupt, one.interrupted = None, True
    _stop([one])
    return True


def _start(job: Job, slot: Slot, report: Callable[[str], None]) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.attempts += 1
    report(f"{job.name}: starts on {slot.name}")
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            [*COMMAND, *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=slot.environment(),
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    return _Running(job, slot, process)


def _failed(
    one: _Running,
    code: int,
    waiting: deque[Job],
    failed_in_a_row: dict[Slot, int],
    failures: list[Failure],
    report: Callable[[str], None],
) -> None:
    reason = last_line(one.job.log) or f"exit code {code}"
    if code == USER_ERROR:
        failed_in_a_row[one.slot] = 0
    else:
        failed_in_a_row[one.slot] += 1
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else reason
        if one.job.attempts < 2:
            report(f"{one.job.name}: failed on {one.slot.name} ({reason}); it is tried once more")
            waiting.append(one.job)
            return
    report(f"{one.job.name}: failed: {reason} ({one.job.log})")
    failures.append(Failure(one.job.name, reason))


def last_line(log: Path) -> str:
    """The last line of a job's output, which says why it ended; cut to 300 characters."""
    lines = [line.strip() for line in log.read_bytes().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("lingpt: ")[:300] if lines else ""


def _with_space(text: str) -> str:
    return f" {text}" if text else ""


def _stop(running: Sequence[_Running]) -> None:
    """Ends what still runs: SIGTERM, which training answers by saving, and after a long while SIGKILL."""
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
    """The places for jobs: of `devices` GPUs (all that are here by default), `each` a job, or all of them.

    `sharing` jobs are on the same GPUs at a time. Without a GPU, `devices` processes on the CPU, one by
    default. UserError where the GPUs are not there.
    """
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices is not None and devices < 1:
        raise UserError(f"--devices {devices}: give at least 1")
    if not there:
        return [Slot(f"CPU process {i}") for i in range(devices or 1)]
    count = devices or there
    if count > there:
        raise UserError(f"--devices {count}, but this machine has {there} GPUs")
    each = count if each is None else min(each, count)
    groups = [tuple(range(start, start + each)) for start in range(0, count - each + 1, each)]
    # A place on each card, then the second on each: few jobs are spread.
    return [
        Slot(f"GPU {', '.join(map(str, group))}" + (f", place {place}" if sharing > 1 else ""), group)
        for place in range(1, sharing + 1)
        for group in groups
    ]
