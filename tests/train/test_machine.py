"""What a machine can carry, and the line where it cannot."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.models import GPT, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.machine import (
    Machine,
    choose_machine,
    choose_strategy,
    fits,
    memory_needed,
    out_of_memory,
    scaled,
    what_fits,
)
from lingpt.train.plan import format_plan
from lingpt.train.report import describe


def a_run(memory: float, micro_batch_size: int, **options) -> tuple[Machine, Recipe]:
    """Pythia-1.4b at its own length on one device."""
    recipe = Recipe(
        model=ModelArgs(name="pythia-1.4b"),
        train=TrainConfig(max_steps=10, global_batch_size=24, micro_batch_size=micro_batch_size, **options),
    )
    recipe.data.seq_len = 2048
    return Machine("cuda", 1, 1, "bf16-mixed", "NVIDIA H100", int(memory)), recipe


@pytest.mark.parametrize(
    ("memory", "micro_batch_size", "fix"),
    [
        (80e9, 24, r"--train.micro_batch_size 12 \(about"),  # of those that divide 24
        (32e9, 2, r"--train.micro_batch_size 2 --train.activation_checkpointing true \(about"),
        (24e9, 1, r"2 such devices with --train.strategy fsdp"),
        (2e9, 1, r"shorter sequences"),
    ],
)
def test_out_of_memory_says_what_was_needed_and_what_fits(memory, micro_batch_size, fix):
    """One line with the estimate, what the card has, and options that fit by the same estimate."""
    machine, recipe = a_run(memory, micro_batch_size)
    config = recipe.model.config()
    with pytest.raises(UserError) as raised, out_of_memory(machine, config, recipe):
        raise torch.OutOfMemoryError("CUDA out of memory")
    line = str(raised.value)
    need = memory_needed(config, recipe, "bf16-mixed")["total"]
    assert f"micro-batches of {micro_batch_size} need about {scaled(need, 'B')}" in line
    assert f"NVIDIA H100 has {memory / 1e9:.0f} GB: try" in line and re.search(f"try {fix}", line)
    if size := re.search(r"micro_batch_size (\d+) \(", line):
        recipe.train.micro_batch_size = int(size[1])
        assert fits(memory_needed(config, recipe, "bf16-mixed")["total"], memory)


@pytest.mark.parametrize(
    ("strategy", "devices", "fix"),
    [("ddp", 8, r"^--train.strategy fsdp --train.micro_batch_size 1"), ("fsdp", 2, r"^4 such devices")],
)
def test_who_has_several_devices_is_not_told_to_take_fewer(strategy, devices, fix):
    """Guards: `2 such devices` to someone who has eight."""
    machine, recipe = a_run(24e9 if strategy == "ddp" else 14e9, 1)
    machine = replace(machine, strategy=strategy, devices=devices)
    assert re.match(fix, what_fits(machine, recipe.model.config(), recipe))


def test_advice_counts_what_is_gathered_once():
    """Guards: a micro-batch said to need less than the run would then have taken."""
    machine, recipe = a_run(80e9, 24)
    machine = replace(machine, strategy="fsdp", devices=2, gathers_once=True)
    config = recipe.model.config()
    size = int(re.search(r"micro_batch_size (\d+)", what_fits(machine, config, recipe))[1])
    need = memory_needed(config, recipe, "bf16-mixed", size, 2, gathers_once=True)["total"]
    assert what_fits(machine, config, recipe).endswith(f"(about {scaled(need, 'B')})")
    assert need > memory_needed(config, recipe, "bf16-mixed", size, 2)["total"]


def test_a_model_that_no_card_holds_whole_is_trained_in_parts():
    """Guards: pythia-12b on eight cards of 42 GB, which was made whole on each, in 47 GB of fp32. Cards that
    cannot hold two blocks and the embeddings are still too small."""
    machine, recipe = a_run(42e9, 1)
    recipe.model.name = "pythia-12b"
    machine, config = replace(machine, devices=8, strategy="fsdp"), recipe.model.config()
    way = "--train.micro_batch_size 1 --train.activation_checkpointing true"
    assert what_fits(machine, config, recipe).startswith(way)
    assert what_fits(replace(machine, memory=6e9), config, recipe).startswith("shorter sequences")


def test_a_dry_run_says_how_many_cards_a_large_model_takes():
    """Guards: `does not fit` for every card, of a model that fits several."""
    machine, recipe = a_run(141e9, 1)
    recipe.model.name = "pythia-12b"
    plan = format_plan(recipe, machine, recipe.model.config())
    (line,) = [line for line in plan.splitlines() if line.startswith("sharded by FSDP")]
    assert re.search(r"8 × A100 80GB.*[24] × H200", line), line
    assert re.search(r"disk +142 GB a checkpoint, 426 GB at most", plan), "and not 1.4e+02 GB"


def test_numbers_are_as_a_person_writes_them():
    """Guards: `6.14e-06 B tokens`, `0.00108 k tokens/s`, `about 0.0 GB`."""
    assert scaled(6144, " tokens", "B") == "6.14 k tokens" and scaled(3e9, " tokens", "B") == "3 B tokens"
    assert scaled(1.08, " tokens/s") == "1.08 tokens/s" and scaled(999_900, " tokens/s") == "1 M tokens/s"
    assert scaled(47.4e6, "B") == "47.4 MB" and scaled(141.6e9, "B") == "142 GB" and scaled(0, "B") == "0 B"


def test_the_smallest_card_decides(monkeypatch):
    """Guards: an estimate, and a precision, of the first card alone."""
    cards = [SimpleNamespace(name=n, total_memory=m, major=v) for n, m, v in (("A", 80, 9), ("B", 24, 7))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    both, first = (choose_machine(TrainConfig(devices=devices)) for devices in ("auto", 1))
    assert (both.memory, both.precision) == (24, "32-true")
    assert (first.memory, first.precision) == (80, "bf16-mixed")


def test_reduce_bf16_is_refused_before_anything_starts_or_says_what_it_costs():
    """On CPUs gloo sums no bf16 under DDP; and FSDP then sums in every micro-batch."""
    machine, recipe = a_run(141e9, 1, reduce_bf16=True, strategy="ddp")
    config = recipe.model.config()
    with pytest.raises(UserError, match="under DDP needs GPUs"):
        choose_strategy(replace(machine, accelerator="cpu", devices=2), config, recipe)
    recipe.train.strategy = "fsdp"
    chosen, why = choose_strategy(replace(machine, devices=2), config, recipe)
    assert not chosen.gathers_once and "in every micro-batch" in why


def test_where_the_estimate_fits_something_else_may_use_the_card():
    """Then the next smaller micro-batch is the advice, all the same."""
    machine, recipe = a_run(141e9, 4)
    with (
        pytest.raises(UserError, match=r"something else use it\?\): try --train.micro_batch_size 3 \("),
        out_of_memory(machine, recipe.model.config(), recipe),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_dry_run_says_that_it_does_not_fit_and_what_would():
    """Before anything is allocated; and how long it takes where it fits."""
    machine, recipe = a_run(80e9, 24)
    config = recipe.model.config()
    plan = format_plan(recipe, machine, config)
    assert "does not fit: micro-batches of 24 need about" in plan
    assert what_fits(machine, config, recipe) in plan and "at 40% MFU" in plan


def test_the_opening_line_names_the_strategy_where_there_are_several_devices():
    """Guards: DDP or FSDP that the recipe asks for was named nowhere."""
    machine, recipe = a_run(80e9, 1)
    with torch.device("meta"):
        gpt = GPT(recipe.model.config())
    for strategy, said in (("single", "1 × NVIDIA H100, bf16"), ("fsdp", "2 × NVIDIA H100, FSDP, bf16")):
        machine = replace(machine, strategy=strategy, devices=1 if strategy == "single" else 2)
        assert said in describe(recipe, machine, gpt, {"ours": "cuda"}, 3)
