"""`DRY=1`: what a run would be, before anything is built, downloaded or allocated."""

from lingpt.data import cache_size
from lingpt.models import GPT, Config
from lingpt.train.config import Recipe
from lingpt.train.machine import STATED_MFU, Machine, duration, fits, memory_needed, run_flops
from lingpt.train.throughput import DEVICES, Device, mfu

SHOWN = ("RTX A6000", "A100 40GB", "A100 80GB", "H100 SXM", "H200")


def format_plan(recipe: Recipe, machine: Machine, config: Config) -> str:
    """The plan as text: parameters, FLOPs, memory, tokens, steps, disk, and how long on known devices."""
    import torch

    with torch.device("meta"):
        gpt = GPT(config)
    t, n = recipe.train, gpt.num_parameters()
    precision = (
        machine.precision
        if machine.accelerator == "cuda"
        else "bf16-mixed"
        if t.precision == "auto"
        else t.precision
    )
    tokens = recipe.total_steps * recipe.tokens_per_step
    flops = run_flops(config, recipe)
    need = memory_needed(config, recipe, precision)
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in need.items() if name != "total")
    weights = 2 if precision == "bf16-true" else 4
    one = n * weights * 3
    cache = cache_size(recipe.data.source, config.padded_vocab_size)
    accumulated = t.global_batch_size // (t.micro_batch_size * machine.world_size)
    lines = [
        f"{recipe.run_name}: {recipe.model.name} with {recipe.attention}; nothing is trained, this is a "
        f"dry run",
        "",
        f"model      {n:,} parameters; {gpt.flops_per_token(recipe.data.seq_len) / 1e9:.3g} GFLOP per token "
        "(forward and backward)",
        f"data       {recipe.data.source}, sequences of {recipe.data.seq_len:,} tokens, tokenizer "
        f"{recipe.data.tokenizer or 'of the embedded corpus'}",
        f"batch      {t.global_batch_size} sequences = {recipe.tokens_per_step:,} tokens a step: "
        f"{machine.world_size} "
        f"device{'s' if machine.world_size > 1 else ''} × micro-batch {t.micro_batch_size} × {accumulated} "
        f"accumulated",
        f"run        {recipe.total_steps:,} steps, {tokens / 1e9:.3g} B tokens, {flops:.3g} FLOP",
        f"memory     {need['total'] / 1e9:.1f} GB a device at micro-batch {t.micro_batch_size}, "
        f"{precision}, estimated "
        f"(GB: {parts})",
        f"disk       {one / 1e9:.2g} GB a checkpoint, {one * (t.keep_checkpoints + 1) / 1e9:.2g} GB at most "
        f"while saving (keep {t.keep_checkpoints}); token cache {cache}",
        f"here       {_here(machine, need['total'])}",
        "",
        f"{'device':<12} {'memory':>7}  {'at micro-batch ' + str(t.micro_batch_size):<17} "
        f"{'largest micro-batch':<20} "
        f"{'1 device':>10} {'8 devices':>10}   at {STATED_MFU:.0%} MFU",
    ]
    lines += [
        _row(device, recipe, machine.world_size, config, precision, need["total"], flops)
        for device in _shown()
    ]
    if rate := tokens_per_second(STATED_MFU, flops / tokens, machine):
        lines += ["", f"here: {rate / 1e3:.1f} k tokens/s at {STATED_MFU:.0%} MFU, {duration(tokens / rate)}"]
    return "\n".join(lines)


def tokens_per_second(used: float, flops_per_token: float, machine: Machine) -> float | None:
    """Tokens/s of this machine at an MFU of `used`, or None where its peak is not known."""
    full = mfu(1.0, flops_per_token, machine.peak, machine.world_size)
    return used / full if full else None


def _shown() -> list[Device]:
    return [next(d for d in DEVICES if d.name == name) for name in SHOWN]


def _row(
    device: Device, recipe: Recipe, world_size: int, config: Config, precision: str, need: int, flops: float
) -> str:
    t = recipe.train
    share = t.global_batch_size // world_size
    sizes = [m for m in range(1, share + 1) if share % m == 0]
    largest = 0
    for size in sizes:
        if not fits(memory_needed(config, recipe, precision, size)["total"], device.memory):
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
