"""The training order: a pure function of (seed, step, position), whoever asks."""

from collections import Counter

import numpy as np
import pytest
import torch

from lingpt.data import BatchSampler, PackedDataset


class Rows:
    """Blocks whose content is their index."""

    def __init__(self, n: int) -> None:
        self.n = n

    sample = PackedDataset.sample

    def __len__(self) -> int:
        return self.n

    def gather(self, indices) -> torch.Tensor:
        return torch.as_tensor(np.asarray(indices))[:, None].expand(-1, 5).clone()

    def num_targets(self, indices) -> int:
        return int((np.asarray(indices) > 2).sum())


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 257])
@pytest.mark.parametrize("batch", [1, 4, 10])
def test_every_epoch_visits_every_block_once(n, batch):
    """Also when batches straddle epochs, and when one batch is larger than the dataset."""
    batches = BatchSampler(Rows(n), seed=3, global_batch_size=batch)
    order = [i for step in range(-(-3 * n // batch)) for i in batches.indices(step)]
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_differ():
    """Each reshuffles: no two orders alike, and none is the files' order."""
    order = {
        (seed, epoch): tuple(BatchSampler(Rows(50), seed, 50).indices(epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({*order.values(), tuple(range(50))}) == 5


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_only_share_the_positions(devices):
    """Every rank reads its positions of the same global batch: put together, the batch of one device."""
    batches = BatchSampler(Rows(100), seed=1, global_batch_size=8)
    whole = batches.get(5, range(8))
    parts = [batches.get(5, range(rank, 8, devices)) for rank in range(devices)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), whole)
    assert whole[:, 0].tolist() == batches.indices(5)
    assert whole.shape == (8, 5) and whole.dtype == torch.int64


def test_the_loss_is_over_one_target_at_least():
    """Guards: a loss divided by zero, of a batch of prompts alone."""
    assert BatchSampler(Rows(3), seed=0, global_batch_size=3).num_targets(0) == 1
    assert BatchSampler(Rows(9), seed=0, global_batch_size=9).num_targets(0) == 6


def test_the_order_is_the_same_for_ever():
    """Golden: a changed order would make a resumed run see other data in silence."""
    batches = BatchSampler(Rows(10), seed=1337, global_batch_size=5)
    assert [batches.indices(step) for step in range(3)] == [[2, 9, 7, 8, 5], [0, 4, 1, 3, 6], [3, 5, 6, 4, 9]]


@pytest.mark.slow
def test_the_order_looks_random():
    """Where block 0 lands over many seeds is uniform (chi-squared), and so is what follows."""
    n, trials = 8, 3000
    first = Counter(BatchSampler(Rows(n), seed, 1).indices(0)[0] for seed in range(trials))
    assert chi_squared([first[i] for i in range(n)]) < 29.9  # 7 degrees of freedom
    steps = Counter()
    for seed in range(trials):
        a, b = BatchSampler(Rows(n), seed, 2).indices(0)
        steps[(b - a) % n] += 1
    assert steps[0] == 0 and chi_squared([steps[i] for i in range(1, n)]) < 27.9  # 6 degrees of freedom


def chi_squared(counts: list[int]) -> float:
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 / mean for count in counts)


def test_it_is_as_random_at_a_large_step():
    """Far into training nothing overflows or repeats."""
    batches = BatchSampler(Rows(10**6), seed=2**63, global_batch_size=1000)
    indices = batches.indices(10**9)
    assert len(set(indices)) == 1000 and min(indices) >= 0 and max(indices) < 10**6
