"""What a machine can carry, and the line where it cannot."""

import re
from dataclasses import replace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.format import scaled
from lingpt.models import GPT, ModelArgs
from lingpt.train import Recipe, TrainConfig, train
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import fits, memory_needed, out_of_memory, what_fits_message
from lingpt.train.planning.plan import format_plan


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
    gpt = GPT.on_meta(recipe.model.config())
    with pytest.raises(UserError) as raised, out_of_memory(machine, gpt, recipe):
        raise torch.OutOfMemoryError("CUDA out of memory")
    line = str(raised.value)
    need = memory_needed(gpt, recipe, "bf16-mixed")["total"]
    assert f"micro-batches of {micro_batch_size} need about {scaled(need, 'B')}" in line
    assert f"NVIDIA H100 has {memory / 1e9:.0f} GB: try" in line and re.search(f"try {fix}", line)
    if size := re.search(r"micro_batch_size (\d+) \(", line):
        recipe.train.micro_batch_size = int(size[1])
        assert fits(memory_needed(gpt, recipe, "bf16-mixed")["total"], memory)


@pytest.mark.parametrize(
    ("strategy", "devices", "fix"),
    [("ddp", 8, r"^--train.strategy fsdp --train.micro_batch_size 1"), ("fsdp", 2, r"^4 such devices")],
)
def test_who_has_several_devices_is_not_told_to_take_fewer(strategy, devices, fix):
    """Guards: `2 such devices` to someone who has eight."""
    machine, recipe = a_run(24e9 if strategy == "ddp" else 14e9, 1)
    machine = replace(machine, strategy=strategy, devices=devices)
    assert re.match(fix, what_fits_message(machine, GPT.on_meta(recipe.model.config()), recipe))


def test_advice_counts_what_is_gathered_once():
    """Guards: a micro-batch said to need less than the run would then have taken."""
    machine, recipe = a_run(80e9, 24)
    machine = replace(machine, strategy="fsdp", devices=2, gathers_once=True)
    gpt = GPT.on_meta(recipe.model.config())
    size = int(re.search(r"micro_batch_size (\d+)", what_fits_message(machine, gpt, recipe))[1])
    need = memory_needed(gpt, recipe, "bf16-mixed", size, 2, gathers_once=True)["total"]
    assert what_fits_message(machine, gpt, recipe).endswith(f"(about {scaled(need, 'B')})")
    assert need > memory_needed(gpt, recipe, "bf16-mixed", size, 2)["total"]


@pytest.mark.parametrize("options", [{"optimizer": "muon"}, {"teacher": "runs/sm", "imitate": "logits"}])
def test_nobody_is_told_to_shard_what_cannot_be_sharded(options):
    """Guards: `--train.strategy fsdp` as advice, which the run then refused."""
    machine, recipe = a_run(16e9, 1, **options)
    recipe.model.name = "pythia-2.8b"
    gpt = GPT.on_meta(recipe.model.config())
    assert what_fits_message(machine, gpt, recipe).startswith("shorter sequences")
    assert "fsdp" not in format_plan(recipe, machine, gpt).lower()


def test_a_model_that_no_card_holds_whole_is_trained_in_parts():
    """Guards: pythia-12b on eight cards of 42 GB, which was made whole on each, in 47 GB of fp32. Cards that
    cannot hold two blocks and the embeddings are still too small."""
    machine, recipe = a_run(42e9, 1)
    recipe.model.name = "pythia-12b"
    machine, gpt = replace(machine, devices=8, strategy="fsdp"), GPT.on_meta(recipe.model.config())
    way = "--train.micro_batch_size 1 --train.activation_checkpointing true"
    assert what_fits_message(machine, gpt, recipe).startswith(way)
    assert what_fits_message(replace(machine, memory=6e9), gpt, recipe).startswith("shorter sequences")


def test_a_dry_run_says_how_many_cards_a_large_model_takes():
    """Guards: `does not fit` for every card, of a model that fits several."""
    machine, recipe = a_run(141e9, 1)
    recipe.model.name = "pythia-12b"
    plan = format_plan(recipe, machine, GPT.on_meta(recipe.model.config()))
    (line,) = [line for line in plan.splitlines() if line.startswith("sharded by FSDP")]
    assert re.search(r"8 × A100 80GB.*[24] × H200", line), line
    assert re.search(r"disk +142 GB a checkpoint, 426 GB at most", plan), "and not 1.4e+02 GB"


