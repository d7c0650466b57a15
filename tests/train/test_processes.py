"""Signals and deaths, with real processes: one and two of them, at the moments that hurt."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from lingpt.common.run_folder import newest_checkpoint, read_metrics

# Ctrl-C interrupts also where the tests run in the background, with SIGINT ignored. What is in HOOK comes
# first: it makes some part of the run slow, and says so in a file.
LAUNCH = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
exec(os.environ.get("HOOK", ""))
from lingpt.cli.main import main
sys.exit(main())
"""
SLOW_VALIDATION = """
from pathlib import Path
from lingpt.train import loop
exact = loop.Run.validate
def validate(self, stop):
    gather = self.dataset.val.gather
    def slow(blocks):
        with open(f"validating-{self.parallel.rank}", "a") as batches:
            batches.write(".")
        time.sleep(0.3)
        return gather(blocks)
    object.__setattr__(self.dataset, "val", Slow(self.dataset.val, slow))
    return exact(self, stop)
class Slow:
    def __init__(self, blocks, gather): self.blocks, self.gather = blocks, gather
    def __len__(self): return len(self.blocks)
    def __getattr__(self, name): return getattr(self.blocks, name)
loop.Run.validate = validate
"""
TWO = ("--train.devices", "2", "--train.micro_batch_size", "2")
LONG = ("--train.max_steps", "100000", "--train.save_interval", "100000")


@pytest.fixture
def start(tmp_path: Path, corpus, tmp_path_factory) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts `lingpt train` in `tmp_path`, in a group of its own; kills what is left of it at the end."""
    recipe = {
        "model": {"name": "demo"},
        "data": {key: getattr(corpus, key) for key in ("source", "val_source", "seq_len", "cache_dir")},
        "train": {
            "name": "run", "max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 2,
            "eval_interval": 2, "eval_tokens": 320, "save_interval": 2, "sample_tokens": 0,
            "wandb": False, "accelerator": "cpu",
        },
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    script = tmp_path / "launch"
    script.write_text(LAUNCH)
    started = []

    def run(*argv: str, hook: str = "", **options) -> subprocess.Popen:
        of_others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        env = {key: value for key, value in os.environ.items() if key not in of_others}
        command = [sys.executable, "-P", str(script), "train", "--config", "tiny.yaml", *argv]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**env, "OMP_NUM_THREADS": "1", "HOOK": hook},
            start_new_session=True,
            **streams,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], object], seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def trains(folder: Path) -> bool:
    metrics = folder / "runs/run/metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def end_of(process: subprocess.Popen, seconds: float) -> tuple[int, str]:
    """Exit code, and stderr; the process must end in time."""
    _, err = process.communicate(timeout=seconds)
    return process.returncode, err


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("lingpt: ")]


def other(process: subprocess.Popen) -> int:
    """The pid of the one process that the main one has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    named = [int(pid) for pid in children if b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (pid,) = named
    return pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_each_signal_saves_and_has_its_exit_code(start, tmp_path, number):
    process = start(*LONG)
    wait_for(lambda: trains(tmp_path))
    process.send_signal(number)
    code, err = end_of(process, 200)
    assert code == 128 + number and "stopped and saved at step" in err
    assert newest_checkpoint(tmp_path / "runs/run") is not None


@pytest.mark.parametrize("options", [(), TWO], ids=["one", "two"])
def test_a_signal_in_a_long_validation(start, tmp_path, options):
    """To the main process alone. It is left at the next batch, and comes first when the run goes on."""
    process = start(*options, "--train.eval_tokens", "3200", hook=SLOW_VALIDATION)
    batches = tmp_path / "validating-0"
    wait_for(batches.exists)
    process.send_signal(signal.SIGTERM)
    done = batches.stat().st_size
    code, err = end_of(process, 200)
    assert code == 143 and "stopped and saved at step 2 of 4" in err, err
    assert batches.stat().st_size <= done + 2
    assert len(lines(err)) == 1 and "Traceback" not in err
    code, err = end_of(start(*options, "--train.eval_tokens", "3200"), 400)
    assert code == 0, err
    validated = [line["step"] for line in read_metrics(tmp_path / "runs/run") if line["kind"] == "val"]
    assert validated == [2, 4]


@pytest.mark.parametrize("in_validation", [False, True])
def test_ctrl_c_to_the_group(start, tmp_path, in_validation):
    """A terminal sends it to every process."""
    process = start(*LONG, *TWO, hook=SLOW_VALIDATION if in_validation else "")
    wait_for(lambda: (tmp_path / "validating-1").exists() if in_validation else trains(tmp_path))
    os.killpg(process.pid, signal.SIGINT)
    code, err = end_of(process, 200)
    assert code == 130 and "stopped and saved at step" in err, err
    assert len(lines(err)) == 1 and "Traceback" not in err


@pytest.mark.parametrize("who", ["main", "other"])
def test_a_process_that_is_killed_ends_the_others_with_one_line(start, tmp_path, who):
    process = start(*LONG, *TWO)
    wait_for(lambda: trains(tmp_path))
    pids = {"main": process.pid, "other": other(process)}
    os.kill(pids[who], signal.SIGKILL)
    began = time.monotonic()
    code, err = end_of(process, 200)  # also the pipe's other writers
    assert time.monotonic() - began < 30
    assert code == (-9 if who == "main" else 2), err
    assert "Traceback" not in err and len(lines(err)) == 1, err
    told = "the main process" if who == "main" else "process 1 of 2"
    assert told in err and "the same command goes on" in err
    wait_for(lambda: not Path(f"/proc/{pids['other']}").exists(), 10)


def test_a_stop_sticks_when_it_comes_in_the_middle_of_a_call(start, tmp_path):
    """On a GPU a step spends its time in one call; Python's handlers run after it, next to the agreement."""
    hook = """
from pathlib import Path
from lingpt.train.parallel import Parallel
exact = Parallel.sum
def sum(self, *values):
    found = exact(self, *values)  # what was requested so far is in there: the signal comes too late for it
    if not Path("sent").exists() and Path("go").exists():
        Path("sent").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return found
Parallel.sum = sum
"""
    process = start(*LONG, hook=hook)
    wait_for(lambda: trains(tmp_path))
    (tmp_path / "go").touch()
    code, err = end_of(process, 200)
    assert code == 143 and "stopped and saved at step" in err, err


def test_further_signals_do_not_kill_the_save(start, tmp_path):
    """A launcher passes on what the terminal sent already; a scheduler asks again and again."""
    hook = """
from lingpt.train import loop
exact = loop.Run.save
def save(self):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    exact(self)
    os.kill(os.getpid(), signal.SIGHUP)
loop.Run.save = save
"""
    process = start(*LONG, hook=hook)
    wait_for(lambda: trains(tmp_path))
    process.send_signal(signal.SIGINT)
    code, err = end_of(process, 200)
    assert code == 130 and "stopped and saved at step" in err, err
    assert newest_checkpoint(tmp_path / "runs/run") is not None


def test_a_terminal_that_goes_away(start, tmp_path):
    """Lost ssh: SIGHUP, and every write to the terminal fails from then on."""
    ours, theirs = pty.openpty()
    take_terminal = "import fcntl, termios\nfcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
    process = start(*LONG, hook=take_terminal, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)

    def drain() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        return trains(tmp_path)

    wait_for(drain)
    os.close(ours)
    assert process.wait(60) == 128 + signal.SIGHUP
    saved = newest_checkpoint(tmp_path / "runs/run")
    assert saved is not None and json.loads((saved / "manifest.json").read_text())["step"] > 0
