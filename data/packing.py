"""Whole documents packed into sequences, whose tokens see their own document only.

Best-fit decreasing, as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830):
a document longer than a sequence is cut, and each piece, from the longest on, goes where it leaves the least
room. Little is left empty, and no document is cut that fits. Sequences are in the order of their longest
pieces in the stream, so the first ones are a sample like any other; `BatchSampler` gives training's order.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from lingpt.data.stream import PackedDataset

NO_TARGET = -100  # what the loss ignores


class Batch(NamedTuple):
    """Packed sequences. It is moved as a tensor is."""

    idx: torch.Tensor  # [B, N] int64, the tokens
    targets: torch.Tensor  # [B, N] int64, the next token of the same document, or NO_TARGET
    cu_seqlens: torch.Tensor  # int32, borders of documents as in `GPT.hidden`; its size depends on B alone

    def is_pinned(self) -> bool:
        return self.idx.is_pinned()

    def pin_memory(self) -> Self:
        return type(self)(*(x.pin_memory() for x in self))

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return type(self)(*(x.to(device, non_blocking=non_blocking) for x in self))


class PackedDocuments(PackedDataset):
    """The documents of a stream, packed into sequences of `seq_len` tokens; the interface of `PackedDataset`.

    A document of L tokens, its end-of-text token among them, has L − 1 targets: that token is one, and no
    document's first token is. The last token of a piece of a longer one is the first of the next, so that
    every other token is a target once. What is left empty has no targets.

    end: the token that ends each document in the stream; negative if it is none of its tokens. Other negative
        numbers are complements of tokens that are no targets (answers.py).
    """

    def __init__(self, path: str | Path, seq_len: int, checksums: Sequence[int], end: int) -> None:
        super().__init__(path, seq_len, checksums)
        self._end = end
        starts, lengths = _pieces(*self._documents(), seq_len)
        sequence = best_fit(lengths, seq_len)
        by_length = np.argsort(-lengths, kind="stable")
        _, longest = np.unique(sequence[by_length], return_index=True)
        sequence = starts[by_length[longest]].argsort().argsort()[sequence]
        order = np.argsort(sequence, kind="stable")
        self._starts, self._lengths = starts[order], lengths[order]
        counts = np.bincount(sequence)
        self._first = np.concatenate(([0], np.cumsum(counts)))  # of each sequence's pieces
        targets = self._lengths if end >= 0 else self._learned(self._starts + 1, self._lengths)
        self._targets = np.add.reduceat(targets, self._first[:-1])
        self.most = 1 + max(counts, default=0)  # the last may be what is left empty

    def _documents(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each document of the stream, and the one after its last."""
        ends = self.positions(self._end)
        return np.concatenate(([0], ends + 1))[:-1], ends + (self._end >= 0)

    def _learned(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """How many of the tokens from each of `starts` on are targets."""
        learned = self.stream(0, self.stream_length) >= 0
        before = np.concatenate(([0], np.cumsum(learned)))
        return before[starts + lengths] - before[starts]

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def filled(self) -> float:
        """The share of the sequences' positions that hold tokens."""
        return self._lengths.sum() / (len(self) * self.seq_len)

    def __getitem__(self, index: int) -> torch.Tensor:
        """The tokens of sequence `index`: int64 `[seq_len]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.gather([index]).idx[0]

    def gather(self, indices: Sequence[int] | np.ndarray) -> Batch:  # type: ignore[override]
        """The sequences `indices`, each in 0..len-1."""
        B, N = len(indices), self.seq_len
        idx = np.zeros((B, N), dtype=np.int64)
        targets = np.full((B, N), NO_TARGET, dtype=np.int64)
        borders = []
        for row, index in enumerate(indices):
            at = 0
            for piece in range(self._first[index], self._first[index + 1]):
                start, length = self._starts[piece], self._lengths[piece]
                tokens = self.stream(start, start + length + 1)
                borders.append(row * N + at)
                idx[row, at : at + length], targets[row, at : at + length] = tokens[:-1], tokens[1:]
                at += length
            if at < N:
                borders.append(row * N + at)
        np.copyto(idx, ~idx, where=idx < 0)
        targets[targets < 0] = NO_TARGET
        cu_seqlens = np.full(B * self.most + 1, B * N, dtype=np.int32)
        cu_seqlens[: len(borders)] = borders
        return Batch(*map(torch.from_numpy, (idx, targets, cu_seqlens)))

    def num_targets(self, indices: Sequence[int] | np.ndarray) -> int:
        return int(self._targets[indices].sum())

    def __reduce__(self) -> tuple:
        return PackedDocuments, (self.path, self.seq_len, self._checksums, self._end)


def _pieces(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The first token and the number of those that follow it, 1 to `seq_len`, of each piece of documents."""
    targets = ends - starts - 1
    pieces = -(-targets // seq_len)
    of = np.repeat(np.arange(len(ends)), pieces)
    before = seq_len * (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    return starts[of] + before, np.minimum(targets[of] - before, seq_len)


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """The bin of each item: bins of `size` filled by best-fit decreasing, numbered from 0.

    lengths: integers, 1 to `size`. Items of one length are put into all bins of the same room at once, so the
    time grows with the number of different lengths rather than with that of items.
    """
    bins, opened = np.empty(len(lengths), dtype=np.int64), 0
    rooms, open_bins = list[int](), dict[int, np.ndarray]()  # bins by the room that is left, in order
    order = np.argsort(-lengths, kind="stable")
    borders = np.flatnonzero(np.diff(lengths[order])) + 1
    for items in np.split(order, borders) if len(order) else []:
        length, done = int(lengths[items[0]]), 0
        while done < len(items):
            left = len(items) - done
            if (at := bisect_left(rooms, length)) < len(rooms):
                room = rooms[at]
                used, rest = np.split(open_bins.pop(room), [left])
                if len(rest):
                    open_bins[room] = rest
                else:
                    del rooms[at]
            else:  # so many new ones that the others find room in them
                room, count = size, -(-left // (size // length))
                used, opened = np.arange(opened, opened + count), opened + count
            bins[items[done : done + len(used)]] = used
            done += len(used)
            if room > length:
                if room - length not in open_bins:
                    insort(rooms, room - length)
                others = open_bins.get(room - length, used[:0])
                open_bins[room - length] = np.concatenate((others, used))
    return bins
