"""Each mechanism against its definition, written out token by token in float64."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import litgpt
import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.options import Option
from lingpt.models import ATTENTIONS, GPT, Attention, Config
from lingpt.models.attention import with_options
from lingpt.models.attention.base import QKVAttention, RecurrentState
from lingpt.models.attention.ours_decay import log_decay
from lingpt.models.attention.ours_gated import decay_bias
from lingpt.tests.oracles import by_definition, gated_by_definition, rotated, ssd


@pytest.mark.parametrize("name", ["ours", "ours-decay"])
@pytest.mark.parametrize("learnable_b", [False, True])
def test_ours_is_its_formula(small, name, learnable_b):
    """o_i = Σ w_ij v_j / Σ w_ij, w_ij = (1 + b q̂_i·k̂_j) γ^(i−j), q and k rotated and of unit length."""
    model = small(name, learnable_b=learnable_b).double()
    layer, H, N = model.transformer.h[0].attn, 4, 23
    torch.nn.init.normal_(layer.qkv.bias, generator=torch.Generator().manual_seed(2))
    b = torch.ones(H, dtype=torch.float64)
    if learnable_b:
        b = torch.tensor([1.0, 0.5, -0.25, 0.0], dtype=torch.float64)
        layer.b_offset.data = b - 1.0
    x = torch.randn(2, N, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cos, sin = model.cos[:N], model.sin[:N]
    q, k, v = (t.view(2, N, H, -1) for t in layer.qkv(x).chunk(3, dim=-1))
    gamma = 1 - 2 ** (-5 - 8 * torch.arange(H) / H) if name == "ours-decay" else torch.ones(H)
    o = by_definition(rotated(q, cos, sin), rotated(k, cos, sin), v, b, gamma.double())
    expected = layer.proj(o.flatten(2))
    torch.testing.assert_close(layer(x, cos, sin), expected, rtol=1e-5, atol=1e-6)


GATE_AND_CONV = {"output_gate": True, "normalize": True, "short_conv": True}
FREE = GATE_AND_CONV | {"normalize": None, "learnable_b": True}
SIMPLE_GLA = GATE_AND_CONV | {"normalize": None, "constant": False}
SILU = GATE_AND_CONV | {"conv_silu": True}
GATED_VALUES = GATE_AND_CONV | {"input_gate": True}


@pytest.mark.parametrize(
    "options",
    [{}, GATE_AND_CONV, SILU, FREE, SIMPLE_GLA, GATED_VALUES],
    ids=["plain", "options", "a SiLU, too", "free coefficients", "no constant", "an input gate"],
)
def test_ours_gated_is_its_formula(small, options):
    """Each token's own decay in the weights; with its options the convolution before and the gate after, a
    and b free, or a = 0, where the gate's norm stands for the normaliser; and v times its own gate."""
    model = small("ours-gated", **options).double()
    layer, N = model.transformer.h[0].attn, 23
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(2, N, 64, dtype=torch.float64, generator=generator)
    cos, sin = model.cos[:N], model.sin[:N]
    qkv = layer.qkv(x)
    if options:
        earlier = torch.nn.functional.pad(qkv, (0, 0, 3, 0))
        qkv = torch.stack([layer.conv[k] * earlier[:, k : k + N] for k in range(4)]).sum(0)
        qkv = torch.nn.functional.silu(qkv) if layer.conv_silu else qkv
    q, k, v = (t.view(2, N, 4, -1) for t in qkv.chunk(3, dim=-1))
    if layer.input_gate is not None:
        v = v * 2 * torch.sigmoid(x @ layer.input_gate.weight.T)[..., None]
    gate = torch.sigmoid(x @ layer.decay_proj.weight.T + layer.decay_bias)  # γ_t, [B, N, H]
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if options == FREE:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        values_alone = torch.ones_like(q[..., :1])
        a, b = (1 + x[:, None] for x in (layer.a_offset, layer.b_offset))
        o = a * ssd(values_alone, values_alone, v, gate) + b * ssd(q, k, v, gate)
    elif options == SIMPLE_GLA:
        o = ssd(*(x / x.norm(dim=-1, keepdim=True) for x in (q, k)), v, gate)
    else:
        o = by_definition(q, k, v, 1.0, gate)
    if options:
        r = torch.nn.functional.silu(layer.gate_proj(x))
        o = r.view_as(o) * torch.nn.functional.layer_norm(o, (16,), layer.norm.weight, layer.norm.bias)
    torch.testing.assert_close(layer(x, cos, sin), layer.proj(o.flatten(2)), rtol=1e-5, atol=1e-6)


