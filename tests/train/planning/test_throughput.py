"""MFU is the model's FLOPs over the peak of the right device, or nothing at all."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lingpt.models import GPT, ModelArgs, save_model
from lingpt.train import Recipe, TrainConfig
from lingpt.train.distillation import training_loss
from lingpt.train.planning import throughput
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.plan import estimate
from lingpt.train.planning.throughput import STATED_MFU, flops_per_token, known_device, mfu, peak_flops


@pytest.mark.parametrize(
    ("cuda_name", "name", "bf16"),
    [
        ("NVIDIA H200", "H200", 989e12),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", "H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", "A100 80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312e12),
        ("NVIDIA RTX A6000", "RTX A6000", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 364e12),
        ("NVIDIA L40S", "L40S", 362e12),
        ("NVIDIA L4", "L4", 121e12),
        ("NVIDIA A10", "A10", 125e12),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2e12),
    ],
)
def test_devices_by_their_cuda_names(cuda_name, name, bf16):
    """`A10` must not answer for an A100, nor `L4` for an L40S."""
    assert known_device(cuda_name).name == name
    assert peak_flops(cuda_name, "bf16-mixed") == peak_flops(cuda_name, "bf16-true") == bf16
    assert 0 < peak_flops(cuda_name, "32-true") < bf16


def test_unknown_devices_have_no_peak_and_no_mfu():
    """A wrong number is worse than none."""
    assert peak_flops("CPU (2 cores)", "32-true") is None
    assert peak_flops("Quadro Something", "bf16-mixed") is None
    assert mfu(1e5, 8e9, None) is None


def test_what_products_reach_is_measured_in_operations(monkeypatch):
    """A multiplication and an addition each; two products in a quarter of a second of this clock."""
    clock = iter((0.0, 0.1, 0.15, 0.25))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    assert throughput.measured_flops("cpu", "32-true") == 2 * 512**3 * 2 / 0.25
    dtypes = [throughput.compute_dtype(precision) for precision in ("32-true", "bf16-mixed", "bf16-true")]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_mfu_counts_all_devices():
    assert mfu(100_000, 4e9, 1e15) == pytest.approx(0.4)
    assert mfu(100_000, 4e9, 1e15, n_device=8) == pytest.approx(0.05)


@pytest.mark.parametrize("imitate", ["logits", "attention"])
def test_a_teachers_forward_pass_is_counted(tmp_path, imitate):
    """As PyTorch counts what runs; the plan's rate is by it. Guards: a quarter less for a student than it
    takes. Of attention transfer the input's gradient, which is not needed, is counted."""
    recipe = Recipe(ModelArgs("demo", "gla"), train=TrainConfig(teacher=str(tmp_path), imitate=imitate))
    recipe.train.max_steps, recipe.data.seq_len = 1, 64
    gpt, teacher = (GPT.create(ModelArgs("demo", name).config(), 0) for name in ("gla", "ours"))
    save_model(teacher, tmp_path)
    batch = torch.zeros(2, 65, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        training_loss(recipe, gpt, compiled=False)(batch).backward()
    counted = counter.get_total_flops() / 128
    declared = flops_per_token(gpt, recipe)
    assert declared == counted if imitate == "logits" else counted < declared < 1.15 * counted
    machine = Machine("cuda", 1, 1, "bf16-mixed", "NVIDIA H100", 85 * 10**9)
    rate = estimate(recipe, machine, gpt).tokens_per_second
    assert rate == pytest.approx(STATED_MFU * machine.peak / declared)
