"""What a machine can carry, and the line where it cannot."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.format import duration, scaled
from lingpt.models import GPT, Config, ModelArgs
from lingpt.train import Recipe, TrainConfig, train
from lingpt.train.planning import memory_fit
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import (
    check_machine,
    checkpoint_bytes,
    fits,
    memory_needed,
    micro_batch_sizes,
    out_of_memory,
    what_fits_message,
)
from lingpt.train.planning.plan import format_plan
from lingpt.train.planning.throughput import CPU_CORE_FLOPS, STATED_MFU, run_flops


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
    """Guards: `2 such devices` to someone who has eight, or their memory."""
    machine, recipe = a_run(24e9 if strategy == "ddp" else 14e9, 1)
    machine, gpt = replace(machine, strategy=strategy, devices=devices), GPT.on_meta(recipe.model.config())
    advice = what_fits_message(machine, gpt, recipe)
    recipe.train.activation_checkpointing = True
    need = memory_needed(gpt, recipe, "bf16-mixed", over=8 if strategy == "ddp" else 4)["total"]
    assert re.match(fix, advice) and advice.endswith(f"(about {scaled(need, 'B')} each)")
    assert micro_batch_sizes(recipe, 8) == [1, 3]


def test_advice_counts_what_is_gathered_once():
    """Guards: a micro-batch said to need less than the run would then have taken."""
    machine, recipe = a_run(80e9, 24)
    machine = replace(machine, strategy="fsdp", devices=2, gathers_once=True)
    gpt = GPT.on_meta(recipe.model.config())
    size = int(re.search(r"micro_batch_size (\d+)", what_fits_message(machine, gpt, recipe))[1])
    need = memory_needed(gpt, recipe, "bf16-mixed", size, 2, gathers_once=True)["total"]
    assert what_fits_message(machine, gpt, recipe).endswith(f"(about {scaled(need, 'B')})")
    assert need > memory_needed(gpt, recipe, "bf16-mixed", size, 2)["total"]
    machine = replace(machine, memory=int(need * 1.08 + 1e9) - 10)
    assert f"--train.micro_batch_size {size} " not in what_fits_message(machine, gpt, recipe)
    total = re.search(r"memory +(\S+ GB) a device", format_plan(recipe, machine, gpt))[1]
    assert total == scaled(memory_needed(gpt, recipe, "bf16-mixed", None, 2, True)["total"], "B")


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
    plans = [format_plan(recipe, replace(machine, strategy=name), gpt) for name in ("fsdp", "ddp")]
    for plan, verdict in zip(plans, ("fits +[1-9]", "does not fit +none fits "), strict=True):
        assert re.search(f"^A100 80GB +80 GB +{verdict}", plan, re.M)
    sharded, whole = (float(re.search(r"^host +(\S+) GB", plan, re.M)[1]) for plan in plans)
    assert whole == pytest.approx(8 * sharded, rel=0.01)


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


def test_a_run_s_disk_is_of_all_that_it_keeps():
    """The newest two, the best, the one that it can be extended from, and the one that is written."""
    _, recipe = a_run(80e9, 1, schedule="wsd", keep_best=True)
    gpt = GPT.on_meta(recipe.model.config())
    one, most = checkpoint_bytes(gpt, recipe)
    assert (one, most) == (12 * gpt.num_parameters(), 5 * one)
    recipe.train.precision, recipe.train.schedule = "bf16-true", "cosine"
    assert checkpoint_bytes(gpt, recipe) == (one // 2, 2 * one)


def test_a_cpu_is_refused_what_takes_it_more_than_a_week(monkeypatch):
    """On all of its cores, unless it is asked for; and more memory than it has for all processes."""
    monkeypatch.setattr(memory_fit, "available_cores", lambda: 4)
    _, recipe = a_run(0, 24)
    gpt = GPT.on_meta(recipe.model.config())
    machine = Machine(
        "cpu", 1, 1, "32-true", "CPU", int(1.5 * memory_needed(gpt, recipe, "32-true")["total"])
    )
    a_day = 10 * 86400 * 4 * CPU_CORE_FLOPS / run_flops(gpt, recipe)  # in steps
    recipe.train.max_steps = int(6.9 * a_day)
    check_machine(machine, gpt, recipe)
    with pytest.raises(UserError, match="GB of memory, and it has"):
        check_machine(replace(machine, devices=2), gpt, recipe)
    recipe.train.max_steps = int(7.2 * a_day)
    with pytest.raises(UserError, match="the run would need about 7 d") as raised:
        check_machine(machine, gpt, recipe)
    need = math.ceil(memory_needed(gpt, recipe, "bf16-mixed", 1)["total"] / 1e9)
    time = duration(run_flops(gpt, recipe) / (STATED_MFU * 312e12))
    assert f"one with {need} GB or more (such as A100 40GB: about {time} at" in str(raised.value)
    recipe.train.accelerator = "cpu"
    check_machine(machine, gpt, recipe)


@pytest.mark.parametrize("options", [{"segments": 2}, {"context_parallel": 2}])
def test_gradients_that_stay_are_counted(options):
    """Guards: gradients that were said to be freed before the step's end: of the segments before, which are
    added to, and of DDP, whose buckets hold them always."""
    _, recipe = a_run(80e9, 1, **options)
    recipe.model.attention = "ours"
    gpt = GPT.on_meta(recipe.model.config())
    for recipe.train.global_batch_size in (2, 1):
        assert memory_needed(gpt, recipe, "bf16-mixed")["gradients"] == 4 * gpt.num_parameters()


def test_a_plan_says_where_the_gradients_are():
    """Guards: `gradients 0 B`, of one micro-batch a step: they are allocated as it frees the rest."""
    machine, recipe = a_run(80e9, 24)
    recipe.model.name = "pythia-160m"
    gpt = GPT.on_meta(recipe.model.config())
    for recipe.train.micro_batch_size, said in ((24, "; gradients take the place of "), (12, "gradients 6")):
        (line,) = re.findall("^memory .*", format_plan(recipe, machine, gpt), re.M)
        assert said in line and " 0 B" not in line


def test_a_teachers_weights_are_counted(tmp_path):
    """Guards: the memory of a linearised model as if it learnt alone, 5.7 GB less for pythia-1.4b, or from a
    teacher of its own size. One that is not there, as in a dry run, is taken for that."""
    _, recipe = a_run(80e9, 1)
    gpt, larger = GPT.on_meta(recipe.model.config()), Config.from_name("pythia-2.8b")
    (tmp_path / "config.json").write_text(json.dumps(larger.to_dict() | {"model_type": "lingpt"}))
    for precision, size in (("bf16-mixed", 4), ("bf16-true", 2)):
        recipe.train.teacher = None
        alone = memory_needed(gpt, recipe, precision)
        for teacher, model in (("runs/sm", gpt), (str(tmp_path), GPT.on_meta(larger))):
            recipe.train.teacher = teacher
            more = memory_needed(gpt, recipe, precision)["total"] - alone["total"]
            assert more == size * model.num_parameters()


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
    seconds = gpt.flops_per_token(2048) * 10 * 24 * 2048 / (STATED_MFU * 989e12)
    assert plan.endswith(duration(seconds))
    assert format_plan(recipe, replace(machine, num_nodes=2), gpt).endswith(duration(seconds / 2))
    assert re.search(rf"^H200 .* {duration(seconds)} +{duration(seconds / 8)} *$", plan, re.M)
    plan = format_plan(recipe, replace(machine, precision="32-true"), gpt)
    assert plan.endswith(duration(seconds * 989 / 67))
    assert re.search(rf"^H200 .* {duration(seconds * 989 / 67)} ", plan, re.M)
    cpu = replace(machine, accelerator="cpu", precision="32-true")
    needs = [re.search("^memory .*", format_plan(recipe, where, gpt), re.M)[0] for where in (machine, cpu)]
    assert needs[0] == needs[1] and "bf16-mixed" in needs[0]


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
