"""The schedule is a pure function with the recipe's numbers in it; decay falls on matrices alone."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from lingpt.common.errors import UserError
from lingpt.models import GPT, Config, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.planning.machine import choose_machine
from lingpt.train.start import check_recipe
from lingpt.train.step import (
    AsyncHostCopy,
    learning_rates,
    make_optimizer,
    set_learning_rate,
    step_where_finite,
)


def test_schedule_warms_up_peaks_falls_and_ends_at_the_minimum():
    config = TrainConfig(learning_rate=1e-3, min_learning_rate=5e-5, warmup_steps=100)
    rates = [learning_rates(config, 1431)(step) for step in range(1431)]
    assert math.isclose(rates[0], 1e-5)
    assert rates[99] == max(rates) == 1e-3
    assert math.isclose(rates[-1], 5e-5)
    assert all(a <= b for a, b in pairwise(rates[:100]))
    assert all(a >= b for a, b in pairwise(rates[100:]))
    middle = (100 + 1430) // 2
    assert math.isclose(rates[middle], (1e-3 + 5e-5) / 2, rel_tol=1e-3)


def test_warm_up_stable_decay_can_be_extended():
    """Until the decay begins, the rate does not depend on the number of steps; the cosine's always does."""
    config = TrainConfig(
        learning_rate=1e-3, min_learning_rate=5e-5, warmup_steps=100, schedule="wsd", decay_steps=200
    )
    rates = [learning_rates(config, 1000)(step) for step in range(1000)]
    assert math.isclose(rates[0], 1e-5) and rates[99:800] == [1e-3] * 701 and math.isclose(rates[-1], 5e-5)
    assert all(a > b for a, b in pairwise(rates[799:]))
    assert math.isclose(rates[849], (1e-3 + 5e-5) / 2), "1 − √progress: half of it after a quarter"
    assert Recipe(train=replace(config, max_steps=1000)).decay_start == 800  # where a checkpoint is kept
    longer = [learning_rates(config, 3000)(step) for step in range(3000)]
    assert longer[:800] == rates[:800] and math.isclose(longer[-1], 5e-5)
    config.decay_steps = None
    assert learning_rates(config, 1000)(799) == 1e-3 > learning_rates(config, 1000)(800), "a fifth decays"


def test_a_run_shorter_than_its_warm_up_still_reaches_the_peak():
    config = TrainConfig(learning_rate=1e-3, warmup_steps=100)
    assert max(learning_rates(config, 50)(step) for step in range(50)) == 1e-3
    assert learning_rates(config, 1)(0) > 0


