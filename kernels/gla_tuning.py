"""What fla-core's GLA kernels need before the first step: compiled in parallel, tuned, remembered.

At its first call at a size each of the kernels tries all of its configurations, 314 in all: Triton compiles
one, times it, and goes on to the next, for minutes on one core. Here the same configurations are compiled
first, in a process per core, into the disk cache that Triton looks in; those that take too long are left
out. Then they are timed as always, each for a shorter time, alone on the GPU. Triton's cache keeps the
choices (FLA asks it to): the next start compiles and times nothing.

The processes record what Triton would tune by one call at a short length, on CPU tensors and without a
launch: no kernel depends on the length. Of several processes that train on a machine the first tunes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread, Timer
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from lingpt.common.devices import available_cores
from lingpt.kernels.gated_linear_attention import HAS_FLA, fla_attention

T = TypeVar("T")

SHORT_TIMING = {"warmup": 5, "rep": 20}  # ms a configuration, a fifth of Triton's
COMPILE_SECONDS = 50.0  # what is not compiled by then is not tuned; 16 cores need less for all of it
_SHORT_N = 128  # two chunks
_MOST_PROCESSES = 16  # each may hold half a GB of the GPU's memory, for its CUDA context


class Size(NamedTuple):
    """Of a call: B sequences of N tokens, H heads, key and value dimensions of a head, and a dtype."""

    B: int
    N: int
    H: int
    Dk: int
    Dv: int
    dtype: torch.dtype


class Autotuning:
    """Begun when it is made, in the background; `finish` when the GPU has nothing else to do.

    Nothing is compiled where the kernels are tuned for `size` already. Until then others may use the GPU.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        keep_triton_cache()
        self.needed = not is_tuned(functools.partial(call, size, device))
        if self.needed:
            compile_all = functools.partial(compile_in_processes, _worker(size), extra_env=triton_cache_env())
            self._compiled = _in_background(compile_all)

    def finish(self, report: Callable[[str], None]) -> None:
        """Waits for the compiling, then tunes. Where compiling in parallel fails, Triton does all of it."""
        if not self.needed:
            return
        report(
            "gla: FLA's kernels are compiled in parallel, then tuned, once for this GPU and these sizes; "
            f"remembered in Triton's cache ({os.environ.get('TRITON_CACHE_DIR')})"
        )
        total, left_out = None, 0
        try:
            compiled, total = self._compiled.result()
            left_out = total - compiled
            late = f" ({left_out} took longer than {COMPILE_SECONDS:.0f} s: left out)" if left_out else ""
            report(f"gla: {compiled} of {total} configurations are compiled{late}; each is timed")
        except (OSError, RuntimeError, ValueError) as error:
            report(f"gla: compiling in parallel failed ({error}): one after the other, which takes minutes")
        with timing_briefly(total, left_out):
            call(self.size, self.device)
        torch.cuda.empty_cache()
        self.needed = False


def begin_autotuning(size: Size, device: torch.device) -> Autotuning | None:
    """Begins to tune for calls of `size` on `device`; None where FLA's kernels do not run."""
    tuned = HAS_FLA and device.type == "cuda" and size.dtype in (torch.bfloat16, torch.float16)
    return Autotuning(size, device) if tuned else None


