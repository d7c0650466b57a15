"""`replace_attention`: transformers' models with linear attention train, are saved and load."""

import importlib
import json
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from lingpt import UserError, replace_attention
from lingpt.models import load_model, load_weights
from lingpt.models.gpt import GPT

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 160, "max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0}
GROUPS = {"num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "GPTNeoX": {},
    "Llama": GROUPS | {"rope_parameters": ROPE, "tie_word_embeddings": True},
    "Qwen2": GROUPS,
    "Qwen3": GROUPS | {"head_dim": 32},
}


@pytest.fixture(params=MODELS)
def stock(request):
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**(SIZES | MODELS[request.param]))
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # trained: not the ones that a new layer starts with
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_it_is_lingpts_model_that_starts_from_the_same(stock, tokens, tmp_path):
    """The logits of `init_from`: the old projections, all else as in a new model, to rounding."""
    if stock.config.model_type == "gpt_neox":
        pytest.importorskip("litgpt", reason="LinGPT reads GPT-NeoX's weights with LitGPT")
    stock.save_pretrained(tmp_path)
    source = load_model(tmp_path)
    config = type(source.config)(**(source.config.to_dict() | {"attention": "ours-gated"}))
    model = GPT.create(config, seed=0)
    load_weights(model, tmp_path)
    replaced = replace_attention(stock, "ours-gated")
    for mine, theirs in zip(model.blocks, replaced.base_model.layers, strict=True):
        layer = getattr(theirs, "attention", None) or theirs.self_attn
        layer.attn.decay_proj.weight.copy_(mine.attn.decay_proj.weight)
    torch.testing.assert_close(replaced(tokens).logits, model(tokens), rtol=0, atol=1e-5)


def test_a_model_of_the_same_configuration_stays_as_it_is(stock, tokens, tmp_path):
    """Guards: of two models of one configuration the second was refused, and saved as a replaced one."""
    other = AutoModelForCausalLM.from_config(stock.config).eval()
    logits = other(tokens).logits
    replaced = replace_attention(stock, "ours-gated")
    other.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(other) and torch.equal(again(tokens).logits, logits)
    assert replaced.base_model.config is replaced.config
    assert replace_attention(other, "gla").config.lingpt_attention == "gla"
    assert replaced.config.lingpt_attention == "ours-gated"


@pytest.mark.parametrize(("attention", "layers"), [("hybrid", None), ("ours-decay", [0, 3]), ("gla", [1])])
def test_it_trains_saves_and_loads(stock, tokens, tmp_path, attention, layers):
    """The chosen layers only; loaded by the Auto classes to the bit, with its constants; and `generate`."""
    model = replace_attention(stock, attention, layers)
    assert model.config.lingpt_layers == (layers or [0, 1, 2])
    optimizer, losses = torch.optim.AdamW(model.train().parameters(), lr=3e-3), []
    for _ in range(6):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    model.eval().save_pretrained(tmp_path)
    informed, _ = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    pickled = pickle.loads(pickle.dumps(model))  # as torch.save of a whole model, and processes, do
    for again in (pickled, informed, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(again) is type(model) and torch.equal(again(tokens).logits, model(tokens).logits)
        for before, after in zip(model.buffers(), again.buffers(), strict=True):
            assert torch.equal(before, after)
    ids = again.generate(tokens[:, :9], attention_mask=tokens[:, :9] > 0, max_new_tokens=8, do_sample=False)
    assert torch.equal(ids[:, -1], model(ids[:, :-1]).logits[:, -1].argmax(-1))


@torch.no_grad()
def test_padding_and_packing_are_kept_apart(stock, tokens):
    """Rows of different lengths are as each alone; so are packed sequences."""
    model = replace_attention(stock, "hybrid")
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[1, :15], mask[1, :15] = 0, 0
    together = model(padded, attention_mask=mask).logits
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    packed = model(tokens[1:], position_ids=positions).logits
    alone = model(tokens[1:, 15:]).logits
    torch.testing.assert_close(together[:1], model(tokens[:1]).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(together[1:, 15:], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[:, 15:], alone, rtol=0, atol=1e-5)
    three = torch.cat([torch.arange(15), torch.arange(11), torch.arange(14)])[None]
    middle = model(tokens[1:], position_ids=three).logits[:, 15:26]
    torch.testing.assert_close(middle, alone[:, :11], rtol=0, atol=1e-5)


@torch.no_grad()
def test_packing_needs_no_mask_where_flash_attention_has_none(stock, tokens):
    """Guards: sequences packed for FlashAttention, whose masks say nothing of them, that saw each other; a
    mask of another form than SDPA's that is read the wrong way round."""
    model = replace_attention(stock, "ours-gated")
    model.config._attn_implementation_internal = "flash_attention_2"  # no layer is left that would call it
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    packed, alone = model(tokens, position_ids=positions).logits, model(tokens[:, 15:]).logits
    torch.testing.assert_close(packed[:, 15:], alone, rtol=0, atol=1e-5)
    mask = F.pad(torch.ones_like(tokens[:, 15:]), (15, 0))
    for implementation in ("flash_attention_2", "eager"):  # masks [B, N], and added to the scores
        model.config._attn_implementation_internal = implementation
        padded = model(tokens, attention_mask=mask).logits
        torch.testing.assert_close(padded[:, 15:], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_sliding_window_is_no_padding(tokens):
    """Guards: tokens before the last token's window, in layers that had one, taken for padding."""
    torch.manual_seed(0)
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    stock = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SIZES, **GROUPS, **sliding))
    model = replace_attention(stock.eval(), "ours-gated")
    whole, part = model(tokens).logits, model(tokens[:, :30]).logits
    torch.testing.assert_close(whole[:, :30], part, rtol=0, atol=1e-5)


def test_a_missing_extra_is_one_line(monkeypatch):
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lingpt.hf")
    with pytest.raises(ModuleNotFoundError, match=r"^transformers is not installed: pip install .*\[hf\]"):
        importlib.import_module("lingpt.hf")


def test_mistakes_are_one_line(tokens, tmp_path):
    """Also for whoever loads it without `import lingpt.hf`: the type of the model is its own."""
    config = transformers.LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    bert, layer = transformers.BertModel(transformers.BertConfig(**SIZES)), torch.nn.Linear(2, 2)
    for given, line in (
        ((bert, "ours"), "cannot replace the attention of a BertModel: give a model of GPTNeoXForCausalLM"),
        ((layer, "ours"), "cannot replace the attention of a Linear: give"),
        ((model, "softmax"), "give some of 0 to 3"),
        ((model, "ours", [7]), r"layers=\[7\] of attention 'ours': give some of 0 to 3"),
        ((model, "hybrid", [3]), r"leaves some of the layers \[3\] softmax: give a linear one"),
        ((model, "our"), "unknown attention 'our'"),
        ((model, "ours+value_residual"), "values that a whole model shares"),
    ):
        with pytest.raises(UserError, match=line):
            replace_attention(*given)
    replace_attention(model, "ours", torch.tensor([0, 2]))  # whose numbers JSON does not know
    with pytest.raises(UserError, match="replaced already"):
        replace_attention(model, "ours")
    with pytest.raises(ValueError, match="keeps no cache: give use_cache=False"):
        model(tokens, use_cache=True)
    with pytest.raises(ValueError, match="reads no object: give attn_implementation='sdpa'"):
        model.model.layers[0].self_attn(torch.zeros(1, 5, 64), attention_mask=object())  # flex_attention's
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "lingpt_llama" and saved["lingpt_layers"] == [0, 2]
