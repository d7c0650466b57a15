"""Compiles Triton kernels before the benchmark, in parallel processes that share one cache.

With a cold cache they autotune for minutes. Here every configuration is compiled and none timed: other
running processes would distort the choice, and timing takes turns on the GPU. So the caches of choices, FLA's
and Triton's, are off here, and the benchmark tunes alone, on compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.runner import choose_implementations, choose_shapes
from lingpt.bench.kernels.shapes import SWEEPS, Shape
from lingpt.common.devices import available_cores

NOT_CACHED = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}  # the choices; kernels are
WARM_N = 1024  # kernels depend on whether B is 1, on H and on D; not on N, as long as 16 divides it


def warm_up(
    implementations: Iterable[str] = (),
    only: Iterable[str] = (),
    dtype: str = "bfloat16",
    sweeps: dict[str, tuple[Shape, ...]] = SWEEPS,
) -> dict[str, str]:
    """Runs every autotuning implementation once at each kind of shape of the `sweeps` named in `only`
    (default: all); returns the errors by "implementation shape".

    Raises UserError for a name that does not exist.
    """
    from tqdm import tqdm

    chosen, shapes = choose_implementations(implementations), choose_shapes(only, sweeps)
    tuned = [i for i in chosen if i.autotunes and i.unsupported_reason() is None]
    kinds = sorted({Shape(min(s.B, 2), WARM_N, s.H, s.D, s.Dv) for s in shapes})
    cells = [(i.name, shape) for i in tuned for shape in kinds if i.takes(shape)]
    with ThreadPoolExecutor(available_cores()) as pool:
        ran = pool.map(lambda cell: _warm_in_process(*cell, dtype=dtype), cells)
        errors = list(tqdm(ran, total=len(cells), desc="warm", disable=None))
    return {f"{name} {shape}": error for (name, shape), error in zip(cells, errors, strict=True) if error}


def _warm_in_process(name: str, shape: Shape, *, dtype: str) -> str | None:
    """Runs `warm_one` in a new process; None if it worked, else the last line of the error."""
    script = f"from lingpt.bench.kernels.warm import warm_one; warm_one({name!r}, {tuple(shape)}, {dtype!r})"
    environment = os.environ | NOT_CACHED | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    return None if ran.returncode == 0 else (ran.stderr.strip().splitlines() or ["no message"])[-1]


def warm_one(name: str, shape: tuple[int, int, int, int, int], dtype: str) -> None:
    """Runs one forward and backward in this process, each Triton kernel once in every configuration."""
    from triton.runtime.autotuner import Autotuner

    def run_once(kernel_call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        kernel_call()
        return [0.0] * len(quantiles)

    Autotuner.do_bench = property(lambda _: run_once)
    BenchCall(IMPLEMENTATIONS[name], Shape(*shape), getattr(torch, dtype), torch.device("cuda")).both()
    torch.cuda.synchronize()
