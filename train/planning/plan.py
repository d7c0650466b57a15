"""`--train.dry_run true`: describes a run before anything is built, downloaded or allocated."""

from typing import NamedTuple

import torch

from lingpt.common.format import counted, duration, one_digit, scaled
from lingpt.data import availability, cache_size
from lingpt.models import GPT
from lingpt.train.config import Recipe
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import (
    checkpoint_bytes,
    fits,
    fits_here,
    largest_that_fits,
    memory_here,
    memory_needed,
    micro_batch_sizes,
    needs_whole_model,
    too_small_message,
)
from lingpt.train.planning.throughput import (
    DEVICES,
    STATED_MFU,
    Device,
    flops_per_token,
    measured_flops,
    run_flops,
)
from lingpt.train.runs.checkpoint_writer import pinned_bytes
from lingpt.train.step import muon_matrices

# Bytes/s that a device receives, and seconds until a collective starts: within a host, and beyond.
NVLINK, NETWORK = (300e9, 30e-6), (40e9, 60e-6)
SHOWN = ("RTX A6000", "A100 40GB", "A100 80GB", "H100 SXM", "H200")


def format_plan(recipe: Recipe, machine: Machine, gpt: GPT) -> str:
    """The plan as text: parameters, FLOPs, memory, tokens, steps, disk, and the time on known devices."""
    t = recipe.train
    on_gpu = "bf16-mixed" if t.precision == "auto" else t.precision
    precision = machine.precision if machine.accelerator == "cuda" else on_gpu
    tokens = recipe.total_steps * recipe.tokens_per_step
    flops = run_flops(gpt, recipe)
    least = memory_needed(gpt, recipe, precision, over=machine.sharded_over)["total"]
    micro_batch = f"at micro-batch {t.micro_batch_size}"
    shown = [next(device for device in DEVICES if device.name == name) for name in SHOWN]
    lines = [
        f"{recipe.run_name}: {recipe.model.name} with {recipe.attention_form}; nothing is trained, this is "
        "a dry run",
        "",
        *(f"{name:<10} {text}" for name, text in _about(recipe, machine, gpt, precision).items()),
        "",
        f"{'device':<12} {'memory':>7}  {micro_batch:<17} {'largest micro-batch':<20} {'1 device':>10} "
        f"{'8 devices':>10}   at {STATED_MFU:.0%} MFU",
        *(_row(device, recipe, machine, gpt, precision, least, flops) for device in shown),
    ]
    if several := [text for device in shown if (text := _sharded(device, gpt, recipe, precision, least))]:
        lines += ["", f"sharded by FSDP {micro_batch} it fits {', '.join(several)}"]
    here = estimate(recipe, machine, gpt)
    rate, rough = here.tokens_per_second, machine.accelerator == "cpu"
    time = duration(tokens / rate, rough)
    speed = scaled(one_digit(rate) if rough else rate, " tokens/s")
    lines += ["", f"here: about {speed} at {here.basis}, {time}"]
    return "\n".join(lines)


def _about(recipe: Recipe, machine: Machine, gpt: GPT, precision: str) -> dict[str, str]:
    """The lines above the table of devices: name → text."""
    t, data, world_size = recipe.train, recipe.data, machine.world_size
    tokens = recipe.total_steps * recipe.tokens_per_step
    need = memory_here(machine, gpt, recipe, precision)
    parts = ", ".join(
        f"{name} {scaled(size, 'B')}" for name, size in need.items() if size and name != "total"
    )
    if not need["gradients"]:
        parts += "; gradients take the place of activations"
    weight = 2 if precision == "bf16-true" else 4  # bytes
    checkpoint, most = checkpoint_bytes(gpt, recipe)
    saved = "nothing is saved"
    if t.keep_checkpoints:
        saved = f"{scaled(checkpoint, 'B')} a checkpoint, {scaled(most, 'B')} at most while saving"
        saved += f" (keep {t.keep_checkpoints})"
    cache = cache_size(data.source, gpt.config.padded_vocab_size)
    tokens_here = t.micro_batch_size * recipe.piece_len
    inputs = scaled(tokens_here * gpt.config.n_layer * gpt.config.n_embd * weight, "B")
    pinned = scaled(_pinned(gpt, recipe, precision, machine) if t.keep_checkpoints else 0, "B")
    accumulated = t.global_batch_size // (t.micro_batch_size * recipe.data_parallel(world_size))
    return {
        "model": f"{gpt.num_parameters():,} parameters; {scaled(flops_per_token(gpt, recipe), 'FLOP')} "
        "per token (forward and backward)",
        "data": f"{data.source}, sequences of {data.seq_len:,} tokens, tokenizer "
        f"{data.tokenizer or 'of the embedded corpus'}; {availability(data)}",
        "batch": f"{counted(t.global_batch_size, 'sequence')} = {recipe.tokens_per_step:,} tokens a step: "
        f"{counted(world_size, 'device')} × micro-batch {t.micro_batch_size} × {accumulated} accumulated",
        "run": f"{recipe.total_steps:,} steps, {scaled(tokens, ' tokens', 'B')}, "
        f"{run_flops(gpt, recipe):.3g} FLOP",
        "memory": f"{scaled(need['total'], 'B')} a device at micro-batch {t.micro_batch_size}, {precision}, "
        f"estimated ({parts})",
        "disk": f"{saved}; token cache {cache}",
        "host": f"{pinned} of pinned memory beside a GPU: the copy of a checkpoint that is written while "
        "training goes on" + (f"; {inputs}, the blocks' inputs" if t.offload_activations else ""),
        "here": _here(machine, gpt, recipe),
        **({"context": _context(recipe, gpt)} if t.context_parallel > 1 else {}),
    }


