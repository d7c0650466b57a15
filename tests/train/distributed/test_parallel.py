"""How the processes divide their work: nothing twice, nothing left out, as many calls on each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lingpt.common.errors import UserError
from lingpt.models import GPT, Config, ModelArgs, save_index, save_model, write_shards
from lingpt.train import TrainConfig
from lingpt.train.compilation import compile_blocks
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.loss import NextTokenLoss
from lingpt.train.model import fill_shards, make_model
from lingpt.train.planning.machine import choose_machine
from lingpt.train.step import step_where_finite


class Rank(Parallel):
    """One rank of several, without the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.fabric = SimpleNamespace(global_rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "size"), [(16, 4), (7, 2), (1, 4), (24, 1), (5, 8)])
def test_every_item_counts_once_and_all_ranks_make_the_same_calls(n, size, world_size):
    ranks = [list(Rank(rank, world_size).micro_batches(n, size)) for rank in range(world_size)]
    assert [i for pieces in ranks for piece, counts in pieces if counts for i in piece] == list(range(n))
    assert len({len(pieces) for pieces in ranks}) == 1
    first = ranks[0][0][0]
    assert all(piece == first for pieces in ranks for piece, counts in pieces if not counts), "another shape"


def test_ranks_with_pieces_of_the_same_sequences_have_the_same_share():
    shares = []
    for rank in (Rank(number, 4) for number in range(4)):
        rank.context = SimpleNamespace(size=2)
        shares.append([list(samples) for samples, _ in rank.micro_batches(8, 2)])
    assert shares == [[[0, 1], [2, 3]]] * 2 + [[[4, 5], [6, 7]]] * 2


def test_parameters_are_gathered_once_only_where_all_have_room(alone, monkeypatch):
    """Guards: processes that make other calls, as the memory of their cards differs."""
    roomy = replace(choose_machine(TrainConfig(accelerator="cpu")), gathers_once=True)
    everyone: list[tuple] = []
    monkeypatch.setattr(alone, "all_gather_object", lambda _: everyone)
    for other in (True, False):
        everyone[:] = [(roomy, {}), (replace(roomy, gathers_once=other), {})]
        alone.check_same_settings(roomy, {})
        assert alone._gathers_once == other
    everyone[1] = (replace(roomy, precision="bf16-mixed"), {})
    with pytest.raises(UserError, match="ranks of single, 32-true: 0; single, bf16-mixed: 1"):
        alone.check_same_settings(roomy, {})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_connections_wait_longer_than_the_watch(strategy):
    """Guards: a backtrace of NCCL's in place of the line that names who is late."""
    with one_process(strategy) as parallel:
        assert vars(parallel.fabric.strategy)["_timeout"] > timedelta(minutes=30)


def test_progress_is_the_collectives_of_every_group():
    """By which a process that hangs is found: also as checkpoints are written, and among pieces."""
    with one_process("fsdp") as parallel:
        parallel.context = SimpleNamespace(group=dist.new_group(backend="gloo"), size=1)
        groups = [dist.group.WORLD, parallel.host_mesh.get_group(), parallel.context.group]
        before = parallel._collectives()
        for number, group in enumerate(groups, start=1):
            dist.all_reduce(torch.ones(1), group=group)
            assert parallel._collectives() == before + number


@pytest.fixture
def alone() -> Parallel:
    return Parallel(choose_machine(TrainConfig(accelerator="cpu")))


def test_one_process_agrees_with_itself(alone):
    assert alone.all_reduce_sum(torch.tensor(2.5), 3, True) == [2.5, 3.0, 1.0]
    assert alone.all_gather_object("state") == ["state"]
    assert alone.on_rank_zero(lambda: 7) == 7
    assert 5e7 < alone.peak_memory < 5e10, "bytes"
    with pytest.raises(UserError, match="no space"):
        alone.on_rank_zero(lambda: exec('raise UserError("no space")', {"UserError": UserError}))


