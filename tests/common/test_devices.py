"""Guards the device that is named, and the dtype that text is generated in."""

import os

import pytest
import torch

from lingpt.common.devices import available_cores, decoding_dtype, device_name, find_device
from lingpt.common.errors import UserError


@pytest.mark.parametrize(("there", "kind", "shown"), [(True, "cuda", "some GPU"), (False, "cpu", "cpu")])
def test_the_first_gpu_is_taken_where_there_is_one(monkeypatch, there, kind, shown):
    """And results have its name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    device = find_device("auto")
    assert device == torch.device(kind) and device_name(device) == shown


def test_only_the_cores_that_this_process_may_use_count(monkeypatch):
    """Guards: a thread for each core of the machine where SLURM gave two of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert available_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # only Linux has it
    for found, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda found=found: found)
        assert available_cores() == expected


def test_a_cpu_has_no_number():
    """Guards: `cpu:1`, with which a model folder was called damaged."""
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="device 'cpu:1': the CPU has no number; use --device cpu"):
        find_device("cpu:1")


@pytest.mark.parametrize("name", ["hpu", "meta", "gpu"])
def test_a_device_that_is_not_here(name):
    """Guards: of `hpu` PyTorch raises a ModuleNotFoundError, which was a traceback."""
    with pytest.raises(UserError, match=f"device '{name}': .*; use --device auto"):
        find_device(name)


def test_a_gpu_that_has_bf16_generates_in_it(monkeypatch):
    """Guards: checkpoints of mixed training, which are in fp32, decoded without the kernels for 16 bits."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, expected in (((9, 0), torch.bfloat16), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert decoding_dtype(None, gpu) is expected
    assert decoding_dtype(None, cpu) is None, "the checkpoint's own"
    assert decoding_dtype("float32", gpu) is torch.float32
    with pytest.raises(UserError, match=r"unknown dtype 'bf16' \(did you mean 'bfloat16'\?\)"):
        decoding_dtype("bf16", gpu)
