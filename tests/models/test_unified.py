"""The named recurrences of `unified`, against their definition token by token."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from lingpt.kernels import channel_decay_operator
from lingpt.models.attention.short_conv import apply_short_conv
from lingpt.models.attention.softmax import apply_rope
from lingpt.models.attention.unified import FORMS, UnifiedAttention

# What is done to q and k: nothing in the other forms.
FEATURES = dict.fromkeys(["linear", "linear-unnormalised"], lambda x: 1 + F.elu(x))
FEATURES |= dict.fromkeys(["linear-softplus", "linear-softplus-unnormalised"], F.softplus)
FEATURES |= dict.fromkeys(["lightning", "hgrn2"], F.silu)
ROTATED = ("retnet", "gated-retention")
OWN_KEYS = ("mamba2", "mlstm", "hgrn2")  # scaled by a gate, or made of it


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_its_recurrence(small, form):
    """S_t = diag(a_t) S_{t−1} diag(b_t) + k_t v_tᵀ, y_t = S_tᵀ q_t, and the form's normaliser, in float64."""
    model = small("unified", form=form, short_conv=True).double()
    layer, x = model.blocks[0].attn, torch.randn(2, 40, 64, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tables = model.cos[:40].double(), model.sin[:40].double()
    q, k, v, left, right = layer.recurrence(x, *tables, None, None)
    of_x = layer.split_heads(apply_short_conv(layer.qkv(x), layer.conv, silu=True))
    for name, given, found in zip("qkv", of_x, (4 * q, k, v), strict=True):
        if name != "v":
            given = apply_rope(given, *tables) if form in ROTATED else given
            given = FEATURES.get(form, lambda x: x)(given)
        if name != "k" or form not in OWN_KEYS:
            torch.testing.assert_close(found, given, msg=name)
    a = left.exp() if left.dim() == 4 else left.exp().unsqueeze(-1)
    b = torch.ones_like(v) if right is None else right.exp()
    S, n, rows = torch.zeros(2, 4, 16, 16).double(), torch.zeros(2, 4, 16).double(), []
    for t in range(40):
        S = a[:, t, :, :, None] * S * b[:, t, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        n = a[:, t] * n + k[:, t]
        y, total = (q[:, t, :, None] @ S)[:, :, 0], (q[:, t] * n).sum(-1, keepdim=True)
        divisor = {"none": 1.0, "sum": total, "at least 1": total.abs().clamp(min=1)}
        rows.append(y / divisor[FORMS[form].normalise])
    expected = layer.gate_and_project(torch.stack(rows, 1), x)
    torch.testing.assert_close(layer(x, *tables), expected)
    assert (a <= 1).all() and (b <= 1).all()
    assert (right is None) == (form != "dfw")


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_form_decodes_and_packs_as_it_trains(small, tokens, form):
    """Guards: a normaliser or a gate that a state does not carry on, or that reads another document."""
    model = small("unified", form=form, short_conv=True).double()
    state, whole = model.new_state(2), model(tokens)
    pieces = [tokens[:, :30], *tokens[:, 30:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat([model.step(piece, state) for piece in pieces], 1), whole)
    borders = [0, 9, 70, 101, 140]
    packed = model.hidden(tokens, cu_seqlens=torch.tensor(borders)).flatten(0, 1)
    alone = [model.hidden(tokens.flatten()[None, a:b])[0] for a, b in itertools.pairwise(borders)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-6, atol=1e-6)  # RoPE's tables are in fp32


def test_constant_decays_move_with_the_layer_and_are_not_saved(small):
    """Guards: decays left on the CPU; checkpoints with a tensor that others do not have."""
    constant, none = (small("unified", form=form) for form in ("retnet", "linear-identity"))
    assert constant.state_dict().keys() == none.state_dict().keys()
    assert constant.to("meta").blocks[0].attn.log_decay.is_meta


def test_positive_features_stay_positive():
    """Guards: 0/0 where all features of a query are rounded to 0."""
    x = torch.tensor([-20.0, -8.0, -1.0, 0.0, 2.0])
    expected = torch.where(x > 0, 1 + x, x.exp())
    for form in ("linear", "linear-unnormalised"):
        torch.testing.assert_close(FORMS[form].features(x), expected)
        assert (FORMS[form].features(x.bfloat16()) > 0).all()


def test_gates_of_an_input():
    """Guards: a gate, its cap, or what scales k, wrong where the input is not 0; in the papers' words."""
    z, k = 9 * torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)
    bias = torch.randn(2, 4, dtype=torch.float64)
    forget, write = (z + bias).sigmoid()[:, 0], 15 * ((z + bias)[:, 1] / 15).tanh()
    step = (1 + (z + bias)[:, 0].exp()).log()
    f = forget[..., None]  # as if it were of one channel
    expected = {
        "gated-retention": (k, forget.pow(1 / 16)),
        "mamba2": (k * step[..., None], (-step * bias[1].exp()).exp()),
        "mlstm": (k * write.exp()[..., None], forget),
        "hgrn2": (1 - f, f),
        "rwkv6": (k, (-f / (1 - f)).exp()),
        "gateloop": (k, f),
        "dfw": (k, (z + bias).sigmoid()[..., None]),
    }
    assert expected.keys() == {name for name, form in FORMS.items() if form.gates}
    for name, found in expected.items():
        form, per_channel, both = FORMS[name], found[1].dim() > 2, name in ("mlstm", "dfw")
        gates, start = (z, bias) if both else (z[:, :1], bias if name == "mamba2" else bias[:1])
        got = (
            form.gates(gates[..., None], k, start[..., None]) if per_channel else form.gates(gates, k, start)
        )
        torch.testing.assert_close((got[0], got[1].exp()), found)


def gates(small, form):
    layer = small("unified", form=form).blocks[0].attn
    x, *tables = torch.zeros(1, 1, 64), torch.ones(1, 4), torch.zeros(1, 4)
    _, k, _, *decays = layer.recurrence(x, *tables, None, None)
    return k[0, 0], *(decay[0, 0] for decay in decays if decay is not None)


def test_initial_decays(small):
    """For an input of zeros the gates are those of the papers: RetNet's, RWKV's, Mamba's time steps."""
    retnet = torch.log1p(-torch.exp2(-5.0 - 2.0 * torch.arange(4)))
    for form in ("retnet", "lightning", "gated-retention"):
        torch.testing.assert_close(gates(small, form)[1], retnet)
    torch.testing.assert_close(gates(small, "rwkv6")[1][0, [0, -1]], -torch.tensor([-6.0, -1.0]).exp())
    dt = torch.logspace(-3, -1, 4)
    torch.testing.assert_close(gates(small, "mamba2")[1], -torch.linspace(1, 16, 4) * dt)
    key, left = gates(small, "hgrn2")
    torch.testing.assert_close(key, 1 - left.exp())
    torch.testing.assert_close(left[:, 0].exp(), torch.full((4,), 0.5))
    torch.testing.assert_close(gates(small, "mlstm")[1][-1].exp(), torch.tensor(6.0).sigmoid())
    for form in ("linear", "linear-softplus", "linear-unnormalised", "linear-identity"):
        assert not gates(small, form)[1].any()
    for form in ("gateloop", "dfw"):
        for decay in gates(small, form)[1:]:
            assert math.isclose(decay[0, -1].exp().item(), 1 - 2**-10, rel_tol=1e-5)


def test_a_right_decay_is_not_of_the_kernels_on_tensor_cores(small, monkeypatch):
    """Guards: a run's record and a warning that know nothing of the kernel that it trains with."""
    shapes = []  # of a head's q and v; a normaliser is a column of v
    monkeypatch.setattr(
        channel_decay_operator, "unsupported_reason", lambda q, Dv: shapes.append((q.shape[-1], Dv))
    )
    config, cpu = small("unified").config, torch.device("cpu")
    kernels = {form: UnifiedAttention.kernel_name(config, cpu, torch.bfloat16, form=form) for form in FORMS}
    assert shapes == [(16, 16 + (FORMS[form].normalise != "none")) for form in FORMS if form != "dfw"]
    # On a CPU, what tensor cores do not compute is PyTorch's.
    assert {name for name, kernel in kernels.items() if kernel != "cuda"} == {"dfw"}
