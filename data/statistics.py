"""What is in a corpus: the lengths of its documents, and exact duplicates of documents and lines."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from lingpt.data.dataset import Part

BINS = 40  # of the histogram
SAMPLES, SAMPLE_WIDTH = 5, 80  # rejected documents of each kind that are shown, and characters of each


@dataclass
class Statistics:
    """lengths: tokens of each document, its end among them. documents, lines: hashes, equal for equal text.
    rejects: some documents that are empty, or copies of others, by their number from 1."""

    lengths: np.ndarray
    documents: array = field(default_factory=lambda: array("q"))
    lines: array = field(default_factory=lambda: array("q"))
    empty: int = 0
    rejects: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each fact, for a terminal."""
        quantiles = np.quantile(self.lengths, [0, 0.1, 0.5, 0.9, 1]).astype(int)
        names = ("shortest", "10 %", "median", "90 %", "longest")
        return [
            ("lengths", ", ".join(f"{n} {q:,}" for n, q in zip(names, quantiles, strict=True)) + " tokens"),
            ("duplicates", f"{_copies(self.documents):.2%} of documents, {_copies(self.lines):.2%} of lines"),
            ("empty", f"{self.empty:,} documents"),
        ]

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents in each of `BINS` ranges of length, equally wide in the logarithm, and their borders."""
        return np.histogram(self.lengths, np.geomspace(self.lengths.min(), self.lengths.max() + 1, BINS + 1))

    def bars(self) -> list[str]:
        """The histogram for a terminal: a line for each factor of two."""
        powers = np.floor(np.log2(self.lengths)).astype(int)
        counts = np.bincount(powers)
        first, scale = int(powers.min()), 40 / counts.max()
        return [
            f"  {2**power:>9,} … {2 ** (power + 1) - 1:<9,} {'█' * round(count * scale):<40} {count:,}"
            for power, count in enumerate(counts.tolist()[first:], first)
        ]


def measure(part: Part, end: int) -> Statistics:
    """The statistics of the training text of `part`, of which the text is read once more. end: the token that
    ends a document. Equal texts are found by a hash of 64 bits; the memory is 8 bytes a line."""
    found = Statistics(np.diff(part.train.positions(end), prepend=-1))
    seen, copies = set[int](), 0
    for number, document in enumerate(part.corpus.train.read(), start=1):
        if not document.text:
            found.empty += 1
            found.rejects += [f"{number:,} is empty"] if found.empty <= SAMPLES else []
            continue
        digest = hash(document.text)
        found.documents.append(digest)
        found.lines.extend(hash(line) for line in document.text.splitlines() if line.strip())
        if digest in seen and (copies := copies + 1) <= SAMPLES:
            found.rejects.append(f"{number:,} is a copy: {' '.join(document.text[:SAMPLE_WIDTH].split())} …")
        seen.add(digest)
    return found


def _copies(hashes: array) -> float:
    """The share of those that are equal to an earlier one."""
    return 1 - len(np.unique(np.frombuffer(hashes, dtype=np.int64))) / len(hashes)
