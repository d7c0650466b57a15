"""Attention layers for any model: what a model's layer computes, with rotary tables of their own."""

import copy

import pytest
import torch

from lingpt import UserError
from lingpt.layers import GLA, AttentionLayer, GatedLinearAttention, LinearAttention
from lingpt.models import GPT, Config

LAYERS: dict[str, tuple[type, dict, dict]] = {
    "ours": (
        LinearAttention,
        {
            "num_kv_heads": 2,
            "head_dim": 32,
            "bias": True,
            "norm_qk": True,
            "rope_base": 500.0,
            "rotary_percentage": 0.5,
        },
        {},
    ),
    "ours-gated": (
        GatedLinearAttention,
        {"num_kv_heads": 2},
        {"output_gate": True, "gate_activation": "sigmoid", "short_conv": True},
    ),
    "gla": (GLA, {"expand_k": 1.0}, {}),
}
NAMES = {"num_kv_heads": "n_query_groups", "head_dim": "head_size", "expand_k": "gla_expand_k"}


@pytest.fixture(params=LAYERS)
def pair(request):
    """A layer, and a model's with the same weights and cos and sin from outside."""
    cls, sizes, options = LAYERS[request.param]
    torch.manual_seed(0)
    layer = cls(64, 4, **sizes)
    shape = {
        "n_layer": 1,
        "n_embd": 64,
        "n_head": 4,
        "bias": False,
        "rotary_percentage": 1.0,
        "block_size": 96,
    }
    shape |= {NAMES.get(name, name): size for name, size in sizes.items()}
    config = Config(name="model", attention=request.param, **shape, **options)
    model = GPT(config)
    model.blocks[0].attn.load_state_dict(layer.attn.state_dict())
    return layer, model


def test_bitwise_what_the_model_computes(pair):
    """Forward, backward, packed, and in bf16 after a cast."""
    layer, model = pair
    attn, x = model.blocks[0].attn, torch.randn(2, 70, 64, requires_grad=True)
    cos, sin = model.cos[:70], model.sin[:70]
    borders = torch.tensor([0, 30, 70, 75, 140], dtype=torch.int32)
    for cu_seqlens in (None, borders):
        ours, theirs = layer(x, cu_seqlens), attn(x, cos, sin, None, cu_seqlens)
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
        assert torch.equal(*gradients)
    layer, attn = layer.bfloat16(), attn.bfloat16()
    assert torch.equal(layer(x.bfloat16()), attn(x.bfloat16(), cos, sin))


@torch.no_grad()
def test_a_state_continues_and_the_tables_grow(pair):
    """Token by token it is the whole sequence, and sequences may be longer than what the layer began with."""
    layer, _ = pair
    x = torch.randn(2, 2100, 64)
    state = layer.new_state(2)
    parts = [layer(part, state=state) for part in x[:, :60].split([40, *[1] * 20], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x)[:, :60], rtol=1e-4, atol=1e-5)
    assert state.position == 60 and layer(x)[:, -1].isfinite().all()
    assert all(name.startswith("attn.") for name in layer.state_dict())  # no tables, whose size varies


def test_weights_loaded_into_a_layer_made_on_meta(pair):
    """Guards: rotary tables of whatever `to_empty` found in memory."""
    layer, _ = pair
    other = torch.nn.Sequential(copy.deepcopy(layer).to("meta"))
    x = torch.randn(1, 9, 64)
    other.to_empty(device="cpu")[0].load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_weights_assigned_to_a_layer_made_on_meta():
    """Guards: decays that stay on meta, as no weight moves."""
    config = Config(name="model", attention="ours-decay", n_layer=1, n_embd=64, n_head=4)
    layer, x = AttentionLayer(config), torch.randn(1, 9, 64)
    with torch.device("meta"):
        other = AttentionLayer(config)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x), layer(x))


def test_training_after_a_longer_sequence_in_inference_mode(pair):
    """Guards: rotary tables that autograd may not save."""
    layer, _ = pair
    x = torch.randn(1, 2100, 64)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()


def test_a_state_is_where_it_was_after_an_error(pair):
    """Guards: a position of tokens that the state has not seen."""
    layer, _ = pair
    state = layer.new_state(2)
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5, 64, dtype=torch.float64), state=state)
    assert state.position == 0


def test_gla_has_heads_of_any_size():
    """Guards: a size refused for rotary embeddings, which it has not."""
    assert GLA(96, 8)(torch.randn(1, 5, 96)).shape == (1, 5, 96)


def test_a_gated_layer_with_another_gate_or_none():
    """Guards: a default activation that stands in for the one given, or is refused as there is no gate."""
    assert GatedLinearAttention(64, 4, gate_activation="silu").config.gate_activation == "silu"
    bare = GatedLinearAttention(64, 4, output_gate=False, short_conv=False)
    names = {name.split(".")[0] for name in bare.attn.state_dict()}
    assert names == {"qkv", "proj", "decay_proj", "decay_bias"}


def test_mistakes_are_one_line():
    """Each says what to do."""
    layer, x = LinearAttention(64, 4), torch.randn(2, 5, 64)
    for wrong, line in (
        (lambda: layer(x[..., :32]), r"the layer takes \[B, N, 64\]; got \[2, 5, 32\]"),
        (lambda: layer(x, state=layer.new_state(3)), "2 rows for a state of 3: make one by new_state"),
        (
            lambda: layer(x, state=GatedLinearAttention(64, 4).new_state(2)),
            "a state of ours-gated in a layer of ours: make one by new_state",
        ),
        (lambda: GatedLinearAttention(64, 4)(x, [0, 10]), r"cu_seqlens must be a tensor; got \[0, 10\]"),
        (lambda: GLA(64, 4, num_kv_heads=2), "num_kv_heads is not an option of the layer, which has"),
        (lambda: GLA(64, 4, gla_expand_k=1), "gla_expand_k is not an option of the layer, which has"),
        (lambda: layer(x, torch.tensor([0, 10]), layer.new_state(2)), "cu_seqlens goes without a state"),
        (lambda: GLA(64, 3), "gla_n_head=3 must divide n_embd=64"),
        (lambda: LinearAttention(64, 4, 3), "n_head=4 must be a multiple of n_query_groups=3"),
        (lambda: LinearAttention(64, 4, colour=1), "colour is not an option of the layer, which has backend"),
        (lambda: LinearAttention(64, 4, conv_silu=True), "conv_silu=True needs short_conv=True"),
        (lambda: LinearAttention(64, 4, value_residual=True), "values that a whole model shares"),
    ):
        with pytest.raises(UserError, match=line):
            wrong()
