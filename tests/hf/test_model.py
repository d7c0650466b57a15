"""Our models in transformers: the same numbers, and what its users do with a model."""

import weakref
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import lingpt.hf
from lingpt.common.errors import UserError
from lingpt.hf.model import CACHE
from lingpt.models import ALIASES, ATTENTIONS, GPT, ModelArgs, export_hf, generate, load_model
from lingpt.models.attention.softmax import KVCache

NOT_STOCK = [*(name for name in ATTENTIONS if name != "softmax"), "softmax+softmax_gate+softmax_conv"]
FORMS = [
    *NOT_STOCK,
    *ALIASES,
    "gla+short_conv+gate_activation=sigmoid+input_gate",
    "ours+learnable_b+short_conv",
    "hybrid+input_gate+softmax_window=5",
    "hybrid+value_residual",
    "softmax+value_residual",
]


def make(form: str, **shape: Any) -> GPT:
    """A model of four layers with heads of 16, 120 tokens in 128 rows."""
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "block_size": 96, "vocab_size": 120}
    model = GPT(ModelArgs("small", form, padding_multiple=64, **(sizes | shape)).config())
    model.init_weights(0)
    return model.eval()


@pytest.fixture(
    params=[form if form == "hybrid" else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def model(request: pytest.FixtureRequest) -> GPT:
    return make(request.param)


@pytest.fixture
def exported(model, tmp_path):
    """The exported model, loaded by transformers."""
    export_hf(model, tmp_path / "out")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, 120, (2, 70), generator=torch.Generator().manual_seed(1))


def padded(tokens: torch.Tensor, lengths: list[int], side: str = "left") -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded with token 0, and their mask."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(max(lengths) - length, None) if side == "left" else slice(length)
        ids[row, where], mask[row, where] = tokens[row % len(tokens), :length], 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_logits_are_lingpts(model, exported, tokens, tmp_path):
    """To the bit, in fp32; the base model's output is what the head reads; no constant is lost on meta."""
    output = exported(tokens, output_hidden_states=True)
    assert torch.equal(output.logits, model(tokens)) and len(output.hidden_states) == 5
    assert torch.equal(exported(inputs_embeds=exported.transformer.wte(tokens)).logits, output.logits)
    base = AutoModel.from_pretrained(tmp_path / "out")(tokens).last_hidden_state
    assert torch.equal(base, model.hidden(tokens)) and torch.equal(base, output.hidden_states[-1])
    few = exported(tokens, logits_to_keep=3).logits  # a product of another shape, so of another order of sums
    torch.testing.assert_close(few, output.logits[:, -3:], rtol=0, atol=1e-6)
    these = exported(tokens, logits_to_keep=torch.tensor([8, 40])).logits
    torch.testing.assert_close(these, output.logits[:, [8, 40]], rtol=0, atol=1e-6)
    constants = [*model.buffers()]
    assert all(torch.equal(*pair) for pair in zip(exported.buffers(), constants, strict=True))


@torch.no_grad()
def test_its_configuration_says_what_it_returns(tokens, tmp_path):
    """Guards: its `return_dict` and `output_hidden_states` were not read; all layers' outputs were kept."""
    export_hf(make("ours"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    first, alive = list[weakref.ref](), list[bool]()
    model.transformer.h[0].register_forward_hook(lambda *given: first.append(weakref.ref(given[2])))
    model.transformer.h[3].register_forward_hook(lambda *_: alive.append(first[0]() is not None))
    model(tokens)
    assert alive == [False]
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == 5
    model.config.return_dict = False
    assert len(model(tokens)[1]) == 5 and isinstance(model(tokens, return_dict=True).logits, torch.Tensor)


def test_transformers_finds_the_embeddings(exported):
    """As where tokens are added for a chat. Guards: the first of them, whose rows were there and no tokens,
    were never generated."""
    rows = exported.config.vocab_size + 3
    assert exported.generation_config.suppress_tokens[0] == 120
    exported.resize_token_embeddings(rows)
    assert exported.generation_config.suppress_tokens is None
    assert len(exported.transformer.wte.weight) == len(exported.lm_head.weight) == rows
    assert exported(torch.tensor([[rows - 1]])).logits.shape == (1, 1, rows)


@torch.no_grad()
def test_tied_embeddings_stay_tied(tokens, tmp_path):
    """In Llama's shape: saved once, with more rows, too; equal in both libraries."""
    shape = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "n_query_groups": 2, "norm_qk": True}
    shape |= {"parallel_residual": False, "bias": False, "tie_embeddings": True}
    export_hf(make("hybrid", **shape), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.resize_token_embeddings(131, mean_resizing=False)
    model.save_pretrained(tmp_path / "more")
    again, own = AutoModelForCausalLM.from_pretrained(tmp_path / "more"), load_model(tmp_path / "more")
    fresh = AutoModelForCausalLM.from_config(lingpt.hf.LinGPTConfig(model.config.network))
    assert all(one.lm_head.weight is one.transformer.wte.weight for one in (model, again, fresh))
    assert "lm_head.weight" not in load_file(tmp_path / "more/model.safetensors")
    logits = model(tokens).logits
    assert logits.shape[-1] == 131 and torch.equal(again(tokens).logits, logits)
    assert torch.equal(own(tokens), logits)


@torch.no_grad()
def test_generate_is_lingpts(model, exported, tokens):
    """Greedy, with a state of constant size in all layers but softmax's."""
    prompt = tokens[:, :9]
    ids = exported.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(ids, generate(model, prompt, 64, temperature=0))
    sizes = []
    for columns in (20, 60):
        cache = exported(tokens[:, :columns], use_cache=True).past_key_values
        sizes.append([lingpt.hf.LinGPTCache([layer]).num_bytes() for layer in cache.layers])
    grows = [a != b for a, b in zip(*sizes, strict=True)]
    assert grows == [name == "softmax" for name in model.config.attention_per_layer]


@torch.no_grad()
def test_generate_goes_on_from_a_cache(exported, tokens):
    """As in a chat: the same text as in one call, of the columns that the cache has not seen."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}
    whole = exported.generate(tokens[:, :9], max_new_tokens=16, **options).sequences
    first = exported.generate(tokens[:, :9], max_new_tokens=7, **options)
    cache, read = first.past_key_values, list[int]()
    exported.transformer.wte.register_forward_hook(lambda *given: read.append(given[2].shape[1]))
    rest = exported.generate(first.sequences, past_key_values=cache, max_new_tokens=9, **options)
    assert torch.equal(rest.sequences, whole) and read == [1] * 9


def test_a_caches_room_is_doubled():
    """Guards: all keys and values copied for each token; a room that grows where it need not."""
    cache, room = lingpt.hf.LinGPTCache([KVCache(torch.ones(1, 3, 9, 2), torch.ones(1, 3, 9, 2))]), []
    for columns in (9, 10, 18, 19, 90):
        cache.reserve(columns)
        (layer,) = cache.layers
        assert layer.k.shape == layer.v.shape and (layer.k.sum(), layer.v.sum()) == (54, 54)
        room.append(list(layer.k.shape))
    assert room == [[1, 3, columns, 2] for columns in (9, 18, 18, 36, 90)]


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(model, exported, tokens):
    """Guards: padding tokens in the state of a linear attention, which moved the last logits by 0.16.

    `unified` in float64: at a first token whose q·k is near 0, the norm of a head makes fp32's rounding 300
    times as large.
    """
    atol = 1e-5
    if model.config.attention == "unified":
        exported, atol = exported.double(), 1e-6
    lengths = [31, 8, 31, 2]
    batch = padded(tokens, lengths)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    together, forward = exported.generate(**batch, **options), exported(**batch).logits
    for row, length in enumerate(lengths):
        alone = tokens[row % 2, None, :length]
        torch.testing.assert_close(forward[row, 31 - length :], exported(alone).logits[0], rtol=0, atol=atol)
        single = exported.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert together.sequences[row, 31:].tolist() == single.sequences[0, length:].tolist()
        for a, b in zip(together.logits, single.logits, strict=True):
            torch.testing.assert_close(a[row], b[0], rtol=0, atol=atol)


@torch.no_grad()
def test_beams_and_sequences_are_those_without_a_cache(exported, tokens):
    """A beam's state goes where the beam goes."""
    batch = padded(tokens, [20, 13])
    options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (exported.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without) and len(with_cache) == 4
    twice, rows = exported(tokens, use_cache=True).past_key_values, [0, 0, 1, 1]
    twice.batch_repeat_interleave(2)
    expected = exported(torch.cat([tokens, tokens[:, :1]], 1)[rows]).logits[:, -1:]
    found = exported(tokens[rows, :1], past_key_values=twice).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(exported, tokens):
    """By position ids that begin again, or by borders, as collators without padding give them."""
    row, lengths = tokens[:1], (23, 40, 7)
    parts = [exported(part).logits for part in row.split(lengths, dim=1)]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for given in ({"position_ids": positions}, {"cu_seq_lens_q": torch.tensor([0, 23, 63, 70])}):
        torch.testing.assert_close(exported(row, **given).logits, torch.cat(parts, dim=1), rtol=0, atol=1e-5)
    long, filled = row.repeat(1, 2), torch.cat([torch.arange(96), torch.arange(44)])[None]  # 96 fit
    found = exported(long, position_ids=filled).logits[:, :96]
    torch.testing.assert_close(found, exported(long[:, :96]).logits, rtol=0, atol=1e-5)
    rows, two = row.repeat(2, 1), torch.cat([positions, torch.arange(70)[None]])
    whole = torch.cat([torch.cat(parts, dim=1), exported(row).logits])
    torch.testing.assert_close(exported(rows, position_ids=two).logits, whole, rtol=0, atol=1e-5)
    behind = {"input_ids": F.pad(row, (6, 0)), "attention_mask": F.pad(torch.ones_like(row), (6, 0))}
    found = exported(**behind, position_ids=F.pad(positions, (6, 0))).logits[:, 6:]
    torch.testing.assert_close(found, whole[:1], rtol=0, atol=1e-5)


def test_a_step_of_training(exported, tokens):
    """The loss of labels, of which −100 is ignored, with padding on either side; the same with its blocks
    recomputed; every parameter has a gradient."""
    whole, batch = tokens[:, :33], padded(tokens, [33, 20], "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = exported(**batch, labels=labels).loss
    parts = [exported(x[None], labels=x[None]).loss for x in (whole[0], whole[1, :20])]
    torch.testing.assert_close(loss, (32 * parts[0] + 19 * parts[1]) / 51)
    left = padded(tokens, [33, 20])
    labels = left["input_ids"].masked_fill(left["attention_mask"] == 0, -100)
    labels[1, 13] = -100  # the first token, which only padding precedes
    torch.testing.assert_close(exported(**left, labels=labels).loss, loss)
    counted = exported(**left, labels=labels, num_items_in_batch=102).loss  # of two batches, as by Trainer
    torch.testing.assert_close(counted, loss / 2)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in exported.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    exported.zero_grad()
    exported.train().gradient_checkpointing_enable()
    computed = list[int]()
    exported.transformer.h[0].register_forward_pre_hook(lambda *_: computed.append(1))
    exported(**left, labels=labels).loss.backward()
    assert len(computed) == 2
    for name, p in exported.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(model, exported, tokens, tmp_path):
    """By transformers, in one file and in shards, in bf16, and read by LinGPT again.

    Guards: the gates' biases stayed in fp32 where fp32 weights are read in bf16."""
    device_map = "cpu" if find_spec("accelerate") else None  # a map needs accelerate
    for dtype in (torch.float32, torch.bfloat16):
        exported = exported.to(dtype)
        saved = tmp_path / str(dtype)
        exported.save_pretrained(saved, max_shard_size="100KB")
        again = AutoModelForCausalLM.from_pretrained(saved, dtype="auto", device_map=device_map)
        own = load_model(saved)
        for name, tensor in exported.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor) and torch.equal(
                own.state_dict()[name], tensor
            )
        assert torch.equal(again(tokens).logits, own(tokens)) and own.config == model.config
        assert {buffer.dtype for buffer in again.buffers()} == {torch.float32}
    assert torch.equal(load_model(tmp_path / "out")(tokens), model(tokens))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(half(tokens).logits, load_model(tmp_path / "out", dtype=torch.bfloat16)(tokens))


@torch.no_grad()
def test_pushed_to_the_hub_it_keeps_its_bits(tokens, tmp_path, monkeypatch):
    """The files of the commit, in place of an upload, load as the model."""
    export_hf(make("hybrid"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    def write(repo_id, operations, **_):
        for operation in operations:
            with operation.as_file() as file:
                path = tmp_path / repo_id / operation.path_in_repo
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())

    # transformers 5.3 calls functions that it has imported, 5.24 the methods of what `hf_api` returns.
    names = {"create_repo": lambda repo_id, **_: SimpleNamespace(repo_id=repo_id), "create_commit": write}
    for name, function in (names | {"hf_api": lambda: SimpleNamespace(**names)}).items():
        monkeypatch.setattr(f"transformers.utils.hub.{name}", function, raising=False)
    card = SimpleNamespace(save=lambda _: None)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: card)
    model.push_to_hub("someone/small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "someone/small")
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    assert again.generation_config.suppress_tokens == [*range(120, 128)]  # the rows that are no token


def test_a_new_model_starts_as_gpt_neox_does(tokens):
    """From a configuration alone, in transformers' way."""
    config = lingpt.hf.LinGPTConfig(make("hybrid").config.to_dict())
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(config)
    assert fresh.transformer.h[0].mlp.proj.weight.std().item() == pytest.approx(2 / (4 * 8), rel=0.05)
    assert not fresh.transformer.h[0].mlp.proj.bias.any()
    assert all(torch.isfinite(x).all() for x in (*fresh.parameters(), *fresh.buffers()))
    assert fresh(tokens).logits.std() > 0
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(config)
    assert not torch.equal(other.transformer.wte.weight, fresh.transformer.wte.weight)


def test_the_tokenizer_comes_along(tmp_path):
    """Unequal prompts can be padded at once."""
    from transformers import AutoTokenizer

    train_bpe = pytest.importorskip("lingpt.data.tokenizer", reason="needs lingpt[train]").train_bpe
    tokenizer = train_bpe(["the river ran slowly past old mills"] * 9, 300)
    export_hf(make("ours", vocab_size=300), tmp_path / "out", tokenizer.save(tmp_path / "from"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = theirs(["the river ran", "old"], return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0 and theirs.pad_token_id == tokenizer.eos_id
    assert theirs.encode("the river ran") == tokenizer.encode("the river ran")


@torch.no_grad()
def test_mistakes_are_one_line(tmp_path, tokens):
    """What a state cannot do is said, not done wrong."""
    export_hf(make("ours"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    right, empty = padded(tokens, [9, 5], "right"), padded(tokens, [9, 0])
    cache = model(tokens, use_cache=True).get(CACHE)
    few = lingpt.hf.LinGPTCache(cache.layers[:3])
    twice = torch.cat([torch.arange(35), torch.arange(35)])[None]
    longer = torch.cat([torch.arange(97), torch.arange(43)])[None]
    joined = {"input_ids": tokens[:, :3], "cu_seq_lens_q": torch.tensor([0, 2, 3, 5, 6])}
    later = {"input_ids": tokens[:, :3], "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    hole = {"input_ids": tokens[:, :3], "attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}
    for given, line in (
        (right | {"use_cache": True}, "padding on the right would enter the states"),
        (
            right | {"past_key_values": model.transformer.new_cache(2, 9, torch.float32)},
            "padding on the right would",
        ),
        (empty, "a row of padding only"),
        ({"input_ids": tokens, "attention_mask": torch.ones(2, 5)}, r"of \[2, 5\]: give \[2, 70\]"),
        ({"input_ids": tokens, "attention_mask": torch.ones(2, 1, 70, 70).tril()}, r"give \[2, 70\]"),
        (hole, "padding between tokens"),
        (later | {"past_key_values": cache}, "padding after tokens that the cache has seen"),
        ({"input_ids": tokens[:, :0]}, "nothing to continue"),
        ({}, "give input_ids or inputs_embeds"),
        ({"input_ids": tokens.repeat(1, 2)}, "140 tokens, but the model's block size is 96"),
        ({"input_ids": tokens.repeat(1, 2), "position_ids": longer}, "97 tokens, but the model's block size"),
        ({"input_ids": tokens, "past_key_values": object()}, "holds no states"),
        ({"input_ids": tokens, "cache": object()}, "holds no states"),
        ({"input_ids": tokens[:1], "past_key_values": cache}, "a cache of 4 layers and 2 rows for 4 and 1"),
        ({"input_ids": tokens, "past_key_values": few}, "a cache of 3 layers and 2 rows for 4 and 2"),
        ({"input_ids": tokens, "position_ids": twice, "use_cache": True}, "packed sequences keep no cache"),
        (joined | {"past_key_values": cache}, "packed sequences keep no cache"),
    ):
        with pytest.raises(ValueError, match=line) as error:
            model(**given)
        assert "\n" not in str(error.value)
    config = AutoConfig.from_pretrained(tmp_path)
    config.network["from_the_future"] = 1
    with pytest.raises(UserError, match=r"'from_the_future' .*if a newer LinGPT wrote it, update this one"):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "other", ["ours", "softmax", "gla", "hybrid+input_gate", "hybrid+gate_activation=sigmoid"]
)
def test_weights_of_another_attention_are_refused(tmp_path, other):
    """Guards: parameters that are left out, or that start anew, behind a warning; those of another
    size. Options without parameters, such as an activation, do not show in the weights."""
    export_hf(make("hybrid"), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.network = make(other).config.to_dict()
    config.save_pretrained(tmp_path)
    if "gate_activation" in other:
        AutoModelForCausalLM.from_pretrained(tmp_path)
        config.network["intermediate_size"] = 128
        config.save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    with pytest.raises(UserError, match=r"the weights are of different models, as .*load both from one") as e:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(e.value)
