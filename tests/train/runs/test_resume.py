"""Going on with a run: what is damaged in its folder is named and passed over; the rest is not touched."""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load

from lingpt.common.errors import UserError
from lingpt.common.run_folder import (
    read_config,
    read_manifest,
    read_metrics,
    valid_checkpoints,
    write_manifest,
)
from lingpt.train import loop, report, train
from lingpt.train.runs.resume import refusal


def names(folder) -> list[str]:
    return [path.name for path in valid_checkpoints(folder)]


def flip_bit(path) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("content", [None, b"", b"model:\n  name: de", b"\xff\xfe", b"- 1\n", b"model: {na"])
def test_a_damaged_config_goes_on(make_recipe, capsys, content):
    """Cut by a disk that was full: the newest checkpoint has the recipe too."""
    folder = train(make_recipe(max_steps=3))
    path = folder / "config.yaml"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"learning_rate: 0.001 → 0.5"):
        train(make_recipe(learning_rate=0.5))
    train(make_recipe())
    assert "step 3 of 6" in capsys.readouterr().out
    assert read_config(folder)["train"]["max_steps"] == 6 and not list(folder.glob("abandoned-*"))
    assert [line["step"] for line in read_metrics(folder) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"model:\n  name: de", b"\xff\xfe"])
def test_a_damaged_config_before_the_first_checkpoint(make_recipe, capsys, monkeypatch, content):
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(make_recipe())
    (make_recipe().run_folder / "config.yaml").write_bytes(content)
    assert names(train(make_recipe()))[-1] == "step-00000006"
    assert "it is written again" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", '{"a": 1', "[]", '{"earlier": 3}', '{"earlier": "long ago"}', "\0"])
def test_a_damaged_environment_goes_on(make_recipe, capsys, content):
    folder = train(make_recipe(max_steps=3))
    (folder / "environment.json").write_text(content)
    train(make_recipe())
    assert "step 3 of 6" in (out := capsys.readouterr().out)
    assert re.search(
        r"^\S+/environment\.json (is damaged|holds no JSON object).*a new one is written$", out, re.M
    )
    assert json.loads((folder / "environment.json").read_text())["versions"]
    assert (folder / "damaged-environment.json").read_text() == content


