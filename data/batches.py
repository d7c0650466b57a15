"""The blocks of each step's batch: a pure function of (seed, step, position in the global batch).

There is no loader state, so resuming is exact at any step; the number of devices only decides which of them
reads which positions.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from lingpt.data.mixture import Blocks
from lingpt.data.packing import Batch

AHEAD = 3  # micro-batches that are read before they are asked for


class BatchSampler:
    """The order of training: every epoch visits every block once, in its own order; a batch may straddle two.

    The order is that of `blocks.sample`: constant work per sample.
    """

    def __init__(self, blocks: Blocks, seed: int, global_batch_size: int) -> None:
        self.blocks, self.seed, self.global_batch_size = blocks, seed, global_batch_size

    def indices(self, step: int) -> list[int]:
        """The blocks of the global batch of `step` (0-based), in the batch's order."""
        return self._blocks_at(step, range(self.global_batch_size)).tolist()

    def get(self, step: int, positions: Sequence[int]) -> torch.Tensor | Batch:
        """The samples at `positions` of the global batch of `step`: int64 `[len(positions), seq_len + 1]`, or
        packed documents."""
        return self.blocks.gather(self._blocks_at(step, positions))

    def num_targets(self, step: int) -> int:
        """How many tokens the loss of the global batch of `step` is a sum over; at least 1."""
        return max(1, self.blocks.num_targets(self._blocks_at(step, range(self.global_batch_size))))

    def _blocks_at(self, step: int, positions: Sequence[int]) -> np.ndarray:
        numbers = step * self.global_batch_size + np.asarray(positions, dtype=np.int64)
        return self.blocks.sample(numbers, self.seed)


class Prefetcher:
    """The micro-batches of all steps in order, each `[micro-batch, seq_len + 1]` int64, or a `Batch`.

    A thread reads them while earlier ones are trained on, so that no step waits for the disk.

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
        self._coming: dict[int, Future[torch.Tensor | Batch]] = {}

    def __len__(self) -> int:
        """The number of micro-batches per step."""
        return len(self._micro_batches)

    def get(self, step: int, number: int) -> torch.Tensor | Batch:
        """Micro-batch `number` of `step`; starts reading the following ones."""
        n = len(self)
        first = step * n + number
        for at in range(first, first + 1 + AHEAD):
            if at not in self._coming:
                self._coming[at] = self._thread.submit(self._read, *divmod(at, n))
        return self._coming.pop(first).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int, number: int) -> torch.Tensor | Batch:
        block = self._batches.get(step, self._micro_batches[number])
        return block.pin_memory() if self._pin else block
