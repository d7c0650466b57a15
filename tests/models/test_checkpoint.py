"""Model folders: whole or not at all, never another attention; an honest report of what a new run took."""

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lingpt.common.errors import UserError
from lingpt.models import (
    ATTENTIONS,
    ModelArgs,
    export_hf,
    load_model,
    load_weights,
    read_model_config,
    save_model,
)

from .conftest import litgpt_config


def test_a_model_comes_back(small, tokens, tmp_path, variant):
    """Same configuration, same bits, same logits, parameters that still train."""
    model = small(**variant)
    save_model(model, tmp_path / "step-1")
    again = load_model(tmp_path / "step-1")
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert load_model(tmp_path / "step-1", attention=variant["attention"]).config == model.config


def test_dtype_can_be_chosen(small, tokens, tmp_path):
    """Evaluation in bf16."""
    model = small("ours-decay")
    save_model(model, tmp_path)
    half = load_model(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half(tokens), model.bfloat16()(tokens))
    save_model(half, tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}


def test_others_may_read_a_model(small, tmp_path):
    """Guards: a run on a shared disk is readable by its other users, whatever safetensors writes with."""
    save_model(small("ours"), tmp_path)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "model.safetensors": 0o644,
        "config.json": 0o644,
    }


@pytest.mark.parametrize("name", ATTENTIONS)
def test_no_attention_loads_as_another(small, tmp_path, name):
    """Neither a caller nor a changed config.json makes the weights of one mechanism run as another."""
    save_model(small(name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for other in ATTENTIONS.keys() - {name}:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for asked in (other, [name, name, other]):
            line = re.escape(f"trained with attention '{name}', not {asked!r}")
            with pytest.raises(UserError, match=line):
                load_model(tmp_path, attention=asked)
        (tmp_path / "config.json").write_text(json.dumps(config | {"attention": other}))
        line = f"says attention '{other}', but the weights were trained with \"{name}\""
        with pytest.raises(UserError, match=line):
            load_model(tmp_path)


def edit_config(**changes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def edit_weights(edit: Callable[[dict], dict]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(edit(load_file(path)), path, metadata={"lingpt.attention": '"ours"'})

    return damage


def cut(name: str) -> Callable[[Path], None]:
    """To its first half."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


OTHER_TENSORS = [
    (
        edit_weights(lambda x: {n: x[n] for n in x if ".1.mlp.fc.bias" not in n}),
        "transformer.h.1.mlp.fc.bias is missing",
    ),
    (
        edit_weights(lambda x: x | {"transformer.adapter": torch.ones(1)}),
        "transformer.adapter has no place in it",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *OTHER_TENSORS,
        (shutil.rmtree, "no model in .*: there is no such folder"),
        (cut("model.safetensors"), "model.safetensors is missing, damaged"),
        (cut("config.json"), "config.json is damaged or not JSON"),
        (
            lambda folder: save_file({"x": torch.ones(1)}, folder / "model.safetensors"),
            "weights were trained with one that they do not name",
        ),
        (
            edit_config(n_embd=32, head_size=8),
            r"does not hold a 'small': lm_head.weight is \[128, 64\], not \[128, 32\]",
        ),
        (edit_config(colour="red"), "unknown key 'colour'"),
        (
            edit_config(model_type="gemma"),
            "holds a gemma model: LinGPT reads its own, LitGPT's, gpt_neox, llama, qwen2",
        ),
        (edit_config(network=3), "config.json is damaged: its network is no object"),
    ],
)
def test_a_damaged_folder_is_one_line(small, tmp_path, damage, message):
    """Whatever happened to a folder, loading says what is wrong with which file, in one line."""
    folder = tmp_path / "model"
    save_model(small("ours"), folder)
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("damage", "message"), OTHER_TENSORS)
def test_only_an_attention_may_be_new(small, tmp_path, damage, message):
    """Guards: a run that begins with other layers as they are initialised, or without some of the weights."""
    save_model(small("ours"), tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=f"is another model than 'small': {message}"):
        load_weights(small("gla"), tmp_path)


def test_a_full_disk_leaves_the_old_model(small, tokens, tmp_path):
    """A save that fails half-way (at the process's file size limit) leaves the last one whole, no remains."""
    old, new = small("ours", seed=1), small("ours", seed=2)
    save_model(old, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*model\.safetensors.*") as error:
            save_model(new, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert f"({os.strerror(errno.EFBIG)}), and" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_model(tmp_path)(tokens), old(tokens))


def test_a_folder_that_is_a_file_is_one_line(small, tmp_path):
    """A path that cannot be a folder is an error for the user, without a traceback."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_model(small(), tmp_path / "taken")


def write_litgpt_folder(model, folder):
    folder.mkdir()
    config = dataclasses.asdict(litgpt_config(model.config))
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    torch.save({"model": model.state_dict()}, folder / "lit_model.pth")


@pytest.mark.parametrize("write", [save_model, export_hf, write_litgpt_folder], ids=["ours", "hf", "litgpt"])
def test_a_run_starts_from_softmax_weights(small, tokens, tmp_path, write):
    """Pythia's weights under `ours`: every tensor taken, none new, the attention that of the new run."""
    source, model = small("softmax", seed=1), small("ours", seed=2)
    write(source, tmp_path / "source")
    report = load_weights(model, tmp_path / "source")
    assert report.taken == list(model.state_dict())
    assert (report.new, report.unused) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert model.config.attention == "ours"
    assert (model(tokens) - source(tokens)).abs().max() > 1e-2


def test_the_report_says_what_is_new_and_unused(small, tmp_path):
    """From `ours` with a learnt b to `gla`: its own tensors start fresh, the others' are named as left."""
    source, model = small("ours", seed=1, learnable_b=True), small("gla", seed=2)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(source, tmp_path)
    report = load_weights(model, tmp_path)
    own = model.state_dict()
    assert all(torch.equal(own[name], source.state_dict()[name]) for name in report.taken)
    assert all(torch.equal(own[name], fresh[name]) for name in report.new)
    assert set(report.taken) | set(report.new) == set(own)
    assert "transformer.h.0.attn.qkvr.weight" in report.new
    assert "transformer.h.2.attn.b_offset" in report.unused
    lines = str(report).splitlines()
    assert lines[0].endswith("(LinGPT model with attention ours + learnable_b)")
    assert "transformer.h.*.attn.b_offset ×3" in lines[3]


def test_shared_values_may_be_new_and_unused(small, tmp_path):
    """Guards: `init_from` refused weights without `value_residual` for a model with it, and the reverse."""
    source, model = small("softmax", seed=1), small("ours", seed=2, value_residual=True)
    export_hf(source, tmp_path / "plain")
    report = load_weights(model, tmp_path / "plain")
    own = {name for name in model.state_dict() if ".shared_values." in name or name.endswith(".value_mix")}
    assert set(report.new) == own and len(own) == 4 + model.config.n_layer and not report.unused
    export_hf(model, tmp_path / "shared")
    report = load_weights(source, tmp_path / "shared")
    assert set(report.unused) == own and not report.new


def test_rotary_frequencies_may_be_scaled_for_a_longer_context(small, tokens, tmp_path):
    """Guards: `init_from` refused them as another model. Scaled ones are not forgotten."""
    adjustments = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
    longer = {"block_size": 128, "rope_adjustments": adjustments}
    source, model = small("softmax", seed=1), small("softmax", seed=2, **longer)
    save_model(source, tmp_path / "plain")
    assert not load_weights(model, tmp_path / "plain").new
    assert (model(tokens) - source(tokens)).abs().max() > 1e-4  # the same weights, with other tables
    save_model(model, tmp_path / "scaled")
    with pytest.raises(UserError, match=r"rope_adjustments is \{.*\}, not None"):
        load_weights(source, tmp_path / "scaled")


def test_a_tensor_of_another_shape_is_new_and_unused(small, tmp_path):
    """Guards: `gla` with its convolution as no beginning for ours with one, of other channels."""
    source = small("gla", seed=1, short_conv=True)
    model = small("ours-gated", seed=2, output_gate=True, short_conv=True)
    name = "transformer.h.0.attn.conv"
    save_model(source, tmp_path)
    fresh = model.state_dict()[name].clone()
    report = load_weights(model, tmp_path)
    assert name in report.new and name in report.unused and name not in report.taken
    assert torch.equal(model.state_dict()[name], fresh)
    assert all(line.count("attn.conv ×3") == 1 for line in str(report).splitlines()[2:])


def test_a_litgpt_folder_without_a_config_is_that_of_its_name(small, tmp_path):
    """Its own config comes first."""
    folder = tmp_path / "pythia-14m"
    write_litgpt_folder(small("softmax"), folder)
    assert read_model_config(folder).n_layer == 3
    (folder / "model_config.yaml").unlink()
    assert read_model_config(folder) == ModelArgs("pythia-14m", "softmax").config()


def test_fewer_keys_than_queries_are_another_model(small, tmp_path):
    """Guards: attention left as it was initialised where LitGPT's checkpoint has grouped queries."""
    write_litgpt_folder(small("softmax"), tmp_path / "source")
    config = tmp_path / "source/model_config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"n_query_groups": 2}))
    with pytest.raises(UserError, match="n_query_groups is 2, not 4"):
        load_weights(small(), tmp_path / "source")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_layer": 2}, "n_layer is 3, not 2"),
        ({"intermediate_size": 128}, "intermediate_size is 256, not 128"),
        ({"bias": False}, "bias is True, not False"),
        ({"vocab_size": 200}, "padded_vocab_size is 128, not 256"),
        ({"n_head": 8}, "n_head is 4, not 8"),
        ({"rotary_percentage": 0.5}, "rotary_percentage is 0.25, not 0.5"),
    ],
)
@pytest.mark.parametrize("write", [save_model, export_hf, write_litgpt_folder], ids=["ours", "hf", "litgpt"])
def test_another_model_is_refused(small, tmp_path, write, overrides, message):
    """Another size is an error, and nothing is taken; heads and rotation leave no trace in the shapes."""
    write(small("softmax", seed=1), tmp_path / "source")
    model = small("ours", seed=2, **overrides)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_weights(model, tmp_path / "source")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_damaged_litgpt_checkpoints_are_one_line(small, tmp_path):
    """Truncated, or a pickle with code in it: an error, and the code is never run."""
    folder = tmp_path / "source"
    write_litgpt_folder(small("softmax"), folder)
    weights = folder / "lit_model.pth"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"lit_model\.pth is missing, damaged") as error:
        load_weights(small(), folder)
    assert "\n" not in str(error.value)
    torch.save({"model": print}, weights)
    with pytest.raises(UserError, match=r"lit_model\.pth"):
        load_weights(small(), folder)
    (folder / "model_config.yaml").unlink()
    with pytest.raises(UserError, match=r"cannot read .*model_config\.yaml"):
        load_weights(small(), folder)