def cut(path) -> None:
    """In two halves, of which the first is left."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", flip_bit),
        ("train_state.pt", flip_bit),
        ("tokenizer.json", flip_bit),
        ("config.json", flip_bit),
        ("manifest.json", flip_bit),
        ("train_state.pt", cut),
        ("manifest.json", cut),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(make_recipe, capsys, file, damage):
    """And the run ends where it would have: the steps in between are trained again."""
    folder = train(make_recipe())
    weights = folder / "checkpoints/step-00000006/model.safetensors"
    good = load(weights.read_bytes())
    damage(folder / "checkpoints/step-00000006" / file)
    train(make_recipe())
    out = capsys.readouterr().out
    assert "is passed over" in out and "step-00000003, step 3 of 6" in out
    reason = f"{file} has " if damage is cut else f"{file} does not match its checksum"
    assert ("is not whole" if file == "manifest.json" else reason) in out
    again = load(weights.read_bytes())
    assert all(torch.equal(tensor, again[name]) for name, tensor in good.items())
    assert (folder / "checkpoints/damaged-step-00000006").is_dir()


def test_a_named_checkpoint_that_is_damaged_is_refused(make_recipe):
    path = train(make_recipe()) / "checkpoints/step-00000003"
    for damage, reason in (
        (flip_bit, r"is damaged \(train_state.pt"),
        (Path.unlink, r"is not whole \(train_state.pt is missing"),
    ):
        damage(path / "train_state.pt")
        with pytest.raises(UserError, match=rf"step-00000003 {reason}.*resume from another"):
            train(make_recipe(resume=str(path)))


def test_weights_with_a_flipped_bit_start_no_run(make_recipe):
    path = train(make_recipe()) / "checkpoints/step-00000006"
    flip_bit(path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors does not match its checksum\): use another"):
        train(make_recipe(name="other", init_from=str(path)))


def test_where_none_can_be_read_nothing_is_touched(make_recipe):
    folder = train(make_recipe())
    for path in valid_checkpoints(folder):
        flip_bit(path / "model.safetensors")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}
    with pytest.raises(UserError, match=r"step-00000006 is damaged.*step-00000003 is damaged.*resume never"):
        train(make_recipe())
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}
    assert names(train(make_recipe(max_steps=3, resume="never"))) == ["step-00000003"]


def test_a_train_state_that_does_not_read_is_passed_over(make_recipe, capsys):
    folder = train(make_recipe())
    newest = folder / "checkpoints/step-00000006"
    (newest / "train_state.pt").write_bytes(b"no pickle")
    write_manifest(newest, read_manifest(folder / "checkpoints/step-00000003") | {"step": 6})
    train(make_recipe(max_steps=7))
    out = capsys.readouterr().out
    assert "step-00000006 is not usable" in out and "step-00000003, step 3 of 7" in out


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": "many"},
        {"train_time": None},
        {"config": {"model": 3}},
        {"skipped": [1]},
        {"data_fingerprint": 7},
    ],
)
def test_values_of_other_types_in_a_manifest_are_passed_over(make_recipe, capsys, wrong):
    """Guards: a traceback, of a manifest that was edited and given its checksum."""
    folder = train(make_recipe())
    newest = folder / "checkpoints/step-00000006"
    write_manifest(newest, read_manifest(newest) | wrong)
    train(make_recipe(max_steps=7))
    out = capsys.readouterr().out
    assert f"is not of a run ({next(iter(wrong))}" in out and "step-00000003, step 3 of 7" in out


def test_a_divergence_that_says_no_number_is_still_one(make_recipe):
    """Guards: a traceback, of a line whose number of skipped steps is text. From a checkpoint that is named
    the run goes on."""
    folder = train(make_recipe(max_steps=3))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "diverged", "step": 3, "skipped": "ten"}\n')
    with pytest.raises(UserError, match="not finite for 0 steps up to step 3"):
        train(make_recipe())
    assert names(train(make_recipe(resume=str(folder / "checkpoints/step-00000003"))))[-1] == "step-00000006"


@pytest.mark.parametrize("name", ["step-00000003-best", "step-00000009.backup", "step-9", "step-000000009"])
def test_copies_are_neither_rotated_nor_resumed(make_recipe, capsys, name):
    folder = train(make_recipe(max_steps=3))
    shutil.copytree(folder / "checkpoints/step-00000003", copy := folder / "checkpoints" / name)
    train(make_recipe(save_interval=1, keep_checkpoints=1))
    assert "step-00000003, step 3 of 6" in capsys.readouterr().out
    assert names(folder) == ["step-00000006"] and (copy / "model.safetensors").is_file()


def test_a_copy_under_another_steps_name_is_not_of_that_step(make_recipe, capsys):
    folder = train(make_recipe(max_steps=3))
    shutil.copytree(folder / "checkpoints/step-00000003", folder / "checkpoints/step-00000005")
    train(make_recipe())
    assert "step-00000003, step 3 of 6" in capsys.readouterr().out


def test_twice_from_the_same_old_checkpoint(make_recipe, monkeypatch):
    """Each branch that is left stays, with its losses.

    Guards: losses that were gone where the disk was full, or had damaged a line of them."""
    folder = train(make_recipe())
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(losses := b"\xff\n" + metrics.read_bytes())
    old = str(folder / "checkpoints/step-00000003")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot write to .*metrics"):
        patch.setattr("lingpt.train.runs.resume.write_bytes", Mock(side_effect=OSError))
        train(make_recipe(resume=old))
    assert metrics.read_bytes() == losses
    for _ in range(2):
        train(make_recipe(resume=old))
    aside = sorted(path.name for path in (folder / "checkpoints").glob("abandoned-*"))
    assert aside == ["abandoned-step-00000006", "abandoned-step-00000006.2"]
    assert (folder / "abandoned-metrics.jsonl").read_bytes() == losses


def test_a_run_whose_losses_are_gone_goes_on(make_recipe):
    """From its newest checkpoint, and from another."""
    folder = train(make_recipe(max_steps=2, save_interval=1))
    for resume in (str(folder / "checkpoints/step-00000001"), "auto"):
        (folder / "metrics.jsonl").unlink()
        assert train(make_recipe(max_steps=3, save_interval=1, resume=resume)) == folder
    assert not list(folder.glob("abandoned-*"))


def test_a_branch_that_was_left_goes_on_as_another_run(make_recipe, monkeypatch):
    """Guards: one run with the losses of two branches, which `auto` resumed from the other one's newer
    checkpoint."""
    folder = train(make_recipe())
    train(make_recipe(resume=str(folder / "checkpoints/step-00000003")))
    left = str(folder / "checkpoints/abandoned-step-00000006")
    before = (folder / "metrics.jsonl").read_text()
    monkeypatch.chdir(folder.parent)
    for out_dir in (str(folder.parent), "."):
        with pytest.raises(UserError, match=r"of a branch that this run has left.* another --train.name"):
            train(make_recipe(resume=left, max_steps=8, out_dir=out_dir))
    assert (folder / "metrics.jsonl").read_text() == before
    other = train(make_recipe(resume=left, max_steps=8, name="other"))
    assert names(other)[-1] == "step-00000008" and names(folder)[-1] == "step-00000006"


@pytest.mark.parametrize("resume", ["never", "named"])
def test_the_command_that_goes_on_does(make_recipe, monkeypatch, resume):
    """The same one would start over, or go back to the checkpoint that it names."""
    folder = train(make_recipe())
    where = "never" if resume == "never" else str(folder / "checkpoints/step-00000003")
    for argv in (
        ["--train.resume", where, "--config", "a b.yaml"],
        [f"--train.resume={where}", "--config", "a b.yaml"],
    ):
        monkeypatch.setattr(sys, "argv", ["lingpt", "train", *argv])
        expected = f"lingpt train {shlex.join(argv)} --train.resume auto"
        assert report.resume_message(make_recipe(resume=where)) == f"this command resumes it: {expected}"
    monkeypatch.setattr(sys, "argv", ["lingpt", "train", "--config", "x.yaml"])
    same = "the same command resumes it: lingpt train --config x.yaml"
    assert report.resume_message(make_recipe()) == same
    assert report.resume_message(make_recipe(name="new", resume="never")) == same, "nothing to go on from yet"


def test_what_a_killed_process_left_is_cleared(make_recipe):
    """Half-written files next to the run's own, as `kill -9` leaves them, of older versions, too."""
    folder = train(make_recipe(max_steps=2))
    checkpoints = [folder / "checkpoints" / f".step-00000002{end}" for end in (".x1y2z3.partial", ".partial")]
    left = [folder / ".metrics.jsonl.x1y2z3.partial", *(path / "model.safetensors" for path in checkpoints)]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    train(make_recipe(max_steps=2))
    assert not any(path.exists() for path in [*left, *checkpoints])


