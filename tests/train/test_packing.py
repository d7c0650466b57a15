"""Training on packed documents: each counts as if it were alone, and a resumed run has the same ones."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

from lingpt.common.errors import UserError
from lingpt.common.run_folder import read_metrics
from lingpt.data import Batch, prepare
from lingpt.models import GPT, ModelArgs
from lingpt.train import train
from lingpt.train.compilation import compile_blocks
from lingpt.train.runs.replay import replay
from lingpt.train.signals import Stop
from lingpt.train.validation import validate

from .conftest import start

HYBRID = "ours-gated+output_gate+short_conv+softmax_every=2"


@pytest.fixture
def make_packed(make_recipe):
    def make(attention: str = "ours-gated", **overrides):
        recipe = make_recipe(**overrides)
        model = ModelArgs(name="demo", attention=attention, n_layer=2)
        return replace(recipe, model=model, data=replace(recipe.data, packing="documents"))

    return make


def one_by_one(gpt: GPT, batch: Batch) -> tuple[torch.Tensor, int]:
    """The loss summed over the documents of a batch, each by itself; and the number of their targets."""
    idx, targets, total, count = batch.idx.flatten(), batch.targets.flatten(), torch.zeros(()), 0
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        if b > a and targets[a] != -100:
            assert (targets[a:b] != -100).all()
            total = total + F.cross_entropy(gpt(idx[None, a:b])[0], targets[a:b], reduction="sum")
            count += b - a
    return total, count


def test_a_step_is_that_of_the_documents_one_by_one(make_packed):
    """Loss, gradient and validation, with accumulation and activation checkpointing."""
    recipe = make_packed(HYBRID, micro_batch_size=2, activation_checkpointing=True, grad_clip=1e9)
    recipe.data = replace(recipe.data, seq_len=64)  # in 32 no row has two documents
    run = start(recipe)
    val = run.dataset.val
    run.optimizer.step = lambda: None
    line = run.step(Stop())
    gradients = {name: p.grad.clone() for name, p in run.gpt.named_parameters()}
    run.gpt.zero_grad()
    total, count = one_by_one(run.gpt, run.batches.get(0, range(8)))
    (total / count).backward()
    assert line["loss"] == pytest.approx(total.item() / count, rel=1e-5)
    for name, p in run.gpt.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        blocks = recipe.validation_blocks(len(val))
        total, count = one_by_one(run.gpt, val.gather(range(blocks)))
    loss, _ = validate(run, val, Stop())
    assert loss == pytest.approx(total.item() / count, rel=1e-5)


@pytest.mark.slow
def test_resume_is_bitwise_equal_and_a_step_can_be_replayed(make_packed):
    folder = train(make_packed())
    weights = folder / "checkpoints/step-00000006"
    whole, lines = load_file(weights / "model.safetensors"), read_metrics(folder)
    shutil.rmtree(weights)
    assert train(make_packed()) == folder
    for name, tensor in load_file(weights / "model.safetensors").items():
        assert torch.equal(tensor, whole[name]), name
    losses = [[(line["step"], line.get("loss")) for line in found] for found in (lines, read_metrics(folder))]
    assert losses[0] == losses[1]
    logged = next(line["loss"] for line in lines if line["kind"] == "train" and line["step"] == 4)
    assert f"loss {logged:.4f} nats/token" in replay(folder, 4, device="cpu")


def test_other_borders_compile_nothing_anew(make_packed):
    """Guards: a recompilation of the blocks for each number of documents."""
    recipe = make_packed(HYBRID)
    dataset, counter = prepare(recipe.data, progress=False), CompileCounter()
    gpt = GPT.create(recipe.model.config(), seed=0)
    compile_blocks(gpt, backend=counter)
    counts, documents = [], set()
    for row in range(5):
        batch = dataset.train.gather([row])
        gpt.hidden(batch.idx, cu_seqlens=batch.cu_seqlens).sum().backward()
        counts.append(counter.frame_count)
        documents.add(batch.cu_seqlens.unique().numel())
    assert len(set(counts)) == 1 and len(documents) > 1


def test_a_validation_of_prompts_alone_is_told_before_training(make_packed, tmp_path):
    """Guards: a division by zero at the first validation, which may come after hours."""
    recipe = make_packed(eval_tokens=32)
    texts = {key: tmp_path / f"{key}.jsonl" for key in ("source", "val_source")}
    for key, path in texts.items():
        path.write_text(json.dumps({"prompt": "a " * 99, "completion": key}))
    recipe.data = replace(recipe.data, **{key: str(path) for key, path in texts.items()}, rows="answers")
    with pytest.raises(UserError, match=r"the validation has no answer .* raise --train\.eval_tokens"):
        train(recipe)
    assert not recipe.run_folder.exists()


def test_what_cannot_be_packed_is_refused_before_any_work(make_recipe):
    """Guards: a dry run that promises what training refuses."""
    recipe = make_recipe(dry_run=True)
    recipe.data = replace(recipe.data, rows="answers")
    with pytest.raises(UserError, match="answers are packed whole: add --data"):
        train(recipe)