class WithLoRA(torch.nn.Linear):
    """x ↦ W x + b + B A x, of rank 2."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.A = torch.nn.Parameter(torch.ones(2, self.in_features))
        self.B = torch.nn.Parameter(torch.zeros(self.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.A.T @ self.B.T


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", ["qkv", "decay_proj"])
def test_layers_of_ours_gated_that_are_more_than_their_weights(small, name):
    """Guards: LoRA, parametrisations, hooks and a replaced forward, on layers whose weights are otherwise
    multiplied as one matrix: what was bypassed would never be trained, without a word."""

    def lora(layer):
        setattr(attention, name, WithLoRA(layer))

    def hook(layer):
        layer.register_forward_hook(lambda layer, args, y: 2 * y)

    def pre_hook(layer):
        layer.register_forward_pre_hook(lambda layer, args: (2 * args[0],))

    def parametrisation(layer):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())

    def own_forward(layer):
        layer.forward = lambda x: 2 * torch.nn.functional.linear(x, layer.weight, layer.bias)

    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(3))
    for change in (lora, hook, pre_hook, parametrisation, own_forward):
        model = small("ours-gated")
        attention = model.transformer.h[0].attn
        before = attention(x, model.cos[:9], model.sin[:9])
        change(getattr(attention, name))
        after = attention(x, model.cos[:9], model.sin[:9])
        if change is lora:
            torch.testing.assert_close(after, before)  # B is 0
            after.square().sum().backward()
            assert getattr(attention, name).B.grad.abs().max() > 0
        else:
            assert not torch.allclose(after, before), change


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"short_conv": True},
        {"short_conv": True, "conv_silu": True},
        {"input_gate": True},
        {"input_gate": True, "short_conv": True},
    ],
)
def test_one_product_is_the_products_one_by_one(small, options):
    """Guards: what training computes at once, and decoding and a hooked layer by themselves; values and every
    gradient."""
    model = small("ours-gated", **options).double()
    attention, generator = model.transformer.h[0].attn, torch.Generator().manual_seed(3)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=generator, requires_grad=True)
    leaves = [x, *attention.parameters()]
    ways = []
    for _ in range(2):
        y = attention(x, model.cos[:9], model.sin[:9])
        ways.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        attention.decay_proj.register_forward_hook(lambda layer, args, y: None)
    for at_once, one_by_one in zip(*ways, strict=True):
        torch.testing.assert_close(at_once, one_by_one)


def test_rows_of_the_gated_projection_are_whole_cache_lines(small):
    """q, k, v and the gates of a token, in 16 bits: every row begins at a multiple of 128 bytes."""
    for n_embd, n_head, conv, gated in ((64, 4, False, True), (96, 3, True, False), (128, 2, True, True)):
        model = small("ours-gated", n_embd=n_embd, n_head=n_head, short_conv=conv, input_gate=gated)
        row = model.transformer.h[0].attn.project_qkv_and_decay(torch.zeros(1, 1, n_embd))
        gates = (1 + gated) * n_head
        assert 3 * n_embd + gates <= row.shape[-1] < 3 * n_embd + gates + 64
        assert 2 * row.shape[-1] % 128 == 0


def test_gates_start_at_retnets_decays():
    """logsigmoid(c_h) is ours-decay's ln γ_h, to fp32."""
    torch.testing.assert_close(
        torch.nn.functional.logsigmoid(decay_bias(16)), log_decay(16), rtol=2e-5, atol=0
    )


