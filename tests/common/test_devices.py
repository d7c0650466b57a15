"""Guards the device that is named, and the dtype that text is generated in."""

import pytest
import torch

from lingpt.common.devices import decoding_dtype, find_device
from lingpt.common.errors import UserError


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
