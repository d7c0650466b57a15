"""What a run will run on: devices, precision, and whether the machine can carry it at all."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from lingpt.common.errors import UserError
from lingpt.models import GPT, Config, memory_estimate
from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.launch import launched
from lingpt.train.loss import rows_per_chunk
from lingpt.train.throughput import DEVICES, peak_flops

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
STATED_MFU = 0.4  # for estimates of how long a run takes
CPU_CORE_FLOPS = 5e10  # what a core reaches in fp32, generously
_MAX_CPU_DAYS = 7.0


@dataclass(frozen=True)
class Machine:
    """The devices of a run. `peak` is one device's FLOP/s at `precision`, or None where it is not known.

    devices: of one machine. memory: bytes of one device; on a CPU, of the machine, whose processes share it.
    strategy: how they share the model; `single` for one device. gathers_once: under `fsdp`, each device has
    the whole parameters, and sums its own gradient, for as long as a step takes.
    """

    accelerator: str
    devices: int
    num_nodes: int
    precision: Precision
    name: str
    memory: int
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    gathers_once: bool = False

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @property
    def sharded_over(self) -> int:
        """Devices that share one model's parameters."""
        return self.world_size if self.strategy == "fsdp" else 1

    @property
    def peak(self) -> float | None:
        return peak_flops(self.name, self.precision) if self.accelerator == "cuda" else None


