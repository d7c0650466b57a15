"""What only a GPU shows: compiled blocks in bf16, the clock without the compiling, fused AdamW resumed."""

import pytest
import torch
from safetensors.torch import load_file

from lingpt.bench.steps import bench_steps
from lingpt.common.errors import UserError
from lingpt.common.run_folder import read_metrics
from lingpt.models import ALIASES, ATTENTIONS, GPT, Config, ModelArgs
from lingpt.train import TrainConfig, train
from lingpt.train.compilation import compile_blocks
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.loss import NextTokenLoss
from lingpt.train.planning.machine import choose_machine


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "precision", "tolerance"),
    [
        *((attention, "bf16-mixed", 0.05) for attention in [*ATTENTIONS, *ALIASES]),
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
        recipe.model = ModelArgs("demo", attention)
        folders.append(train(recipe))
    low, exact = ([line["loss"] for line in read_metrics(f) if line["kind"] == "train"] for f in folders)
    assert low == pytest.approx(exact, abs=tolerance)
    assert low[-1] < low[0] - 0.5


@pytest.mark.gpu
def test_the_clock_does_not_count_compiling(make_recipe):
    """The first step is no slower than ten of the others."""
    folder = train(make_recipe(accelerator="cuda", devices=1, max_steps=10, compile="always"))
    times = [line["train_time"] for line in read_metrics(folder) if line["kind"] == "train"]
    assert times[0] < 10 * (times[-1] - times[0]) / 9 + 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [*ATTENTIONS, *ALIASES])
def test_a_deterministic_run_has_the_same_bits_again(make_recipe, attention):
    """Compiled, in bf16, and resumed in the middle: every loss and every weight, and no operation refuses."""
    recipes = [
        make_recipe(name=name, accelerator="cuda", devices=1, max_steps=6, deterministic=True)
        for name in ("one", "two", "resumed")
    ]
    for recipe in recipes:
        recipe.model = ModelArgs("demo", attention)
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
@pytest.mark.parametrize("attention", ["softmax", *(f"{alias}+value_residual" for alias in ALIASES)])
def test_compiled_gradients_of_two_micro_batches_are_those_of_eager(attention):
    """Also those that Inductor returns in one buffer, of the biases that a block adds to the same sum."""
    gradients = []
    for compiled in (True, False):
        parallel = Parallel(choose_machine(TrainConfig(accelerator="cuda", devices=1, precision="32-true")))
        gpt = GPT.create(ModelArgs("demo", attention).config(), seed=0, device="cuda")
        if compiled:
            compile_blocks(gpt)
        model = parallel.wrap(NextTokenLoss(gpt))
        torch.manual_seed(0)
        for i in range(2):
            with parallel.accumulate(model, enabled=i == 0):
                parallel.backward(model(torch.randint(2048, (4, 257), device="cuda")), 1024)
        assert len({p.grad.data_ptr() for p in gpt.parameters()}) == len(list(gpt.parameters()))
        gradients.append([p.grad for p in gpt.parameters()])
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-5)


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


@pytest.mark.gpu
@pytest.mark.parametrize("sdpa", ["flash", "cudnn", "efficient"])
def test_softmax_trains_by_the_kernel_that_is_named(sdpa):
    """Compiled, in bf16, with the blocks computed again; fp32, which two of them do not take, is refused."""
    config = Config.from_name("demo", attention="softmax", sdpa=sdpa)
    kernel, cuda = ATTENTIONS["softmax"].kernel_name, torch.device("cuda")
    assert kernel(config, cuda, torch.bfloat16, sdpa=sdpa) == sdpa
    assert kernel(config, cuda, torch.bfloat16, sdpa="auto") in ("flash", "cudnn")
    if sdpa != "efficient":
        with pytest.raises(UserError, match=rf"{sdpa} cannot train on cuda in float32 .* \(Expected query"):
            kernel(config, cuda, torch.float32, sdpa=sdpa)
    model = GPT.create(config, seed=0, device="cuda", dtype=torch.bfloat16)
    model.recompute_blocks = True
    for block in model.blocks:
        block.compile(dynamic=False)
    tokens = torch.randint(2048, (2, 256), device="cuda")
    model(tokens)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(tokens).float().square().mean().backward()
    ran = {event.key for event in profile.key_averages()}
    names = {name: f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn", "efficient")}
    assert {name for name, op in names.items() if op in ran} == {sdpa}
    assert f"{names[sdpa]}_backward" in ran


@pytest.mark.gpu
def test_a_step_of_every_attention_is_timed():
    """By the kernel that is named, with the memory that it takes: of 1.3 M parameters 16 bytes, and more."""
    names = ["identity", "ours", "softmax-flash", "softmax-cudnn"]
    results = bench_steps(["demo"], [256], names, tokens_per_step=2048, accelerator="cuda", rounds=2)
    assert [(row.attention, row.status) for row in results.rows] == [(name, "ok") for name in names]
    assert [row.kernel for row in results.rows[2:]] == ["flash", "cudnn"]
    assert all(row.peak_memory > 20e6 and row.steps > 10 for row in results.rows)