def test_options_start_as_the_plain_attention(small, tokens):
    """The convolution's filter starts as the identity, and the input gate at 1: neither changes anything
    before the first step."""
    for name in ("ours", "ours-decay", "ours-gated"):
        for option in ("short_conv", "input_gate"):
            with_option, without = (small(name, **{option: wanted})(tokens) for wanted in (True, False))
            if name == "ours-gated":  # whose products are of another width then
                torch.testing.assert_close(with_option, without)
            else:
                assert torch.equal(with_option, without)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ours", {}),
        ("ours", {"n_query_groups": 2}),
        ("ours-gated", {"short_conv": True, "input_gate": True}),
        ("softmax", {"softmax_conv": True, "n_query_groups": 2}),
        ("gla", {"short_conv": True, "input_gate": True}),
    ],
)
def test_value_residual_is_its_formula(small, name, options):
    """The plain layer, with v + σ(p)·(u − v) in the place of v in the projection's output."""
    mixing, plain = (small(name, value_residual=on, **options).double() for on in (True, False))
    layer, generator = mixing.blocks[0].attn, torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    assert set(plain.blocks[0].attn.load_state_dict(layer.state_dict(), strict=False)[1]) == {"value_mix"}
    config, N = mixing.config, 23
    x = torch.randn(2, N, 64, dtype=torch.float64, generator=generator)
    u = torch.randn(2, N, config.shared_values_width, dtype=torch.float64, generator=generator)
    projection = plain.blocks[0].attn.qkvr if name == "gla" else plain.blocks[0].attn.qkv
    first = 64 if name == "gla" else sum(config.qkv_sizes[:2])
    rows = projection(x)
    v = rows[..., first : first + u.shape[-1]]
    part = torch.sigmoid(layer.value_mix).repeat_interleave(u.shape[-1] // len(layer.value_mix))
    v += part * (u - v)
    projection.forward = lambda x: rows
    cos, sin = mixing.cos[:N], mixing.sin[:N]
    torch.testing.assert_close(layer(x, cos, sin, None, None, u), plain.blocks[0].attn(x, cos, sin))


@pytest.mark.parametrize("llama", [False, True])
def test_all_layers_share_one_projection_of_the_embeddings(small, tokens, llama):
    """The same in all layers that have the option, half of it at first; `unified` has none."""
    sizes = {"bias": False, "norm_class_name": "RMSNorm", "parallel_residual": False} if llama else {}
    model, given = small(["softmax", "unified", "ours-gated"], value_residual=True, **sizes).double(), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda _, args, y: given.append(args[5]))
    model(tokens)
    shared, x = model.transformer["shared_values"], model.transformer["wte"](tokens)
    x = (
        x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt()
        if llama
        else ((x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, correction=0).add(1e-5).sqrt())
    )
    assert (shared.linear.bias is None) == llama
    torch.testing.assert_close(given[0], x @ shared.linear.weight.T)
    assert given[0] is given[2] and not hasattr(model.blocks[1].attn, "value_mix")
    assert all(torch.equal(model.blocks[i].attn.value_mix, torch.zeros(4).double()) for i in (0, 2))


def test_the_decay_is_retnets():
    """γ_h = 1 − 2^(−5 − 8h/H): the first head remembers about 32 tokens, the last thousands."""
    gamma = log_decay(16).double().exp()
    expected = torch.tensor([1 - 2 ** (-5 - 8 * h / 16) for h in range(16)], dtype=torch.float64)
    torch.testing.assert_close(1 - gamma, 1 - expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"output_gate": True, "normalize": False}], ids=["b", "a and b"])
def test_learnable_b_starts_as_the_fixed_one(small, tokens, options):
    """Learning b changes nothing before the first step."""
    assert torch.equal(small("ours", learnable_b=True, **options)(tokens), small("ours", **options)(tokens))


