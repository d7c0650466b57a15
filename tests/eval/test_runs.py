"""Guards the choice of what is evaluated: newest, whole, and as the attention it was trained with."""

import json
import os
import re
import shutil

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.files import write_json
from lingpt.common.run_folder import CONFIG, attention_label, find_model_folder, read_manifest, write_manifest
from lingpt.eval.runs import Checkpoint, find_checkpoints
from lingpt.models import OPTIMIZER, save_index, save_model, write_shards

from .conftest import BLOCK_SIZE, evaluate, tiny_model, write_checkpoint, write_run


def age(run, seconds):
    """Makes every file of a run look that old."""
    for file in run.rglob("*"):
        os.utime(file, (1_700_000_000 - seconds,) * 2)


def test_newest_run_of_each_attention(tmp_path, tokenizer):
    """One run an attention and its options, the one whose checkpoint was written last, at its highest step;
    hybrids apart."""
    for name, attention, seconds in [
        ("old", "ours", 300),
        ("new", "ours", 100),
        ("softmax", "softmax", 200),
        ("hybrid", ["softmax", "ours"], 400),
        ("turned", ["ours", "softmax"], 400),
    ]:
        age(write_run(tmp_path, name, attention, tokenizer, steps=(20, 100, 3)), seconds)
    found = find_checkpoints(tmp_path, "demo")
    assert [(c.run.name, attention_label(c.attention), c.step) for c in found] == [
        ("new", "ours", 100),
        ("turned", "ours+softmax", 100),
        ("softmax", "softmax", 100),
        ("hybrid", "softmax+ours", 100),
    ]
    assert found[3].attention == ("softmax", "ours")
    model = {"name": "demo", "attention": "ours", "learnable_b": True, "n_layer": 2}
    write_json(tmp_path / "new" / CONFIG, {"model": model})
    forms = [(c.run.name, c.form) for c in find_checkpoints(tmp_path, "demo")]
    assert forms[:2] == [("old", "ours"), ("new", "ours + learnable_b")]


def test_the_model_defaults_to_the_newest_run(tmp_path, tokenizer):
    """Without --model, the model trained last, and no run without a checkpoint; the nearest to a name that
    has no run."""
    age(write_run(tmp_path, "a", "ours", tokenizer, model="pythia-14m"), 10)
    age(write_run(tmp_path, "b", "gla", tokenizer, model="demo"), 20)
    write_run(tmp_path, "just begun", "softmax", tokenizer, steps=(), model="pythia-31m")
    assert [c.model for c in find_checkpoints(tmp_path)] == ["pythia-14m"]
    with pytest.raises(UserError, match=r"no run of pythia-70m .*did you mean 'pythia-14m'"):
        find_checkpoints(tmp_path, "pythia-70m")
    with pytest.raises(UserError, match="train one first"):
        find_checkpoints(tmp_path / "nowhere")


def test_runs_by_name(tmp_path, tokenizer):
    """--runs takes runs in their order, each once, several of one attention, and single checkpoints."""
    a, b = (write_run(tmp_path, name, "ours", tokenizer, steps=(1, 2)) for name in "ab")
    found = find_checkpoints(tmp_path, runs=[b, a / "checkpoints" / "step-00000001", b])
    assert [(c.run.name, c.step) for c in found] == [("b", 2), ("a", 1)]
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"is a folder of runs \(.*\), and no run: give some of them"):
        find_checkpoints(tmp_path, runs=[tmp_path])
    with pytest.raises(UserError, match="no whole checkpoint yet"):
        find_checkpoints(tmp_path, runs=[tmp_path / "empty"])
    with pytest.raises(UserError, match="no run at"):
        find_checkpoints(tmp_path, runs=[tmp_path / "nowhere"])


