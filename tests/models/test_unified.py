"""The named recurrences of `unified`, against their definition token by token."""

import math

import pytest
import torch

from lingpt.models.attention.unified import FORMS


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_its_recurrence(small, form):
    """S_t = diag(a_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t, with the form's normaliser, in float64."""
    model = small("unified", form=form, short_conv=True).double()
    layer, x = model.blocks[0].attn, torch.randn(2, 40, 64, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tables = model.cos[:40].double(), model.sin[:40].double()
    q, k, v, left = layer.recurrence(x, *tables, None, None)
    a = left.exp() if left.dim() == 4 else left.exp().unsqueeze(-1)
    S, n, rows = torch.zeros(2, 4, 16, 16).double(), torch.zeros(2, 4, 16).double(), []
    for t in range(40):
        S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        n = a[:, t] * n + k[:, t]
        y, total = (q[:, t, :, None] @ S)[:, :, 0], (q[:, t] * n).sum(-1, keepdim=True)
        divisor = {"none": 1.0, "sum": total, "at least 1": total.abs().clamp(min=1)}
        rows.append(y / divisor[FORMS[form].normalise])
    expected = layer.gate_and_project(torch.stack(rows, 1), x)
    torch.testing.assert_close(layer(x, *tables), expected)
    assert (left <= 0).all()


def gates(small, form):
    layer = small("unified", form=form).blocks[0].attn
    _, k, _, left = layer.recurrence(torch.zeros(1, 1, 64), torch.ones(1, 4), torch.zeros(1, 4), None, None)
    return k[0, 0], left[0, 0]


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
    assert not gates(small, "linear")[1].any()
    assert math.isclose(gates(small, "gateloop")[1][0, -1].exp().item(), 1 - 2**-10, rel_tol=1e-5)