def keep_triton_cache() -> None:
    """Names Triton's cache for this process; inductor, with its first kernel, would name a temporary one."""
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def triton_cache_env() -> dict[str, str]:
    """Environment variables with which another process finds in Triton's cache what this one looks for.

    Entries are named after ptxas's version too, which a process asks for once; but inductor, with its first
    kernel, names another ptxas for this process and those that it starts.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import driver

    return {"TRITON_MOCK_PTX_VERSION": get_ptxas_version(driver.active.get_current_target().arch)}


def call(size: Size, device: torch.device) -> None:
    """A forward and a backward pass, as training makes them."""
    B, N, H, Dk, Dv, dtype = size
    made = functools.partial(torch.zeros, device=device, requires_grad=True)
    q, k = (made(B, N, H, Dk, dtype=dtype) for _ in "qk")
    v = made(B, N, H, Dv, dtype=dtype)
    log_gate = made(B, N, H, Dk, dtype=torch.float32)
    o, _ = fla_attention(q, k, v, log_gate, None, Dk**-0.5)
    o.sum().backward()


# -- in the process that trains ------------------------------------------------------------------------------


class _NotTuned(Exception):
    pass


def is_tuned(calls: Callable[[], None]) -> bool:
    """Whether `calls()` finds the choice of each kernel that it meets, in memory or on disk."""

    def not_tuned(*_: Any, **__: Any) -> None:
        raise _NotTuned

    try:
        with _replaced("_bench", not_tuned):
            calls()
    except _NotTuned:
        return False
    return True


@contextlib.contextmanager
def timing_briefly(total: int | None = None, left_out: int = 0) -> Iterator[None]:
    """While inside, Triton's autotuners time a configuration for a fifth of the time or less, behind a bar.

    total: of configurations, where it is known. left_out: how many of them were not compiled in time. That
    many cache misses are treated as failed configurations; a kernel left with none is compiled at its first
    launch.
    """
    from triton.runtime.autotuner import Autotuner

    bench, clock = Autotuner._bench, _Clock()
    with tqdm(total=total, desc="gla: tuning", unit="config", leave=False, disable=None) as bar:
        missing = iter(range(left_out))

        def briefly(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            if tuner._do_bench is None:  # the kernel has no clock of its own
                tuner.do_bench = clock
            clock.times(tuner.nargs)
            bar.update()
            with _not_compiling(missing):
                return bench(tuner, *args, config=config, **meta)

        try:
            with _replaced("_bench", briefly):
                yield
        finally:
            clock.times(None)  # the autotuners keep the clock, which must not keep the call's tensors


class _Clock:
    """Triton's `do_bench`, in short; of what is far slower than the fastest so far, a single run is timed."""

    TOO_SLOW, CHEAP = 3.0, 1.0  # × the fastest; ms: a shorter time is largely the host's, and costs little

    def __init__(self) -> None:
        self._call: Any = None
        self._fastest = math.inf

    def times(self, call: Any) -> None:
        """What is timed from now on are configurations of this call of a kernel."""
        if call is not self._call:
            self._call, self._fastest = call, math.inf

    def __call__(self, kernel: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
        """Milliseconds."""
        from triton.testing import do_bench

        kernel()  # loads it
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel()
        end.record()
        end.synchronize()
        once = begin.elapsed_time(end)
        if once > max(self.CHEAP, self.TOO_SLOW * self._fastest):
            return [once] * len(quantiles)
        found = do_bench(kernel, quantiles=quantiles, **SHORT_TIMING)
        self._fastest = min(self._fastest, found[0])
        return found


@contextlib.contextmanager
def _not_compiling(kernels: Iterator[int]) -> Iterator[None]:
    """While inside, a miss of Triton's cache fails instead of compiling, as often as `kernels` has items."""
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    own = ASTSource.make_ir  # called for what the cache does not hold

    def make_ir(source: Any, *args: Any, **options: Any) -> Any:
        for _ in kernels:
            raise PTXASError("not compiled in time")  # the autotuner goes on with the next configuration
        return own(source, *args, **options)

    ASTSource.make_ir = make_ir
    try:
        yield
    finally:
        ASTSource.make_ir = own


@contextlib.contextmanager
def _replaced(method: str, by: Callable) -> Iterator[None]:
    """Another method of Triton's autotuners, while inside."""
    from triton.runtime.autotuner import Autotuner

    own = getattr(Autotuner, method)
    setattr(Autotuner, method, by)
    try:
        yield
    finally:
        setattr(Autotuner, method, own)


def compile_in_processes(
    command: list[str],
    processes: int | None = None,
    seconds: float = COMPILE_SECONDS,
    extra_env: dict[str, str] | None = None,
) -> tuple[int, int]:
    """Has `command`, in as many processes as there are cores, do its work for so many seconds at most.

    Each process writes how many tasks there are, then a line for each task whose number it has read.
    extra_env: environment variables of theirs. Returns how many tasks are done, and how many there are.
    Raises RuntimeError, with the last line of its stderr, where one ends early.
    """
    processes = processes or min(available_cores(), _MOST_PROCESSES)
    tasks, deadline = itertools.count(), time.monotonic() + seconds
    with tqdm(desc="gla: compiling", unit="config", leave=False, disable=None) as bar:
        feed = functools.partial(_feed, command, extra_env or {}, tasks, deadline, bar)
        results = [future.result() for future in [_in_background(feed) for _ in range(processes)]]
    done, total = sum(done for done, _ in results), max(total for _, total in results)
    if not total:
        raise RuntimeError(f"no process was ready within {seconds:.0f} s")
    return done, total


def _feed(
    command: list[str], extra_env: dict[str, str], tasks: Iterator[int], deadline: float, bar: tqdm
) -> tuple[int, int]:
    """Starts one process, and gives it one task after the other until there are no more, or no more time."""
    found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    environment = os.environ | found | {"OMP_NUM_THREADS": "1"} | extra_env
    done = total = 0
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=environment, start_new_session=True,
        ) as worker,
        _ended_at(deadline, worker),
    ):  # fmt: skip
        stdin, stdout = worker.stdin, worker.stdout
        assert stdin and stdout

        def reply() -> int | None:
            if line := stdout.readline():
                return int(line)
            worker.wait()
            if time.monotonic() >= deadline:
                return None
            stderr.seek(0)
            raise RuntimeError((stderr.read().strip().splitlines() or ["a process ended early"])[-1])

        bar.total = total = reply() or 0
        while (task := next(tasks)) < total:
            with contextlib.suppress(BrokenPipeError):  # the missing reply says more
                os.write(stdin.fileno(), b"%d\n" % task)
            if reply() is None:
                break
            done += 1
            bar.update()
        stdin.close()
    return done, total