def choose_machine(config: TrainConfig) -> Machine:
    """What `config` asks for, on this machine. Raises UserError where it is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerator = ("cuda" if gpus else "cpu") if config.accelerator == "auto" else config.accelerator
    if accelerator == "cuda" and not gpus:
        raise UserError("--train.accelerator cuda, but PyTorch finds no CUDA device: use cpu or auto")
    devices, num_nodes = _processes(config, gpus if accelerator == "cuda" else 1)
    if devices < 1:
        raise UserError(f"--train.devices is {devices}; it must be at least 1")
    if accelerator == "cuda" and devices > gpus:
        raise UserError(_too_few(gpus, devices))
    if accelerator == "cuda" and devices * num_nodes > 1 and not torch.distributed.is_nccl_available():
        raise UserError("several GPUs need NCCL, which this PyTorch was built without: --train.devices 1")
    if accelerator == "cuda":
        cards = [torch.cuda.get_device_properties(index) for index in range(devices)]
        # What the smallest and the oldest of them can do.
        name, memory = cards[0].name, min(card.total_memory for card in cards)
        bf16 = all(card.major >= 8 for card in cards)
    else:
        name, bf16 = f"CPU ({os.cpu_count()} cores)", False
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = ("bf16-mixed" if bf16 else "32-true") if config.precision == "auto" else config.precision
    for precision in PRECISIONS:
        if precision == wanted:
            return Machine(accelerator, devices, num_nodes, precision, name, memory)
    raise UserError(f"unknown precision {wanted!r}: use auto, {', '.join(PRECISIONS)}")


def _too_few(gpus: int, devices: int) -> str:
    if launcher := launched():
        return (
            f"{launcher.by} has started {devices} processes on this machine, and each sees {gpus} GPU(s): "
            "start one a GPU, each of which sees all of them (torchrun --nproc_per_node; SLURM "
            "--ntasks-per-node and --gpus-per-node)"
        )
    return f"{devices} devices are asked for, but this machine has {gpus} GPU(s): lower --train.devices"


def _processes(config: TrainConfig, there: int) -> tuple[int, int]:
    """Processes on each machine, and machines: as the recipe says, or as a launcher has started them.

    there: devices of this machine. Raises UserError where recipe and launcher disagree.
    """
    launcher = launched()
    if launcher is None:
        if config.num_nodes not in (1, "auto") and "NODE_RANK" not in os.environ:
            raise UserError(
                f"--train.num_nodes {config.num_nodes}, but nothing has started processes on the others: "
                "start the run with torchrun or srun (docs/many-devices.md)"
            )
        if config.num_nodes == "auto" and int(allotted := os.environ.get("SLURM_NNODES", "1")) > 1:
            raise UserError(
                f"SLURM has given this job {allotted} machines, but nothing has started processes on them: "
                "start the run with srun (docs/many-devices.md), or use this one alone: --train.num_nodes 1"
            )
        nodes = 1 if config.num_nodes == "auto" else config.num_nodes
        return (there if config.devices == "auto" else config.devices), nodes
    devices = launcher.here if config.devices == "auto" else config.devices
    nodes = launcher.machines if config.num_nodes == "auto" else config.num_nodes
    started = {"devices": launcher.here, "num_nodes": launcher.machines}
    asked = {"devices": devices, "num_nodes": nodes}
    if ways := [f"--train.{name} auto" for name in asked if asked[name] != started[name]]:
        here, machines = counted(launcher.here, "process", "es"), counted(launcher.machines, "machine")
        raise UserError(
            f"{launcher.by} has started {here} a machine on {machines}, but the recipe asks for "
            f"{counted(devices, 'device')} on {nodes}: {' '.join(ways)} takes what has been started, or "
            "start as many as the recipe says"
        )
    return devices, nodes


def counted(number: int, what: str, ending: str = "s") -> str:
    """`1 device`, `2 devices`."""
    return f"{number} {what}{'' if number == 1 else ending}"


def choose_strategy(machine: Machine, config: Config, recipe: Recipe) -> tuple[Machine, str | None]:
    """`machine` with the strategy that the recipe asks for, or that its memory asks for, and why it is that.

    None for the reason where there was no choice.
    """
    wanted, n = recipe.train.strategy, machine.world_size
    if n == 1:
        alone = "strategy: one device has nobody to share with: it trains as it is"
        return machine, alone if wanted != "auto" else None
    if wanted == "ddp":
        return _with_ddp(machine, recipe), None
    # Processes on a CPU share its memory.
    room = machine.memory / (machine.devices if machine.accelerator == "cpu" else 1)
    why = None
    if wanted == "auto":
        ddp, fsdp = (memory_needed(config, recipe, machine.precision, over=over)["total"] for over in (1, n))
        has = f"of {room / 1e9:.0f} GB"
        if fits(ddp, room):
            why = f"strategy: DDP, for the whole model fits each device (about {scaled(ddp, 'B')} {has})"
            return _with_ddp(machine, recipe), why
        why = (
            f"strategy: FSDP over {n} devices, for the whole model needs about {scaled(ddp, 'B')} {has} "
            f"each, and a part {scaled(fsdp, 'B')}"
        )
    # Where there is room, the devices communicate once a step; but FSDP2 would then sum the gradients of the
    # micro-batches in bf16, too, where those of the devices are.
    once = memory_needed(config, recipe, machine.precision, over=n, gathers_once=True)["total"]
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


def memory_needed(
    config: Config,
    recipe: Recipe,
    precision: str,
    micro_batch_size: int | None = None,
    over: int = 1,
    gathers_once: bool = False,
) -> dict[str, int]:
    """Bytes a device needs at the peak of a step, by what they hold, and their `total`.

    over: devices that the model is sharded over. gathers_once: as `Machine` says.
    """
    size = micro_batch_size or recipe.train.micro_batch_size
    return memory_estimate(
        config,
        size,
        recipe.data.seq_len,
        precision,
        loss_chunk_tokens=rows_per_chunk(config.padded_vocab_size, config.n_embd),
        sharded_over=over,
        activation_checkpointing=recipe.train.activation_checkpointing,
        accumulates=recipe.train.global_batch_size > size,
        gathers_once=gathers_once,
    )


def memory_here(
    machine: Machine, config: Config, recipe: Recipe, precision: str | None = None
) -> dict[str, int]:
    """`memory_needed` of each device of `machine`, as it will train; at another `precision` where given."""
    return memory_needed(
        config,
        recipe,
        precision or machine.precision,
        over=machine.sharded_over,
        gathers_once=machine.gathers_once,
    )


def fits(need: float, memory: float) -> bool:
    """Whether an estimate of `need` bytes is safe in `memory`, with CUDA's context and fragments on top."""
    return need * 1.08 + 1e9 <= memory


def fits_here(machine: Machine, config: Config, recipe: Recipe) -> bool:
    """Whether the estimate of what each device needs is safe in what it has."""
    return fits(memory_here(machine, config, recipe)["total"], machine.memory)


def run_flops(config: Config, recipe: Recipe) -> float:
    """FLOPs of the whole run, from the model's own declaration."""
    with torch.device("meta"):
        per_token = GPT(config).flops_per_token(recipe.data.seq_len)
    return float(per_token) * recipe.total_steps * recipe.tokens_per_step


