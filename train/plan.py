"""`DRY=1`: what a run would be, before anything is built, downloaded or allocated."""

import os

import torch

from lingpt.data import availability, cache_size
from lingpt.models import GPT, Config
from lingpt.train.config import Recipe
from lingpt.train.machine import CPU_CORE_FLOPS, STATED_MFU, Machine, duration, fits, memory_needed, run_flops
from lingpt.train.throughput import DEVICES, Device, mfu

SHOWN = ("RTX A6000", "A100 40GB", "A100 80GB", "H100 SXM", "H200")


def format_plan(recipe: Recipe, machine: Machine, config: Config) -> str:
    """The plan as text: parameters, FLOPs, memory, tokens, steps, disk, and how long on known devices."""
    with torch.device("meta"):
        gpt = GPT(config)
    t, data, world_size = recipe.train, recipe.data, machine.world_size
    on_gpu = "bf16-mixed" if t.precision == "auto" else t.precision
    precision = machine.precision if machine.accelerator == "cuda" else on_gpu
    tokens = recipe.total_steps * recipe.tokens_per_step
    flops = run_flops(config, recipe)
    need = memory_needed(config, recipe, precision, over=machine.sharded_over)
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in need.items() if name != "total")
    checkpoint = gpt.num_parameters() * (2 if precision == "bf16-true" else 4) * 3  # AdamW has two moments
    most = checkpoint * (t.keep_checkpoints + t.keep_best + 1)
    accumulated = t.global_batch_size // (t.micro_batch_size * world_size)
    about = {
        "model": f"{gpt.num_parameters():,} parameters; {gpt.flops_per_token(data.seq_len) / 1e9:.3g} GFLOP "
        "per token (forward and backward)",
        "data": f"{data.source}, sequences of {data.seq_len:,} tokens, tokenizer "
        f"{data.tokenizer or 'of the embedded corpus'}; {availability(data)}",
        "batch": f"{t.global_batch_size} sequences = {recipe.tokens_per_step:,} tokens a step: {world_size} "
        f"device{'s' if world_size > 1 else ''} × micro-batch {t.micro_batch_size} × {accumulated} "
        "accumulated",
        "run": f"{recipe.total_steps:,} steps, {tokens / 1e9:.3g} B tokens, {flops:.3g} FLOP",
        "memory": f"{need['total'] / 1e9:.1f} GB a device at micro-batch {t.micro_batch_size}, {precision}, "
        f"estimated (GB: {parts})",
        "disk": f"{checkpoint / 1e9:.2g} GB a checkpoint, {most / 1e9:.2g} GB at most while saving (keep "
        f"{t.keep_checkpoints}); token cache {cache_size(data.source, config.padded_vocab_size)}",
        "here": _here(machine, need["total"]),
    }
    micro_batch = f"at micro-batch {t.micro_batch_size}"
    shown = [next(device for device in DEVICES if device.name == name) for name in SHOWN]
    lines = [
        f"{recipe.run_name}: {recipe.model.name} with {recipe.attention_label}; nothing is trained, this is "
        "a dry run",
        "",
        *(f"{name:<10} {text}" for name, text in about.items()),
        "",
        f"{'device':<12} {'memory':>7}  {micro_batch:<17} {'largest micro-batch':<20} {'1 device':>10} "
        f"{'8 devices':>10}   at {STATED_MFU:.0%} MFU",
        *(_row(device, recipe, machine, config, precision, need["total"], flops) for device in shown),
    ]
    if rate := tokens_per_second(STATED_MFU, flops / tokens, machine):
        lines += ["", f"here: {rate / 1e3:.1f} k tokens/s at {STATED_MFU:.0%} MFU, {duration(tokens / rate)}"]
    elif machine.accelerator == "cpu":
        cores = (os.cpu_count() or 1) * machine.num_nodes
        rate = CPU_CORE_FLOPS * cores / (flops / tokens)
        speed = f"{CPU_CORE_FLOPS / 1e9:.0f} GFLOP/s a core"
        lines += ["", f"here: about {rate / 1e3:.3g} k tokens/s at {speed}, {duration(tokens / rate)}"]
    return "\n".join(lines)


def tokens_per_second(used: float, flops_per_token: float, machine: Machine) -> float | None:
    """Tokens/s of this machine at an MFU of `used`, or None where its peak is not known."""
    full = mfu(1.0, flops_per_token, machine.peak, machine.world_size)
    return used / full if full else None


def _row(
    device: Device, recipe: Recipe, machine: Machine, config: Config, precision: str, need: int, flops: float
) -> str:
    t, over = recipe.train, machine.sharded_over
    share = t.global_batch_size // machine.world_size
    sizes = [m for m in range(1, share + 1) if share % m == 0]
    largest = 0
    for size in sizes:
        if not fits(memory_needed(config, recipe, precision, size, over)["total"], device.memory):
            break
        largest = size
    peak = device.fp32 if precision.startswith("32") else device.bf16
    seconds = flops / (peak * STATED_MFU)
    return (
        f"{device.name:<12} {device.memory / 1e9:>4.0f} GB  {_verdict(need, device.memory):<17} "
        f"{largest or 'none fits':<20} {duration(seconds):>10} {duration(seconds / 8):>10}"
    )


def _here(machine: Machine, need: int) -> str:
    if machine.accelerator == "cpu":
        return f"{machine.name}, no GPU"
    verdict = _verdict(need, machine.memory)
    return f"{machine.devices} × {machine.name}, {machine.memory / 1e9:.0f} GB each: {verdict}"


def _verdict(need: float, memory: float) -> str:
    return "fits" if fits(need, memory) else "does not fit"
