"""The sweep over implementations and shapes; the training shapes, which are compared, in ROUNDS rounds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.environment import warn_if_shared
from lingpt.bench.kernels.implementations import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS, Implementation
from lingpt.bench.kernels.measure import first_round, next_round
from lingpt.bench.kernels.results import Results, Row
from lingpt.bench.kernels.shapes import CUMSUM, QUICK, SWEEPS, Shape
from lingpt.bench.results import Session, Skipped, chosen
from lingpt.common.devices import find_device
from lingpt.common.errors import UserError

ROUNDS = 5


def run_bench(
    only: Iterable[str] = (),
    implementations: Iterable[str] = (),
    *,
    quick: bool = False,
    budget: float = 1200.0,
    limit: float = 6.0,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    sweeps: dict[str, tuple[Shape, ...]] | None = None,
    save_to: Path | None = None,
    append: bool = False,
) -> Results:
    """Measures `implementations` (names; default: DEFAULT_IMPLEMENTATIONS) on the sweeps named in `only`
    (default: all).

    `quick` takes fewer shapes; `budget` is in seconds: once it is spent, no further timing begins, and the
    rest is recorded as skipped; `limit` is the maximum in seconds that one implementation may take at one
    shape in a round, predicted from its smaller shapes. A shape of two sweeps is measured once. The results
    go to `save_to` after every row; `append` keeps the rows there, if they are of this card, these versions
    and this source, and does not time them again. Ratios compare only what one call has measured.

    Raises UserError for a name that does not exist and for a machine without the device.
    """
    from tqdm import tqdm

    where = _usable_device(device)
    sweeps = sweeps or (QUICK if quick else SWEEPS)
    only = list(only)
    selected, shapes = choose_implementations(implementations), choose_shapes(only, sweeps)
    training = set(sweeps.get("training", ())) if not only or "training" in only else set()
    warn_if_shared(where)
    name = str(dtype).removeprefix("torch.")
    results = Results.begin(where, name, save_to, append)
    schedule = _schedule(shapes, selected, training, results)
    clock, session = Clock(where), Session(results, where, budget, save_to)
    timings = tqdm(schedule, desc="bench", unit="timing", disable=None)
    for n, shape, implementation in timings:
        timings.set_postfix_str(f"{implementation.name} {shape} round {n}")
        if n == 1:
            graphs = shape in training and shape != CUMSUM
            measure = functools.partial(_first_round, results.rows, clock, limit=limit, graphs=graphs)
            session.turn(Row(implementation.name, shape, name), measure)
        elif row := results.row(implementation.name, shape):
            session.turn(row, functools.partial(next_round, clock=clock))
    return results


def _first_round(rows: list[Row], clock: Clock, row: Row, *, limit: float, graphs: bool) -> None:
    predicted = _predict(rows, row)
    if predicted is not None and 8 * predicted > limit:  # warm-up, sizing, two untimed, three timed, and more
        raise Skipped(f"would take about {predicted:.1f} s a call, the limit is {limit:.0f} s in all")
    first_round(row, clock, limit=limit, graphs=graphs)


def _predict(rows: list[Row], row: Row) -> float | None:
    """Seconds of forward and backward of the row, scaled from the largest shape timed; None if none was."""

    def work(s: Shape) -> float:
        return s.B * s.H * s.D * s.N ** (2 if IMPLEMENTATIONS[row.implementation].quadratic else 1)

    timed = [
        (work(other.shape), other.both_ms)
        for other in rows
        if other.implementation == row.implementation and other.both_ms is not None
    ]
    if not timed:
        return None
    largest, ms = max(timed, key=lambda pair: pair[0])
    return ms / 1e3 * work(row.shape) / largest


def _usable_device(name: str) -> torch.device:
    """The device, made the current one; UserError if there is none."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"unknown device {name!r}: use cuda, cuda:1 … or cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        hint = "--device cpu measures PyTorch's"
        raise UserError(f"the benchmark needs a CUDA device, and there is none here ({hint})")
    if device.index is not None:
        torch.cuda.set_device(find_device(name, instead="cuda"))
    return device


def _schedule(
    shapes: list[Shape], implementations: list[Implementation], training: set[Shape], done: Results
) -> list[tuple[int, Shape, Implementation]]:
    """Round, shape and implementation of each timing: all rounds of the training shapes, then the rest."""
    rounds = [(n, shape) for n in range(1, 1 + ROUNDS) for shape in shapes if shape in training]
    once = [(1, shape) for shape in shapes if shape not in training]
    return [
        (n, shape, implementation)
        for n, shape in rounds + once
        for implementation in implementations
        if implementation.takes(shape) and (shape in training or not implementation.training_only)
        if not done.is_done(implementation.name, shape)
    ]


def choose_implementations(names: Iterable[str]) -> list[Implementation]:
    """The implementations by name, by default DEFAULT_IMPLEMENTATIONS; UserError for an unknown name."""
    found = chosen("implementation", names, IMPLEMENTATIONS, DEFAULT_IMPLEMENTATIONS)
    return [IMPLEMENTATIONS[name] for name in found]


def choose_shapes(only: Iterable[str], sweeps: dict[str, tuple[Shape, ...]]) -> list[Shape]:
    """The shapes of the sweeps named in `only` (default: all), each once; UserError for an unknown name."""
    return list(
        dict.fromkeys(shape for name in chosen("sweep", only, sweeps, sweeps) for shape in sweeps[name])
    )
