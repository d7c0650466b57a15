"""Checkpoints in the background: copied to the host's memory, and written while training goes on."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lingpt.common.errors import UserError
from lingpt.train.console import print_rank0

MAX_FAILURES = 10  # in a row; then the run ends
RETRY_SECONDS = 60.0  # between two tries while training goes on
LAST_TRIES, LAST_PAUSE = 3, 1.0  # when the run ends and nothing is left to train meanwhile


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread of its own, so that a step never waits for the disk.

    What cannot be written is said in a line and tried again, every `RETRY_SECONDS` and with every newer
    checkpoint, which takes its place. After `MAX_FAILURES` in a row the error is raised.

    mesh: where the state is sharded, and all processes write together, their mesh on the host. What fails is
    then tried again with the next checkpoint only, which all of them reach.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh, self._host = mesh, HostBuffers(mesh)
        self._thread: threading.Thread | None = None
        self._stop_retrying = threading.Event()
        self._write: Callable[[], object] = lambda: None
        self._failures = 0
        self._error: UserError | None = None
        self._bug: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Lets the checkpoint in hand be written to its end, but for a user who leaves at once."""
        self._stop_retrying.set()
        if self._thread and not (kind and issubclass(kind, KeyboardInterrupt)):
            self._thread.join()

    @property
    def too_many_failures(self) -> bool:
        return self._failures >= MAX_FAILURES

    def reserve(self, like: Sequence[torch.Tensor]) -> None:
        """Takes the host's memory for a state of such tensors, in its order, before the first one comes.

        In the background: to pin it takes seconds, for which the first checkpoint would stop training.
        """
        self._thread = threading.Thread(target=self._host.reserve, args=(like,), name="pinning", daemon=True)
        self._thread.start()

    def submit(self, state: Any, write: Callable[[Any], object]) -> None:
        """Copies `state`, a tree of tensors, and calls `write(copy)` in the background.

        Waits for the checkpoint before this one, if it is still being written. Raises UserError where too
        many in a row have failed.
        """
        self.wait()
        if self._error and self.too_many_failures:
            raise self._error
        copy = self._host.copy_to_host(state)
        self._write = lambda: write(copy)
        self._stop_retrying.clear()
        # A daemon: a user who leaves at once does not wait for it, and what is half-written is not kept.
        self._thread = threading.Thread(target=self._write_until_done, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written; a failed checkpoint is not tried again meanwhile."""
        self._stop_retrying.set()
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._bug:
            raise self._bug

    def finish(self) -> None:
        """Waits until the last checkpoint is written; UserError where a few more tries do not help."""
        self.wait()
        for _ in range(LAST_TRIES - 1):
            if self._error:
                time.sleep(LAST_PAUSE)
                self._try()
        self._write, self._host = lambda: None, HostBuffers(self._mesh)
        if self._bug:
            raise self._bug
        if self._error:
            raise self._error

    def _write_until_done(self) -> None:
        while not self._try() and not self._bug and not self.too_many_failures:
            print_rank0(
                f"{self._error}; training goes on, and it is tried again "
                f"(failure {self._failures} of {MAX_FAILURES} in a row)"
            )
            if self._mesh or self._stop_retrying.wait(RETRY_SECONDS):
                return

    def _try(self) -> bool:
        try:
            self._write()
        except UserError as error:
            self._error, self._failures = error, self._failures + 1
            return False
        except BaseException as bug:
            self._bug = bug
            return False
        self._error, self._failures = None, 0
        return True


class HostBuffers:
    """Copies trees of tensors to the host's memory, always to the same: pinned, where they are on a GPU.

    mesh: of the copies of DTensors.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._buffers: list[torch.Tensor] = []
        self._mesh = mesh

    def reserve(self, like: Sequence[torch.Tensor]) -> None:
        """Makes the memory for tensors like these, which `copy_to_host` will meet in this order."""
        device = like[0].device  # a thread has a current GPU of its own
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
                # One tuple in two places (AdamW's betas) stays one, for its pickle to stay the same.
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


def pinned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The pinned memory that copies of `tensors` take: PyTorch rounds each up to a power of two."""
    return sum(1 << max(0, tensor.nbytes - 1).bit_length() for tensor in tensors)
