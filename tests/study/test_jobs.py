"""Guards the children of a study: side by side, each on its card, and what happens when one fails or dies."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lingpt.common.errors import UserError
from lingpt.study import jobs
from lingpt.study.jobs import Failure, Job, Slot, Stopped, find_slots, run_jobs

# In place of `lingpt`: a Python without site-packages, started in no time, that runs its argument.
CHILD = (sys.executable, "-S", "-c", "import os, sys, time, signal; exec(sys.argv[1])")
GPUS = [Slot("GPU 0", (0,)), Slot("GPU 1", (1,))]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(jobs, "COMMAND", CHILD)
    monkeypatch.setattr(jobs, "POLL", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def job(tmp_path):
    return lambda name, code, **more: Job(name, [code], tmp_path / f"{name}.log", **more)


def test_side_by_side_each_on_its_card(job, tmp_path):
    """Two wait for each other, on two cards; the third comes after, with which all ends."""
    wait = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists({1!r}), True)]"
    meet = "open({0!r}, 'w'); " + wait
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    show = "; print('card', os.environ['CUDA_VISIBLE_DEVICES'])"
    lines = []
    every = [
        job("x", meet.format(a, b) + show),
        job("y", meet.format(b, a) + show),
        job("z", "print('last')"),
    ]
    every[2].log = tmp_path / "of the last" / "logs" / "z.log"
    assert run_jobs(every, GPUS, report=lines.append) == []
    assert ": done" in lines[2], "a third beside two"
    assert {(tmp_path / f"{name}.log").read_text() for name in "xy"} == {"card 0\n", "card 1\n"}
    assert every[2].log.read_text() == "last\n" and lines[-1].startswith("z: done")


def test_one_that_fails_does_not_end_the_others(job, tmp_path):
    """A user's error is not tried again; a crash is, once, and its line names the log."""
    lines = []
    wrong = job("wrong", "print('lingpt: no file there', file=sys.stderr); sys.exit(2)")
    crash, killed = job("crash", "raise RuntimeError('CUDA error')"), job("dead", "os.kill(os.getpid(), 9)")
    found = run_jobs([wrong, crash, killed, job("well", "pass")], [Slot("CPU")], report=lines.append)
    assert {(f.job, f.reason) for f in found} == {
        ("wrong", "no file there"),
        ("crash", "RuntimeError: CUDA error"),
        ("dead", "ended by SIGKILL"),
    }
    starts = [line.partition(":")[0] for line in lines if "starts on" in line]
    assert [starts.count(one) for one in ("wrong", "crash", "dead")] == [1, 2, 2]
    assert any(line.startswith("well: done") for line in lines)
    assert "dead: failed on CPU (ended by SIGKILL); it is tried once more" in lines
    assert f"dead: failed: ended by SIGKILL ({killed.log})" in lines


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "CUDA error: unspecified launch failure\\nCompile with `TORCH_USE_CUDA_DSA` to see more.\\n",
            "RuntimeError: CUDA error: unspecified launch failure",
        ),
        ("no room\\n  target: lingpt.op\\n  return forward(*call)", "RuntimeError: no room"),
    ],
)
def test_a_traceback_s_reason_is_its_error(job, error, reason):
    """Guards: PyTorch's hints behind an error, and a line of source, given as why a job failed."""
    (found,) = run_jobs([job("x", f"raise RuntimeError('{error}')")], [Slot("CPU")], report=[].append)
    assert found.reason == reason


@pytest.mark.parametrize(("begin", "shown"), [("lingpt: ", "{}"), ("", "{:.300}…")], ids=["ours", "other"])
def test_the_end_of_our_own_line_is_not_cut(job, begin, shown):
    """Guards: a reason cut after 300 characters, before its end: how to mend it. The log is named."""
    text = "x" * 400 + ": use another"
    code = f"sys.exit(print({begin + text!r}) or 2)"
    (found,) = run_jobs([job("x", code)], [Slot("CPU")], report=[].append)
    assert found.reason == shown.format(text)
    assert found.why() == f"{found.reason} ({found.log})" and found.log.read_text().endswith("another\n")