def check_machine(machine: Machine, config: Config, recipe: Recipe) -> None:
    """Refuses a model that this machine without a GPU cannot train in a week; `accelerator: cpu` insists."""
    if machine.accelerator != "cpu":
        return
    need = memory_here(machine, config, recipe)["total"] * machine.devices
    flops = run_flops(config, recipe)
    days = flops / (CPU_CORE_FLOPS * (os.cpu_count() or 1)) / 86400
    too_large, too_long = need > machine.memory, days > _MAX_CPU_DAYS and recipe.train.accelerator == "auto"
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
    empty: Any = torch.utils.deterministic
    fill = empty.fill_uninitialized_memory
    # cuBLAS reads it when it starts; the processes that are launched later inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        # Nothing here reads memory that it has not written: filling every new tensor would only cost time.
        empty.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        empty.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags


@contextlib.contextmanager
def out_of_memory(machine: Machine, config: Config, recipe: Recipe) -> Iterator[None]:
    """Turns a GPU's running out of memory into a UserError that says what was needed and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of memory: {too_small(machine, config, recipe)}") from error


def too_small(machine: Machine, config: Config, recipe: Recipe) -> str:
    """What `recipe` needs of a device by the estimate, what the device has, and what would fit."""
    need = memory_here(machine, config, recipe)["total"]
    others = " (does something else use it?)" if fits(need, machine.memory) else ""
    return (
        f"micro-batches of {recipe.train.micro_batch_size} need about {scaled(need, 'B')} by the estimate, "
        f"and {machine.name} has {machine.memory / 1e9:.0f} GB{others}: "
        f"try {what_fits(machine, config, recipe)}"
    )


def what_fits(machine: Machine, config: Config, recipe: Recipe) -> str:
    """The options that make `recipe` fit `machine`'s devices, by the estimate.

    A smaller micro-batch; or blocks that are computed again, with the largest that then fits; or shards on
    these devices, where each has the whole model; or more devices.
    """
    t, over, once = recipe.train, machine.sharded_over, machine.gathers_once
    sizes = [size for size in micro_batch_sizes(recipe, machine.world_size) if size <= t.micro_batch_size]
    recomputing = replace(recipe, train=replace(t, activation_checkpointing=True))
    ways = [("", recipe, [size for size in sizes if size < t.micro_batch_size])]
    if not t.activation_checkpointing:
        ways.append((" --train.activation_checkpointing true", recomputing, sizes))
    for option, changed, possible in ways:
        if size := largest_that_fits(
            machine.memory, machine.precision, config, changed, possible, over, once
        ):
            need = memory_needed(config, changed, machine.precision, size, over, once)["total"]
            return f"--train.micro_batch_size {size}{option} (about {scaled(need, 'B')})"
    here = machine.world_size
    for devices in sorted({here, 2, 4, 8, 16, 32, 64}):
        need = memory_needed(config, recomputing, machine.precision, 1, devices)["total"]
        if devices >= here and devices > over and fits(need, machine.memory):
            more = f"{devices} such devices with " if devices > here else ""
            return (
                f"{more}--train.strategy fsdp --train.micro_batch_size 1 "
                f"--train.activation_checkpointing true (about {scaled(need, 'B')} each)"
            )
    return "shorter sequences (--data.seq_len), or a smaller model"


def micro_batch_sizes(recipe: Recipe, world_size: int) -> list[int]:
    """Those that divide a device's share of the batch, ascending."""
    share = recipe.train.global_batch_size // world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def largest_that_fits(
    memory: float,
    precision: str,
    config: Config,
    recipe: Recipe,
    sizes: Sequence[int],
    over: int = 1,
    gathers_once: bool = False,
) -> int:
    """The largest of the ascending micro-batch `sizes` that fits `memory` bytes by the estimate, or 0."""
    for size in reversed(sizes):
        if fits(memory_needed(config, recipe, precision, size, over, gathers_once)["total"], memory):
            return size
    return 0


def duration(seconds: float) -> str:
    """`45 s`, `3.2 min`, `5.1 h`, `12 days`, `3.4 years`."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def scaled(value: float, unit: str, billion: str = "G") -> str:
    """Three digits of it: `47.4 MB`, `142 GB`; of ` tokens`, with B for a billion, `3 B tokens`."""
    prefixes = {1e12: "T", 1e9: billion, 1e6: "M", 1e3: "k"}
    size = next((size for size in prefixes if value >= 0.9995 * size), 1)
    return " ".join(f"{value / size:.3g} {prefixes.get(size, '')}{unit}".split())
