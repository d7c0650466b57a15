"""What a run will run on: devices, precision, and whether the machine can carry it at all."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lingpt.common.errors import UserError
from lingpt.models import GPT, Config, memory_estimate
from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.loss import PIECE_ELEMENTS
from lingpt.train.throughput import DEVICES, peak_flops

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
STATED_MFU = 0.4  # for estimates of how long a run takes
CPU_CORE_FLOPS = 5e10  # what a core reaches in fp32, generously
_PATIENCE_DAYS = 7.0


@dataclass(frozen=True)
class Machine:
    """The devices of a run. `peak` is one device's FLOP/s at `precision`, or None where it is not known."""

    accelerator: str
    devices: int
    num_nodes: int
    precision: Precision
    name: str
    memory: int

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @property
    def peak(self) -> float | None:
        return peak_flops(self.name, self.precision) if self.accelerator == "cuda" else None


def choose_machine(config: TrainConfig) -> Machine:
    """What `config` asks for, on this machine. Raises UserError where it is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerator = ("cuda" if gpus else "cpu") if config.accelerator == "auto" else config.accelerator
    if accelerator == "cuda" and not gpus:
        raise UserError("--train.accelerator cuda, but PyTorch finds no CUDA device: use cpu or auto")
    devices = (gpus if accelerator == "cuda" else 1) if config.devices == "auto" else config.devices
    if devices < 1 or (accelerator == "cuda" and devices > gpus):
        has = f"this machine has {gpus} GPUs" if accelerator == "cuda" else "give at least 1"
        raise UserError(f"--train.devices {devices}, but {has}")
    if accelerator == "cuda":
        card = torch.cuda.get_device_properties(0)
        name, memory, bf16 = card.name, card.total_memory, card.major >= 8
    else:
        name, bf16 = f"CPU ({os.cpu_count()} cores)", False
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = ("bf16-mixed" if bf16 else "32-true") if config.precision == "auto" else config.precision
    for precision in PRECISIONS:
        if precision == wanted:
            return Machine(accelerator, devices, config.num_nodes, precision, name, memory)
    raise UserError(f"unknown precision {wanted!r}: use auto, {', '.join(PRECISIONS)}")


def memory_needed(
    config: Config, recipe: Recipe, precision: str, micro_batch_size: int | None = None
) -> dict[str, int]:
    """Bytes a device needs at the peak of a step, by what they hold, and their `total`."""
    return memory_estimate(
        config,
        micro_batch_size or recipe.train.micro_batch_size,
        recipe.data.seq_len,
        precision,
        loss_chunk_tokens=PIECE_ELEMENTS // config.padded_vocab_size,
    )


def fits(need: float, memory: float) -> bool:
    """Whether an estimate of `need` bytes is safe in `memory`, with CUDA's context and fragments on top."""
    return need * 1.08 + 1e9 <= memory


def run_flops(config: Config, recipe: Recipe) -> float:
    """FLOPs of the whole run, from the model's own declaration."""
    with torch.device("meta"):
        per_token = GPT(config).flops_per_token(recipe.data.seq_len)
    return float(per_token) * recipe.total_steps * recipe.tokens_per_step


def check_machine(machine: Machine, config: Config, recipe: Recipe) -> None:
    """Refuses a model that this machine without a GPU cannot train in a week; `accelerator: cpu` insists."""
    if machine.accelerator != "cpu":
        return
    need = memory_needed(config, recipe, machine.precision)["total"] * machine.devices
    flops = run_flops(config, recipe)
    days = flops / (CPU_CORE_FLOPS * (os.cpu_count() or 1)) / 86400
    too_large, too_long = need > machine.memory, days > _PATIENCE_DAYS and recipe.train.accelerator == "auto"
    if not (too_large or too_long):
        return
    on_gpu = memory_needed(config, recipe, "bf16-mixed", 1)["total"]
    such = "which no card that is known here has"
    if cards := [device for device in DEVICES if fits(on_gpu, device.memory)]:
        card = min(cards, key=lambda device: device.memory)
        time_on_card = duration(flops / (card.bf16 * STATED_MFU))
        such = f"such as {card.name}: about {time_on_card} at {STATED_MFU:.0%} MFU"
    reason = f"about {duration(days * 86400)}"
    if too_large:
        reason = f"{need / 1e9:.0f} GB of memory, and it has {machine.memory / 1e9:.0f}"
    raise UserError(
        f"{recipe.model.name} needs a GPU: this machine has none, and on its {os.cpu_count()} cores the run "
        f"would need {reason}; it needs one with {math.ceil(on_gpu / 1e9)} GB or more ({such}); "
        "`--train.dry_run true` shows the plan, and the recipe `demo` trains here"
    )


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """While inside, and where enabled, PyTorch computes everything in an order that is always the same.

    The same device, processes, micro-batches and versions then give the same bits. Before CUDA starts.
    """
    if not enabled:
        yield
        return
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    # cuBLAS reads it when it starts; the processes that are launched later inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        cudnn.deterministic, cudnn.benchmark = flags


@contextlib.contextmanager
def out_of_memory(micro_batch_size: int) -> Iterator[None]:
    """Turns a GPU's running out of memory into a UserError that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = f"--train.micro_batch_size {micro_batch_size // 2}"
        fix = smaller if micro_batch_size > 1 else "a smaller model or shorter sequences"
        raise UserError(
            f"the GPU's memory is too small for micro-batches of {micro_batch_size}: try {fix}"
        ) from error


def duration(seconds: float) -> str:
    """`45 s`, `3.2 min`, `5.1 h`, `12 days`, `3.4 years`."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
