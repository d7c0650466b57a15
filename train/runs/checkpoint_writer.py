"""Asynchronous checkpoints: copied to host memory, and written in the background while training continues."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lingpt.common.errors import UserError
from lingpt.train.console import print_rank0

MAX_FAILURES = 10  # failures in a row after which the run ends
RETRY_SECONDS = 60.0  # between two tries during training
LAST_TRIES, LAST_PAUSE = 3, 1.0  # tries at the end of the run, and seconds between them


class CheckpointWriter:
    """Writes one checkpoint at a time in a background thread, so that a step does not wait for the disk.

    A failed write is reported in one line and retried every `RETRY_SECONDS`, until a newer checkpoint
    replaces it. After `MAX_FAILURES` in a row the error is raised.

    mesh: if the state is sharded, so that all processes write together, their mesh on the host. There is then
    no retry before the next checkpoint, which all of them reach.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh, self._host = mesh, HostBuffers(mesh)
        self._thread: threading.Thread | None = None
        self._stop_retrying = threading.Event()
        self._write: Callable[[], object] = lambda: None
        self.failures = 0  # in a row
        self._error: UserError | None = None
        self._bug: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until the current checkpoint is written, unless the user leaves at once."""
        self._stop_retrying.set()
        if self._thread and not (kind and issubclass(kind, KeyboardInterrupt)):
            self._thread.join()

    def reserve(self, weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Allocates host memory for a state of these weights and this optimizer, before the first checkpoint.

        Runs in the background: pinning takes seconds, for which the first checkpoint would block training.
        """
        args = (state_like(weights, optimizer),)
        self._thread = threading.Thread(target=self._host.reserve, args=args, name="pinning", daemon=True)
        self._thread.start()

    def submit(self, state: Any, write: Callable[[Any], object]) -> None:
        """Copies `state`, a tree of tensors, and calls `write(copy)` in the background.

        Waits for the previous checkpoint, if it is still being written. Raises UserError if too many in a row
        have failed.
        """
        self.wait()
        if self._error and self.failures >= MAX_FAILURES:
            raise self._error
        copy = self._host.copy_to_host(state)
        self._write = lambda: write(copy)
        self._stop_retrying.clear()
        # A daemon: a user who leaves at once does not wait for it, and the partial checkpoint is discarded.
        self._thread = threading.Thread(target=self._write_until_done, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written; a failed checkpoint is not retried meanwhile."""
        self._stop_retrying.set()
        if self._thread:
            self._thread.join()
        if self._bug:
            raise self._bug

    def finish(self) -> None:
        """Waits until the last checkpoint is written; UserError if it still fails after `LAST_TRIES`."""
        self.wait()
        for _ in range(LAST_TRIES - 1):
            if self._error and not self._bug:
                time.sleep(LAST_PAUSE)
                self._try()
        self._write, self._host = lambda: None, HostBuffers(self._mesh)
        if self._bug:
            raise self._bug
        if self._error:
            raise self._error

    def _write_until_done(self) -> None:
        while not self._try() and not self._bug and self.failures < MAX_FAILURES:
            print_rank0(
                f"{self._error}; training goes on, and it is tried again "
                f"(failure {self.failures} of {MAX_FAILURES} in a row)"
            )
            if self._mesh or self._stop_retrying.wait(RETRY_SECONDS):
                return

    def _try(self) -> bool:
        try:
            self._write()
        except UserError as error:
            self._error, self.failures = error, self.failures + 1
            return False
        except BaseException as bug:
            self._bug = bug
            return False
        self._error, self.failures = None, 0
        return True


class HostBuffers:
    """Copies trees of tensors to host memory, always to the same buffers: pinned if the tensors are on a GPU.

    mesh: the mesh of the copies of DTensors.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._buffers: list[torch.Tensor] = []
        self._mesh = mesh

    def reserve(self, like: Sequence[torch.Tensor]) -> None:
        """Allocates buffers for tensors like these, which `copy_to_host` will get in this order."""
        device = like[0].device  # the current GPU is per thread
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for number, tensor in enumerate(like):
                self._buffer(number, tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def copy_to_host(self, tree: Any) -> Any:
        """`tree` (dicts, lists, tuples, tensors) with its tensors copied; valid until the next call."""
        numbers = itertools.count()

        def copy(value: Any) -> Any:
            if isinstance(value, DTensor):
                local = copy(value.to_local())
                return DTensor.from_local(
                    local,
                    self._mesh,
                    value.placements,
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
            if isinstance(value, torch.Tensor):
                return self._buffer(next(numbers), value).copy_(value.detach(), non_blocking=True)
            if isinstance(value, dict):
                return {key: copy(part) for key, part in value.items()}
            if isinstance(value, list | tuple):
                parts = [copy(part) for part in value]
                # A tuple shared by two places (AdamW's betas) stays shared, so that its pickle is the same.
                unchanged = all(new is old for new, old in zip(parts, value, strict=True))
                return value if isinstance(value, tuple) and unchanged else type(value)(parts)
            return value

        copied = copy(tree)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _buffer(self, number: int, like: torch.Tensor) -> torch.Tensor:
        if number < len(self._buffers):
            old = self._buffers[number]
            if (old.shape, old.dtype, old.stride()) == (like.shape, like.dtype, like.stride()):
                return old
        new = torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=like.is_cuda)
        self._buffers[number : number + 1] = [new]
        return new


def state_like(weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors like those of a checkpoint, in its order, before the optimizer has created its state."""
    tensors = list(weights.values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # Muon's momentum; AdamW's step count and two moments
            adamw = [torch.empty((), device=parameter.device), parameter, parameter]
            tensors += [parameter] if "momentum" in group else adamw
    return tensors


def pinned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of pinned memory for copies of `tensors`: PyTorch rounds each up to a power of two."""
    return sum(1 << max(0, tensor.nbytes - 1).bit_length() for tensor in tensors)