def test_every_seed_can_be_that_of_a_later_rank():
    """Guards: numpy refused the seed of rank 1 where the recipe's was the largest."""
    rank, seeds = Rank(1, 2), []
    rank.fabric.seed_everything = lambda seed, verbose: seeds.append(seed)
    for seed in (0, 2**32 - 1):
        rank.seed(seed)
    assert seeds == [1, 0]


def test_a_sum_is_one_collective(monkeypatch):
    """Guards: there was a barrier before it, in every step."""
    rank, called = Rank(0, 2), []
    rank.fabric.device = torch.device("cpu")
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **options: called.append(name))
    assert rank.all_reduce_sum(torch.tensor(1.5), 2) == [1.5, 2.0] and called == ["all_reduce"]
    assert rank.any_rank(True) and not rank.any_rank(False), "one is enough"


def test_backward_is_of_the_mean(alone):
    """Of the sum over `count` items, as the loop accumulates it."""
    weight = torch.tensor(3.0, requires_grad=True)
    for part in (1.0, 2.0):
        alone.backward(weight * part, count=4)
    assert weight.grad.item() == pytest.approx(3 / 4)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_steps_as_its_own_device_does(alone, tmp_path, fused):
    """Guards: the checkpoint's way to compute a step, of a GPU, taken to a CPU, and the reverse; its rate and
    the number of its steps are taken."""
    own, other = (torch.optim.AdamW([torch.ones(2)], lr=0.1, fused=f) for f in (fused, not fused))
    for optimizer in (other, own):
        (group,) = optimizer.param_groups
        group["params"][0].grad = torch.ones(2)
    other.step()
    state = other.state_dict()
    state["param_groups"][0] |= {"foreach": True, "lr": 0.5}
    alone.load_optimizer(own, state, tmp_path)
    (group,) = own.param_groups
    assert (group["fused"], group["foreach"], group["lr"]) == (fused, None, 0.5)
    step_where_finite(own, torch.ones(()))
    assert own.state[group["params"][0]]["step"] == 2


class TwoBiases(torch.autograd.Function):
    """x + a + b; both biases get the same gradient, in one buffer, as from Inductor's backward pass."""

    @staticmethod
    def forward(ctx, x, a, b):
        return x + a + b

    @staticmethod
    def backward(ctx, grad):
        total = grad.sum(0, keepdim=True)
        return grad, total.view(-1), total.view(-1)


def test_gradients_in_one_buffer_are_accumulated_and_clipped_once(alone):
    a, b = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    module = torch.nn.ParameterList([a, b])
    x = torch.randn(2, 5, 4)
    TwoBiases.apply(x[0], a, b).square().sum().backward()
    assert a.grad.data_ptr() == b.grad.data_ptr(), "autograd copies it by now"
    a.grad = b.grad = None
    for part in x:
        with alone.accumulate(module, enabled=False):
            alone.backward(TwoBiases.apply(part, a, b).square().sum(), count=1)
    whole = 2 * x.sum((0, 1))
    torch.testing.assert_close((a.grad, b.grad), (whole, whole))
    alone.clip_gradients(module, 0.5)
    assert torch.cat([a.grad, b.grad]).norm().item() == pytest.approx(0.5)


@contextmanager
def one_process(strategy: str, reduce_bf16: bool = False, **changed: bool) -> Iterator[Parallel]:
    with mock.patch.dict(os.environ), mock.patch.object(torch._dynamo.config, "optimize_ddp", True):
        machine = replace(choose_machine(TrainConfig(accelerator="cpu")), strategy=strategy, **changed)
        parallel = Parallel(machine, reduce_bf16)
        yield parallel
        parallel.close()


@pytest.fixture
def ddp() -> Iterator[Parallel]:
    with one_process("ddp") as parallel:
        yield parallel


def test_ddp_sums_in_bf16_where_that_is_asked_for(monkeypatch):
    hooks = []
    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", lambda *args: hooks.append(args[2]))
    for reduce_bf16 in (False, True):
        with one_process("ddp", reduce_bf16) as parallel:
            parallel.wrap(torch.nn.Linear(3, 1))
    assert hooks == [bf16_compress_hook]  # which needs NCCL