def test_muon_keeps_one_number_for_each_weight_of_its_matrices():
    """Guards: two, as AdamW's, in the memory, on disk and on the host: runs that fit were refused."""
    machine, recipe = a_run(80e9, 1)
    gpt, found = GPT.on_meta(recipe.model.config()), []
    matrices = sum(p.numel() for name, p in gpt.named_parameters() if ".h." in name and p.dim() == 2)
    for recipe.train.optimizer in ("adamw", "muon"):
        need = memory_needed(gpt, recipe, "bf16-mixed")
        assert need["total"] == sum(size for use, size in need.items() if use != "total")
        plan = format_plan(recipe, machine, gpt)
        on_disk = 4 * gpt.num_parameters() + need["optimizer"]
        assert f"{scaled(on_disk, 'B')} a checkpoint" in plan
        found.append((need["optimizer"], re.search(r"host +(\S+) GB of pinned", plan)[1]))
    (adamw, on_host), (muon, less_on_host) = found
    assert adamw - muon == 4 * matrices and float(less_on_host) < 0.75 * float(on_host)


@pytest.mark.parametrize("options", [{"segments": 2}, {"context_parallel": 2}])
def test_gradients_that_stay_are_counted(options):
    """Guards: gradients that were said to be freed before the step's end: of the segments before, which are
    added to, and of DDP, whose buckets hold them always."""
    _, recipe = a_run(80e9, 1, **options)
    recipe.model.attention = "ours"
    gpt = GPT.on_meta(recipe.model.config())
    for recipe.train.global_batch_size in (2, 1):
        assert memory_needed(gpt, recipe, "bf16-mixed")["gradients"] == 4 * gpt.num_parameters()


def test_a_teachers_weights_are_counted():
    """Guards: the memory of a linearised model as if it learnt alone, 5.7 GB less for pythia-1.4b."""
    _, recipe = a_run(80e9, 1)
    gpt = GPT.on_meta(recipe.model.config())
    alone = memory_needed(gpt, recipe, "bf16-mixed")
    recipe.train.teacher = "runs/sm"
    assert memory_needed(gpt, recipe, "bf16-mixed")["total"] - alone["total"] == 4 * gpt.num_parameters()


def test_where_the_estimate_fits_something_else_may_use_the_card():
    """Then the next smaller micro-batch is the advice, all the same."""
    machine, recipe = a_run(141e9, 4)
    with (
        pytest.raises(UserError, match=r"something else use it\?\): try --train.micro_batch_size 3 \("),
        out_of_memory(machine, GPT.on_meta(recipe.model.config()), recipe),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_dry_run_says_that_it_does_not_fit_and_what_would():
    """Before anything is allocated; and how long it takes where it fits."""
    machine, recipe = a_run(80e9, 24)
    gpt = GPT.on_meta(recipe.model.config())
    plan = format_plan(recipe, machine, gpt)
    assert "does not fit: micro-batches of 24 need about" in plan
    assert what_fits_message(machine, gpt, recipe) in plan and "at 40% MFU" in plan


def test_a_long_sequence_is_told_to_wait_in_the_hosts_memory():
    """A million tokens over two cards of 80 GB: what recomputed blocks keep alone is 100 GB a card."""
    machine, recipe = a_run(85e9, 1, context_parallel=2)
    recipe.model, recipe.data.seq_len = ModelArgs("pythia-1.4b", "ours", block_size=2**20), 2**20
    recipe.train.global_batch_size = 1
    machine, gpt = replace(machine, devices=2, strategy="ddp"), GPT.on_meta(recipe.model.config())
    options = "--train.micro_batch_size 1 --train.activation_checkpointing true"
    advice = what_fits_message(machine, gpt, recipe)
    assert advice.startswith(f"{options} --train.offload_activations true (about 7")
    recipe.train.activation_checkpointing = recipe.train.offload_activations = True
    plan = format_plan(recipe, machine, gpt)
    assert "85 GB each: fits" in plan and "; 103 GB, the blocks' inputs" in plan


def test_a_dry_run_builds_the_model_once(monkeypatch, capsys):
    """Guards: pythia-12b was built for each of 58 estimates, which took most of a dry run's time."""
    built, build = [], GPT.__init__
    monkeypatch.setattr(GPT, "__init__", lambda gpt, config: built.append(gpt) or build(gpt, config))
    _, recipe = a_run(80e9, 24, dry_run=True, accelerator="cpu")
    train(recipe)
    assert "H200" in capsys.readouterr().out and len(built) == 1
