"""Chooses how the devices of a run share its model: each has all of it (DDP), or a part (FSDP)."""

from dataclasses import replace

from lingpt.common.errors import UserError
from lingpt.common.format import scaled
from lingpt.models import GPT
from lingpt.train.config import Recipe
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import fits, memory_needed, needs_whole_model


def choose_strategy(machine: Machine, gpt: GPT, recipe: Recipe) -> tuple[Machine, str | None]:
    """`machine` with the recipe's strategy, or else the one that its memory needs; and the reason, or None if
    there is nothing to explain. UserError for a strategy that the recipe's other options exclude.
    """
    wanted, n = recipe.train.strategy, machine.world_size
    if n == 1:
        alone = "strategy: one device has nobody to share with: it trains as it is"
        return machine, alone if wanted != "auto" else None
    if wanted == "ddp":
        return _with_ddp(machine, recipe), None
    if (option := needs_whole_model(recipe)) and wanted == "fsdp":
        raise UserError(f"{option} needs the whole model, which fsdp splits: use --train.strategy ddp")
    # Processes on a CPU share its memory.
    room = machine.memory / (machine.devices if machine.accelerator == "cpu" else 1)
    why = None
    if wanted == "auto":
        ddp, fsdp = (memory_needed(gpt, recipe, machine.precision, over=over)["total"] for over in (1, n))
        has = f"of {room / 1e9:.0f} GB"
        if fits(ddp, room):
            why = f"strategy: DDP, for the whole model fits each device (about {scaled(ddp, 'B')} {has})"
            return _with_ddp(machine, recipe), why
        if option:
            return _with_ddp(machine, recipe), f"strategy: DDP, for {option} needs the whole model"
        why = (
            f"strategy: FSDP over {n} devices, for the whole model needs about {scaled(ddp, 'B')} {has} "
            f"each, and a part {scaled(fsdp, 'B')}"
        )
    # If memory allows, devices communicate once per step; but with `reduce_bf16`, FSDP2 would then accumulate
    # the gradients of the micro-batches in bf16, too.
    once = memory_needed(gpt, recipe, machine.precision, over=n, gathers_once=True)["total"]
    if fits(once, room) and recipe.train.reduce_bf16:
        often = (
            "reduce_bf16: with FSDP the gradients are summed over the devices in every micro-batch; without "
            "it, in fp32 and once a step"
        )
        why = f"{why}; {often}" if why else often
    gathers_once = fits(once, room) and not recipe.train.reduce_bf16
    return replace(machine, strategy="fsdp", gathers_once=gathers_once), why


def _with_ddp(machine: Machine, recipe: Recipe) -> Machine:
    if recipe.train.reduce_bf16 and machine.accelerator == "cpu":
        raise UserError(
            "--train.reduce_bf16 under DDP needs GPUs: leave it out, or use --train.strategy fsdp"
        )
    return replace(machine, strategy="ddp")
