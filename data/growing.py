"""A stream of tokens that is read while another process still writes it (`--data.stream`).

The order of samples must not depend on how much has been tokenised: blocks are drawn from windows of the
stream, one after another, each in a random order of its own. A sample waits until its window is whole.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.errors import UserError, one_line
from lingpt.common.files import PARTIAL
from lingpt.common.local_rank import local_rank
from lingpt.common.parent import (
    STOP_SIGNALS,
    end_with_parent,
    ends_with_this_process,
    signals_wait_in_children,
)
from lingpt.data.stream import CHECKSUM, ROWS, PackedDataset, permute

WINDOW = 1 << 25  # tokens
POLL = 0.2  # seconds


class GrowingDataset(PackedDataset):
    """The interface of `PackedDataset` for the file `train.arrow` of an entry of the cache that may not be
    finished: then `work(*arguments)`, in a process of its own, finishes it.

    The length, and what is not written yet, are waited for. finished: the blocks of the finished entry.
    Raises UserError where that process fails, with its line.
    """

    def __init__(
        self,
        folder: Path,
        seq_len: int,
        finished: Callable[[], PackedDataset],
        work: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> None:
        self.path, self.seq_len, self._finished = folder / "train.arrow", seq_len, finished
        self._chunks, self._checked, self.stream_length = [], [], 0
        self._whole = self._repeats = False
        self._said: str | None = None  # the line of the process that has failed
        self._maps = threading.Lock()  # the thread that reads ahead waits, too
        self._closed = threading.Event()
        self._work, self._arguments = work, arguments
        if not folder.exists():
            self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._errors, errors = context.Pipe(duplex=False)
        arguments = (errors, self._work, self._arguments)
        self._process = context.Process(target=_in_child, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # else `start` does it, which unblocks signals
        os.environ.update(environment := ends_with_this_process())
        try:
            with signals_wait_in_children():
                self._process.start()
        finally:
            for name in environment:
                os.environ.pop(name, None)
            errors.close()

    def __len__(self) -> int:
        self._wait_for(sys.maxsize)
        return super().__len__()

    def sample(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The blocks of the training samples `numbers`, int64, counted from 0 over all epochs."""
        size = max(1, WINDOW // self.seq_len)  # blocks of a window
        self._wait_for((int(numbers.max(initial=0)) // size + 1) * size, sampling=True)
        total = max(1, self.stream_length - 1) // self.seq_len if self._whole else sys.maxsize
        epoch, index = np.divmod(numbers, total)
        if epoch.any() and not self._repeats:
            self._repeats = True
            if local_rank() == 0:
                print(f"the text repeats: all {total:,} blocks have been read", file=sys.stderr)
        window, index = np.divmod(index, size)
        blocks = np.empty_like(index)
        for number in np.unique(window):
            own = window == number
            first = int(number) * size
            key = (epoch[own] << 32) + number
            blocks[own] = first + permute(index[own], min(size, total - first), seed, key)
        return blocks

    def stream(self, start: int, stop: int) -> np.ndarray:
        self._wait_for(stop // self.seq_len + 1)
        return super().stream(start, stop)

    def close(self) -> None:
        """No sample is waited for any more: whoever does gets a CancelledError."""
        self._closed.set()

    def _wait_for(self, blocks: int, sampling: bool = False) -> None:
        """Returns when so many blocks can be read, or all of the stream."""
        while not self._whole and max(0, self.stream_length - 1) // self.seq_len < blocks:
            with self._maps:
                if self.path.parent.exists():
                    whole = self._finished()
                    # In this order: another thread may be reading.
                    self._checksums = whole._checksums
                    self._chunks, self._checked = whole._chunks, whole._checked
                    self.stream_length, self._whole = whole.stream_length, True
                    return
                self._map_more()
            if not self._process.is_alive() and not self.path.parent.exists():
                raise UserError(f"the process that tokenises has ended ({self._fault()}): start again")
            if sampling and self._closed.is_set():
                raise CancelledError
            time.sleep(POLL)

    def _fault(self) -> str:
        """Why the process has ended; each thread that waits for it is told the same."""
        with self._maps:
            if self._said is None:
                try:
                    self._said = self._errors.recv()
                except EOFError:
                    self._said = "killed, perhaps for its memory"
            return self._said

    def _map_more(self) -> None:
        """Maps the whole record batches that have been written since, each with its checksum.

        A file that a killed process has left is a part of the same stream: its folder's name is that of the
        text and the tokenizer.
        """
        import pyarrow as pa

        for folder in self.path.parent.parent.glob(f".{self.path.parent.name}.*{PARTIAL}"):
            try:
                reader = pa.ipc.open_stream(pa.memory_map(str(folder / self.path.name)))
                number = 0
                while True:
                    batch, values = reader.read_next_batch_with_custom_metadata()
                    tokens = batch.column(0).to_numpy(zero_copy_only=True)
                    number += 1
                    if number <= len(self._chunks):
                        continue
                    if len(tokens) < ROWS or int(values[CHECKSUM]) != zlib.crc32(tokens.data):
                        break
                    self._chunks.append(tokens)
                    self._checked.append(True)
            except (OSError, StopIteration, pa.ArrowException):  # up to where it is written
                continue
        self.stream_length = sum(map(len, self._chunks))


def _in_child(errors: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """`work`, which ends with the parent. What else asks all processes to stop is the parent's to take."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes what is half-written
    end_with_parent()
    try:
        work(*arguments)
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            errors.send(one_line(error, 1000))
