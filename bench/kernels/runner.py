"""The sweep over implementations and shapes.

Hosts and clocks drift, by 5 % up to a factor of two within a minute. So the training shapes, which are
compared, are timed in ROUNDS rounds, each over all of them and all implementations: ratios are taken within a
round, and a bad minute does not affect one row only.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.environment import check_same, environment, used_by_others
from lingpt.bench.kernels.implementations import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS, Implementation
from lingpt.bench.kernels.measure import measure, measure_again, new_row, over_rounds
from lingpt.bench.kernels.results import Cell, Results, Row
from lingpt.bench.kernels.shapes import CUMSUM, QUICK, SWEEPS, Shape
from lingpt.bench.rows import budget_spent, skipped
from lingpt.common.devices import find_device
from lingpt.common.errors import UserError, unknown

ROUNDS = 5  # rounds of the training shapes, whose times are compared as ratios


def run_bench(
    only: Iterable[str] = (),
    implementations: Iterable[str] = (),
    *,
    quick: bool = False,
    budget: float = 1200.0,
    limit: float = 6.0,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    sweeps: dict[str, tuple[Shape, ...]] | None = None,
    save_to: Path | None = None,
    append: bool = False,
    progress: bool = True,
) -> Results:
    """Measures `implementations` (names; default: all but the slow PyTorch ones) on the sweeps named in
    `only` (default: all).

    `quick` takes fewer shapes; `budget` is in seconds: once it is spent, no further timing begins, and the
    rest is recorded as skipped; `limit` is the maximum in seconds that one implementation may take at one
    shape in a round, predicted from its smaller shapes. A shape of two sweeps is measured once. The results
    go to `save_to` after every row; `append` keeps the rows there, if they are of this card, these versions
    and this source, and does not time them again. Ratios compare only what one call has measured.

    Raises UserError for a name that does not exist and for a machine without the device.
    """
    from tqdm import tqdm

    device = _usable_device(device)
    sweeps = sweeps or (QUICK if quick else SWEEPS)
    chosen, shapes = choose_implementations(implementations), choose_shapes(only, sweeps)
    training = set(sweeps.get("training", ()))
    clock = Clock(device)
    if clock.cuda and (line := used_by_others(device)):
        warnings.warn(line, stacklevel=2)
    results = Results.load(save_to) if append and save_to and save_to.is_file() else _new_results(clock)
    check_same(save_to, results.environment, environment(device))
    deadline, session = time.perf_counter() + budget, datetime.now().astimezone().isoformat()
    schedule = _schedule(shapes, chosen, training, results)
    rounds: dict[Cell, list[Row]] = defaultdict(list)  # one row per round for each cell
    timings = tqdm(schedule, desc="bench", unit="timing", disable=None if progress else True)
    for n, shape, implementation in timings:
        timings.set_postfix_str(f"{implementation.name} {shape} round {n}")
        rows = rounds[implementation.name, shape]
        spent = budget_spent(budget) if time.perf_counter() > deadline else None
        if n > 1 and (spent or not rows[-1].rounds):  # never timed, or failed in an earlier round
            continue
        if n > 1:
            row = measure_again(rows[0], implementation, dtype, clock)
        elif reason := spent or _too_slow(results.rows, implementation, shape, limit):
            row = skipped(new_row(implementation, shape, dtype), reason)
        else:
            graphs = shape in training and shape != CUMSUM
            row = measure(implementation, shape, dtype, clock, limit=limit, graphs=graphs)
        row.session = session
        rows.append(row)
        results.put(over_rounds(rows))
        if save_to is not None:
            results.save(save_to)
    return results


def _usable_device(name: str | torch.device) -> torch.device:
    """The device, made the current one; UserError if there is none."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", str(name)):
        raise UserError(f"unknown device {str(name)!r}: use cuda, cuda:1 … or cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        hint = "--device cpu measures PyTorch's"
        raise UserError(f"the benchmark needs a CUDA device, and there is none here ({hint})")
    if device.index is not None:
        torch.cuda.set_device(find_device(str(device), instead="cuda"))
    return device


def _new_results(clock: Clock) -> Results:
    bandwidth = clock.copy_bandwidth(1 << 30 if clock.cuda else 1 << 24)
    empty_node_ms = list(clock.empty_node())
    return Results(environment(clock.device), copy_bandwidth=bandwidth, empty_node_ms=empty_node_ms)


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
        if shape in training or not implementation.training_only
        if not done.is_done(implementation.name, shape)
    ]


def choose_implementations(names: Iterable[str]) -> list[Implementation]:
    """The implementations by name, by default DEFAULT_IMPLEMENTATIONS; UserError for an unknown name."""
    names = _check_names(names, IMPLEMENTATIONS, "implementation") or DEFAULT_IMPLEMENTATIONS
    return [IMPLEMENTATIONS[name] for name in names]


def choose_shapes(only: Iterable[str], sweeps: dict[str, tuple[Shape, ...]]) -> list[Shape]:
    """The shapes of the sweeps named in `only` (default: all), each once; UserError for an unknown name."""
    names = _check_names(only, sweeps, "sweep") or sweeps
    return list(dict.fromkeys(shape for name in names for shape in sweeps[name]))


def _check_names(names: Iterable[str], known: Collection[str], what: str) -> list[str]:
    """The names without duplicates; UserError for an unknown one."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
    return names


def _too_slow(rows: list[Row], implementation: Implementation, shape: Shape, limit: float) -> str | None:
    """Why the implementation would exceed `limit` at this shape, judging by shapes timed already; or None."""
    predicted = _predict(rows, implementation, shape)
    if predicted is None or 8 * predicted <= limit:  # warm-up, sizing, two untimed, three timed, and more
        return None
    return f"would take about {predicted:.1f} s a call, the limit is {limit:.0f} s in all"


def _predict(rows: list[Row], implementation: Implementation, shape: Shape) -> float | None:
    """Seconds of forward and backward at `shape`, scaled from the largest timed; None if none was."""

    def work(s: Shape) -> float:
        return s.B * s.H * s.D * s.N ** (2 if implementation.quadratic else 1)

    timed = [
        (work(row.shape), row.both_ms)
        for row in rows
        if row.implementation == implementation.name and row.both_ms is not None
    ]
    if not timed:
        return None
    largest, ms = max(timed, key=lambda pair: pair[0])
    return ms / 1e3 * work(shape) / largest
