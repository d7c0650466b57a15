"""Measures times: of any work on a device, and of a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch


class Clock:
    """Times work: with CUDA events, flushing the L2 cache before each run; elsewhere with the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        # Larger than any L2 cache; writing it also gives the host time to enqueue the timed launch.
        self._flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if self.cuda else None

    def time(
        self, work: Callable[[], object], before: Callable[[], object] | None = None, repeats: int = 1
    ) -> list[float]:
        """Milliseconds of each of `repeats` runs of `work`; `before` runs untimed ahead of each."""
        spans = []
        for _ in range(repeats):
            if before is not None:
                before()
            spans.append(self._span(work))
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return [milliseconds() for milliseconds in spans]

    def _span(self, work: Callable[[], object]) -> Callable[[], float]:
        """Runs `work`; returns a function that gives the milliseconds once the device has finished."""
        if self._flush is None:
            began = time.perf_counter()
            work()
            milliseconds = (time.perf_counter() - began) * 1e3
            return lambda: milliseconds
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        work()
        end.record()
        return partial(start.elapsed_time, end)

    def median(
        self, work: Callable[[], object], before: Callable[[], object] | None = None, repeats: int = 1
    ) -> float:
        return statistics.median(self.time(work, before, repeats))

    def copy_bandwidth(self, size: int) -> float:
        """Bytes per second of copying `size` bytes, read plus written: the memory bandwidth available now."""
        source = torch.randint(0, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        self.time(lambda: target.copy_(source), repeats=3)
        return 2 * size / (self.median(lambda: target.copy_(source), repeats=20) / 1e3)
