"""Whether a run fits its machine, by an estimate of the memory it needs, and which options would fit."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lingpt.common.devices import available_cores
from lingpt.common.errors import UserError
from lingpt.common.format import duration, scaled
from lingpt.models import GPT, memory_estimate
from lingpt.train.config import Recipe
from lingpt.train.loss import rows_per_chunk
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.throughput import CPU_CORE_FLOPS, DEVICES, STATED_MFU, find_teacher, run_flops
from lingpt.train.step import muon_matrices

_MAX_CPU_DAYS = 7.0


def memory_needed(
    gpt: GPT,
    recipe: Recipe,
    precision: str,
    micro_batch_size: int | None = None,
    over: int = 1,
    gathers_once: bool = False,
) -> dict[str, int]:
    """Bytes that a device needs at the peak of a step, by their use, and their `total`.

    over: number of devices that the model is sharded over. gathers_once: as in `Machine`.
    """
    t = recipe.train
    size = micro_batch_size or t.micro_batch_size
    # Segments accumulate, too; and DDP never frees its gradients, where each device has one piece.
    accumulates = t.global_batch_size > size or t.segments > 1 or (t.context_parallel > 1 and over == 1)
    need = memory_estimate(
        gpt,
        size,
        recipe.piece_len,
        precision,
        loss_chunk_tokens=rows_per_chunk(gpt.config.padded_vocab_size, gpt.config.n_embd),
        sharded_over=over,
        activation_checkpointing=t.activation_checkpointing,
        offload_activations=t.offload_activations,
        accumulates=accumulates,
        gathers_once=gathers_once,
        context_parallel=t.context_parallel,
        moments=moments(gpt, recipe),
    )
    if t.teacher is not None:  # its weights stay beside the model's
        weight = 2 if precision == "bf16-true" else 4  # bytes
        need["teacher"] = find_teacher(gpt, t.teacher).num_parameters() * weight
        need["total"] += need["teacher"]
    return need


def moments(gpt: GPT, recipe: Recipe) -> int:
    """Numbers that the optimizer keeps: two per weight by AdamW, one by Muon."""
    return 2 * gpt.num_parameters() - sum(matrix.numel() for matrix in muon_matrices(gpt, recipe.train))


def checkpoint_bytes(gpt: GPT, recipe: Recipe) -> tuple[int, int]:
    """Bytes of a checkpoint, of weights and moments; and of all that a run keeps while it writes one."""
    t = recipe.train
    one = (gpt.num_parameters() + moments(gpt, recipe)) * (2 if t.precision == "bf16-true" else 4)
    kept = t.keep_checkpoints + t.keep_best + (t.schedule == "wsd") + 1
    return one, one * kept if t.keep_checkpoints else 0


def memory_here(machine: Machine, gpt: GPT, recipe: Recipe, precision: str | None = None) -> dict[str, int]:
    """`memory_needed` on each device of `machine`, as it will train, or at another `precision`, if given."""
    return memory_needed(
        gpt,
        recipe,
        precision or machine.precision,
        over=machine.sharded_over,
        gathers_once=machine.gathers_once,
    )


def fits(need: float, memory: float) -> bool:
    """Whether an estimate of `need` bytes fits `memory`, with room for CUDA's context and fragmentation."""
    return need * 1.08 + 1e9 <= memory


def fits_here(machine: Machine, gpt: GPT, recipe: Recipe) -> bool:
    """Whether the memory that each device needs, by the estimate, fits."""
    return fits(memory_here(machine, gpt, recipe)["total"], machine.memory)


def check_machine(machine: Machine, gpt: GPT, recipe: Recipe) -> None:
    """Raises UserError for a model that this machine without a GPU cannot train in a week, unless
    `accelerator: cpu` is given."""
    if machine.accelerator != "cpu":
        return
    need = memory_here(machine, gpt, recipe)["total"] * machine.devices
    flops = run_flops(gpt, recipe)
    days = flops / (CPU_CORE_FLOPS * available_cores()) / 86400
    too_large, too_long = need > machine.memory, days > _MAX_CPU_DAYS and recipe.train.accelerator == "auto"
    if not (too_large or too_long):
        return
    on_gpu = memory_needed(gpt, recipe, "bf16-mixed", 1)["total"]
    such = "which no card that is known here has"
    if cards := [device for device in DEVICES if fits(on_gpu, device.memory)]:
        card = min(cards, key=lambda device: device.memory)
        time_on_card = duration(flops / (card.bf16 * STATED_MFU))
        such = f"such as {card.name}: about {time_on_card} at {STATED_MFU:.0%} MFU"
    reason = f"about {duration(days * 86400, rough=True)}"
    if too_large:
        reason = f"{need / 1e9:.0f} GB of memory, and it has {machine.memory / 1e9:.0f}"
    raise UserError(
        f"{recipe.model.name} needs a GPU: this machine has none, and on its {available_cores()} cores the "
        f"run would need {reason}; it needs one with {math.ceil(on_gpu / 1e9)} GB or more ({such}); "
        "a dry run (--train.dry_run true, or make's DRY=1) shows the plan, and the recipe `demo` trains here"
    )


