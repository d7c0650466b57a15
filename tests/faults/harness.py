"""Runs the real command in a process of its own, and does to it what a machine may do.

A process is forked from a server that has the packages in memory: starting takes a moment, and what runs is
`lingpt.cli.main` with a command line. `shim.c` is preloaded: it kills a process at one of its writing calls,
or makes the call fail. Needs Linux, and a C compiler for the shim.
"""

import contextlib
import ctypes
import gc
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.numpy
import yaml

from lingpt.common.files import file_sha256
from lingpt.common.run_folder import TRAIN_STATE, newest_checkpoint, read_metrics

SHIM = Path(__file__).with_name("shim.c")
HANG = 300.0  # seconds after which a process counts as hung
LINGER = 60.0  # seconds that the processes of a command may outlive it
TRAIN = ("train", "--config", "tiny.yaml")
TWO = ("--train.devices", "2", "--train.micro_batch_size", "2")
PRELOADED = [__name__, "lingpt.cli.main", "lingpt.cli.train", "lingpt.train.trackers", "lingpt.train.curves"]
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
class Outcome:
    """How a process ended. code: negative for a signal that killed it, None where it hung and was killed."""

    code: int | None
    output: str
    calls: int = 0

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("lingpt: ")]


@dataclass
class Command:
    """A started command, and the folder it works in."""

    process: multiprocessing.process.BaseProcess
    folder: Path
    log: Path
    since: float = field(default_factory=time.time)

    @property
    def run(self) -> Path:
        return self.folder / "runs/run"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: int, pid: int | None = None) -> None:
        """To the command's own process, or to one of `others`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or self.pid, number)

    def send_group(self, number: int) -> bool:
        """To the command and all that it has started; whether there was anyone. 0 only asks."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def others(self) -> list[int]:
        """The processes that the command has started, to train with it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        own = str(self.folder / "lingpt").encode()
        return [int(pid) for pid in children if own in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def runs(self) -> bool:
        return self.process.is_alive()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it holds, or the command has ended."""
        until = time.monotonic() + HANG
        while self.runs() and not condition():
            assert time.monotonic() < until, f"it did not come: {self.log.read_text()}"
            time.sleep(0.02)

    def has_logged(self) -> bool:
        """Whether a first step is in the run's metrics by now."""
        metrics = self.run / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_mtime > self.since and metrics.stat().st_size > 0

    def end(self, seconds: float = HANG) -> Outcome:
        """Waits for the process, and for those that it has started; what hangs is killed."""
        self.process.join(seconds)
        code, until = self.process.exitcode, time.monotonic() + LINGER
        while code is not None and self.send_group(0) and time.monotonic() < until:
            time.sleep(0.02)
        self.send_group(signal.SIGKILL)
        self.process.join()
        counted = self.log.with_suffix(".calls")
        calls = int(counted.read_text()) if counted.exists() else 0
        return Outcome(code, self.log.read_text(), calls)


class Harness:
    """Starts commands in `folder`, where a recipe `tiny.yaml` lies."""

    def __init__(self, folder: Path, recipe: dict) -> None:
        self.folder, self.started = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        (folder / "lingpt").write_text(LAUNCHER)

    def start(self, *argv: str, fault: Fault | None = None, hook: str = "", **env: str) -> Command:
        """Starts `lingpt *argv`. hook: code that runs first, to make a moment long enough to be hit."""
        log = Path(tempfile.mkstemp(suffix=".log", dir=self.folder)[1])
        process = _server().Process(target=_run, args=(self.folder, argv, log, fault, hook, env))
        process.start()
        self.started.append(Command(process, self.folder, log))
        return self.started[-1]

    def run(self, *argv: str, fault: Fault | None = None, **env: str) -> Outcome:
        return self.start(*argv, fault=fault, **env).end()

    def close(self) -> None:
        for command in self.started:
            command.send_group(signal.SIGKILL)


_context = None


def _server() -> multiprocessing.context.ForkServerContext:
    """The server that commands are forked from, started with the shim."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOADED)
        with _environment(LD_PRELOAD=str(shim()), OMP_NUM_THREADS="1"):
            multiprocessing.forkserver.ensure_running()
    return _context


def shim() -> Path | None:
    """The compiled shim; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    library = Path(tempfile.mkdtemp(prefix="lingpt-faults-")) / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(folder: Path, argv: tuple[str, ...], log: Path, fault: Fault | None, hook: str, env: dict) -> None:
    """The child: its own process group, its output in `log`, and then the command as a shell starts it."""
    gc.freeze()  # what the server has imported
    os.setsid()
    os.chdir(folder)
    os.environ.update(env, HOOK=hook)
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup
    sys.argv = [str(folder / "lingpt"), *argv]
    arm = ctypes.CDLL(None).fault_arm
    fault = fault or Fault(call=sys.maxsize)
    arm(
        str(folder / fault.below).encode(), ctypes.c_long(fault.call), ctypes.c_long(fault.times), fault.error
    )
    exec(hook, {})
    from lingpt.cli.main import main

    code = main()
    log.with_suffix(".calls").write_text(str(ctypes.CDLL(None).fault_calls()))
    sys.stdout.flush()
    os._exit(code)


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
