"""Measures time, memory and correctness of one implementation at one shape, in the same call."""

from __future__ import annotations

import gc
import time

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.call import (
    BenchCall,
    base_of,
    capture,
    interleaved_ratios,
    nan_first,
    relative_errors,
)
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.results import Row
from lingpt.bench.results import Skipped
from lingpt.common.errors import first_line

HOST_BOUND_SECONDS = 5e-3  # of a forward and a backward pass


def first_round(
    row: Row, clock: Clock, *, limit: float = 10.0, graphs: bool = False, seconds: float = 0.15
) -> None:
    """Compiles, measures memory and correctness, finds how many runs fit, and times them.

    `seconds`: the time to aim for; `limit`: the maximum, without compiling; `graphs`: time CUDA graphs, too;
    short calls, where eager times may be the host's, have them in any case. Skipped if the implementation
    does not run here.
    """
    implementation, dtype = IMPLEMENTATIONS[row.implementation], getattr(torch, row.dtype)
    if reason := implementation.unsupported_reason(row.shape, dtype, clock.device):
        raise Skipped(reason)
    call = BenchCall(implementation, row.shape, dtype, clock.device)
    call.both()  # compiles, autotunes: not counted against `limit`
    start = time.perf_counter()
    row.tolerance, row.errors = implementation.tolerance, relative_errors(call)
    row.reason = call.backward_unsupported_reason or ""
    if not _within_tolerance(row.errors, row):
        worst = max(row.errors, key=lambda name: nan_first(row.errors[name]))
        row.status, row.reason = "wrong", f"{worst} is off by {row.errors[worst]:.1e} (relative RMS)"
    if clock.cuda:
        _measure_memory(row, call, clock.device)
    call.clear()

    once = sum(clock.time(call.both)) / 1e3
    left = max(limit - (time.perf_counter() - start), 0.0)
    row.repeats = int(max(3, min(50, seconds / once, left / (3 * once))))
    _time(row, call, clock, graphs or once < HOST_BOUND_SECONDS, check=True)


def next_round(row: Row, clock: Clock) -> None:
    """A later round: only the times, on new inputs, and those of graphs if the first round had them."""
    implementation, dtype = IMPLEMENTATIONS[row.implementation], getattr(torch, row.dtype)
    call = BenchCall(implementation, row.shape, dtype, clock.device)
    _time(row, call, clock, graphs=row.forward_graph_ms is not None and not row.graph_reason)


def _time(row: Row, call: BenchCall, clock: Clock, graphs: bool, check: bool = False) -> None:
    """Adds a round of times, after two untimed runs. `check`: in the first round, see `_time_graphs`."""
    clock.time(call.both, repeats=2)
    times = {"forward_ms": clock.median(call.forward, call.clear, row.repeats)}
    call.clear()
    if not call.backward_unsupported_reason:
        times["backward_ms"] = clock.median(call.backward, call.forward, row.repeats)
        times["both_ms"] = clock.median(call.both, call.clear, row.repeats)
    call.clear()
    if graphs and clock.cuda:
        try:
            times |= _time_graphs(row, call, clock, check)
        except torch.OutOfMemoryError:
            row.graph_reason = "out of memory"
        except Exception as error:
            row.graph_reason = f"{type(error).__name__}: {first_line(error)}"
        call.clear()
    row.add_round(**times)


def _time_graphs(row: Row, call: BenchCall, clock: Clock, check: bool) -> dict[str, float]:
    """The times of replays. `check`: also their correctness, and their ratio to `base_of`."""
    graphs = capture(call, clock.device)
    graphs.forward.replay()
    graphs.backward.replay()
    if check and not _within_tolerance(relative_errors(call), row):
        row.graph_reason = "a replay gives another result"
        return {}
    forward, backward = graphs.times(clock, row.repeats)
    if check and (base := base_of(call.implementation, row.shape)):
        base_graphs = capture(BenchCall(*base, call.do.dtype, clock.device), clock.device)
        row.ratio_to_base = interleaved_ratios(graphs, base_graphs, clock, turns=max(1, row.repeats // 2))
    if call.backward_unsupported_reason:
        return {"forward_graph_ms": forward}
    return {"forward_graph_ms": forward, "backward_graph_ms": backward}


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


def _within_tolerance(errors: dict[str, float], row: Row) -> bool:
    return all(error <= row.tolerance for error in errors.values())
