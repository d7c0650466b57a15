"""Micro-batches that are read ahead are those that are read on the spot, and no step waits for the disk."""

import threading

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.data.batches import AHEAD, Prefetcher

PIECES = [range(0, 2), range(2, 4)]


class BatchSampler:
    """Numbers in place of tokens, and which of them have been read."""

    def __init__(self) -> None:
        self.read, self.more = [], threading.Semaphore(0)

    def get(self, step: int, positions) -> torch.Tensor:
        self.read.append((step, positions[0]))
        self.more.release()
        if step == 9:
            raise UserError("damaged")
        return torch.tensor([[step, position] for position in positions])


@pytest.fixture
def batches():
    return BatchSampler()


@pytest.fixture
def prefetch(batches):
    prefetch = Prefetcher(batches, PIECES, torch.device("cpu"))
    yield prefetch
    prefetch.close()


def test_what_is_asked_for_comes_in_any_order(prefetch):
    """In order, once more (warming up reads the first one), and from another step (resuming)."""
    for step, number in [(0, 0), (0, 0), (0, 1), (1, 0), (1, 1), (7, 0), (7, 1), (2, 1)]:
        block = prefetch.get(step, number)
        assert block.tolist() == [[step, position] for position in PIECES[number]]


def test_the_next_ones_are_read_before_they_are_asked_for(prefetch, batches):
    """Each once, over the end of a step; no others are kept in memory."""
    prefetch.get(0, 0)
    for _ in range(1 + AHEAD):
        assert batches.more.acquire(timeout=20)
    assert batches.read == [(0, 0), (0, 2), (1, 0), (1, 2)]
    prefetch.get(0, 1)
    assert batches.more.acquire(timeout=20)
    assert batches.read[4:] == [(2, 0)] and len(prefetch._coming) == AHEAD


def test_an_error_comes_with_the_batch_that_it_is_of(prefetch):
    """Not with one before it."""
    assert prefetch.get(8, 1) is not None
    with pytest.raises(UserError, match="damaged"):
        prefetch.get(9, 0)


def test_closed_it_reads_no_further(prefetch, batches):
    """It waits for what is being read, and leaves the rest. Guards: a thread that outlives its run."""
    left, get = threading.Event(), batches.get
    batches.get = lambda *args: (batches.read and left.wait(2), get(*args))[1]
    prefetch.get(0, 0)
    [*prefetch._coming.values()][-1].add_done_callback(lambda _: left.set())
    prefetch.close()
    assert len(batches.read) <= 2
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
