"""The blocks of each step's batch: a pure function of (seed, step, position in the global batch).

There is no loader state, so resuming is exact at any step; the number of devices only decides which of them
reads which positions.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from lingpt.data.packing import Batch
from lingpt.data.stream import PackedDataset

_FEISTEL_ROUNDS = 6
AHEAD = 3  # micro-batches that are read before they are asked for


class BatchSampler:
    """The order of training: every epoch visits every block once, in its own order; a batch may straddle two.

    The order is a keyed Feistel permutation with cycle walking (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"): constant work per sample, and the same on every machine and with every library
    version.
    """

    def __init__(self, blocks: PackedDataset, seed: int, global_batch_size: int) -> None:
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
        sample = step * self.global_batch_size + np.asarray(positions, dtype=np.int64)
        epoch, index = np.divmod(sample, len(self.blocks))
        return permute(index, len(self.blocks), self.seed, epoch)


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
        self._coming = {at: future for at, future in self._coming.items() if at >= first}
        for at in range(first, first + 1 + AHEAD):
            if at not in self._coming:
                self._coming[at] = self._thread.submit(self._read, *divmod(at, n))
        return self._coming.pop(first).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int, number: int) -> torch.Tensor | Batch:
        block = self._batches.get(step, self._micro_batches[number])
        return block.pin_memory() if self._pin else block


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Sends each `index` in 0..n-1 to one of 0..n-1, one to one for each (seed, epoch); int64."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    key = _mix(_mix(np.full(index.shape, seed % 2**64, dtype=np.uint64)) + epoch.astype(np.uint64))
    x = _feistel(index.astype(np.uint64), key, half)
    while (outside := x >= n).any():  # 4^half < 4n, so a few iterations suffice
        x[outside] = _feistel(x[outside], key[outside], half)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """A keyed permutation of the numbers of 2·half bits, element by element."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for i in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (_mix(key + (right << np.uint64(8)) + np.uint64(i)) & mask)
    return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
