"""How the processes divide their work: nothing twice, nothing left out, as many calls on each."""

from types import SimpleNamespace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.train import TrainConfig
from lingpt.train.machine import choose_machine
from lingpt.train.parallel import Parallel


class Rank(Parallel):
    """One rank of several, without the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.fabric = SimpleNamespace(global_rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "size"), [(16, 4), (7, 2), (1, 4), (24, 1), (5, 8)])
def test_every_item_counts_once_and_all_ranks_make_the_same_calls(n, size, world_size):
    ranks = [list(Rank(rank, world_size).pieces(n, size)) for rank in range(world_size)]
    assert [i for pieces in ranks for piece, counts in pieces if counts for i in piece] == list(range(n))
    assert len({len(pieces) for pieces in ranks}) == 1
    first = ranks[0][0][0]
    assert all(piece == first for pieces in ranks for piece, counts in pieces if not counts), "another shape"


@pytest.fixture
def alone() -> Parallel:
    return Parallel(choose_machine(TrainConfig(accelerator="cpu")))


def test_one_process_agrees_with_itself(alone):
    assert alone.sum(torch.tensor(2.5), 3, True) == [2.5, 3.0, 1.0]
    assert alone.gather("state") == ["state"]
    assert alone.on_rank_zero(lambda: 7) == 7
    with pytest.raises(UserError, match="no space"):
        alone.on_rank_zero(lambda: exec('raise UserError("no space")', {"UserError": UserError}))


def test_backward_is_of_the_mean(alone):
    """Of the sum over `count` items, as the loop accumulates it."""
    weight = torch.tensor(3.0, requires_grad=True)
    for part in (1.0, 2.0):
        alone.backward(weight * part, count=4)
    assert weight.grad.item() == pytest.approx(3 / 4)
