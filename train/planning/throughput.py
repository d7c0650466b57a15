"""Peak FLOP/s of devices, and the share of the peak that a run reaches (MFU).

Peaks are dense (no sparsity), in FLOP/s; bf16 on tensor cores with fp32 accumulation, fp32 on CUDA cores
(PyTorch's default: no TF32). Source: NVIDIA's data sheets and architecture white papers. MFU (model FLOPs
utilisation) as in Chowdhery et al. 2022 ("PaLM", appendix B), of causal attention only the causal half.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import find_model_folder
from lingpt.models import GPT, read_model_config
from lingpt.models.gpt import linear_flops
from lingpt.train.config import Recipe

STATED_MFU = 0.4  # for estimates of how long a run takes
CPU_CORE_FLOPS = 5e10  # a generous estimate of what a core reaches in fp32


@dataclass(frozen=True)
class Device:
    """A kind of accelerator: its peak rates in FLOP/s, its memory in bytes, and the name CUDA gives it."""

    name: str
    pattern: str
    bf16: float
    fp32: float
    memory: float

    def peak(self, precision: str) -> float:
        """FLOP/s at one of Fabric's precisions."""
        return self.fp32 if precision.startswith("32") else self.bf16


_GB = 1e9
DEVICES = (  # the first whose pattern is in the device's name counts, so longer patterns come first
    Device("B200", "B200", 2250e12, 75e12, 180 * _GB),
    Device("H200", "H200", 989e12, 67e12, 141 * _GB),
    Device("H100 NVL", "H100 NVL", 835e12, 60e12, 94 * _GB),
    Device("H100 PCIe", "H100 PCIe", 756e12, 51e12, 80 * _GB),
    Device("H100 SXM", "H100", 989e12, 67e12, 80 * _GB),
    Device("A100 80GB", "A100-SXM4-80GB", 312e12, 19.5e12, 80 * _GB),
    Device("A100 80GB", "A100 80GB", 312e12, 19.5e12, 80 * _GB),
    Device("A100 40GB", "A100", 312e12, 19.5e12, 40 * _GB),
    Device("RTX 6000 Ada", "RTX 6000 Ada", 364e12, 91.1e12, 48 * _GB),
    Device("L40S", "L40S", 362e12, 91.6e12, 48 * _GB),
    Device("L4", "L4", 121e12, 30.3e12, 24 * _GB),
    Device("RTX A6000", "A6000", 154.8e12, 38.7e12, 48 * _GB),
    Device("A10", "A10", 125e12, 31.2e12, 24 * _GB),
    Device("RTX 5090", "RTX 5090", 209.5e12, 104.8e12, 32 * _GB),
    Device("RTX 4090", "RTX 4090", 165.2e12, 82.6e12, 24 * _GB),
    Device("RTX 3090", "RTX 3090", 71e12, 35.6e12, 24 * _GB),
)


def known_device(name: str) -> Device | None:
    """The device with this CUDA name (`torch.cuda.get_device_name()`), or None."""
    words = name.replace("-", " ").split()
    for device in DEVICES:
        pattern = device.pattern.replace("-", " ").split()
        if any(words[i : i + len(pattern)] == pattern for i in range(len(words))):
            return device
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device at one of Fabric's precisions, or None if it is not known."""
    device = known_device(device_name)
    return device.peak(precision) if device else None


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products and attention in one of the supported Fabric precisions."""
    return torch.bfloat16 if precision.startswith("bf16") else torch.float32


def measured_flops(accelerator: str, precision: str) -> float:
    """FLOP/s that matrix products reach on this machine's first device, measured for 0.2 s."""
    dtype = compute_dtype(precision)
    size = 4096 if accelerator == "cuda" else 512
    matrix = torch.ones(size, size, dtype=dtype, device=accelerator)
    out, count, began = matrix @ matrix, 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < 0.2 or not count:
        torch.mm(matrix, matrix, out=out)
        if accelerator == "cuda":
            torch.cuda.synchronize()
        count += 1
    return 2 * size**3 * count / seconds


def run_flops(gpt: GPT, recipe: Recipe) -> float:
    """FLOPs of the whole run."""
    return float(flops_per_token(gpt, recipe)) * recipe.total_steps * recipe.tokens_per_step


def flops_per_token(gpt: GPT, recipe: Recipe, length: int | None = None) -> int:
    """FLOPs per token of a training step: the model's, and the forward pass of the recipe's teacher.

    length: how many tokens a token attends to; by default the sequence's, or a segment's.
    """
    length, t = length or recipe.data.seq_len // recipe.train.segments, recipe.train
    if t.teacher is None:
        return gpt.flops_per_token(length)
    teacher = find_teacher(gpt, t.teacher)
    if t.imitate != "attention":
        return gpt.flops_per_token(length) + teacher.flops_per_token(length) // 3
    # Of the model only its attentions, and of the teacher all but the head.
    attentions = [block.attn for block in gpt.blocks]
    own = sum(linear_flops(attention) + attention.flops_per_token(length) for attention in attentions)
    return 3 * own + teacher.flops_per_token(length) // 3 - 2 * teacher.lm_head.weight.numel()


def find_teacher(gpt: GPT, teacher: str) -> GPT:
    """The model in the folder `teacher`, on the meta device; `gpt` if it is not there, as in a dry run for
    another machine."""
    try:
        return _on_meta(teacher)
    except (UserError, OSError):
        return gpt


@functools.cache  # it is asked for at every size of a micro-batch
def _on_meta(model: str) -> GPT:
    return GPT.on_meta(read_model_config(find_model_folder(Path(model), verify=False)))


def mfu(
    tokens_per_second: float, flops_per_token: float, peak: float | None, n_device: int = 1
) -> float | None:
    """The share of the devices' peak that these FLOPs use, 0 … 1; None if the peak is not known."""
    return tokens_per_second * flops_per_token / (peak * n_device) if peak else None
