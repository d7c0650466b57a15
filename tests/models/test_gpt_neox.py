"""To and from `transformers`: the same logits, and no export of what GPT-NeoX would compute otherwise."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lingpt.common.errors import UserError
from lingpt.data import load_tokenizer
from lingpt.data.tokenizer import train_bpe
from lingpt.models import ATTENTIONS, export_hf, load_model

from .conftest import LLAMA, switched

SCALED = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_seq_len": 32}


@pytest.fixture(params=[(0.25, True), (1.0, False)], ids=["pythia", "full-rotary-sequential"])
def hf_model(request):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    rotary_pct, parallel = request.param
    config = GPTNeoXConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=96, rotary_pct=rotary_pct, use_parallel_residual=parallel, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # zero biases would hide a permutation of them
    return model


@torch.no_grad()
@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded"])
def test_softmax_has_transformers_logits(hf_model, tokens, tmp_path, layout):
    """Stock Pythia folders of every age load, and compute what `transformers` does, within 1e-5 in fp32."""
    if layout == "bin":
        hf_model.config.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        part = values.pop("rope_parameters")["partial_rotary_factor"]  # a key of its own in transformers 4
        del values["layer_norm_eps"]  # a default, as is 0.25
        values |= {"rotary_pct": part} if part != 0.25 else {}
        if values["use_parallel_residual"]:  # as well
            del values["use_parallel_residual"]
        values["_name_or_path"] = "EleutherAI/pythia-14m"  # as they are published
        (tmp_path / "config.json").write_text(json.dumps(values))
        old = {
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2)
        }  # what old releases saved too
        torch.save(hf_model.state_dict() | old, tmp_path / "pytorch_model.bin")
    else:
        hf_model.save_pretrained(tmp_path, max_shard_size="200KB" if layout == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "sharded")
    model = load_model(tmp_path)
    assert model.config.name == ("pythia-14m" if layout == "bin" else tmp_path.name)
    torch.testing.assert_close(model(tokens), hf_model(tokens).logits, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("parallel", [True, False])
def test_our_softmax_models_run_in_transformers(small, tokens, tmp_path, parallel):
    """An exported folder gives our logits there; read back, our tensors to the bit."""
    from transformers import AutoModelForCausalLM

    model = small("softmax", rotary_percentage=0.5, parallel_residual=parallel, norm_eps=0.01)
    torch.nn.init.normal_(model.transformer.h[1].attn.qkv.bias)
    export_hf(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.architectures == [type(theirs).__name__] == ["GPTNeoXForCausalLM"]
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    again = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert again.config.rotary_percentage == 0.5


OTHERS = [{"attention": name} for name in ATTENTIONS if name != "softmax"]
OTHERS += [{"attention": ["softmax", "softmax", "ours"]}, {"attention": "softmax", "softmax_window": 24}]
SHAPES = [dict.fromkeys([name], True) for name in (*switched("softmax"), "norm_qk", "tie_embeddings")]
SHAPES += [{"bias": False}, {"n_query_groups": 2}, {"head_size": 32}, {"rope_adjustments": SCALED}]
SHAPES += [LLAMA | {"parallel_residual": True}, LLAMA | {"rotary_percentage": 0.5}, LLAMA | {"bias": True}]
OTHERS += [{"attention": "softmax"} | shape for shape in SHAPES]


@pytest.mark.parametrize("form", OTHERS)
def test_what_transformers_does_not_compute_is_exported_as_our_own(small, tmp_path, form):
    """Under GPT-NeoX's or Llama's keys it would load there and be scored as another model."""
    export_hf(small(**form), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("lingpt", ["LinGPTForCausalLM"])
    assert load_model(tmp_path).config == small(**form).config


def test_damaged_folders_are_one_line(small, tmp_path):
    """What is missing or foreign is named."""
    export_hf(small("softmax"), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(load_file(weights) | {"gpt_neox.layers.0.adapter": torch.ones(1)}, weights)
    with pytest.raises(UserError, match=r"gpt_neox\.layers"):
        load_model(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match="no weights in"):
        load_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for names in ({}, *({"weight_map": x} for x in (3, {"a": 3}, {"a": "../model.safetensors"}))):
        index.write_text(json.dumps(names))
        with pytest.raises(UserError, match="names no files of its folder"):
            load_model(tmp_path)
    values = json.loads(config.read_text())
    scaled = values["rope_parameters"] | {"rope_type": "linear", "factor": 4.0}  # as transformers 5 has it
    config.write_text(json.dumps(values | {"rope_parameters": scaled}))
    with pytest.raises(UserError, match=r"not supported .*scaled"):
        load_model(tmp_path)
    for variant in ({"hidden_act": "gelu_fast"}, {"tie_word_embeddings": True}):
        config.write_text(json.dumps(values | variant))
        with pytest.raises(UserError, match=r"not supported \(activation, tied"):
            load_model(tmp_path)
    config.write_text(json.dumps(values | {"attention_bias": False}))  # of the MLP it has biases all the same
    with pytest.raises(UserError, match=r"not supported .*without biases"):
        load_model(tmp_path)
    for value in ({"rope_theta": "much"}, {"rope_theta": []}):
        config.write_text(json.dumps(values | {"rope_parameters": value}))
        with pytest.raises(UserError, match="a value that is none of GPT-NeoX's"):
            load_model(tmp_path)
    config.write_text(json.dumps({"model_type": "gpt_neox"}))
    with pytest.raises(UserError, match="lacks 'max_position_embeddings'"):
        load_model(tmp_path)


TEXT = "naïve 水 🙂\n\n\tdef f():\r\n  x = 1   <|endoftext|> the  end"


@pytest.mark.parametrize("given", ["a checkpoint's folder", "a file", "NeoX's"])
def test_the_tokenizer_is_exported_too(small, tmp_path, request, given):
    """Guards: AutoTokenizer on an exported folder gives an empty tokenizer, without a word; `generate` with
    rows that are no token, or without the token that ends a text."""
    from transformers import AutoTokenizer

    if given == "NeoX's":
        tokenizer = load_tokenizer(request.getfixturevalue("real_data") / "tokenizer")
    else:
        tokenizer = train_bpe(["the river ran slowly past old mills"] * 9, 300)
    path = tokenizer.save(tmp_path / "from")
    with pytest.warns(UserWarning, match="gets no tokenizer"):
        export_hf(small("softmax"), tmp_path / "none")
    model = small("softmax", vocab_size=tokenizer.vocab_size + 9)
    export_hf(model, tmp_path / "out", path if given == "a file" else path.parent)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert theirs.encode(TEXT, add_special_tokens=False) == ids and theirs.decode(ids) == TEXT
    assert theirs.model_max_length == 96 and theirs.padding_side == "left"
    named = [f"{name}_token_id" for name in ("bos", "eos", "pad")]
    assert {getattr(theirs, name) for name in (*named, "unk_token_id")} == {tokenizer.eos_id}
    config, generation = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    )
    unused = range(tokenizer.vocab_size, model.config.padded_vocab_size)
    expected = dict.fromkeys(named, tokenizer.eos_id)
    assert generation == expected | {"suppress_tokens": [*unused]}
    assert config.items() >= (expected | {"dtype": "float32"}).items()


def test_an_end_token_that_is_only_in_the_vocabulary_is_exported(small, tmp_path):
    """Guards: a tokenizer that trains and generates, and was then refused as none with that token."""
    from transformers import AutoTokenizer

    values = json.loads(train_bpe(["the river ran slowly"] * 9, 300).raw.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": []}))
    export_hf(small("softmax", vocab_size=300), tmp_path / "out", tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == 0
    assert theirs.encode("the river") == load_tokenizer(tmp_path).encode("the river")


def test_an_exported_tokenizer_puts_no_tokens_around_a_text(small, tmp_path):
    """Guards: the begin of text of Llama's tokenizers, which the model has never read, before each prompt."""
    from tokenizers import AddedToken, processors
    from transformers import AutoTokenizer

    raw = train_bpe(["the river ran slowly"] * 9, 300).raw
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    begin = {"single": "<s> $A", "special_tokens": [("<s>", raw.token_to_id("<s>"))]}
    raw.post_processor = processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(**begin)])
    raw.save(str(tmp_path / "tokenizer.json"))
    export_hf(small("softmax", vocab_size=301), tmp_path / "out", tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the river", "<s>the river"):
        assert theirs.encode(text) == load_tokenizer(tmp_path).encode(text)
        assert theirs.encode(text) == load_tokenizer(tmp_path / "out").encode(text)


@torch.no_grad()
def test_a_base_of_the_rotary_frequencies_that_is_not_whole(hf_model, tokens, tmp_path):
    """Guards: `rope_theta` 10.7, read as 10."""
    hf_model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values["rope_parameters"] = values["rope_parameters"] | {"rope_theta": 10.7}
    values["rotary_pct"] = rope["partial_rotary_factor"]  # transformers 5 forgets it otherwise
    (tmp_path / "config.json").write_text(json.dumps(values))
    model, theirs = load_model(tmp_path), type(hf_model).from_pretrained(tmp_path)
    assert model.config.rope_base == 10.7
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("content", ["{}", "{", '{"added_tokens": []}'])
def test_what_is_no_tokenizer_is_not_exported(small, tmp_path, content):
    """One line, and no half of an export."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        export_hf(small("softmax"), tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_more_tokens_than_the_model_is_not_exported(small, tmp_path):
    """Guards: a folder whose text, in transformers, is an index out of range."""
    train_bpe(["the river ran slowly"] * 9, 300).save(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json has \d+ tokens, the model 128: give the model's"):
        export_hf(small("softmax"), tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()
