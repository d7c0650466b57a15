"""What only a GPU shows: compiled blocks in bf16, the clock without the compiling, fused AdamW resumed."""

import time

import pytest

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
