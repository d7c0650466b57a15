"""What a run will run on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.train import TrainConfig
from lingpt.train.planning.machine import choose_machine


def test_the_smallest_card_decides(monkeypatch):
    """Guards: an estimate, and a precision, of the first card alone."""
    cards = [SimpleNamespace(name=n, total_memory=m, major=v) for n, m, v in (("A", 80, 8), ("B", 24, 7))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    both, first = (choose_machine(TrainConfig(accelerator="cuda", devices=n)) for n in ("auto", 1))
    assert (both.memory, both.precision) == (24, "32-true")
    assert (first.memory, first.precision) == (80, "bf16-mixed")
    assert choose_machine(TrainConfig(devices=1, precision="bf16-true")).precision == "bf16-true"
    both = replace(both, num_nodes=3)
    assert [replace(both, strategy=way).sharded_over for way in ("fsdp", "ddp")] == [6, 1]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    for options in ({}, {"devices": 1, "num_nodes": 2}):
        monkeypatch.setenv("NODE_RANK", "0")  # started by hand, as Lightning has it
        with pytest.raises(UserError, match="several GPUs need NCCL"):
            choose_machine(TrainConfig(**options))


def test_a_cpu_has_the_memory_of_the_machine():
    machine = choose_machine(TrainConfig(accelerator="cpu"))
    assert 2**29 < machine.memory < 2**50, "bytes"
    assert (machine.precision, machine.world_size) == ("32-true", 1)
