"""Processes that start in a moment: forked from a server that has the packages in memory.

A fresh Python takes seconds to import them; only tests of the start itself need one. The server, one for each
process of pytest, has no threads and has not touched CUDA. What it forks has arguments, an environment,
signal handlers and a session of its own, as from a shell.

The shim of tests/faults is preloaded; it does nothing until it is armed.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

SHIM = Path(__file__).with_name("faults") / "shim.c"
HANG = 300.0  # seconds after which a process counts as hung
LINGER = 60.0  # seconds that the processes which it has started may outlive it
PRELOADED = [
    __name__, "lingpt.cli.main", "lingpt.cli.train", "lingpt.train.runs.trackers", "lingpt.plots.curves",
    "datasets", "matplotlib.figure", "matplotlib.backends.backend_agg",
]  # fmt: skip


@dataclass
class Outcome:
    """How a process ended. code: negative for a signal that killed it, None where it hung and was killed."""

    code: int | None
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("lingpt: ")]


@dataclass
class Forked:
    """A process that was started, in the folder `folder`, and the file that has its output."""

    process: multiprocessing.process.BaseProcess
    folder: Path
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: int, pid: int | None = None) -> None:
        """To the process itself, or to another one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or self.pid, number)

    def send_group(self, number: int) -> bool:
        """To the process and all that it has started; whether there was anyone. 0 only asks."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def output(self) -> str:
        return self.log.read_text()

    def runs(self) -> bool:
        return self.process.is_alive()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it holds, or the process has ended."""
        until = time.monotonic() + HANG
        while self.runs() and not condition():
            assert time.monotonic() < until, f"it did not come: {self.output()}"
            time.sleep(0.02)

    def end(self, seconds: float = HANG) -> Outcome:
        """Waits for the process, and for those that it has started; what hangs is killed."""
        self.process.join(seconds)
        code, until = self.process.exitcode, time.monotonic() + LINGER
        while code is not None and self.send_group(0) and time.monotonic() < until:
            time.sleep(0.02)
        self.send_group(signal.SIGKILL)
        self.process.join()
        return Outcome(code, self.output())


def fork(
    target: Callable[..., None], *args: Any, argv: tuple[str, ...], folder: Path, env: Mapping[str, str]
) -> Forked:
    """Starts `target(*args)` in `folder`, as the program of the command line `argv`."""
    log = Path(tempfile.mkstemp(suffix=".log", dir=folder)[1])
    process = _server().Process(target=_run, args=(target, args, argv, folder, dict(env), log))
    process.start()
    return Forked(process, folder, log)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def fork_script(code: str, *argv: str, folder: Path, env: Mapping[str, str]) -> Forked:
    """Starts `python script.py *argv` with this code."""
    script = Path(tempfile.mkstemp(suffix=".py", dir=folder)[1])
    script.write_text(code)
    return fork(_run_script, argv=(str(script), *argv), folder=folder, env=env)


def _run_script() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def _run(
    target: Callable[..., None], args: tuple, argv: tuple[str, ...], folder: Path, env: dict, log: Path
) -> None:
    """The child becomes what a shell would have started."""
    gc.freeze()  # what the server has imported
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup
    sys.argv = list(argv)
    target(*args)


_context = None


def _server() -> multiprocessing.context.ForkServerContext:
    """The server that all are forked from, started with the shim; it ends with this process."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOADED)
        # Arrow's allocator would start a thread.
        quiet = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with _environment(LD_PRELOAD=str(shim() or ""), **quiet):
            forkserver.ensure_running()
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
