"""Replays of CUDA graphs: times without Python overhead, and comparisons of two calls to a few per cent."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS, Implementation
from lingpt.bench.kernels.shapes import LONG, REFERENCE, Shape


class Graphs(NamedTuple):
    """CUDA graphs of a call's forward and, captured after it, of its backward."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph

    def times(self, clock: Clock, repeats: int) -> tuple[float, float]:
        """Median milliseconds of a replay of forward and of backward."""
        return (
            clock.median(self.forward.replay, repeats=repeats),
            clock.median(self.backward.replay, self.forward.replay, repeats),
        )


def capture(call: BenchCall, clock: Clock) -> Graphs:
    stream = torch.cuda.Stream(clock.device)
    stream.wait_stream(torch.cuda.current_stream(clock.device))
    with torch.cuda.stream(stream):
        call.both()
    torch.cuda.current_stream(clock.device).wait_stream(stream)
    graphs = Graphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs.forward, stream=stream):
        call.forward()
    with torch.cuda.graph(graphs.backward, stream=stream, pool=graphs.forward.pool()):
        call.backward()
    return graphs


def base_of(implementation: Implementation, shape: Shape) -> tuple[Implementation, Shape] | None:
    """The cell to compare with by interleaved replays: the base of a variant, REFERENCE for ours on long
    sequences; None for others."""
    if implementation.variant_of is not None:
        return IMPLEMENTATIONS[implementation.variant_of], shape
    return (implementation, REFERENCE) if implementation.ours and shape in LONG else None


def interleaved_ratios(graphs: Graphs, base: Graphs, clock: Clock, turns: int) -> list[float]:
    """The times of forward and of backward over those of `base`, in `turns` alternations of a few replays
    each.

    Alternating matters: between two cells, clocks drift by more than the few per cent to be measured.
    """
    ratios: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        for ratio, ms, base_ms in zip(ratios, graphs.times(clock, 5), base.times(clock, 5), strict=True):
            ratio.append(ms / base_ms)
    return [statistics.median(ratio) for ratio in ratios]
