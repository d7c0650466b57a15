"""Measures time, memory and correctness of one implementation at one shape, in the same call; one row per
round."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.correctness import relative_errors
from lingpt.bench.kernels.graphs import base_of, capture, interleaved_ratios
from lingpt.bench.kernels.implementations import Implementation
from lingpt.bench.kernels.results import Row
from lingpt.bench.kernels.shapes import Shape
from lingpt.bench.rows import attempt, skipped
from lingpt.common.errors import first_line

TIMES = ("forward_ms", "backward_ms", "both_ms", "forward_graph_ms", "backward_graph_ms")


def measure(
    implementation: Implementation,
    shape: Shape,
    dtype: torch.dtype,
    clock: Clock,
    *,
    limit: float = 10.0,
    graphs: bool = False,
    seconds: float = 0.15,
) -> Row:
    """The first round: never raises for what the implementation does. `seconds`: the time to aim for;
    `limit`: the maximum, without compiling.

    `measure_again` gives more rounds, and `over_rounds` combines them into one row.
    """
    row = new_row(implementation, shape, dtype)
    row.tolerance = implementation.tolerance
    row.forward_flops = implementation.flops(shape)
    if reason := implementation.unsupported_reason(shape, dtype, clock.device):
        return skipped(row, reason)
    return _attempt(
        row, implementation, dtype, clock, lambda call: _first_round(row, call, clock, limit, graphs, seconds)
    )


def measure_again(first: Row, implementation: Implementation, dtype: torch.dtype, clock: Clock) -> Row:
    """A later round of what `first` timed: only the times, on new inputs, in a new row."""
    row = new_row(implementation, first.shape, dtype)
    row.repeats = first.repeats
    graphs = first.forward_graph_ms is not None
    return _attempt(row, implementation, dtype, clock, lambda call: time_round(row, call, clock, graphs))


def over_rounds(rows: list[Row]) -> Row:
    """The first round's row, with each time replaced by the median over the rounds. A later round in which
    anything failed does not count, and `reason` says so."""
    first, *later = rows
    if not later:
        return first
    complete = [first, *(row for row in later if row.rounds and not row.graph_reason)]
    failed = [
        f"round {n}: {row.reason or row.graph_reason}"
        for n, row in enumerate(later, 2)
        if row not in complete
    ]
    times = {name: [getattr(row, name) for row in complete] for name in TIMES}
    medians = {name: statistics.median(ms) for name, ms in times.items() if None not in ms}
    by_round = {name: times[name] for name in medians}
    reason = "; ".join(filter(None, [first.reason, *failed]))
    return replace(first, rounds=len(complete), by_round=by_round, reason=reason, **medians)


def new_row(implementation: Implementation, shape: Shape, dtype: torch.dtype) -> Row:
    return Row(implementation.name, shape, str(dtype).removeprefix("torch."))


def _attempt(
    row: Row,
    implementation: Implementation,
    dtype: torch.dtype,
    clock: Clock,
    fill: Callable[[BenchCall], None],
) -> Row:
    """The row, which `fill` fills from a call on new inputs, or why it could not."""

    def work() -> Row:
        fill(BenchCall(implementation, row.shape, dtype, clock.device))
        return row

    return attempt(row, work, clock.device)


def _first_round(row: Row, call: BenchCall, clock: Clock, limit: float, graphs: bool, seconds: float) -> None:
    """Compiles, measures memory and correctness, finds how many runs fit, and times them."""
    call.both()  # compiles, autotunes: not counted against `limit`
    start = time.perf_counter()
    row.errors, row.reason = relative_errors(call), call.backward_unsupported_reason or ""
    if not _within_tolerance(row.errors, row):
        worst = max(row.errors, key=lambda name: _nan_last(row.errors[name]))
        row.status, row.reason = "wrong", f"{worst} is off by {row.errors[worst]:.1e} (relative RMS)"
    if clock.cuda:
        _measure_memory(row, call, clock.device)
    call.clear()

    once = sum(clock.time(call.both)) / 1e3
    left = max(limit - (time.perf_counter() - start), 0.0)
    row.repeats = int(max(3, min(50, seconds / once, left / (3 * once))))
    time_round(row, call, clock, graphs, check=True)


def time_round(row: Row, call: BenchCall, clock: Clock, graphs: bool, check: bool = False) -> None:
    """Measures the times, after two untimed runs. `check` (in the first round): see `_time_graphs`."""
    clock.time(call.both, repeats=2)
    row.forward_ms = clock.median(call.forward, call.clear, row.repeats)
    call.clear()
    if not call.backward_unsupported_reason:
        row.backward_ms = clock.median(call.backward, call.forward, row.repeats)
        row.both_ms = clock.median(call.both, call.clear, row.repeats)
    row.rounds = 1
    call.clear()
    if graphs and clock.cuda:
        _time_graphs(row, call, clock, check)


def _measure_memory(row: Row, call: BenchCall, device: torch.device) -> None:
    """Measures peak memory beyond what was allocated before: inputs, do and the benchmark's own buffers."""
    unit = row.shape.unit_bytes(call.do.element_size())
    for _ in range(3):
        call.clear()
        gc.collect()
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call.forward()
        row.forward_memory = (torch.cuda.max_memory_allocated(device) - base) / unit
        if not call.backward_unsupported_reason:
            call.backward()
            row.both_memory = (torch.cuda.max_memory_allocated(device) - base) / unit
        call.clear()
        # Autograd's thread frees the last graph of a run asynchronously, perhaps during the next run.
        if torch.cuda.memory_allocated(device) == base:
            return


def _time_graphs(row: Row, call: BenchCall, clock: Clock, check: bool) -> None:
    """Measures the times of replays. `check`: also their correctness, and their ratio to `base_of`."""
    try:
        graphs = capture(call, clock)
        graphs.forward.replay()
        graphs.backward.replay()
        if check and not _within_tolerance(relative_errors(call), row):
            row.graph_reason = "a replay gives another result"
            return
        row.forward_graph_ms, backward = graphs.times(clock, row.repeats)
        row.backward_graph_ms = None if call.backward_unsupported_reason else backward
        if check and (base := base_of(call.implementation, row.shape)) is not None:
            base_graphs = capture(BenchCall(*base, call.do.dtype, clock.device), clock)
            turns = max(1, row.repeats // 2)
            row.ratio_to_base = interleaved_ratios(graphs, base_graphs, clock, turns)
    except torch.OutOfMemoryError:
        row.graph_reason = "out of memory"
    except Exception as error:
        row.graph_reason = f"{type(error).__name__}: {first_line(error)}"
    finally:
        call.clear()


def _within_tolerance(errors: dict[str, float], row: Row) -> bool:
    return all(error <= row.tolerance for error in errors.values())


def _nan_last(x: float) -> float:
    return math.inf if math.isnan(x) else x