def test_data_may_move_and_not_change(make_recipe, corpus, tmp_path, capsys):
    """Guards: text or tokenizer on another disk, by another path, and the run could only be begun again; and
    a run that went on, with its losses, from the checkpoint of one on other text."""
    train(make_recipe(max_steps=3))
    moved, recipe = tmp_path / "elsewhere" / "mine.jsonl", make_recipe()
    moved.parent.mkdir()
    shutil.copy(corpus.source, moved)
    recipe.data = replace(corpus, source=str(moved))
    assert refusal(recipe, recipe.model.config()) is None
    assert names(train(recipe))[-1] == "step-00000006" and "step 3 of 6" in capsys.readouterr().out
    assert read_config(recipe.run_folder)["data"]["source"] == str(moved)
    with moved.open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}))
    with pytest.raises(UserError, match=r"on other data \(fingerprint"):
        train(recipe)
    recipe.data = replace(corpus, source=str(moved.rename(moved.with_name("other.jsonl"))))
    with pytest.raises(UserError, match=r"on other data \(data.source: .*/mine.jsonl → .*/other.jsonl; fing"):
        train(recipe)
    recipe.train.name = "other"
    given = train(recipe) / "checkpoints/step-00000006"
    recipe.train.name, recipe.train.resume = None, str(given)
    with pytest.raises(UserError, match=r"demo-ours/checkpoints/step-00000006 was trained on other data"):
        train(recipe)


def test_data_may_move_before_the_first_checkpoint(make_recipe, corpus, tmp_path, monkeypatch):
    """By the fingerprint in the run's record; where that is gone, or another, the path is the data: the
    losses that are there would be of other text."""
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(make_recipe())
    recipe = make_recipe()
    copy = tmp_path / "copy.jsonl"
    recipe.data = replace(corpus, source=str(shutil.copy(corpus.source, copy)))
    record = recipe.run_folder / "environment.json"
    whole = record.read_text()
    record.unlink()
    with pytest.raises(UserError, match=r"another config \(data.source: .* → .*copy.jsonl\)"):
        train(recipe)
    record.write_text(whole)
    text = copy.read_text()
    copy.write_text(text + "\n" + json.dumps({"text": "one more"}))
    with pytest.raises(UserError, match=r"another config \(data.source: .* → .*copy.jsonl\)"):
        train(recipe)
    copy.write_text(text)
    assert names(train(recipe))[-1] == "step-00000006"