def test_a_short_run_ends_at_the_minimum():
    """Guards: the second of two steps was at the peak."""
    for schedule in ("cosine", "wsd"):
        config = TrainConfig(learning_rate=1e-3, min_learning_rate=5e-5, schedule=schedule)
        assert [learning_rates(config, 2)(step) for step in range(2)] == [1e-3, 5e-5]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_on_matrices_only(optimizer):
    """One step with zero gradients moves what decays, and nothing else; the betas are the recipe's."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.constant_(model[1].bias, 1.0)
    config = TrainConfig(optimizer=optimizer, learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.99)
    optimizer = make_optimizer(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "1.weight"}
    torch.testing.assert_close(model[1].weight, before["1.weight"] * (1 - 0.1 * 0.5))
    assert {group.get("betas") for group in optimizer.param_groups} - {None} == {(0.8, 0.99)}
    assert (TrainConfig().beta1, TrainConfig().beta2) == (0.9, 0.95)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(fused):
    """Neither weights nor moments nor the count of steps; the next one is as if it had not been."""
    parameters = nn.Linear(3, 2).requires_grad_(True).parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
    plain = copy.deepcopy(optimizer)
    for step, number in enumerate([1.0, math.nan, math.inf, 2.0]):
        for one in (optimizer, plain):
            for parameter in one.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, 0.5 + step if math.isfinite(number) else math.nan)
        step_where_finite(optimizer, torch.tensor(1.0, dtype=torch.float64), torch.tensor(number))
        if math.isfinite(number):
            plain.step()
        expected = plain.param_groups[0]["params"]
        for parameter, as_plain in zip(optimizer.param_groups[0]["params"], expected, strict=True):
            assert torch.equal(parameter, as_plain)
    states = (one.state_dict()["state"] for one in (optimizer, plain))
    for state, as_plain in zip(*(list(state.values()) for state in states), strict=True):
        assert state["step"] == 2
        assert all(torch.equal(state[name], as_plain[name]) for name in as_plain)


@pytest.mark.gpu
def test_nobody_waits_for_a_gpu_until_the_optimizer_has_its_work():
    """Of a step's end: the sums over ranks, their way to the host, and the optimizer's step."""
    parallel = Parallel(choose_machine(TrainConfig(accelerator="cuda", devices=1)))
    model = nn.Linear(512, 512, device=parallel.device)
    optimizer = parallel.wrap_optimizer(make_optimizer(model, TrainConfig()))
    model(torch.ones(4, 512, device=parallel.device)).sum().backward()
    before = model.weight.detach().clone()
    for loss, moves in ((math.nan, False), (3.0, True)):
        loss_sum = torch.tensor(loss, dtype=torch.float64, device=parallel.device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = parallel.clip_gradients(model, 1.0)
            sums = parallel.all_reduce_sum_async(loss_sum, True, 2.0)
            numbers = AsyncHostCopy(sums, norm)
            step_where_finite(optimizer, sums[0], norm)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found, *rest = numbers.wait()
        assert rest == [1.0, 2.0, pytest.approx(norm.item())]
        assert found == loss or (math.isnan(found) and math.isnan(loss))
        assert torch.equal(model.weight, before) != moves
    parallel.close()


def test_linear_attentions_learn_at_their_own_rate():
    """All of their weights do, in a hybrid, and nothing else; AdamW's first step is as long as its rate."""
    config = TrainConfig(learning_rate=1e-3, attention_learning_rate=4e-3, weight_decay=0.0)
    args = ModelArgs(name="demo", attention="hybrid", n_layer=4)
    model = GPT.create(args.config(), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, config)
    set_learning_rate(optimizer, 5e-4)  # half of the peak
    muon_step(optimizer, model, 0)
    for name, p in model.named_parameters():
        step, linear = p.detach() - before[name], ".attn." in name and ".h.3." not in name
        expected = torch.full_like(step, 2e-3 if linear else 5e-4)
        torch.testing.assert_close(step.abs(), expected, rtol=0.05, atol=2e-8, msg=name)


def test_a_rate_for_linear_attentions_needs_some(make_recipe):
    """Guards: a rate that nothing learns at."""
    recipe = make_recipe(attention_learning_rate=4e-3)
    check_recipe(recipe)
    recipe.model = replace(recipe.model, attention="softmax")
    line = "attention_learning_rate is for linear attentions, and softmax is none: leave it out"
    with pytest.raises(UserError, match=line):
        check_recipe(recipe)


def muon_step(optimizer, model, seed):
    """A step with a random gradient of that seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_muon_takes_the_matrices_of_linear_layers_and_adamw_the_rest():
    """At the rate times its ratio, Muon's step has AdamW's size and equal singular values."""
    config = TrainConfig(
        optimizer="muon", learning_rate=1e-3, muon_learning_rate=4e-3, min_learning_rate=0.0, weight_decay=0.0
    )
    options = {"attention": "ours-gated", "short_conv": True, "value_residual": True}
    model = GPT.create(Config.from_name("demo", **options), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, config)
    set_learning_rate(optimizer, 5e-4)  # half of the peak
    muon_step(optimizer, model, 0)
    by_muon = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, p in model.named_parameters():
        linear = name.endswith("weight") and not name.startswith("lm_head") and "norm" not in name
        assert (id(p) in by_muon) == (linear and p.dim() == 2 and "wte" not in name), name
        step = p.detach() - before[name]
        if id(p) not in by_muon:
            torch.testing.assert_close(step.abs(), torch.full_like(step, 5e-4), rtol=0.05, atol=2e-8)
        elif min(step.shape) > 8:
            assert 0.7 * 0.2 * 2e-3 < step.square().mean().sqrt() < 1.3 * 0.2 * 2e-3, name
            low, high = torch.linalg.svdvals(step).quantile(torch.tensor([0.1, 0.9]))
            assert high < 2 * low, name


def test_muon_goes_on_from_its_state_as_if_it_had_not_stopped():
    config, losses = TrainConfig(optimizer="muon", muon_learning_rate=4e-3), []
    for stops in (False, True):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        optimizer = make_optimizer(model, config)
        muon_step(optimizer, model, 0)
        if stops:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(model, config)
            optimizer.load_state_dict(state)
        set_learning_rate(optimizer, 5e-4)
        muon_step(optimizer, model, 1)
        losses.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
