"""Runs the real command in a process of its own, and does to it what a machine may do.

A process is forked (tests/forked.py): starting takes a moment, and what runs is `lingpt.cli.main` with a
command line. The second process of a run is forked too, unless `fresh` asks for one as users have it; in
`make soak` all are. `shim.c` is preloaded: it kills a process at one of its writing calls, or makes the call
fail. Needs Linux, and a C compiler for the shim.
"""

import ctypes
import hashlib
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.numpy
import yaml
from lightning.fabric.strategies.launchers import subprocess_script

from lingpt.common.files import file_sha256
from lingpt.common.parent import STOP_SIGNALS
from lingpt.common.run_folder import TRAIN_STATE, newest_checkpoint, read_metrics
from lingpt.tests.forked import Forked, Outcome, fork

STEPS = 12  # of the recipe's run
TRAIN = ("train", "--config", "tiny.yaml")
TWO = ("--train.devices", "2", "--train.micro_batch_size", "2")
PIECES = ("--train.devices", "2", "--train.context_parallel", "2")
LAUNCHER = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
exec(os.environ.get("HOOK", ""))
from lingpt.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Fault:
    """What happens at writing calls below the folder `below`, from the `call`-th one on.

    error: the number that the calls fail with; 0 kills the process.
    """

    call: int
    times: int = 1
    error: int = 0
    below: str = "runs"


@dataclass
class Command(Forked):
    """A started command, and the folder it works in."""

    since: float = field(default_factory=time.time)

    @property
    def run(self) -> Path:
        return self.folder / "runs/run"

    @property
    def calls(self) -> int:
        """Its writing calls to the folder of its fault; known once it has ended by itself."""
        return int(_count_of(self.folder, self.pid).read_text())

    def others(self) -> list[int]:
        """The processes that the command has started, to train with it."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except FileNotFoundError:  # it has ended
            return []
        own = str(self.folder / "lingpt").encode()
        return [
            int(pid)
            for pid in children
            if _began(self.folder, int(pid)).exists() or own in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def has_logged(self, step: int = 0) -> bool:
        """Whether it has added to the run's metrics by now, and come to `step`."""
        metrics = self.run / "metrics.jsonl"
        if not (metrics.exists() and metrics.stat().st_mtime > self.since):
            return False
        lines = read_metrics(self.run)
        return bool(lines) and lines[-1]["step"] >= step

    def takes_signals(self) -> bool:
        """Whether it has set its handlers: a signal before that ends it as it ends any program."""
        if not _began(self.folder, self.pid).exists():  # so far it has those of the server
            return False
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.SIGHUP - 1) & 1)

    def wait_for_a_step(self, rng: random.Random) -> None:
        """A random one but the last; and then for a moment, to hit whatever comes after it, too."""
        step = rng.randrange(1, STEPS)
        self.wait_for(lambda: self.has_logged(step))
        time.sleep(rng.uniform(0, 0.05))


class Harness:
    """Starts commands in `folder`, where a recipe `tiny.yaml` lies."""

    def __init__(self, folder: Path, recipe: dict) -> None:
        self.folder, self.started = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        (folder / "lingpt").write_text(LAUNCHER)

    def start(
        self, *argv: str, fault: Fault | None = None, hook: str = "", fresh: bool = False, **env: str
    ) -> Command:
        """Starts `lingpt *argv`.

        hook: code that runs first, to make a moment long enough to be hit. fresh: the second process, of a
        run with two, is a new Python, which imports PyTorch for seconds.
        """
        fresh = fresh or "LINGPT_SOAK" in os.environ
        second = not fresh and "--train.devices" in argv
        whole = {**os.environ, "OMP_NUM_THREADS": "1", **env, "HOOK": hook}
        argv = (str(self.folder / "lingpt"), *argv)
        forked = fork(_run, self.folder, fault, hook, second, argv=argv, folder=self.folder, env=whole)
        self.started.append(Command(**vars(forked)))
        return self.started[-1]

    def run(self, *argv: str, fault: Fault | None = None, **env: str) -> Outcome:
        return self.start(*argv, fault=fault, **env).end()

    def close(self) -> None:
        for command in self.started:
            command.send_group(signal.SIGKILL)


class SecondProcess:
    """A process that waits until Lightning starts the second one of the run, and is then that one.

    It is forked before the main process has done anything, and ends with it.
    """

    def __init__(self, folder: Path) -> None:
        self.returncode: int | None = None
        read_end, self._write_end = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write_end)
            with open(read_end) as pipe:
                line = pipe.read()
            if not line:
                os._exit(0)
            # As in a child of Lightning's, signals are blocked until its handlers are there.
            os.environ.clear()
            sys.argv[1:], environment = json.loads(line)
            os.environ.update(environment)
            code = 1
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read_end)
        self._folder, self._polled = folder, threading.Lock()

    def start(self, command: list[str], env: dict[str, str], **_: Any) -> "SecondProcess":
        """In place of `subprocess.Popen`."""
        assert command[1] == sys.argv[0]
        _began(self._folder, self.pid).touch()
        os.write(self._write_end, json.dumps((command[2:], env)).encode())
        os.close(self._write_end)
        return self

    def poll(self) -> int | None:
        with self._polled:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(folder: Path, fault: Fault | None, hook: str, second: bool) -> None:
    """In the child: arms the shim, which also counts the calls, and calls the command."""
    if second:
        subprocess_script.subprocess = SimpleNamespace(Popen=SecondProcess(folder).start)
    fault = fault or Fault(call=sys.maxsize)
    shim = ctypes.CDLL(None)
    shim.fault_arm(
        str(folder / fault.below).encode(), ctypes.c_long(fault.call), ctypes.c_long(fault.times), fault.error
    )
    exec(hook, {})
    from lingpt.cli.main import main

    _began(folder, os.getpid()).touch()
    code = main()
    _count_of(folder, os.getpid()).write_text(str(shim.fault_calls()))
    sys.stdout.flush()
    os._exit(code)


def _began(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.began"


def _count_of(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.calls"


def merged(recipe: dict, overrides: dict) -> dict:
    """The recipe with `{"train.max_steps": 3}` and the like put in."""
    groups = {group: dict(values) for group, values in recipe.items()}
    for key, value in overrides.items():
        group, name = key.split(".")
        groups[group][name] = value
    return groups


# -- what a run has come to ---------------------------------------------------------------------------------


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step that the run has logged; of a repeated step, the last."""
    return {
        line["step"]: (line["loss"], line["grad_norm"])
        for line in read_metrics(run)
        if line["kind"] == "train"
    }


def last_state(run: Path) -> dict[str, str]:
    """Digests of the newest checkpoint's tensors and of its train state."""
    newest = newest_checkpoint(run)
    assert newest is not None
    # Not the file's: safetensors writes the entries of its header in any order.
    tensors = safetensors.numpy.load_file(newest / "model.safetensors")
    digests = {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}
    return {**digests, TRAIN_STATE: file_sha256(newest / TRAIN_STATE)}