def test_a_card_that_died_loses_no_job(job):
    """All that starts on card 0 crashes: the work is done on card 1, and nothing is lost."""
    code = "sys.exit(1) if os.environ['CUDA_VISIBLE_DEVICES'] == '0' else time.sleep(0.05)"
    lines = []
    assert run_jobs([job(f"job{i}", code) for i in range(5)], GPUS, report=lines.append) == []
    assert sum(": done" in line for line in lines) == 5


DEAD = "sys.exit(1) if os.environ['CUDA_VISIBLE_DEVICES'] == '0' else time.sleep(0.3)"


def test_a_retry_waits_for_another_card(job):
    """Two cards, two jobs, one card dead, as with the shares of the scores: none is lost, however long the
    healthy card is busy; a second place on the dead card is no other card.
    """
    for slots in (GPUS, [GPUS[0], Slot("GPU 0, place 2", (0,)), GPUS[1]]):
        jobs_, lines = [job(f"job{i}", DEAD) for i in range(2)], []
        assert run_jobs(jobs_, slots, report=lines.append) == []
        assert {one.failed_on for one in jobs_} <= {None, (0,)}


def test_a_card_that_cuda_no_longer_sees(job):
    """Its jobs end with a user's exit code, and are tried on another card all the same; what is wrong
    wherever it runs is not tried again."""
    import torch

    from lingpt.common.devices import find_device
    from lingpt.train import TrainConfig
    from lingpt.train.planning.machine import choose_machine

    if not torch.cuda.is_available():  # what the commands say is what is looked for
        for ask in (lambda: find_device("cuda"), lambda: choose_machine(TrainConfig(accelerator="cuda"))):
            with pytest.raises(UserError, match="|".join(jobs.CARD_GONE)):
                ask()
    gone = "(print('x finds no CUDA device: y'), sys.exit(2))"
    code = f"{gone} if os.environ['CUDA_VISIBLE_DEVICES'] == '0' else 0"
    assert run_jobs([job(f"job{i}", code) for i in range(3)], GPUS, report=lambda line: None) == []
    for code, slots, reason in (
        ("sys.exit(2)", GPUS, "exit code 2"),
        (gone, [Slot("CPU")], "x finds no CUDA device: y"),
    ):
        wrong, lines = job("wrong", code), []
        assert run_jobs([wrong], slots, report=lines.append) == [Failure("wrong", reason, wrong.log)]
        assert len(lines) == 2


def test_no_line_of_an_earlier_attempt(job, tmp_path):
    """A failure without output says its exit code, not what the log has from before."""
    (tmp_path / "x.log").write_text("all was well\n")
    (failure,) = run_jobs([job("x", "sys.exit(3)")], [Slot("CPU")], report=lambda line: None)
    assert failure.reason == "exit code 3"


def test_failures_survive_the_end_of_the_time(job):
    with pytest.raises(Stopped) as stopped:
        run_jobs(
            [job("wrong", "sys.exit(2)"), job("long", SAVES)],
            [Slot("CPU"), Slot("CPU 2")],
            time.monotonic() + 1.0,
            lambda line: None,
        )
    assert [failure.job for failure in stopped.value.failures] == ["wrong"]


SAVES = (
    "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(143))); "
    "print('on', flush=True); time.sleep(60)"
)


def test_the_end_of_the_time_lets_the_children_save(job, tmp_path):
    first, lines = job("first", SAVES), []
    with pytest.raises(Stopped):
        run_jobs([first, job("second", "pass")], [Slot("CPU")], time.monotonic() + 0.8, lines.append)
    assert lines[-1] == "stopping: waits until first has saved"  # it may take minutes
    assert first.log.read_text() == "on\nsaved\n" and not (tmp_path / "second.log").exists()


def test_a_child_that_does_not_end_is_killed(job, monkeypatch):
    """Guards: a study that waits forever for a child that has hung."""
    monkeypatch.setattr(jobs, "GRACE", 0.3)
    deaf = job("deaf", "signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(Stopped):
        run_jobs([deaf], [Slot("CPU")], start + 0.8, [].append)
    assert 1.1 <= time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(deaf.last_line()), 0)