def test_a_dry_run_names_the_run_that_training_refuses(make_recipe, capsys):
    """Guards: a plan, and then a refusal. It changes nothing; what may change is not named."""
    folder = train(make_recipe(max_steps=2))
    before = sorted(folder.rglob("*"))
    said = f"{folder} holds a run with another config (train.seed: 0 → 1): choose another --train.name"
    for options, refused in (({"seed": 1}, True), ({"seed": 1, "resume": "never"}, False), ({}, False)):
        train(make_recipe(max_steps=4, dry_run=True, **options))
        assert (f"\n{said}" in (out := capsys.readouterr().out)) == refused == ("holds a run" in out)
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_names_the_weights_that_are_not_there(make_recipe, tmp_path, capsys):
    """Guards: a plan for a model of other sizes, those of the recipe, without a word."""
    train(make_recipe(dry_run=True, init_from=str(tmp_path / "gone")))
    assert capsys.readouterr().out.endswith(f"\nno model in {tmp_path / 'gone'}: there is no such folder\n")


def test_weights_to_start_from_are_not_taken_for_those_of_a_run_that_goes_on(make_recipe):
    """Guards: `--train.init_from other` trained on the run's own weights, and its record said `other`."""
    other = train(make_recipe(name="other"))
    train(make_recipe())
    with pytest.raises(UserError, match=r"train.init_from: None → .*other.*--train.name"):
        train(make_recipe(max_steps=9, init_from=str(other / "checkpoints/step-00000006")))


@pytest.mark.slow
def test_where_the_weights_came_from_stays_on_record(make_recipe):
    """Guards: a run that was resumed without `--train.init_from` had begun from nothing, by its record: the
    command that it was started with was refused, and its curve averaged with one from random weights."""
    init_from = str(train(make_recipe(name="other")) / "checkpoints/step-00000006")
    train(make_recipe(max_steps=3, init_from=init_from))
    folder = train(make_recipe())
    newest = read_manifest(valid_checkpoints(folder)[-1]) or {}
    assert newest["config"]["train"]["init_from"] == read_config(folder)["train"]["init_from"] == init_from
    train(make_recipe(max_steps=7, init_from=init_from))
    with pytest.raises(UserError, match=r"train.init_from: .*step-00000006 → .*step-00000003"):
        train(make_recipe(max_steps=8, init_from=init_from.replace("step-00000006", "step-00000003")))


@pytest.mark.slow
def test_the_folder_of_the_weights_may_be_written_in_another_way(make_recipe, monkeypatch):
    """Guards: `--train.init_from runs/sm/` was "another config" than `runs/sm`."""
    other = train(make_recipe(name="other", max_steps=1))
    monkeypatch.chdir(other.parent)
    train(make_recipe(max_steps=1, init_from="other"))
    for steps, same in enumerate(("other/", "./other", str(other)), 2):
        train(make_recipe(max_steps=steps, init_from=same))


def test_a_run_that_has_done_more_steps_keeps_its_record(make_recipe, capsys):
    """Guards: asked for fewer steps it did nothing, but its config.yaml said that it was of so many."""
    folder = train(make_recipe())
    record = (folder / "config.yaml").read_bytes(), (folder / "environment.json").read_bytes()
    train(make_recipe(max_steps=3))
    assert "nothing to train: the run is at step 6 of 3" in capsys.readouterr().out
    assert record == ((folder / "config.yaml").read_bytes(), (folder / "environment.json").read_bytes())


def test_what_a_start_found_it_starts_from(make_recipe, monkeypatch, capsys):
    """Guards: each rank looked for the newest checkpoint of `--train.init_from` itself, even while that run
    was saving another."""
    other = train(make_recipe(name="other", max_steps=2, save_interval=1, keep_checkpoints=2))
    newest, later = other / "checkpoints/step-00000002", other / "saved-a-moment-later"
    newest.rename(later)
    monkeypatch.setattr("lingpt.train.start.record_start", lambda *_: later.rename(newest))
    train(make_recipe(max_steps=1, init_from=str(other)))
    assert f"weights from {newest.with_name('step-00000001')} (" in capsys.readouterr().out


def test_weights_that_do_not_exist_are_missed_before_the_data_is_read(make_recipe, monkeypatch):
    """Guards: a typo in `--train.init_from` or `--train.resume` that was found after hours of tokenising."""
    monkeypatch.setattr("lingpt.train.start.prepare", lambda *_, **__: pytest.fail("the data is read"))
    with pytest.raises(UserError, match="no model in typo: there is no such folder"):
        train(make_recipe(init_from="typo"))
    with pytest.raises(UserError, match="no checkpoint typo to resume from"):
        train(make_recipe(resume="typo"))