def test_the_run_that_one_stands_in_has_its_name(tmp_path, tokenizer, monkeypatch):
    """Guards: `--runs .` was scored as the run "", and so it stood in the tables."""
    run = write_run(tmp_path, "mine", "ours", tokenizer)
    monkeypatch.chdir(run)
    for path in (".", "checkpoints/step-00000010"):
        (found,) = find_checkpoints("nowhere", runs=[path])
        assert (found.run, found.run.name) == (run, "mine")
    monkeypatch.chdir(run / "checkpoints")
    assert find_checkpoints("nowhere", runs=[".."])[0].run.name == "mine"


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN = {
    "cut off": cut,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"files": {'),
    "half a tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0",'),
    "aside": lambda folder: folder.rename(folder.with_name(folder.name + ".tmp")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_half_written_checkpoint_is_never_chosen(how, tmp_path, tokenizer, capsys):
    """However the newest one was left, the one before it is taken, and a line says so; guards: silence."""
    run = write_run(tmp_path, "run", "ours", tokenizer, steps=(10, 20))
    newest = run / "checkpoints" / "step-00000020"
    assert read_manifest(newest) is not None
    BROKEN[how](newest)
    for runs in ((), [run]):
        assert find_checkpoints(tmp_path, runs=runs)[0].step == 10
        line = rf"{newest} is not whole.* and is passed over for step-00000010\n"
        assert re.fullmatch(line if newest.exists() else "", capsys.readouterr().err)
    assert find_model_folder(run).name == "step-00000010" and bool(capsys.readouterr().err) == newest.exists()
    if newest.exists():
        with pytest.raises(UserError, match="not a complete checkpoint"):
            Checkpoint.open(newest)


def test_a_folder_that_holds_no_run_is_said_to(tmp_path):
    """Guards: "no whole checkpoint yet: train on" of a model that was exported."""
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/model.safetensors").touch()
    with pytest.raises(UserError, match="exported is not a run folder: give one"):
        find_checkpoints(tmp_path, runs=[tmp_path / "exported"])


def test_where_no_checkpoint_is_whole_the_file_is_named(tmp_path, tokenizer):
    """Guards: "no whole checkpoint yet: train on" beside one whose shard or file was missing."""
    run = write_run(tmp_path, "run", "ours", tokenizer, steps=(10,))
    (run / "checkpoints/step-00000010/model.safetensors").unlink()
    for choose in (find_model_folder, lambda run: find_checkpoints(tmp_path, runs=[run])):
        with pytest.raises(UserError, match=r"step-00000010 is not whole \(model.safetensors is missing\)"):
            choose(run)


def test_fingerprint_and_dtype(tmp_path, tokenizer):
    """Another training at the same step has another fingerprint, a copy the same; dtype is the weights'."""
    one, two = write_run(tmp_path, "one", "ours", tokenizer, steps=(5,)), tmp_path / "two"
    shutil.copytree(one, two)
    first, second = (find_checkpoints(tmp_path, runs=[run])[0] for run in (one, two))
    assert first.weights == second.weights and first.dtype == "float32"
    model = tiny_model("ours", seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6 * torch.rand_like(parameter))
    write_checkpoint(second.folder, model, tokenizer)
    assert find_checkpoints(tmp_path, runs=[two])[0].weights != first.weights
    model.bfloat16().blocks[0].attn.float()  # the smaller part
    write_checkpoint(second.folder, model, tokenizer)
    assert find_checkpoints(tmp_path, runs=[two])[0].dtype == "bfloat16"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_of_which_a_file_has_changed_is_scored_again(tmp_path, hf_folder, name):
    """Guards: the scores of another rotary base, as of the same model, when its config.json was mended."""
    shutil.copytree(hf_folder, tmp_path / "model")
    (before,) = find_checkpoints(tmp_path, runs=[tmp_path / "model"])
    assert before.weights == find_checkpoints(tmp_path, runs=[tmp_path / "model"])[0].weights
    with (tmp_path / "model" / name).open("ab") as file:
        file.write(b" ")
    assert find_checkpoints(tmp_path, runs=[tmp_path / "model"])[0].weights != before.weights


@pytest.mark.parametrize("attention", ["ours", ["softmax", "ours"]])
def test_a_model_folder_is_what_its_config_says(tmp_path, tokenizer, attention):
    """The attention of each layer, too; and it needs its tokenizer."""
    save_model(tiny_model(attention), tmp_path)
    with pytest.raises(UserError, match=r"has no tokenizer\.json: copy that of the run into it"):
        find_checkpoints(tmp_path, runs=[tmp_path])
    tokenizer.save(tmp_path)
    (found,) = find_checkpoints(tmp_path, runs=[tmp_path])
    assert found.attention == (attention if attention == "ours" else tuple(attention))
    assert (found.name, found.step, found.train_length) == (tmp_path.name, 0, BLOCK_SIZE)


def test_the_dtype_of_a_model_of_transformers(tmp_path, hf_folder):
    """Its config's, under the older name too; else that of the weights."""
    shutil.copytree(hf_folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    for given, dtype in (
        ({}, "float32"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ):
        write_json(file, config | given)
        (found,) = find_checkpoints(tmp_path, runs=[file.parent])
        assert found.dtype == dtype


def test_a_checkpoint_in_shards_is_scored_as_one_file_is(tmp_path, tokenizer, eval_data):
    """Guards: nothing was scored of a model that FSDP had trained: it has no file of all weights."""
    runs = [write_run(tmp_path, name, "ours", tokenizer) for name in ("whole", "sharded")]
    whole, sharded = (find_checkpoints(tmp_path, runs=[run])[0] for run in runs)
    model = tiny_model("ours", seed=10)
    (sharded.folder / "model.safetensors").unlink()
    write_shards(sharded.folder, {**model.state_dict(), f"{OPTIMIZER}moment": torch.zeros(7)}, None)
    save_index(model, sharded.folder)
    write_manifest(sharded.folder, {"step": 10})
    (sharded,) = find_checkpoints(tmp_path)  # written last
    assert sharded.run == runs[1]
    assert sharded.parameters == whole.parameters == model.num_parameters()
    found = [evaluate(one, ["piqa"], data=eval_data, device="cpu").scores for one in (whole, sharded)]
    assert found[0]["piqa (0-shot)"].metrics == found[1]["piqa (0-shot)"].metrics


def test_attention_mismatch_is_refused(tmp_path, tokenizer, eval_data):
    """A checkpoint put into the run of another attention (same keys, same shapes) is not scored as that."""
    ours = write_run(tmp_path, "ours", "ours", tokenizer)
    softmax = write_run(tmp_path, "softmax", "softmax", tokenizer)
    folder = softmax / "checkpoints" / "step-00000010"
    shutil.rmtree(folder)
    shutil.copytree(ours / "checkpoints" / "step-00000010", folder)
    with pytest.raises(UserError, match="trained with attention 'ours', not 'softmax'"):
        evaluate(folder, ["piqa"], data=eval_data, device="cpu")
    assert not (softmax / "eval").exists()
    config = json.loads((folder / "config.json").read_text()) | {"attention": "softmax"}
    (folder / "config.json").write_text(json.dumps(config))  # the weights still name their attention
    write_manifest(folder, {"step": 10})
    with pytest.raises(UserError, match="weights were trained with"):
        evaluate(folder, ["piqa"], data=eval_data, device="cpu")


def test_a_run_that_does_not_say_what_it_is(tmp_path, tokenizer):
    run = write_run(tmp_path, "run", "ours", tokenizer)
    (run / "config.yaml").write_text("model: {name: demo}")
    with pytest.raises(UserError, match="does not say which model"):
        find_checkpoints(tmp_path)


def test_a_sick_run_is_named_and_the_others_are_found(tmp_path, tokenizer, capsys):
    """Guards: one cut config.yaml that no run can be evaluated for."""
    runs = {name: write_run(tmp_path, name, a, tokenizer) for name, a in (("a", "ours"), ("c", "gla"))}
    for name, text in (("b", "model: {name: demo, att"), ("d", "model: [1]"), ("e", "\0\1")):
        (write_run(tmp_path, name, "softmax", tokenizer) / "config.yaml").write_text(text)
    assert {c.run for c in find_checkpoints(tmp_path)} == set(runs.values())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("/config.yaml")[0] for line in lines] == [f"left out: {tmp_path}/{n}" for n in "bde"]
    assert [c.run.name for c in find_checkpoints(tmp_path, runs=[tmp_path / n for n in "bca"])] == ["c", "a"]
    with pytest.raises(UserError, match=r"b/config.yaml is not YAML"):
        find_checkpoints(tmp_path, runs=[tmp_path / "b"])