class Estimate(NamedTuple):
    """tokens_per_second: of all devices together; basis: how it was found. sending: the share of a step
    that a device waits for what others send of their pieces. memory: bytes of a device."""

    tokens_per_second: float
    basis: str
    sending: float
    memory: int


def estimate(recipe: Recipe, machine: Machine, gpt: GPT) -> Estimate:
    """What `recipe` does on `machine`, at the stated MFU, before anything of it is built."""
    flops_per_second, basis = _speed(machine)
    computes, waits = _micro_batch_seconds(
        recipe, gpt, recipe.train.context_parallel, flops_per_second / machine.world_size
    )
    tokens = recipe.train.micro_batch_size * recipe.data.seq_len * recipe.data_parallel(machine.world_size)
    memory = memory_here(machine, gpt, recipe)["total"]
    return Estimate(tokens / (computes + waits), basis, waits / (computes + waits), memory)


def _micro_batch_seconds(recipe: Recipe, gpt: GPT, n: int, flops_per_second: float) -> tuple[float, float]:
    """Seconds that a device computes for a micro-batch, and that it waits for what others send, if n devices
    hold the pieces of its sequences and each has as many tokens as in `recipe`.

    Waiting counts bandwidth and latency of the collectives, without overlap.
    """
    t = recipe.train
    tokens = recipe.data.seq_len // t.context_parallel
    bandwidth, latency = NVLINK if n <= 8 else NETWORK
    passes = 3 if t.activation_checkpointing else 2
    sent = _sent(recipe, gpt, n) if n > 1 else 0
    waits = passes * ((n - 1) * sent / bandwidth + (n > 1) * gpt.config.n_layer * latency)
    per_token = flops_per_token(gpt, recipe, n * tokens // t.segments)
    return t.micro_batch_size * tokens * per_token / flops_per_second, waits


def _sent(recipe: Recipe, gpt: GPT, n: int) -> int:
    """Bytes that each of n devices sends to each other one that has a piece of its sequences, in a pass."""
    elements = sum(block.attn.sent_elements(recipe.piece_len, n) for block in gpt.blocks)
    return 2 * recipe.train.micro_batch_size * elements


def _context(recipe: Recipe, gpt: GPT) -> str:
    """What context parallelism sends, and the share of a step that it takes on H100s, if each device keeps
    its number of tokens and has only that to wait for."""
    n = recipe.train.context_parallel
    device = next(device for device in DEVICES if device.name == "H100 SXM")
    shares = []
    for devices in sorted({n, 8, 64}):
        computes, waits = _micro_batch_seconds(recipe, gpt, devices, STATED_MFU * device.bf16)
        shares.append(f"{waits / (computes + waits):.1%} over {devices}")
    return (
        f"{counted(n, 'device')} a sequence, {recipe.piece_len:,} tokens each; each sends "
        f"{scaled(_sent(recipe, gpt, n), 'B')} to each of the others in a pass, "
        f"estimated share of a step on H100s: {', '.join(shares)}"
    )


def _pinned(gpt: GPT, recipe: Recipe, precision: str, machine: Machine) -> int:
    """Bytes of pinned memory for weights and moments, in each process that writes checkpoints."""
    all_bytes, muons = (
        pinned_bytes(p.to(torch.bfloat16) if precision == "bf16-true" else p for p in tensors)
        for tensors in (gpt.parameters(), muon_matrices(gpt, recipe.train))
    )
    return (3 * all_bytes - muons) // machine.sharded_over


def _speed(machine: Machine) -> tuple[float, str]:
    """FLOP/s of this machine at the stated MFU, and a text on its basis: a known peak or a measured one."""
    if machine.peak:
        return STATED_MFU * machine.peak * machine.world_size, f"{STATED_MFU:.0%} MFU"
    found = measured_flops(machine.accelerator, machine.precision)
    devices = machine.world_size if machine.accelerator == "cuda" else machine.num_nodes
    reached = scaled(one_digit(found), "FLOP/s")
    basis = f"{STATED_MFU:.0%} of what its matrix products reach ({reached}, measured)"
    return STATED_MFU * found * devices, basis


def _row(
    device: Device, recipe: Recipe, machine: Machine, gpt: GPT, precision: str, need: int, flops: float
) -> str:
    sizes = micro_batch_sizes(recipe, machine.world_size)
    largest = largest_that_fits(device.memory, precision, gpt, recipe, sizes, machine.sharded_over)
    verdict = "fits" if fits(need, device.memory) else "does not fit"
    seconds = flops / (device.peak(precision) * STATED_MFU)
    return (
        f"{device.name:<12} {device.memory / 1e9:>4.0f} GB  {verdict:<17} "
        f"{largest or 'none fits':<20} {duration(seconds):>10} {duration(seconds / 8):>10}"
    )


def _here(machine: Machine, gpt: GPT, recipe: Recipe) -> str:
    if machine.accelerator == "cpu":
        return f"{machine.name}, no GPU"
    fitting = fits_here(machine, gpt, recipe)
    verdict = "fits" if fitting else f"does not fit: {too_small_message(machine, gpt, recipe)}"
    return f"{machine.devices} × {machine.name}, {machine.memory / 1e9:.0f} GB each: {verdict}"


def _sharded(device: Device, gpt: GPT, recipe: Recipe, precision: str, need: int) -> str | None:
    """The smallest number of devices that fit the sharded model, as `4 × A100 40GB`; None if one device fits
    `need` bytes, no number fits, or it cannot be sharded."""
    for devices in () if fits(need, device.memory) or needs_whole_model(recipe) else (2, 4, 8):
        if fits(memory_needed(gpt, recipe, precision, over=devices)["total"], device.memory):
            return f"{devices} × {device.name}"
    return None
