"""How the devices share the model, and what is said of it."""

from dataclasses import replace

import pytest

from lingpt.common.errors import UserError
from lingpt.models import GPT, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import memory_needed, too_small_message
from lingpt.train.report import describe


def two_devices(**options) -> tuple[Machine, Recipe]:
    train = TrainConfig(max_steps=10, global_batch_size=24, micro_batch_size=1, **options)
    recipe = Recipe(model=ModelArgs(name="pythia-1.4b"), train=train)
    return Machine("cuda", 2, 1, "bf16-mixed", "NVIDIA H100", int(141e9)), recipe


def test_reduce_bf16_is_refused_before_anything_starts_or_says_what_it_costs():
    """On CPUs gloo sums no bf16 under DDP; and FSDP then sums in every micro-batch."""
    machine, recipe = two_devices(reduce_bf16=True, strategy="ddp")
    gpt = GPT.on_meta(recipe.model.config())
    with pytest.raises(UserError, match="under DDP needs GPUs"):
        choose_strategy(replace(machine, accelerator="cpu"), gpt, recipe)
    recipe.train.strategy = "fsdp"
    chosen, why = choose_strategy(machine, gpt, recipe)
    assert not chosen.gathers_once and "in every micro-batch" in why


def test_processes_on_a_cpu_share_its_memory():
    """Guards: the whole model in each, where only one such process fits."""
    machine, recipe = two_devices()
    gpt = GPT.on_meta(recipe.model.config())
    one_and_a_half = int(1.5 * memory_needed(gpt, recipe, machine.precision)["total"])
    for accelerator, strategy in (("cpu", "fsdp"), ("cuda", "ddp")):
        here = replace(machine, accelerator=accelerator, memory=one_and_a_half)
        assert choose_strategy(here, gpt, recipe)[0].strategy == strategy


def test_parameters_stay_whole_within_a_step_only_where_there_is_room():
    machine, recipe = two_devices(strategy="fsdp")
    gpt = GPT.on_meta(recipe.model.config())
    for once in (False, True):
        need = memory_needed(gpt, recipe, machine.precision, over=2, gathers_once=once)["total"]
        just_enough = replace(machine, memory=int(1.08 * need + 1e9) + 1)
        assert choose_strategy(just_enough, gpt, recipe)[0].gathers_once == once


def test_the_opening_line_names_the_strategy_where_there_are_several_devices():
    """Guards: DDP or FSDP that the recipe asks for was named nowhere."""
    machine, recipe = two_devices()
    gpt = GPT.on_meta(recipe.model.config())
    for strategy, said in (("single", "1 × NVIDIA H100, bf16"), ("fsdp", "2 × NVIDIA H100, FSDP, bf16")):
        machine = replace(machine, strategy=strategy, devices=1 if strategy == "single" else 2)
        assert said in describe(recipe, machine, gpt, {"ours": "cuda"}, 3)


@pytest.mark.parametrize("option", [{"optimizer": "muon"}, {"teacher": "runs/teacher"}])
def test_a_run_that_cannot_be_sharded_trains_with_ddp_whatever_it_needs(option):
    """Guards: `auto` gave it FSDP where it does not fit a device whole, and was then refused for that."""
    machine, recipe = two_devices(**option)
    gpt = GPT.on_meta(recipe.model.config())
    chosen, why = choose_strategy(replace(machine, memory=10**10), gpt, recipe)
    assert chosen.strategy == "ddp" and "needs the whole model" in why
    assert "--train.strategy" not in too_small_message(chosen, gpt, recipe)
    recipe.train.strategy = "fsdp"
    with pytest.raises(UserError, match="needs the whole model, which fsdp splits"):
        choose_strategy(machine, gpt, recipe)
