"""Global memory (the host's: every access must be within a registered tensor) and shared memory."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .faults import MemcheckError

SHARED_START = 1024  # first address of shared memory; as on Hopper, nothing is at address 0
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Memory(TorchDispatchMode):
    """The tensors that kernels may access: those given, and all that PyTorch creates inside the `with`.

    The bounds are those of a tensor's storage, as long as the storage lives.
    """

    active: ClassVar[list[Memory]] = []

    def __init__(self, *tensors: Any) -> None:
        super().__init__()
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self.add(*tensors)

    def add(self, *tensors: Any) -> None:
        """Registers tensors, also in tuples and lists; anything else (None) is ignored."""
        for x in tree_leaves(tensors):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes():
                storage = x.untyped_storage()
                self._storages[storage.data_ptr()] = storage.nbytes(), StorageWeakRef(storage)

    def __enter__(self) -> Memory:
        Memory.active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Memory.active.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def ranges(self) -> list[tuple[int, int]]:
        """Start and size of every storage that is still alive."""
        self._storages = {a: entry for a, entry in self._storages.items() if not entry[1].expired()}
        return [(address, size) for address, (size, _) in self._storages.items()]


class _Span:
    """A range of the host's memory, as a numpy array interface."""

    def __init__(self, start: int, count: int, dtype: np.dtype) -> None:
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (count,),
            "typestr": dtype.str,
            "version": 3,
        }


class GlobalMemory:
    """Checked reads and writes at host addresses; one object per launch."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        ranges = sorted(ranges)
        self.starts = np.array([a for a, _ in ranges], np.uint64)
        self.ends = np.array([a + n for a, n in ranges], np.uint64)
        self.base = int(self.starts[0]) & ~15 if ranges else 0
        length = (int(self.ends.max()) - self.base + 15) if ranges else 0
        self.views = {n: np.asarray(_Span(self.base, length // n, t)) for n, t in UNSIGNED.items()}

    def load(self, address: np.ndarray, size: int, count: int, lanes: np.ndarray) -> np.ndarray:
        """Loads raw elements of `size` bytes: [threads, count]."""
        return self.views[size][self._indices(address, size, count, lanes)]

    def store(self, address: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        size = values.dtype.itemsize
        self.views[size][self._indices(address, size, values.shape[1], lanes)] = values

    def _indices(self, address: np.ndarray, size: int, count: int, lanes: np.ndarray) -> np.ndarray:
        address = address.astype(np.uint64, copy=False)
        self.check(address, size * count, size * count, lanes)
        first = (address - np.uint64(self.base)).astype(np.int64) // size
        return first[:, None] + np.arange(count)

    def check(self, address: np.ndarray, size: int, align: int, lanes: np.ndarray) -> None:
        at = np.searchsorted(self.starts, address, "right") - 1
        good = (at >= 0) & (address % np.uint64(align) == 0) if len(self.starts) else address != address
        if len(self.starts):
            good &= address + np.uint64(size) <= self.ends[at]
        if not good.all():
            i = int(np.argmin(good))
            raise self._fault(int(address[i]), size, align, int(lanes[i]))

    def _fault(self, address: int, size: int, align: int, thread: int) -> MemcheckError:
        what = f"thread {thread}: {size} bytes at global address {address:#x}"
        if address % align:
            return MemcheckError(f"{what}: not a multiple of {align}")
        if not len(self.starts):
            return MemcheckError(f"{what}: no tensor is registered")
        at = int(np.searchsorted(self.starts, np.uint64(address), "right")) - 1
        if at >= 0 and address < int(self.ends[at]) + 4096:
            past = address - int(self.starts[at])
            length = int(self.ends[at] - self.starts[at])
            return MemcheckError(f"{what}: byte {past} of a tensor of {length} bytes")
        return MemcheckError(f"{what}: in no tensor")


class SharedMemory:
    """A block's shared memory, filled with 0xFF so that unwritten floats are NaN."""

    def __init__(self, size: int) -> None:
        self.end = SHARED_START + size
        self.bytes = np.empty(-(-self.end // 16) * 16, np.uint8)
        self.views = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}
        self.clear()

    def clear(self) -> None:
        self.bytes.fill(0xFF)

    def check(self, address: np.ndarray, size: int, lanes: np.ndarray) -> None:
        good = (address >= SHARED_START) & (address + size <= self.end) & (address % size == 0)
        if not good.all():
            i = int(np.argmin(good))
            bounds = f"outside {SHARED_START:#x} … {self.end:#x}"
            why = f"not a multiple of {size}" if address[i] % size else bounds
            raise MemcheckError(
                f"thread {int(lanes[i])}: {size} bytes at shared address {int(address[i]):#x}: {why}"
            )

    def load(self, address: np.ndarray, size: int, count: int) -> np.ndarray:
        return self.views[size][(address // size)[:, None] + np.arange(count)]

    def store(self, address: np.ndarray, values: np.ndarray) -> None:
        size, count = values.dtype.itemsize, values.shape[1]
        self.views[size][(address // size)[:, None] + np.arange(count)] = values