@contextlib.contextmanager
def _ended_at(deadline: float, process: subprocess.Popen) -> Iterator[None]:
    """Ends the process, a leader of its session, and those that it has started, if it runs so long."""

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    timer = Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _in_background(function: Callable[[], T]) -> Future[T]:
    """In a thread that the process does not wait for when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


# -- in the processes that compile ---------------------------------------------------------------------------


def _worker(size: Size) -> list[str]:
    script = f"import torch; from lingpt.kernels.gla_tuning import serve; serve({', '.join(map(repr, size))})"
    return [sys.executable, "-c", script]


def serve(*size: Any) -> None:
    """Compiles the configurations whose numbers come in."""
    from triton.runtime import driver

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no reply
    asked = Size(*size)
    short = asked._replace(N=min(asked.N, _SHORT_N))
    found = configurations(functools.partial(call, short, torch.device("cpu")))
    print(len(found), file=replies)
    for line in sys.stdin:
        with contextlib.suppress(Exception):  # Triton will meet it again, and pass over the configuration
            kernel = found[int(line)]()
            driver.active.launcher_cls(kernel.src, kernel.metadata)  # the C that launches it, compiled once
        print(line.strip(), file=replies)


def configurations(calls: Callable[[], None]) -> list[Callable[[], Any]]:
    """What `calls()` would tune: of each kernel that it meets, each configuration's compilation, not yet run.

    Those of many warps first, the backward pass before the forward pass: few warps with a large tile have
    the longest code, which takes the longest to compile and runs slowly. Launches nothing.
    """
    found: list[tuple[int, Callable[[], Any]]] = []

    def record(tuner: Any, *args: Any, **meta: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(meta):
            whole = {**meta, **config.all_kwargs(), "warmup": True}
            found.append((config.num_warps, functools.partial(tuner.fn.run, *args, **whole)))

    with _replaced("run", record):
        calls()
    return [compilation for _, compilation in sorted(reversed(found), key=lambda item: -item[0])]
