"""Llama's shape: checkpoints of transformers come in and go out, LitGPT agrees, every attention takes it."""

import dataclasses
import json

import litgpt
import pytest
import torch
import torch.nn.functional as F
import transformers
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama, copy_weights_qwen_3

from lingpt.common.errors import UserError
from lingpt.models import ATTENTIONS, GPT, Config, export_hf, load_model, load_weights, save_model

from .conftest import LLAMA as SHAPE
from .conftest import litgpt_config

SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 160, "max_position_embeddings": 96}
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 32, **SCALED}
KINDS = {
    "llama-3": ("Llama", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen-2": ("Qwen2", {}),
    "qwen-3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def theirs(request):
    """A small model of transformers with random weights, also where they start at 0 or 1."""
    name, options = request.param
    config = getattr(transformers, f"{name}Config")(**(SIZES | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.1)
    return model


@torch.no_grad()
def test_softmax_has_transformers_logits_in_and_out(theirs, tokens, tmp_path):
    """Within 1e-5 in fp32, decoded too; exported again it is the same kind of model, to the bit; and a linear
    model starts from it."""
    theirs.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in")
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    state = model.new_state(2)
    stepped = [model.step(part, state) for part in tokens.split([60, *[1] * 10], dim=1)]
    torch.testing.assert_close(torch.cat(stepped, dim=1), expected, rtol=0, atol=2e-5)
    export_hf(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-6)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    linear = GPT(dataclasses.replace(model.config, attention="ours-gated"))
    linear.init_weights(0)
    values = json.loads((tmp_path / "in/config.json").read_text())
    rope = values.pop("rope_parameters")  # two keys in transformers 4, and none for what is the default
    values |= {} if (base := rope.pop("rope_theta")) == 10000.0 else {"rope_theta": base}
    values |= {} if rope["rope_type"] == "default" else {"rope_scaling": rope}
    del values["rms_norm_eps"]
    (tmp_path / "in/config.json").write_text(json.dumps(values))
    assert load_model(tmp_path / "in").config == model.config
    report = load_weights(linear, tmp_path / "in")
    assert report.unused == [] and all("decay" in name for name in report.new)
    assert torch.equal(linear.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@torch.no_grad()
@pytest.mark.parametrize(
    ("norm_qk", "copy"),
    [(False, copy_weights_hf_llama), (True, copy_weights_qwen_3)],
    ids=["llama", "qwen-3"],
)
def test_litgpt_agrees_and_its_checkpoints_load(small, tokens, tmp_path, norm_qk, copy):
    """The keys, logits and files of LitGPT's Llama, whose names the configuration has."""
    adjustments = SCALED | {"original_max_seq_len": 32}
    model = small("softmax", **SHAPE | {"norm_qk": norm_qk, "rope_adjustments": adjustments})
    config = litgpt_config(model.config)
    twin, tensors = litgpt.GPT(config), {}
    export_hf(model, tmp_path / "hf")
    rope = json.loads((tmp_path / "hf/config.json").read_text())["rope_parameters"]
    assert type(rope["original_max_position_embeddings"]) is int  # transformers warns of another
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    copy(config, {}, tensors, exported.state_dict())
    twin.load_state_dict(tensors)
    torch.testing.assert_close(twin(tokens), model(tokens), rtol=0, atol=1e-5)
    torch.save(tensors, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    if norm_qk:  # LitGPT's file does not say that the head is tied
        with pytest.raises(
            UserError, match="is another model than 'small': tie_embeddings is False, not True"
        ):
            load_weights(model, tmp_path)
    torch.testing.assert_close(load_model(tmp_path)(tokens), model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("short_conv", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_takes_the_shape(small, tokens, tmp_path, attention, short_conv):
    """It learns everywhere, decodes as it trains, and is saved and exported whole."""
    options = {"softmax": "softmax_conv"}.get(attention, "short_conv")
    model = small(attention, **SHAPE | {options: short_conv, "head_size": 32})
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    with torch.no_grad():
        state = model.new_state(2)
        stepped = [model.step(part, state) for part in tokens.split([30, 20, *[1] * 20], dim=1)]
        torch.testing.assert_close(torch.cat(stepped, dim=1), model(tokens), rtol=1e-4, atol=2e-5)
        save_model(model, tmp_path / "own")
        export_hf(model, tmp_path / "hf")
        import lingpt.hf  # noqa: F401

        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        for logits in (load_model(tmp_path / "own")(tokens), load_model(tmp_path / "hf")(tokens)):
            assert torch.equal(logits, model(tokens))
        torch.testing.assert_close(exported(tokens).logits, model(tokens), rtol=0, atol=1e-5)
        assert exported.lm_head.weight is exported.get_input_embeddings().weight


@torch.no_grad()
@pytest.mark.parametrize("attention", ["softmax", "ours", "ours-decay", "ours-gated"])
def test_grouped_queries_are_repeated_keys(small, tokens, attention):
    """The definition: each head of k and v, written out for all of its queries."""
    model, whole = (small(attention, **SHAPE | {"n_query_groups": groups}) for groups in (2, 4))
    weights = model.state_dict()
    for name, rows in weights.items():
        if name.endswith("qkv.weight"):
            q, *kv = rows.split((64, 32, 32))
            repeated = [part.view(2, 16, 64).repeat_interleave(2, 0).flatten(0, 1) for part in kv]
            weights[name] = torch.cat((q, *repeated))
    whole.load_state_dict(weights)
    torch.testing.assert_close(model(tokens), whole(tokens), rtol=0, atol=1e-5)


def test_named_models_have_their_parameters():
    """With the vocabularies of the papers, Llama 3.2's own count, and the GLA paper's."""
    for name, attention, vocab_size, count in (
        ("llama-130m", "softmax", 50254, 123_587_328),
        ("llama-1b", "softmax", 128256, 1_235_814_400),
        ("llama-340m", "gla", 32000, pytest.approx(341e6, rel=0.005)),
        ("llama-1.3b", "gla", 32000, pytest.approx(1.37e9, rel=0.005)),
    ):
        config = Config.from_name(name, attention=attention, vocab_size=vocab_size)
        assert GPT.on_meta(config).num_parameters() == count, name


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_act": "gelu"}, "not supported: it has the activation gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "it has RoPE of type yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "it has RoPE of a part of its dimensions"),
        ({"attention_bias": True}, "it has biases in a part of its layers"),
        ({"use_sliding_window": True}, "it has a sliding window"),
        ({"num_key_value_heads": 3}, "none of llama's: n_head=4 must be a multiple of n_query_groups=3"),
        ({"hidden_size": None}, "none of llama's: n_embd is null"),
        ({"num_attention_heads": 0}, "none of llama's: n_head is 0"),
    ],
)
def test_variants_are_one_line(tmp_path, change, line):
    """What would be computed otherwise is refused."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SIZES | change))
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=line) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_shapes_that_are_none_are_one_line():
    """By the names of their options."""
    scaled = SCALED | {"original_max_seq_len": 32}
    for change, line in (
        ({"n_query_groups": 3}, "n_head=4 must be a multiple of n_query_groups=3"),
        (
            {"rope_adjustments": {"factor": 8}},
            "rope_adjustments has factor: give Llama 3's factor, high_freq",
        ),
        (
            {"rope_adjustments": scaled | {"factor": 0.0}},
            "rope_adjustments must be above 0, .*: factor is 0,",
        ),
        (
            {"rope_adjustments": scaled | {"high_freq_factor": 1.0}},
            "and high_freq_factor above low_freq_factor",
        ),
        (
            {"norm_class_name": "LayerNom"},
            "norm_class_name is LayerNom; it must be one of LayerNorm, RMSNorm",
        ),
    ):
        with pytest.raises(UserError, match=line):
            Config(name="x", n_layer=1, n_embd=64, n_head=4, **change)