@pytest.mark.parametrize("reduce_bf16", [False, True])
def test_fsdp_sums_in_bf16_where_that_is_asked_for(reduce_bf16):
    x = 1 + 2**-12
    with one_process("fsdp", reduce_bf16) as parallel:
        module = parallel.wrap(torch.nn.Linear(3, 1))
        with parallel.accumulate(module, enabled=False):
            parallel.backward(module(torch.full((1, 3), x)).sum(), count=1)
        assert (module.weight.grad.full_tensor() == (1.0 if reduce_bf16 else x)).all()


def test_sharded_parameters_stay_whole_until_a_step_s_last_micro_batch():
    with one_process("fsdp", gathers_once=True) as parallel:
        module = parallel.wrap(torch.nn.Linear(3, 1))
        sharded = []
        for enabled in (True, False):
            with parallel.accumulate(module, enabled):
                parallel.backward(module(torch.ones(1, 3)).sum(), count=1)
            sharded.append(all(isinstance(parameter, DTensor) for parameter in module.parameters()))
        assert sharded == [False, True]
        assert all((parameter.grad.full_tensor() == 2).all() for parameter in module.parameters())


@pytest.mark.parametrize("source", ["seed", "one file", "shards", "init_from"])
def test_a_sharded_model_has_the_weights_of_a_whole_one(make_recipe, tmp_path, source):
    """To the bit, constants too, with all its large tensors on the meta device until it is sharded. Guards: a
    whole model on each device before that, more than a card holds. (Several processes: test_many.py)"""
    recipe, other = make_recipe(), GPT.create(ModelArgs(attention="hybrid").config(), seed=7)
    recipe.model, config = ModelArgs(attention="hybrid"), other.config
    whole = GPT.create(config, seed=0) if source == "seed" else other
    checkpoint = tmp_path if source in ("one file", "shards") else None
    init_from = tmp_path if source == "init_from" else None
    with one_process("fsdp") as parallel:
        if source == "shards":
            write_shards(tmp_path, other.state_dict(), torch.distributed.group.WORLD)
            save_index(other, tmp_path)
        else:
            save_model(other, tmp_path)
        gpt = make_model(recipe, config, parallel.device, sharded=True)
        assert all(parameter.is_meta for parameter in gpt.parameters() if parameter.ndim > 1)
        parallel.wrap(NextTokenLoss(gpt))
        assert all(isinstance(block, FSDPModule) for block in gpt.blocks), "more than a block at a time"
        fill_shards(gpt, recipe.train.seed, checkpoint, init_from)
        for (name, sharded), expected in zip(gpt.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(sharded, DTensor) and torch.equal(sharded.full_tensor(), expected), name
        for (name, constant), expected in zip(gpt.named_buffers(), whole.buffers(), strict=True):
            assert torch.equal(constant, expected), name


def test_ddp_leaves_blocks_and_gradients_whole(ddp):
    """A compiled block is one graph, however small DDP's buckets are; and gradients stay where they lie in
    them, for those of the next step would be as much memory again."""
    gpt = GPT.create(Config.from_name("demo", attention="ours", n_embd=512, n_layer=2), seed=0)
    graphs = []
    compile_blocks(gpt, backend=lambda graph, _: graphs.append(graph) or graph)
    model = ddp.wrap(NextTokenLoss(gpt))
    model._forward_module.bucket_bytes_cap = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    with ddp.accumulate(model, enabled=False):
        ddp.backward(model(torch.zeros(1, 17, dtype=torch.long)), 16)
    assert len(graphs) == 1
    gradients = [parameter.grad for parameter in gpt.parameters()]
    where = [gradient.data_ptr() for gradient in gradients if gradient is not None]
    ddp.zero_gradients(torch.optim.SGD(gpt.parameters()))
    assert where == [p.grad.data_ptr() for p in gpt.parameters() if p.grad is not None] and len(where) > 20
    assert not any(gradient.any() for gradient in gradients)
