"""Compiles fla-core's GLA kernels in parallel and autotunes them before the first step.

At its first call at a size each kernel tries all of its configurations, 314 in all: Triton compiles one,
times it, and continues with the next, for minutes on one core. Here the same configurations are compiled
first, in up to 16 processes, into Triton's disk cache; those that take too long are left out. Then they are
timed as usual, but for a shorter time each, alone on the GPU. Triton's cache keeps the choices (FLA enables
that), so the next start compiles and times nothing.

The processes record what Triton would tune in one call at a short length, on CPU tensors and without a
launch: no kernel depends on the length. If several processes train on a machine, the first tunes.
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

SHORT_TIMING = {"warmup": 5, "rep": 20}  # ms per configuration, a fifth of Triton's
COMPILE_SECONDS = 50.0  # configurations not compiled by then are left out; 16 cores need less for all
_SHORT_N = 128  # two chunks
_MOST_PROCESSES = 16  # each may use half a GB of GPU memory for its CUDA context


class Size(NamedTuple):
    """A call's size: B sequences of N tokens, H heads, key and value dimensions of a head, and the dtype;
    and whether there is a backward pass."""

    B: int
    N: int
    H: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    backward: bool = True


class Autotuning:
    """Autotuning that starts compiling in the background at once; call `finish` when the GPU is idle.

    Nothing is compiled if the kernels are already tuned for `size`. Until `finish`, others may use the GPU.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        keep_triton_cache()
        self.needed = not is_tuned(functools.partial(call, size, device))
        if self.needed:
            compile_all = functools.partial(compile_in_processes, _worker(size), extra_env=triton_cache_env())
            self._compiled = _in_background(compile_all)

    def finish(self, report: Callable[[str], None]) -> None:
        """Waits for the compilation, then tunes. If parallel compilation failed, Triton compiles serially."""
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
    """Starts autotuning for calls of `size` on `device`; None if FLA's kernels do not run there."""
    tuned = HAS_FLA and device.type == "cuda" and size.dtype in (torch.bfloat16, torch.float16)
    return Autotuning(size, device) if tuned else None


def keep_triton_cache() -> None:
    """Sets Triton's cache folder for this process; inductor would set a temporary one at its first kernel."""
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def triton_cache_env() -> dict[str, str]:
    """Environment variables that make another process use the same entries of Triton's cache as this one.

    An entry's name includes the version of ptxas, which a process reads once; but inductor, at its first
    kernel, sets another ptxas for this process and those that it starts.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import driver

    return {"TRITON_MOCK_PTX_VERSION": get_ptxas_version(driver.active.get_current_target().arch)}


def call(size: Size, device: torch.device) -> None:
    """Runs a forward and, as in training, a backward pass."""
    B, N, H, Dk, Dv, dtype, backward = size
    made = functools.partial(torch.zeros, device=device, requires_grad=backward)
    q, k = (made(B, N, H, Dk, dtype=dtype) for _ in "qk")
    v = made(B, N, H, Dv, dtype=dtype)
    log_gate = made(B, N, H, Dk, dtype=torch.float32)
    with torch.set_grad_enabled(backward):
        o, _ = fla_attention(q, k, v, log_gate, None, Dk**-0.5)
    if backward:
        o.sum().backward()


# -- in the process that trains ------------------------------------------------------------------------------


class _NotTuned(Exception):
    pass


def is_tuned(calls: Callable[[], None]) -> bool:
    """Whether the choices for all kernels that `calls()` launches are known, in memory or on disk."""

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
    """Makes Triton's autotuners time each configuration for at most a fifth of the time, with a progress bar.

    total: number of configurations, if known. left_out: how many of them were not compiled in time. That many
    cache misses are treated as failed configurations; a kernel left with none is compiled at its first
    launch.
    """
    from triton.runtime.autotuner import Autotuner

    bench, clock = Autotuner._bench, _Clock()
    with tqdm(total=total, desc="gla: tuning", unit="config", leave=False, disable=None) as bar:
        missing = iter(range(left_out))

        def briefly(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            if tuner._do_bench is None:  # the kernel has no timer of its own
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
    """A shorter `do_bench` of Triton's; configurations much slower than the fastest so far are timed once."""

    TOO_SLOW, CHEAP = 3.0, 1.0  # × the fastest; ms, below which times are mostly host time, and cheap

    def __init__(self) -> None:
        self._call: Any = None
        self._fastest = math.inf

    def times(self, call: Any) -> None:
        """Sets the call whose configurations are timed from now on."""
        if call is not self._call:
            self._call, self._fastest = call, math.inf

    def __call__(self, kernel: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
        """Milliseconds of `kernel`, one number per quantile."""
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
    """Makes misses of Triton's cache fail instead of compiling, as often as `kernels` has items."""
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    own = ASTSource.make_ir  # called at a cache miss

    def make_ir(source: Any, *args: Any, **options: Any) -> Any:
        for _ in kernels:
            raise PTXASError("not compiled in time")  # the autotuner continues with the next configuration
        return own(source, *args, **options)

    ASTSource.make_ir = make_ir
    try:
        yield
    finally:
        ASTSource.make_ir = own


@contextlib.contextmanager
def _replaced(method: str, by: Callable) -> Iterator[None]:
    """Replaces a method of Triton's autotuners inside the block."""
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
    """Runs `command` in one process per core (at most `_MOST_PROCESSES`), for at most `seconds`.

    Each process writes the number of tasks, then a line after each task whose number it was sent. extra_env:
    environment variables for the processes. Returns (tasks done, tasks in all). Raises RuntimeError, with the
    last line of its stderr, if one ends early.
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
    """Starts one process and sends it tasks one by one, until all are done or the time is up."""
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
            with contextlib.suppress(BrokenPipeError):  # the missing reply is reported below
                os.write(stdin.fileno(), b"%d\n" % task)
            if reply() is None:
                break
            done += 1
            bar.update()
        stdin.close()
    return done, total


@contextlib.contextmanager
def _ended_at(deadline: float, process: subprocess.Popen) -> Iterator[None]:
    """Kills the process, a session leader, and those it has started, if it still runs at the deadline."""

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
    """Runs `function` in a daemon thread, which does not keep the process alive."""
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
    """Compiles the configurations whose numbers arrive on stdin."""
    from triton.runtime import driver

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps prints of libraries out of the replies
    asked = Size(*size)
    short = asked._replace(N=min(asked.N, _SHORT_N))
    found = configurations(functools.partial(call, short, torch.device("cpu")))
    print(len(found), file=replies)
    for line in sys.stdin:
        with contextlib.suppress(Exception):  # Triton will hit the same error and skip the configuration
            kernel = found[int(line)]()
            driver.active.launcher_cls(kernel.src, kernel.metadata)  # compiles its C launcher
        print(line.strip(), file=replies)


def configurations(calls: Callable[[], None]) -> list[Callable[[], Any]]:
    """Functions that compile what `calls()` would tune: one per kernel and configuration. Launches nothing.

    Those of many warps come first, of the backward pass before the forward pass: few warps with a large tile
    have the longest code, which takes the longest to compile and runs slowly.
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
