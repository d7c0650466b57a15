"""Truncated back-propagation: the forward pass of the whole, gradients within a segment, exact resume."""

import shutil
from dataclasses import replace

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import newest_checkpoint, read_metrics
from lingpt.models import GPT, ModelArgs
from lingpt.train import train
from lingpt.train.loss import NextTokenLoss
from lingpt.train.start import check_recipe
from lingpt.train.step import segment_losses

B, N, K = 2, 96, 4


@pytest.mark.parametrize("recompute", [False, True, "host"])
@pytest.mark.parametrize(
    "form", ["ours", "ours-gated+output_gate+short_conv", "gla+short_conv+value_residual", "unified"]
)
def test_segments_continue_each_other_without_gradient(form, recompute):
    """Against the operators' own chain: each segment from the decoding state of what is before it."""
    gpt = GPT.create(ModelArgs("demo", form, n_layer=2, n_embd=32, n_head=2, vocab_size=64).config(), 0)
    block = torch.randint(64, (B, N + 1), generator=torch.Generator().manual_seed(0))
    loss, n = NextTokenLoss(gpt), N // K
    expected = []
    for i in range(0, N, n):
        state = gpt.new_state(B)
        with torch.no_grad():
            gpt.hidden(block[:, :i], state)
        logits = gpt.lm_head(gpt.hidden(block[:, i : i + n], state))
        targets = block[:, i + 1 : i + 1 + n]
        part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        part.backward()
        expected.append(part.detach())
    gradients = [parameter.grad for parameter in gpt.parameters()]
    gpt.zero_grad()
    gpt.recompute_blocks, gpt.inputs_on_host = bool(recompute), recompute == "host"
    found = []
    for part in segment_losses(loss, gpt, block, K):
        part.backward()
        found.append(part.detach())
    assert gpt.carried is None
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=0)
    for (name, parameter), gradient in zip(gpt.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(sum(found), loss(block), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_run_in_segments_validates_by_position_and_resumes(make_recipe, tmp_path, capsys):
    run = train(make_recipe(name="run", segments=4, save_interval=3))
    lines = read_metrics(run)
    validated = [line for line in lines if line["kind"] == "val"]
    assert [len(line["by_segment"]) for line in validated] == [4, 4]
    assert sum(validated[0]["by_segment"]) / 4 == pytest.approx(validated[0]["loss"])
    again = run.with_name("again")
    shutil.copytree(run, again)
    shutil.rmtree(newest_checkpoint(again))
    train(make_recipe(name="again", segments=4, save_interval=3))
    losses = [[(x["kind"], x["step"], x["loss"]) for x in of] for of in (read_metrics(again), lines)]
    assert losses[0] == losses[1]
    shutil.rmtree(newest_checkpoint(again))
    capsys.readouterr()
    train(make_recipe(name="again", segments=2, save_interval=3))
    assert "train.segments was 4 and is 2: gradients reach back" in capsys.readouterr().out


def test_what_cannot_be_in_segments_is_one_line(make_recipe):
    for options, line in (
        ({"segments": 3}, "train.segments is 3, which does not divide data.seq_len 32"),
        ({"segments": 2, "context_parallel": 2, "devices": 2}, "train.context_parallel needs whole"),
        ({"segments": 2, "teacher": "runs/sm"}, "train.teacher needs whole"),
    ):
        with pytest.raises(UserError, match=line):
            check_recipe(make_recipe(**options))
    recipe = make_recipe(segments=2)
    recipe.model = ModelArgs("demo", "softmax", n_layer=2)
    with pytest.raises(UserError, match="softmax has no state to carry"):
        check_recipe(recipe)
    recipe = make_recipe(segments=2)
    recipe.data = replace(recipe.data, packing="documents")
    with pytest.raises(UserError, match="packed documents begin with empty states"):
        check_recipe(recipe)
