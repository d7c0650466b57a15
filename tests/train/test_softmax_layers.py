"""A linearised hybrid is softmax where its teacher looks furthest back."""

from pathlib import Path

import pytest
import torch

from lingpt.cli.main import main
from lingpt.common.files import read_yaml
from lingpt.data import Batch
from lingpt.models import GPT, ModelArgs
from lingpt.train import softmax_layers, train
from lingpt.train.softmax_layers import layers_that_need_context, place_softmax_layers


def test_layers_that_use_their_context_are_chosen():
    """Only layers 1 and 4 of this teacher attend at all, 1 the more, and its own predictions are the
    targets."""
    args = ModelArgs(name="demo", attention="softmax", n_layer=6, n_embd=32, n_head=2, vocab_size=60)
    teacher = GPT.create(args.config(), 0, dtype=torch.float64)
    for i, block in enumerate(teacher.blocks):
        block.attn.proj.weight.data *= {1: 20.0, 4: 5.0}.get(i, 0.0)
    teacher.lm_head.weight.data *= 30.0
    idx = torch.randint(60, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch = Batch(idx, teacher(idx).argmax(-1), None)
    assert layers_that_need_context(teacher, [batch], 1) == {1}
    assert layers_that_need_context(teacher, [batch], 2) == {1, 4}
    assert all(block.attn.window is None for block in teacher.blocks)


@pytest.mark.slow
def test_linearize_places_the_layers(make_recipe, monkeypatch, capsys):
    """One in six of six layers: not the middle one, but the teacher's, by so many tokens of the validation
    text; all others are the linear attention. The same command resumes the run, whose layers stay where they
    are, also in a dry run, and a model that is no hybrid stays as it is.

    Guards: a dry run that said the run had another config, as a device of other rounding might have."""
    recipe = make_recipe(max_steps=2)
    recipe.model = ModelArgs(name="demo", attention="softmax", n_layer=6)
    teacher, out = train(recipe), Path(recipe.train.out_dir)
    seen: list[tuple[int, int]] = []

    def place(teacher, batches, number):
        seen.append((sum(map(len, batches)), number))
        return {1}

    monkeypatch.setattr(softmax_layers, "TOKENS", 5 * 32)
    monkeypatch.setattr(softmax_layers, "layers_that_need_context", place)
    command = ["linearize", str(teacher), "--train.max_steps=2", "--train.name=student"]
    for more in ([], [], ["--train.dry_run=true"]):
        assert main([*command, "--model.attention=hybrid", *more]) == 0, capsys.readouterr().err
    out_text = capsys.readouterr().out
    assert "softmax layers: 1 of 0 … 5" in out_text and "another config" not in out_text
    assert seen == [(5, 1)]
    assert main([*command, "--model.attention=hybrid", "--train.resume=never"]) == 0
    assert seen == [(5, 1)] * 2
    layers = read_yaml(out / "student/config.yaml")["model"]["attention"]
    assert layers == ["ours-gated", "softmax", *["ours-gated"] * 4]

    # Nor does a teacher with windows of its own say where a whole context is needed.
    args = ModelArgs(name="demo", attention="softmax", n_layer=6, softmax_window=8)
    monkeypatch.setattr(softmax_layers, "load_model", lambda *_, **__: GPT.create(args.config(), 0))
    recipe.train.teacher, recipe.train.name = str(teacher), "even"
    recipe.model = ModelArgs(name="demo", attention="hybrid", n_layer=6)
    even = recipe.model.attention
    place_softmax_layers(recipe)
    assert recipe.model.attention == even and len(seen) == 2

    monkeypatch.setattr(softmax_layers, "load_model", None)  # not even loaded
    command = ["linearize", str(teacher), "--train.max_steps=2", "--train.name=pure"]
    assert main([*command, "--model.attention=ours"]) == 0
    assert read_yaml(out / "pure/config.yaml")["model"]["attention"] == "ours"