def test_free_coefficients_are_not_held(small):
    """Without the normaliser no weight has to be positive."""
    layer = small("ours", learnable_b=True, output_gate=True, normalize=False).transformer.h[0].attn
    layer.a_offset.data.fill_(-4.0)
    layer.b_offset.data.fill_(6.0)
    assert torch.equal(layer.a(), torch.full((4,), -3.0)) and torch.equal(layer.b(), torch.full((4,), 7.0))


def test_learnable_b_is_held_at_the_edge_and_can_return(small, tokens):
    """|b| ≤ 1 whatever the optimiser does, and the gradient beyond the edge is that at the edge."""
    model = small("ours", learnable_b=True)
    layers = [block.attn for block in model.transformer.h]
    gradients = []
    for offset in (0.0, 0.75):
        for layer in layers:
            layer.b_offset.data.fill_(offset)
        assert all(torch.equal(layer.b(), torch.ones(4)) for layer in layers)
        model.zero_grad()
        model(tokens).square().mean().backward()
        gradients.append(layers[0].b_offset.grad.clone())
    assert gradients[0].abs().min() > 0
    assert torch.equal(*gradients)
    layers[0].b_offset.data.fill_(-7.0)
    assert torch.equal(layers[0].b(), -torch.ones(4))


GLA_OPTIONS = {"gate_activation": "sigmoid", "input_gate": True, "gla_temperature": 4.0, "gla_unit_qk": True}


