"""Chooses what a run runs on: devices and precision."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from lingpt.common.devices import available_cores
from lingpt.common.errors import UserError
from lingpt.common.format import counted
from lingpt.train.config import TrainConfig
from lingpt.train.distributed.launch import launched
from lingpt.train.planning.throughput import peak_flops

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]


@dataclass(frozen=True)
class Machine:
    """The devices of a run. `peak` is one device's FLOP/s at `precision`, or None if it is not known.

    devices: number per machine. memory: bytes of one device; on a CPU, of the machine, whose processes share
    it. strategy: how devices share the model; `single` for one device. gathers_once: with `fsdp`, each device
    keeps the parameters, and accumulates its own gradient, unsharded during a step.
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
        """The number of devices that share one model's parameters."""
        return self.world_size if self.strategy == "fsdp" else 1

    @property
    def peak(self) -> float | None:
        return peak_flops(self.name, self.precision) if self.accelerator == "cuda" else None


def choose_machine(config: TrainConfig) -> Machine:
    """The devices and precision of `config` on this machine. Raises UserError if they are not available."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerator = ("cuda" if gpus else "cpu") if config.accelerator == "auto" else config.accelerator
    if accelerator == "cuda" and not gpus:
        raise UserError("accelerator cuda, but PyTorch finds no CUDA device: use cpu or auto")
    devices, num_nodes = _processes(config, gpus if accelerator == "cuda" else 1)
    if devices < 1:
        raise UserError(f"--train.devices is {devices}; it must be at least 1")
    if accelerator == "cuda":
        if devices > gpus:
            raise UserError(_too_few_message(gpus, devices))
        if devices * num_nodes > 1 and not torch.distributed.is_nccl_available():
            raise UserError("several GPUs need NCCL, which this PyTorch was built without: --train.devices 1")
        cards = [torch.cuda.get_device_properties(index) for index in range(devices)]
        # Limited by the smallest and the oldest of the cards.
        name, memory = cards[0].name, min(card.total_memory for card in cards)
        bf16 = all(card.major >= 8 for card in cards)
    else:
        name, bf16 = f"CPU ({available_cores()} cores)", False
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    best: Precision = "bf16-mixed" if bf16 else "32-true"
    precision = best if config.precision == "auto" else config.precision
    return Machine(accelerator, devices, num_nodes, precision, name, memory)


def _too_few_message(gpus: int, devices: int) -> str:
    if launcher := launched():
        return (
            f"{launcher.by} has started {devices} processes on this machine, and each sees {gpus} GPU(s): "
            "start one a GPU, each of which sees all of them (torchrun --nproc_per_node; SLURM "
            "--ntasks-per-node and --gpus-per-node)"
        )
    return f"{devices} devices are asked for, but this machine has {gpus} GPU(s): lower --train.devices"


def _processes(config: TrainConfig, there: int) -> tuple[int, int]:
    """(processes per machine, machines): from the recipe, or as a launcher has started them.

    there: number of devices of this machine. Raises UserError if recipe and launcher disagree.
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
