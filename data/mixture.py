"""Mixtures: several sources, each with its share of the samples."""

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from lingpt.common.errors import UserError
from lingpt.data.packing import Batch

_PART = re.compile(r"(.+)\*([^*]*\d[^*]*)")
_WHOLE = 1_000_000  # shares are multiples of its inverse, for exact arithmetic


class Blocks(Protocol):
    """Blocks of `seq_len + 1` tokens, and the order in which they are trained on."""

    seq_len: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> torch.Tensor: ...

    def gather(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor | Batch: ...

    def num_targets(self, indices: Sequence[int] | np.ndarray) -> int: ...

    def sample(self, numbers: np.ndarray, seed: int) -> np.ndarray: ...


def parse_mixture(source: str) -> dict[str, int]:
    """The sources of `a*0.7,b*0.3` with their shares in millionths, which add up to a million; of text
    without weights, itself. UserError for a weight that is none."""
    texts = [text.strip() for text in source.split(",")]
    matches = [_PART.fullmatch(text) for text in texts]
    if len(texts) == 1 or not any(matches):
        return {source: _WHOLE}
    weights: dict[str, float] = {}
    for text, match in zip(texts, matches, strict=True):
        if match is None:
            raise UserError(f"{text!r} has no weight in the mixture {source}: give each, as a*0.7,b*0.3")
        name, weight = match[1].strip(), _number(match[2])
        if not 0 < weight < math.inf:
            raise UserError(f"the weight of {name} in the mixture is {match[2]}: it must be a number above 0")
        if name in weights:
            raise UserError(f"{name} stands twice in the mixture {source}: give it once")
        weights[name] = weight
    ends = np.cumsum([0.0, *weights.values()]) / sum(weights.values())
    shares = np.diff(np.rint(ends * _WHOLE).astype(np.int64)).tolist()
    if 0 in shares:
        smallest = min(weights, key=lambda name: weights[name])
        raise UserError(f"the share of {smallest} is below a millionth: leave it out, or raise its weight")
    return dict(zip(weights, shares, strict=True))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class Mixture:
    """Blocks of several sources in turn: of any number of the first ones, each source has its share, to
    within a block; of more than two sources, within a block for each but one.

    Block `index` is of the source `i` for which `split` says so, and repeats that source's blocks once they
    are exhausted. The length is that up to the first repetition. shares: in millionths.
    """

    def __init__(self, parts: Sequence[Any], shares: Sequence[int]) -> None:
        self.parts, self.shares, self.seq_len = parts, shares, parts[0].seq_len
        # Of part i and those after it.
        self._rests = np.cumsum(shares[::-1])[::-1].tolist()

    def __len__(self) -> int:
        return min(int(self._join(i, np.array([len(part)]))[0]) for i, part in enumerate(self.parts))

    def __getitem__(self, index: int) -> torch.Tensor:
        """Block `index`: int64 `[seq_len + 1]`, or `[seq_len]` of packed documents."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        of, numbers = self.split(np.array([index]))
        return self.parts[of[0]][int(numbers[0])]

    def gather(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor | Batch:
        """The blocks `indices`: int64 `[len(indices), seq_len + 1]`, or packed documents."""
        of, numbers = self.split(np.asarray(indices, dtype=np.int64))
        rows = [np.flatnonzero(of == i) for i in range(len(self.parts))]
        batches = [part.gather(numbers[own]) for part, own in zip(self.parts, rows, strict=True)]
        back = torch.from_numpy(np.concatenate(rows).argsort())
        if isinstance(batches[0], Batch):
            return _join_packed(batches, rows, back, max(part.most for part in self.parts))
        return torch.cat(batches)[back]

    def num_targets(self, indices: Sequence[int] | np.ndarray) -> int:
        of, numbers = self.split(np.asarray(indices, dtype=np.int64))
        return sum(part.num_targets(numbers[of == i]) for i, part in enumerate(self.parts))

    def sample(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The blocks of the training samples `numbers`, counted from 0: int64. Each source is visited in its
        own order, and repeated in another once it is exhausted."""
        of, numbers = self.split(numbers)
        blocks = np.empty_like(numbers)
        for i, part in enumerate(self.parts):
            own = of == i
            if own.any():
                blocks[own] = self._join(i, part.sample(numbers[own], seed))
        return blocks

    def split(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each index, and which of that source's blocks it is, counted from 0.

        Of s blocks, floor(s · share) are the first source's; of the others, in the same way, the second's.
        """
        of, numbers = np.full_like(indices, len(self.parts) - 1), indices.copy()
        left = np.ones(indices.shape, dtype=bool)  # whether the source is not known yet
        for i, (share, rest) in enumerate(zip(self.shares[:-1], self._rests, strict=False)):
            before = numbers * share // rest
            own = left & ((numbers + 1) * share // rest > before)
            of[own] = i
            numbers = np.where(own, before, np.where(left & ~own, numbers - before, numbers))
            left &= ~own
        return of, numbers

    def _join(self, i: int, numbers: np.ndarray) -> np.ndarray:
        """The inverse of `split`: the index of block `numbers` of source `i`."""
        numbers = -(-(numbers + 1) * self._rests[i] // self.shares[i]) - 1
        for share, rest in reversed(list(zip(self.shares[:i], self._rests[:i], strict=True))):
            numbers = numbers * rest // (rest - share)
        return numbers


def _join_packed(batches: Sequence[Any], rows: Sequence[np.ndarray], back: torch.Tensor, most: int) -> Batch:
    """One batch of packed documents from those of the sources, whose sequences become its `rows`.

    most: pieces of a sequence; the size of `cu_seqlens` depends on the number of sequences alone.
    """
    N, borders = batches[0].idx.shape[1], []
    for batch, own in zip(batches, rows, strict=True):
        row, offset = np.divmod(batch.cu_seqlens.numpy(), N)
        borders.append((own * N)[row[row < len(own)]] + offset[row < len(own)])
    cu_seqlens = np.full(len(back) * most + 1, len(back) * N, dtype=np.int32)
    found = np.sort(np.concatenate(borders))
    cu_seqlens[: len(found)] = found
    idx, targets = (torch.cat([batch[field] for batch in batches])[back] for field in (0, 1))
    return Batch(idx, targets, torch.from_numpy(cu_seqlens))
