"""What a run will run on."""

from types import SimpleNamespace

import torch

from lingpt.train import TrainConfig
from lingpt.train.planning.machine import choose_machine


def test_the_smallest_card_decides(monkeypatch):
    """Guards: an estimate, and a precision, of the first card alone."""
    cards = [SimpleNamespace(name=n, total_memory=m, major=v) for n, m, v in (("A", 80, 9), ("B", 24, 7))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    both, first = (choose_machine(TrainConfig(devices=devices)) for devices in ("auto", 1))
    assert (both.memory, both.precision) == (24, "32-true")
    assert (first.memory, first.precision) == (80, "bf16-mixed")