def test_what_runs_is_reported_now_and_then(job, monkeypatch):
    """By its status or, without one, the last line of its output."""
    monkeypatch.setattr(jobs, "STATUS", 0.2)
    every = [job("x", "print('step 3', flush=True); time.sleep(1)")]
    every += [job("y", "time.sleep(1)", status=lambda: "at step 7")]
    start, lines = time.monotonic(), []
    assert run_jobs(every, [Slot("CPU"), Slot("CPU 2")], report=lines.append) == []
    status = [line for line in lines if " · " in line]
    assert status[-1] == "x step 3 · y at step 7" and len(status) <= (time.monotonic() - start) / 0.2


def test_a_terminal_that_is_gone_leaves_no_child_behind(job):
    """Guards: children that trained on, as the line that they are stopped could not be printed."""
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            raise BrokenPipeError

    first = job("first", SAVES)
    with pytest.raises(Stopped):
        run_jobs([first], [Slot("CPU")], time.monotonic() + 0.8, report)
    assert len(lines) == 2 and first.log.read_text() == "on\nsaved\n"


def test_a_signal_while_jobs_are_started_leaves_none_behind(job, monkeypatch):
    """Guards: children that trained on, unknown to all, as they were started in the same round; the signal
    comes where one is running already and `Popen` has not returned it."""
    children, popen = [], subprocess.Popen

    def start(*args, **options):
        children.append(popen(*args, **options))
        if len(children) == 3:
            signal.raise_signal(signal.SIGTERM)
        return children[-1]

    monkeypatch.setattr(jobs.subprocess, "Popen", start)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs(
                [job(f"job{i}", "time.sleep(60)") for i in range(8)],
                [Slot(f"CPU {i}") for i in range(8)],
                report=lambda line: None,
            )
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [child.poll() for child in children] == [-signal.SIGTERM] * 3


def test_a_job_that_cannot_be_started_does_not_end_the_others(job, tmp_path):
    """Guards: a log that cannot be opened ended the study, and left the jobs that ran to themselves."""
    (tmp_path / "wrong.log").mkdir()
    every = [job("first", "print('done')"), job("wrong", "pass"), job("last", "print('done')")]
    (found,) = run_jobs(every, [Slot("CPU"), Slot("CPU 2")], report=lambda line: None)
    assert found.job == "wrong" and "wrong.log" in found.reason
    assert every[0].log.read_text() == every[2].log.read_text() == "done\n"


def test_the_reason_is_not_another_s_progress(job):
    """Guards: a study that was started twice wrote two children's output into one log, and the line of the
    one that trained was given as why the other had failed."""
    code = "print('lingpt: x is being trained by process 7'); print('step 20, loss 3.1'); sys.exit(2)"
    (found,) = run_jobs([job("x", code)], [Slot("CPU")], report=[].append)
    assert found.reason == "x is being trained by process 7"


def test_slots(monkeypatch):
    """One card a run, two, or all; no more than are there; what CUDA_VISIBLE_DEVICES allows is kept."""
    import torch

    assert [slot.name for slot in find_slots(2, 1)] == ["CPU process 0", "CPU process 1"]
    with pytest.raises(UserError, match="--devices 9999999 processes without a GPU: give at most 1,024"):
        find_slots(9_999_999, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [slot.gpus for slot in find_slots(None, 1)] == [(0,), (1,), (2,), (3,)]
    assert [slot.gpus for slot in find_slots(None, 2)] == [(0, 1), (2, 3)]
    assert [slot.gpus for slot in find_slots(2, None)] == [(0, 1)]
    shared = find_slots(2, 1, sharing=2)
    assert [(s.name, s.gpus) for s in shared[1:3]] == [("GPU 1, place 1", (1,)), ("GPU 0, place 2", (0,))]
    with pytest.raises(UserError, match="--devices 8, but this machine has 4 GPUs"):
        find_slots(8, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert Slot("GPU 1", (1,)).environment()["CUDA_VISIBLE_DEVICES"] == "7"
    assert "CUDA_VISIBLE_DEVICES" in os.environ
