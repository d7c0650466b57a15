"""What only a GPU shows: compiled blocks in bf16, the clock without the compiling, fused AdamW resumed."""

import time

import pytest
import torch
from safetensors.torch import load_file

from lingpt.common.run_folder import read_metrics
from lingpt.models import ATTENTIONS
from lingpt.train import train


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "precision", "tolerance"),
    [
        *((attention, "bf16-mixed", 0.05) for attention in ATTENTIONS),
        # Weights in bf16, too; and the default dtype is bf16 while the model runs.
        *((attention, "bf16-true", 0.15) for attention in ("ours", "ours-decay")),
    ],
)
def test_trains_compiled_in_bf16_like_eager_in_fp32(make_recipe, attention, precision, tolerance):
    """The losses agree within bf16's rounding, and fall."""
    folders = []
    for name, options in (
        ("low", {"precision": precision, "compile": "always"}),
        ("exact", {"precision": "32-true", "compile": "never"}),
    ):
        recipe = make_recipe(name=name, accelerator="cuda", devices=1, max_steps=20, **options)
        recipe.model.attention = attention
        folders.append(train(recipe))
    low, exact = ([line["loss"] for line in read_metrics(f) if line["kind"] == "train"] for f in folders)
    assert low == pytest.approx(exact, abs=tolerance)
    assert low[-1] < low[0] - 0.5


@pytest.mark.gpu
def test_the_clock_does_not_count_compiling(make_recipe):
    """The first step is no slower than ten of the others."""
    began = time.perf_counter()
    folder = train(make_recipe(accelerator="cuda", devices=1, max_steps=10, compile="always"))
    wall = time.perf_counter() - began
    times = [line["train_time"] for line in read_metrics(folder) if line["kind"] == "train"]
    assert times[0] < 10 * (times[-1] - times[0]) / 9 + 0.1
    assert times[-1] < wall / 2


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_deterministic_run_has_the_same_bits_again(make_recipe, attention):
    """Compiled, in bf16, and resumed in the middle: every loss and every weight, and no operation refuses."""
    recipes = [
        make_recipe(name=name, accelerator="cuda", devices=1, max_steps=6, deterministic=True)
        for name in ("one", "two", "resumed")
    ]
    for recipe in recipes:
        recipe.model.attention = attention
        train(recipe)
    recipes[2].train.resume = str(recipes[2].run_folder / "checkpoints/step-00000003")
    train(recipes[2])
    logged = [
        [(line["loss"], line["grad_norm"]) for line in read_metrics(r.run_folder) if line["kind"] == "train"]
        for r in recipes
    ]
    weights = [load_file(r.run_folder / "checkpoints/step-00000006/model.safetensors") for r in recipes]
    for losses, tensors in zip(logged[1:], weights[1:], strict=True):
        assert losses == logged[0]
        assert all(torch.equal(tensor, weights[0][name]) for name, tensor in tensors.items())


@pytest.mark.gpu
def test_resumes_on_a_gpu(make_recipe):
    """Optimizer states come back to the device, fused AdamW takes them, and the losses go on unbroken."""
    whole = train(make_recipe(name="whole", accelerator="cuda", devices=1, max_steps=6))
    parts = make_recipe(name="parts", accelerator="cuda", devices=1, max_steps=6)
    train(parts)
    parts.train.resume = str(parts.run_folder / "checkpoints/step-00000003")
    train(parts)
    a, b = (
        [line["loss"] for line in read_metrics(f) if line["kind"] == "train"]
        for f in (whole, parts.run_folder)
    )
    assert a == pytest.approx(b, rel=1e-3)
