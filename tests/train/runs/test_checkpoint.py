"""Checkpoints: whole or not there, the last k, and the right one to go on from."""

import errno
import os

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import checkpoint_step, read_manifest, valid_checkpoints
from lingpt.models import load_model
from lingpt.train import loop, train
from lingpt.train.runs import checkpoint


def names(folder) -> list[str]:
    return [path.name for path in valid_checkpoints(folder)]


def test_keeps_the_newest_k(make_recipe):
    folder = train(make_recipe(save_interval=1, keep_checkpoints=2))
    assert names(folder) == ["step-00000005", "step-00000006"]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == names(folder), (
        "something else is left"
    )


def test_while_steps_are_skipped_none_goes(make_recipe, monkeypatch):
    """Of the skipped steps 4 and 5; the first one that is not skipped is worth more than they are."""
    step, kept = loop.Run.step, []

    def skipping(self, stop):
        line = step(self, stop)
        self.progress.skipped_in_a_row = {4: 1, 5: 2}.get(self.progress.step, 0)
        return line

    def watched(*args):
        path = save(*args)
        kept.append([checkpoint_step(path) for path in valid_checkpoints(args[0])])
        return path

    save = checkpoint.save
    monkeypatch.setattr(loop.Run, "step", skipping)
    monkeypatch.setattr(checkpoint, "save", watched)
    train(make_recipe(save_interval=1, keep_checkpoints=2))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 3, 4, 5], [5, 6]]


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer(make_recipe):
    newest = valid_checkpoints(train(make_recipe()))[-1]
    assert load_model(newest, attention="ours").num_parameters() > 0
    assert (newest / "tokenizer.json").is_file()
    files = read_manifest(newest)["files"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "train_state.pt"} <= files.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("write failed")]
)
def test_a_full_disk_is_one_line_and_leaves_the_older_ones(make_recipe, monkeypatch, error):
    """PyTorch's own writer turns a full disk into a RuntimeError; both must end the same way."""
    folder = train(make_recipe(max_steps=3))
    save = torch.save

    def full(state, file):
        save({"half": 1}, file)
        raise error

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(
        UserError, match=r"step 6 could not be written .*step-00000003 is intact.*free some space"
    ):
        train(make_recipe())
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000003"]
    monkeypatch.undo()
    train(make_recipe())
    assert names(folder)[-1] == "step-00000006"


def test_another_config_is_refused_by_name(make_recipe):
    train(make_recipe())
    with pytest.raises(UserError, match=r"learning_rate: 0.001 → 0.002.*another --train.name.*resume never"):
        train(make_recipe(learning_rate=2e-3))
    recipe = make_recipe(name="demo-ours")
    recipe.model.attention = "softmax"
    with pytest.raises(UserError, match=r"model.attention: ours → softmax"):
        train(recipe)


def test_a_checkpoint_by_its_path(make_recipe):
    """Goes back to step 3; the newer one is kept aside and not found by `auto` any more."""
    folder = train(make_recipe())
    train(make_recipe(resume=str(folder / "checkpoints/step-00000003"), max_steps=4))
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert (folder / "checkpoints/abandoned-step-00000006").is_dir()


def test_a_checkpoint_that_does_not_fit(make_recipe):
    """Of another attention, not whole: each its own line."""
    source = train(make_recipe()) / "checkpoints/step-00000006"
    recipe = make_recipe(resume=str(source))
    recipe.model.attention = "softmax"
    with pytest.raises(UserError, match=r"is a checkpoint of attention 'ours', not 'softmax'.*init_from"):
        train(recipe)
    (source / "config.json").unlink()
    with pytest.raises(UserError, match="not whole"):
        train(make_recipe(resume=str(source)))
