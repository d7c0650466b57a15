"""A stream of token ids in one Arrow file: written document by document, read as blocks through a memory map,
in an order that a seed gives.

The file is a `datasets` table with one column, `token`, and one token per row. The writer computes a CRC-32
of each record batch; a reader that is given them checks a record batch once, when it first reads from it.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lingpt.common.errors import UserError, one_line
from lingpt.data.tokens import Encoded

CHECKSUM = "crc32"  # the key of a record batch's, for those that read an unfinished file
ROWS = 1 << 20  # tokens of a record batch, the largest contiguous view
_FEISTEL_ROUNDS = 6


class PackedDataset:
    """A stream of tokens as blocks of `seq_len + 1`; the last token of a block is the first of the next.

    So every token but the first is a target once; tokens at the end that fill no block are not used. Blocks
    are copied only when they are read, and pickling passes no tokens.

    checksums: `StreamWriter.checksums` of the file.
    Raises UserError for a file that is no stream, and for a damaged record batch when it is first read.
    """

    def __init__(self, path: str | Path, seq_len: int, checksums: Sequence[int]) -> None:
        import pyarrow as pa

        self.path, self.seq_len, self._checksums = Path(path), seq_len, checksums
        try:
            self._chunks = _map(self.path)
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise self._damaged(f"is not a token cache ({one_line(error)})") from None
        lengths = [len(chunk) for chunk in self._chunks]
        if any(length != ROWS for length in lengths[:-1]) or lengths[-1:] > [ROWS]:
            raise self._damaged(f"has a record batch that is not of {ROWS} tokens")
        if len(checksums) != len(lengths):
            raise self._damaged(f"has {len(lengths)} record batches and should have {len(checksums)}")
        self.stream_length = sum(lengths)
        self._checked = [False] * len(lengths)

    def _damaged(self, fault: str) -> UserError:
        return UserError(f"{self.path} {fault}: delete {self.path.parent} and run again")

    def __len__(self) -> int:
        return max(0, self.stream_length - 1) // self.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        """Block `index`: int64 `[seq_len + 1]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self.gather([index])[0]

    def gather(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor:
        """The blocks `indices`, each in 0..len-1: int64 `[len(indices), seq_len + 1]`."""
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(out, indices, strict=True):
            self._read(int(index) * self.seq_len, row)
        return torch.from_numpy(out)

    def num_targets(self, indices: Sequence[int] | np.ndarray) -> int:
        """How many tokens of the blocks `indices` the loss is a sum over."""
        return len(indices) * self.seq_len

    def sample(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The blocks of the training samples `numbers`, int64, counted from 0 over all epochs."""
        epoch, index = np.divmod(numbers, len(self))
        return permute(index, len(self), seed, epoch)

    def stream(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the stream, fewer at its end: int64 `[stop - start]`."""
        out = np.empty(max(0, min(stop, self.stream_length) - start), dtype=np.int64)
        self._read(start, out)
        return out

    def positions(self, token: int) -> np.ndarray:
        """Where `token` stands in the stream: int64."""
        parts = range(0, self.stream_length, ROWS)
        found = [at + np.flatnonzero(self.stream(at, at + ROWS) == token) for at in parts]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _read(self, start: int, out: np.ndarray) -> None:
        done = 0
        while done < len(out):
            chunk, offset = divmod(start + done, ROWS)
            if not self._checked[chunk]:
                self._check(chunk)
            piece = self._chunks[chunk][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _check(self, chunk: int) -> None:
        if zlib.crc32(self._chunks[chunk].data) != self._checksums[chunk]:
            first = chunk * ROWS
            last = first + len(self._chunks[chunk]) - 1
            raise self._damaged(f"is damaged (its tokens {first} to {last} are not those that were written)")
        self._checked[chunk] = True

    def __reduce__(self) -> tuple:
        return PackedDataset, (self.path, self.seq_len, self._checksums)


def _map(path: Path) -> list[np.ndarray]:
    """The file's record batches, memory-mapped and not read yet."""
    import datasets

    column = datasets.Dataset.from_file(str(path)).data.column("token")
    for chunk in column.chunks:
        chunk.validate()  # checks the header only: no buffer is shorter than its stated length
    chunks = [chunk.to_numpy(zero_copy_only=True) for chunk in column.chunks]
    if any(chunk.dtype not in (np.uint16, np.int32) for chunk in chunks):
        raise ValueError("its tokens are not integers of 16 or 32 bits")
    return chunks


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Sends each `index` in 0..n-1 to one of 0..n-1, one to one for each (seed, epoch); int64.

    A Feistel permutation with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"): the same on every machine and with every library version.
    """
    half = ((n - 1).bit_length() + 1) // 2
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


class StreamWriter:
    """Writes documents, one after another, in record batches of exactly `ROWS` tokens; a context manager.

    Raises OSError if the disk cannot be written. The file is whole only after a clean exit.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        import pyarrow as pa

        self.path, self.documents, self.tokens, self.bytes = path, 0, 0, 0
        self.checksums: list[int] = []  # CRC-32 of each record batch's tokens
        self._buffer, self._filled = np.empty(ROWS, dtype=dtype), 0
        self._schema = pa.schema([("token", pa.from_numpy_dtype(dtype))])

    def __enter__(self) -> "StreamWriter":
        import pyarrow as pa

        self._file = open(self.path, "wb")
        self._arrow = pa.ipc.new_stream(self._file, self._schema)
        return self

    def add(self, document: Encoded) -> None:
        self.documents += 1
        self.tokens += len(document.ids)
        self.bytes += document.num_bytes
        rest = document.ids
        while len(rest):
            piece, rest = np.split(rest, [ROWS - self._filled])
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == ROWS:
                self._flush()

    def counts(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}

    def _flush(self) -> None:
        import pyarrow as pa

        tokens = pa.array(self._buffer[: self._filled])
        self.checksums.append(zlib.crc32(self._buffer[: self._filled].data))
        batch = pa.record_batch([tokens], schema=self._schema)
        self._arrow.write_batch(batch, {CHECKSUM: str(self.checksums[-1])})
        self._file.flush()  # others may read it already
        self._filled = 0

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            if self._filled:
                self._flush()
            self._arrow.close()
        self._file.close()