def test_a_damaged_checkpoint_of_the_weights_run_is_named_once(make_recipe, capsys):
    """Guards: the same line from the check before any work, from every process and row that makes it."""
    train(make_recipe(name="other", max_steps=1))
    folder = train(make_recipe(name="other", max_steps=2))
    (folder / "checkpoints/step-00000002/model.safetensors").unlink()
    capsys.readouterr()
    train(make_recipe(max_steps=1, init_from=str(folder)))
    assert capsys.readouterr().err.count("is passed over for step-00000001") == 1


def test_a_run_goes_on_without_the_weights_it_began_with(make_recipe):
    """Guards: a resumed run that asks for what it does not read."""
    init_from = train(make_recipe(name="other", max_steps=1))
    train(make_recipe(max_steps=2, init_from=str(init_from)))
    shutil.rmtree(init_from)
    assert names(train(make_recipe(max_steps=3, init_from=str(init_from))))[-1] == "step-00000003"


def test_the_old_run_stays_where_the_new_one_has_nothing_to_start_from(make_recipe, monkeypatch):
    """Guards: `--train.resume never` had moved the run by the time that `--train.init_from` was not found, or
    its teacher. Paths are absolute, or not."""
    folder = train(make_recipe(max_steps=3))
    monkeypatch.chdir(folder.parent)
    for options, line in (
        ({"init_from": "typo"}, "no model in typo: there is no such folder"),
        ({"init_from": str(folder)}, "init_from .* is in the run that"),
        ({"teacher": folder.name}, "teacher .* is in the run that"),
        ({"init_from": str(folder), "out_dir": "."}, "init_from .* is in the run that"),
    ):
        with pytest.raises(UserError, match=line):
            train(make_recipe(resume="never", **options))
    assert names(folder) == ["step-00000003"] and not list(folder.parent.glob("*.old-*"))


def test_the_old_run_stays_where_the_new_one_cannot_start_from_the_weights(make_recipe):
    """Guards: `--train.resume never` had moved the run by the time that the weights were of another size, or
    could not be read."""
    other = make_recipe(name="other", max_steps=1)
    other.model.n_layer = 3
    damaged = train(make_recipe(name="damaged", max_steps=1)) / "checkpoints/step-00000001"
    (damaged / "manifest.json").unlink()
    os.truncate(damaged / "model.safetensors", 1000)
    folder = train(make_recipe(max_steps=3))
    for init_from, line in (
        (train(other), "is another model than 'demo': n_layer is 3, not 2"),
        (damaged, "model.safetensors is missing, damaged"),
    ):
        with pytest.raises(UserError, match=line):
            train(make_recipe(resume="never", init_from=str(init_from)))
    assert names(folder) == ["step-00000003"] and not list(folder.parent.glob("*.old-*"))


def test_each_run_that_was_there_is_moved_aside(make_recipe, capsys):
    """Whole, whatever its config. Guards: an old run in the way of the next, and an empty one of a new
    name."""
    for rate in (1e-3, 2e-3, 3e-3):
        folder = train(make_recipe(max_steps=1, resume="never", learning_rate=rate))
    assert f"the old run is now {folder}.old-2" in capsys.readouterr().out
    runs = sorted(folder.parent.iterdir())
    assert [run.name for run in runs] == ["demo-ours", "demo-ours.old-1", "demo-ours.old-2"]
    assert [read_config(run)["train"]["learning_rate"] for run in runs] == [3e-3, 1e-3, 2e-3]
    assert [names(run) for run in runs] == [["step-00000001"]] * 3


def test_a_run_is_no_checkpoint(make_recipe):
    """Guards: "is not whole" of a healthy run's folder."""
    folder = train(make_recipe(max_steps=3))
    with pytest.raises(UserError, match=r"is not a checkpoint: give runs/<name>/checkpoints/step-…"):
        train(make_recipe(resume=str(folder)))


@pytest.mark.slow
def test_a_run_s_config_goes_on_however_it_was_started(make_recipe):
    """Guards: `lingpt train --config runs/x/config.yaml` began anew where x had begun by `resume never`."""
    train(make_recipe())
    folder = train(make_recipe(resume="never", profile=True))
    config = read_config(folder)["train"]
    assert (config["resume"], config["profile"]) == ("auto", False)
