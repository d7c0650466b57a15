"""Prefetches micro-batches in a thread while earlier ones are trained on, so that no step waits for the disk.

A micro-batch is still a pure function of (seed, step, positions): the thread only reads earlier.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lingpt.data import BatchSampler

AHEAD = 3  # number of prefetched micro-batches


class Prefetcher:
    """The micro-batches of all steps in order, each `[micro-batch, seq_len + 1]` int64.

    micro_batches: this rank's positions in the global batch, for each micro-batch of a step. device: their
    destination; for a GPU they are in pinned memory, for asynchronous copies.
    """

    def __init__(
        self, batches: BatchSampler, micro_batches: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._batches, self._micro_batches, self._pin = batches, micro_batches, device.type == "cuda"
        # pin_memory() uses the calling thread's current device, so set it once in the worker.
        start = functools.partial(torch.cuda.set_device, device) if self._pin else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=start)
        self._coming: dict[int, Future[torch.Tensor]] = {}

    def __len__(self) -> int:
        """The number of micro-batches per step."""
        return len(self._micro_batches)

    def get(self, step: int, number: int) -> torch.Tensor:
        """Micro-batch `number` of `step`; starts reading the following ones."""
        n = len(self)
        first = step * n + number
        self._coming = {at: future for at, future in self._coming.items() if at >= first}
        for at in range(first, first + 1 + AHEAD):
            if at not in self._coming:
                self._coming[at] = self._thread.submit(self._read, *divmod(at, n))
        return self._coming.pop(first).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int, number: int) -> torch.Tensor:
        block = self._batches.get(step, self._micro_batches[number])
        return block.pin_memory() if self._pin else block