@pytest.mark.parametrize(
    ("short_conv", "expand_k", "options"),
    [
        (False, 0.5, {}),
        (True, 0.5, {}),
        (True, 1.0, GLA_OPTIONS),
    ],
)
def test_gla_is_its_recurrence(small, short_conv, expand_k, options):
    """§4.4 of the paper, token by token: S_t = diag(α_t) S_{t−1} + k_tᵀ v_t, o_t = q_t S_t, and options."""
    model = small("gla", gla_n_head=2, short_conv=short_conv, gla_expand_k=expand_k, **options).double()
    layer, H, N, d_k = model.transformer.h[0].attn, 2, 19, int(64 * expand_k)
    drawn = [layer.qkvr.bias, layer.gate_up.bias, layer.gate_up.weight, *([layer.conv] if short_conv else [])]
    drawn += [layer.input_gate.weight] if options else []
    for parameter in drawn:
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, N, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    qkv, r = layer.qkvr(x).split((2 * d_k + 64, 64), dim=-1)
    if short_conv:
        earlier = torch.nn.functional.pad(qkv, (0, 0, 3, 0))
        mixed = torch.stack([layer.conv[k] * earlier[:, k : k + N] for k in range(4)]).sum(0)
        qkv = mixed * torch.sigmoid(mixed)
    q, k, v = qkv.split((d_k, d_k, 64), dim=-1)
    alpha = torch.sigmoid(layer.gate_up(layer.gate_down(x))) ** (1 / options.get("gla_temperature", 16))
    q, k, v, alpha = (t.view(2, N, H, -1) for t in (q, k, v, alpha))
    if options:
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        v = v * 2 * torch.sigmoid(x @ layer.input_gate.weight.T)[..., None]
    o = layer.norm(gated_by_definition(q, k, v, alpha, scale=(d_k // H) ** -0.5)).flatten(2)
    expected = layer.proj((1 if options else r) * torch.sigmoid(r) * o)
    torch.testing.assert_close(layer(x, model.cos[:N], model.sin[:N]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (256, 1), (512, 2), (768, 3), (896, 4), (2048, 8)])
def test_the_fewest_heads_of_gla(width, heads, monkeypatch):
    """Guards: heads of 512 in pythia-1.4b's `hybrid-best`, wider than the kernel's; a run's record and a
    warning of the kernel for other heads than the layer has."""
    config = Config.from_name("demo", n_embd=width, attention="gla")
    with torch.device("meta"):
        assert ATTENTIONS["gla"](config, 0, gla_n_head=0).n_head == heads
    monkeypatch.setattr("lingpt.models.attention.gla.choose", lambda backend, q, Dv: (q.shape[-1], Dv))
    options = config.attention_options("gla") | {"gla_n_head": 0, "gla_expand_k": 0.25}
    found = ATTENTIONS["gla"].kernel_name(config, torch.device("cpu"), torch.float32, **options)
    assert found == (width // heads // 4, width // heads)


def test_norms_of_q_and_k_under_autocast(small, tokens):
    """Guards: PyTorch's warning about dtypes, in the terminal of every run with such norms."""
    model = small("softmax", softmax_qk_norm=True, softmax_gate=True, gate_norm="rms")
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        model(tokens)


def test_gla_by_fla_s_kernels_is_scored_without_them(small, tokens):
    """And a run on a machine that lacks them, or the GPU, ends before any work."""
    own, fla = (small("gla", gla_backend=backend).eval() for backend in ("auto", "fla"))
    assert torch.equal(own(tokens), fla(tokens))
    with pytest.raises(UserError, match=r"^model\.gla_backend: backend='fla' needs "):
        ATTENTIONS["gla"].kernel_name(
            fla.config, torch.device("cpu"), torch.float32, **fla.config.attention_options("gla")
        )
    own.step(tokens, state := own.new_state(2))
    for carried in (None, state):  # in segments, too
        with pytest.raises(UserError, match=r"^backend='fla' needs (fla-core: pip install|CUDA)"):
            fla.train().hidden(tokens[:, :9], carried)


@pytest.mark.parametrize(
    ("activation", "norm", "qk_norm", "window"),
    [("silu", "layer", False, None), ("sigmoid", "rms", True, 7), ("silu", "none", False, 99)],
)
def test_softmax_with_a_convolution_and_an_output_gate_is_its_formula(
    small, activation, norm, qk_norm, window
):
    """`ours*`'s options around softmax: W_O (silu(x W_r) ⊙ LayerNorm_head(softmax(q·k / √D) v)); the gate may
    be a sigmoid, its norm RMS or none, q and k may have an RMS norm each, and i − j be less than a window."""
    options = {"gate_activation": activation, "gate_norm": norm}
    options |= {"softmax_qk_norm": qk_norm, "softmax_window": window}
    model = small("softmax", softmax_conv=True, softmax_gate=True, **options).double()
    layer, N = model.transformer.h[0].attn, 23
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(2, N, 64, dtype=torch.float64, generator=generator)
    cos, sin = model.cos[:N], model.sin[:N]
    earlier = torch.nn.functional.pad(layer.qkv(x), (0, 0, 3, 0))
    qkv = torch.stack([layer.conv[k] * earlier[:, k : k + N] for k in range(4)]).sum(0)
    q, k, v = (t.view(2, N, 4, 16).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    if qk_norm:
        q, k = (
            t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
            for t, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    q, k = (rotated(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (q, k))
    distance = torch.arange(N)[:, None] - torch.arange(N)
    seen = (distance >= 0) & (distance < (window or N))
    scores = (q @ k.mT / 4).masked_fill(~seen, -torch.inf)
    o = (scores.softmax(-1) @ v).transpose(1, 2)
    r = layer.gate_proj(x)
    r = torch.sigmoid(r) * (r if activation == "silu" else 1)
    if norm != "none":
        centred = o - o.mean(-1, keepdim=True) if norm == "layer" else o
        o = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
        o = o + layer.norm.bias if norm == "layer" else o
    o = r * o.flatten(2)
    torch.testing.assert_close(layer(x, cos, sin), layer.proj(o), rtol=1e-5, atol=1e-6)


def test_an_mlp_can_have_the_output_gate_s_parameters():
    """So that a comparison is not one of sizes: an eighth more dimensions of the MLP, by a recipe alone."""
    with torch.device("meta"):
        gated, softmax, gla = (
            GPT(Config.from_name("pythia-70m", attention=name, **options)).num_parameters()
            for name, options in (
                ("ours-gated", {"output_gate": True}),
                ("softmax", {"intermediate_size": 4 * 512 + 256}),
                ("gla", {"intermediate_size": 4 * 512 + 256}),
            )
        )
    assert softmax == pytest.approx(gated, rel=1e-3) and gla == pytest.approx(gated, rel=1e-2)


def test_softmax_trains_by_the_kernel_that_is_named(small, tokens):
    """In the compiled block, and when the backward pass computes the block again."""
    model = small("softmax", sdpa="math")
    model.recompute_blocks = True
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    model(tokens)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(tokens).square().mean().backward()
    ran = {event.key: event.count for event in profile.key_averages()}
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"  # what PyTorch takes of itself
    expected = {flash: 0, "aten::_softmax": 2 * 3, "aten::_softmax_backward_data": 3}  # of three layers
    assert {name: ran.get(name, 0) for name in expected} == expected


@torch.no_grad()
def test_the_kernel_that_is_named_is_training_s_alone(small, tokens):
    """A model that was trained by cuDNN is scored and decodes where there is none."""
    model, cudnn = small("softmax").eval(), small("softmax", sdpa="cudnn")
    state = cudnn.new_state(2)
    parts = [cudnn.step(part, state) for part in tokens.split((50, 20), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    assert torch.equal(cudnn.eval()(tokens), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", ["ours", "ours-decay", "ours-gated"])
def test_the_backend_that_is_named_trains_and_no_other(small, tokens, name):
    """A model that was trained by the CUDA kernel is scored and decodes where there is no GPU."""
    model, cuda = small(name, backend="chunkwise"), small(name, backend="cuda")
    with pytest.raises(UserError, match=r"backend='cuda' cannot run this: the tensors are on cpu"):
        cuda(tokens)
    # Decoding, as `lingpt generate` does, needs no `eval`.
    assert torch.equal(cuda.step(tokens, cuda.new_state(2)), model.eval().step(tokens, model.new_state(2)))
    assert torch.equal(cuda.eval()(tokens), model(tokens))
    options = cuda.config.attention_options(name)
    with pytest.raises(UserError, match=r"^model.backend: .* are on cpu; use chunkwise, or auto$"):
        ATTENTIONS[name].kernel_name(cuda.config, torch.device("cpu"), torch.bfloat16, **options)
    with pytest.raises(UserError, match=r"backend is chunk; it must be one of .*chunkwise"):
        Config.from_name("demo", attention=name, backend="chunk")


def test_a_kernel_has_its_name_or_one_line_why_it_cannot_run(small, monkeypatch):
    config = small("softmax").config
    kernel_name, cpu = ATTENTIONS["softmax"].kernel_name, torch.device("cpu")
    assert kernel_name(config, cpu, torch.bfloat16, sdpa="auto") == "flash"
    for name in ("ours", "ours-decay", "ours-gated", "gla"):
        options = config.attention_options(name)
        assert ATTENTIONS[name].kernel_name(config, cpu, torch.bfloat16, **options) == "chunkwise"
    with pytest.raises(UserError, match=r"efficient cannot train on cpu in bfloat16 .* use another kernel"):
        kernel_name(config, cpu, torch.bfloat16, sdpa="efficient")
    with monkeypatch.context() as without:  # in a PyTorch that does not tell, what was asked for
        without.delattr(torch, "_fused_sdp_choice")
        assert kernel_name(config, cpu, torch.bfloat16, sdpa="auto") == "auto"
    with pytest.raises(UserError, match=r"sdpa is falsh; it must be one of auto, flash"):
        Config.from_name("demo", attention="softmax", sdpa="falsh")


@pytest.mark.parametrize("name", ["pythia-70m", "pythia-160m", "pythia-410m", "pythia-1.4b"])
def test_gla_has_the_parameters_of_softmax(name):
    """Within 2 %: a comparison of attentions is not one of sizes."""
    with torch.device("meta"):
        gla, softmax = (GPT(Config.from_name(name, attention=a)).num_parameters() for a in ("gla", "softmax"))
    assert gla == pytest.approx(softmax, rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "softmax"])
def test_recurrent_states_do_not_grow(small, tokens, name):
    """The point of linear attention: decoding memory that does not depend on the length, kept in fp32."""
    model, sizes = small(name).bfloat16(), []
    state = model.new_state(2)
    for piece in tokens[:, :60].split((5, 54, 1), dim=1):
        model.step(piece, state)
        value = state.layers[0].value
        parts = value if isinstance(value, tuple) else (value,)
        assert all(part.dtype == torch.float32 for part in parts)
        sizes.append(sum(part.numel() for part in parts))
    assert len(set(sizes)) == 1


class Mean(QKVAttention):
    """An attention as a newcomer writes it: the mean of the values so far."""

    def __init__(
        self,
        config: "litgpt.Config",
        layer_idx: int,
        *,
        power: 'Annotated[float, Option("of the count")]' = 1.0,
    ) -> None:  # annotations in quotes, as `from __future__ import annotations` has them
        super().__init__(config, layer_idx)
        self.power = power

    @classmethod
    def kernel_name(cls, config, device, dtype, **options):
        return "pytorch"

    def forward(self, x_BNC, cos_NR, sin_NR, state=None, cu_seqlens=None, values_BNV=None):
        seen, total = (state.value or (0, 0.0)) if state else (0, 0.0)
        v_BNC = self.qkv(x_BNC).chunk(3, dim=-1)[2]
        sums = total + v_BNC.float().cumsum(1)
        count = seen + torch.arange(1, x_BNC.shape[1] + 1, device=x_BNC.device)[:, None]
        if state:
            state.value = (seen + x_BNC.shape[1], sums[:, -1:])
        return self.proj((sums / count**self.power).to(x_BNC.dtype))

    def flops_per_token(self, seq_len):
        return 0

    def saved_activations_per_token(self):
        return 2 * self.config.n_embd

    def new_state(self, batch_size, max_seq_len, device, dtype):
        return RecurrentState()


@pytest.fixture
def with_attention(monkeypatch) -> Callable[[type[Attention]], GPT]:
    """`with_attention(cls)`: a model whose attention is `cls`, registered for the test."""

    def build(cls: type[Attention]) -> GPT:
        monkeypatch.setitem(ATTENTIONS, "mine", cls)
        config = dataclass(with_options(type("MyConfig", (Config,), {"__annotations__": {}})))
        model = GPT(config.from_name("demo", attention="mine"))
        model.init_weights(0)
        return model

    return build


def test_an_attention_of_ones_own_is_a_class_and_a_line(with_attention, tokens):
    """Its file may have `from __future__ import annotations`, and the model decodes by it."""
    model = with_attention(Mean)
    assert model.config.power == 1.0
    state = model.new_state(2)
    parts = [model.step(part, state) for part in tokens.split((50, 20), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).detach())


@pytest.mark.parametrize(
    "method", ["kernel_name", "forward", "flops_per_token", "saved_activations_per_token", "new_state"]
)
def test_what_an_attention_lacks_is_named_before_anything_trains(with_attention, method):
    """Guards: a run that ended at its first sample of text for want of `new_state`, with an error that named
    nothing, and one without a `forward` that trained LitGPT's softmax."""
    lacking = {name: value for name, value in vars(Mean).items() if name not in (method, "__classcell__")}
    del lacking["__init__"]  # whose `super` knows Mean alone
    with pytest.raises(TypeError, match=f"abstract.* '?{method}"):
        with_attention(type("Mine", (QKVAttention,), lacking))


@pytest.mark.parametrize(
    "option", ["power=1.0", "power: float = 1.0", "power: Annotated[float, 'of the count.'] = 1.0"]
)
def test_an_option_that_is_not_declared_as_recipes_need_it_is_named(with_attention, option):
    namespace: dict = {"Annotated": Annotated}
    exec(f"def __init__(self, config, layer_idx, *, {option}): ...", namespace)
    cls = type("Mine", (Mean,), {"__init__": namespace["__init__"]})
    with pytest.raises(TypeError, match=r"power is declared otherwise than .power: Annotated"):
        with_attention(cls)
