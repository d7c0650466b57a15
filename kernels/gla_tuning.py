"""What fla-core's GLA kernels need before the first step: compiled in parallel, tuned, remembered.

At its first call at a size each of the kernels tries all of its configurations, 314 in all: Triton compiles
one, times it, and goes on to the next, for minutes on one core. Here the same configurations are compiled
first, in a process per core, into the disk cache that Triton looks in. Then they are timed as always, each
for a shorter time, alone on the GPU. Triton's cache keeps the choices (FLA asks it to): the next start
compiles and times nothing.

The processes record what Triton would tune by one call at a short length, on CPU tensors and without a
launch: no kernel depends on the length. Of several processes that train on a machine the first tunes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from lingpt.kernels.gated_linear_attention import HAS_FLA, fla_attention

T = TypeVar("T")

SHORT_TIMING = {"warmup": 5, "rep": 20}  # ms a configuration, a fifth of Triton's
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


class Tuning:
    """Begun when it is made, in the background; `finish` when the GPU has nothing else to do.

    Nothing is compiled where the kernels are tuned for `size` already. Until then others may use the GPU.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        keep_triton_cache()
        self.needed = not is_tuned(functools.partial(call, size, device))
        if self.needed:
            self._compiled = _in_background(functools.partial(compile_in_processes, _worker(size)))

    def finish(self, report: Callable[[str], None]) -> None:
        """Waits for the compiling, then tunes. Where compiling in parallel fails, Triton does all of it."""
        if not self.needed:
            return
        report(
            "gla: FLA's kernels are compiled in parallel, then tuned, once for this GPU and these sizes; "
            f"remembered in Triton's cache ({os.environ.get('TRITON_CACHE_DIR')})"
        )
        total = None
        try:
            total = self._compiled.result()
            report(f"gla: {total} configurations are compiled; each is timed")
        except (OSError, RuntimeError, ValueError) as error:
            report(f"gla: compiling in parallel failed ({error}): one after the other, which takes minutes")
        with timing_briefly(total):
            call(self.size, self.device)
        torch.cuda.empty_cache()
        self.needed = False


def tuning(size: Size, device: torch.device) -> Tuning | None:
    """Begins to tune for calls of `size` on `device`; None where FLA's kernels do not run."""
    tuned = HAS_FLA and device.type == "cuda" and size.dtype in (torch.bfloat16, torch.float16)
    return Tuning(size, device) if tuned else None


def keep_triton_cache() -> None:
    """Names Triton's cache for this process; inductor, with its first kernel, would name a temporary one."""
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


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
def timing_briefly(total: int | None = None) -> Iterator[None]:
    """While inside, Triton's autotuners time each configuration for a fifth of the time, behind a bar.

    total: of configurations, where it is known.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    bench = Autotuner._bench
    with tqdm(total=total, desc="gla: tuning", unit="config", leave=False, disable=None) as bar:

        def briefly(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            if tuner._do_bench is None:  # the kernel has no clock of its own
                tuner.do_bench = functools.partial(do_bench, **SHORT_TIMING)
            bar.update()
            return bench(tuner, *args, config=config, **meta)

        with _replaced("_bench", briefly):
            yield


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


def compile_in_processes(command: list[str], processes: int | None = None) -> int:
    """Has `command`, in as many processes as there are cores, do all of its work; returns how much it is.

    Each process writes how many pieces there are, then a line for each piece whose number it has read.
    Raises RuntimeError, with the last line of its stderr, where one ends early.
    """
    processes = processes or min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    pieces = itertools.count()
    with tqdm(desc="gla: compiling", unit="config", leave=False, disable=None) as bar:
        fed = [_in_background(functools.partial(_feed, command, pieces, bar)) for _ in range(processes)]
        return max(future.result() for future in fed)


def _feed(command: list[str], pieces: Iterator[int], bar: tqdm) -> int:
    """Starts one process, and gives it one piece after the other until there are no more."""
    found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    environment = os.environ | found | {"OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as worker,
    ):
        stdin, stdout = worker.stdin, worker.stdout
        assert stdin and stdout

        def reply() -> int:
            if line := stdout.readline():
                return int(line)
            worker.wait()
            stderr.seek(0)
            raise RuntimeError((stderr.read().strip().splitlines() or ["a process ended early"])[-1])

        bar.total = total = reply()
        while (piece := next(pieces)) < total:
            with contextlib.suppress(BrokenPipeError):  # the missing reply says more
                os.write(stdin.fileno(), b"%d\n" % piece)
            reply()
            bar.update()
        stdin.close()
    return total


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
    """Compiles the configurations whose numbers come in, the costly kernels (of the backward pass) first."""
    from triton.runtime import driver

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no reply
    asked = Size(*size)
    short = asked._replace(N=min(asked.N, _SHORT_N))
    found = configurations(functools.partial(call, short, torch.device("cpu")))[::-1]
    print(len(found), file=replies)
    for line in sys.stdin:
        with contextlib.suppress(Exception):  # Triton will meet it again, and pass over the configuration
            kernel = found[int(line)]()
            driver.active.launcher_cls(kernel.src, kernel.metadata)  # the C that launches it, compiled once
        print(line.strip(), file=replies)


def configurations(calls: Callable[[], None]) -> list[Callable[[], Any]]:
    """What `calls()` would tune: of each kernel that it meets, each configuration's compilation, not yet run.

    Launches nothing.
    """
    found: list[Callable[[], Any]] = []

    def record(tuner: Any, *args: Any, **meta: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(meta):
            whole = {**meta, **config.all_kwargs(), "warmup": True}
            found.append(functools.partial(tuner.fn.run, *args, **whole))

    with _replaced("run", record):
        calls()
    return found