@contextlib.contextmanager
def out_of_memory(machine: Machine, gpt: GPT, recipe: Recipe) -> Iterator[None]:
    """Turns a GPU's out-of-memory error into a UserError that says what was needed and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of memory: {too_small_message(machine, gpt, recipe)}") from error


def too_small_message(machine: Machine, gpt: GPT, recipe: Recipe) -> str:
    """A message: the memory that `recipe` needs by the estimate, what a device has, and what would fit."""
    need = memory_here(machine, gpt, recipe)["total"]
    others = " (does something else use it?)" if fits(need, machine.memory) else ""
    return (
        f"micro-batches of {recipe.train.micro_batch_size} need about {scaled(need, 'B')} by the estimate, "
        f"and {machine.name} has {machine.memory / 1e9:.0f} GB{others}: "
        f"try {what_fits_message(machine, gpt, recipe)}"
    )


def what_fits_message(machine: Machine, gpt: GPT, recipe: Recipe) -> str:
    """The options that make `recipe` fit `machine`'s devices, by the estimate.

    A smaller micro-batch; or activation checkpointing, with the largest micro-batch that then fits; or that
    with the blocks' inputs in the host's memory; or sharding over these devices instead of the whole model on
    each; or more devices.
    """
    t, over, once = recipe.train, machine.sharded_over, machine.gathers_once
    sizes = [size for size in micro_batch_sizes(recipe, machine.world_size) if size <= t.micro_batch_size]
    recomputing = replace(recipe, train=replace(t, activation_checkpointing=True))
    ways = [("", recipe, [size for size in sizes if size < t.micro_batch_size])]
    if not t.activation_checkpointing:
        ways.append((" --train.activation_checkpointing true", recomputing, sizes))
    if not t.offload_activations:
        offloading = replace(recomputing, train=replace(recomputing.train, offload_activations=True))
        both = " --train.activation_checkpointing true --train.offload_activations true"
        ways.append((both, offloading, sizes[:1]))
    for option, changed, possible in ways:
        if size := largest_that_fits(machine.memory, machine.precision, gpt, changed, possible, over, once):
            need = memory_needed(gpt, changed, machine.precision, size, over, once)["total"]
            return f"--train.micro_batch_size {size}{option} (about {scaled(need, 'B')})"
    here = machine.world_size
    for devices in () if needs_whole_model(recipe) else sorted({here, 2, 4, 8, 16, 32, 64}):
        need = memory_needed(gpt, recomputing, machine.precision, 1, devices)["total"]
        if devices >= here and devices > over and fits(need, machine.memory):
            more = f"{devices} such devices with " if devices > here else ""
            return (
                f"{more}--train.strategy fsdp --train.micro_batch_size 1 "
                f"--train.activation_checkpointing true (about {scaled(need, 'B')} each)"
            )
    return "shorter sequences (--data.seq_len), or a smaller model"


def needs_whole_model(recipe: Recipe) -> str | None:
    """The option for which FSDP must not split the model; None if there is none."""
    if recipe.train.optimizer == "muon":
        return "train.optimizer muon"
    return None if recipe.train.teacher is None else "train.teacher"


def micro_batch_sizes(recipe: Recipe, world_size: int) -> list[int]:
    """The micro-batch sizes that divide a device's share of the batch, ascending."""
    share = recipe.train.global_batch_size // recipe.data_parallel(world_size)
    return [size for size in range(1, share + 1) if share % size == 0]


def largest_that_fits(
    memory: float,
    precision: str,
    gpt: GPT,
    recipe: Recipe,
    sizes: Sequence[int],
    over: int = 1,
    gathers_once: bool = False,
) -> int:
    """The largest of the ascending micro-batch `sizes` that fits `memory` bytes by the estimate; else 0."""
    for size in reversed(sizes):
        if fits(memory_needed(gpt, recipe, precision, size, over, gathers_once)["total"], memory):
            return size
    return 0
