"""a = 0 under the normaliser: o_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = q_i·k_j, for positive features."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_qkv,
    linear_attention_with_state,
)
from lingpt.tests import oracles
from lingpt.tests.oracles import FORMS, gated_by_definition, randn

B, N, H, D = 2, 23, 3, 8
DECAYS = {None: None, "head": (H,), "token": (B, N, H), "channel": (B, N, H, D)}


def inputs(decay: str | None) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q and k of positive features, v; log decays with a reset, which a decay per head has not."""
    q, k, v = oracles.inputs(B, N, H, D, torch.float64)[:3]
    rows = [x.detach().requires_grad_() for x in (1 + F.elu(q), 1 + F.elu(k), v)]
    if decay is None:
        return rows, None
    logs = F.logsigmoid(randn(*DECAYS[decay], seed=4, dtype=torch.float64))
    if decay != "head":
        logs[:, 9] = float("-inf")
    return rows, logs.requires_grad_(decay != "head")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logs: torch.Tensor | None) -> torch.Tensor:
    logs = q.new_zeros(1, 1, H, 1) if logs is None else logs
    if logs.ndim < 4:
        logs = logs.view(*(logs.shape if logs.ndim == 3 else (1, 1, H)), 1)
    decay = logs.exp().expand(B, N, H, D)
    products, sums = (gated_by_definition(q, k, x, decay, scale=1.0) for x in (v, torch.ones_like(v)))
    return products / sums


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("unit", [False, True])
def test_it_is_the_weighted_mean(unit, decay, backend):
    """Guards: values and gradients; that b, which cancels, has none."""
    (q, k, v), logs = inputs(decay)
    b = (1 + randn(H, seed=5, dtype=torch.float64).abs()).requires_grad_()
    o = linear_attention(q, k, v, b, a=0, log_decay=logs, normalize_qk=unit, backend=backend)
    expected = exact(*(F.normalize(x, dim=-1) if unit else x for x in (q, k)), v, logs)
    torch.testing.assert_close(o, expected)
    half = linear_attention(q, k, v, Fraction(1, 2), a=0, log_decay=logs, normalize_qk=unit, backend=backend)
    torch.testing.assert_close(half, expected)
    leaves = [x for x in (q, k, v, logs) if x is not None and x.requires_grad]
    do = randn(B, N, H, D, seed=6, dtype=torch.float64)
    *found, db = torch.autograd.grad(o, (*leaves, b), do)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, do), strict=True):
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num())
    assert db.abs().max() < 1e-12


@pytest.mark.parametrize("decay", DECAYS)
def test_a_state_goes_on(decay):
    """Guards: a state without the sum of the weights; packed sequences that read each other."""
    rows, logs = inputs(decay)
    by_token = logs is not None and logs.ndim > 1
    pieces = []
    state = LinearAttentionState.zeros(B, H, D, dtype=torch.float64)
    for piece in (slice(0, 11), slice(11, 12), slice(12, N)):
        o, state = linear_attention_with_state(
            *(x[:, piece] for x in rows),
            a=0,
            log_decay=logs[:, piece] if by_token else logs,
            normalize_qk=False,
            initial_state=state,
        )
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, 1), exact(*rows, logs))

    borders = torch.tensor([0, 5, N, 2 * N])
    packed = linear_attention(*rows, a=0, log_decay=logs, normalize_qk=False, cu_seqlens=borders)
    alone = linear_attention(
        *(x[:1, 5:] for x in rows),
        a=0,
        log_decay=logs[:1, 5:] if by_token else logs,
        normalize_qk=False,
    )
    torch.testing.assert_close(packed[:1, 5:], alone)


@pytest.mark.parametrize("backend", ["chunkwise", "recurrent"])
def test_sums_above_the_range_of_fp16(backend):
    """Guards: a sum of weights that is infinite in fp16, by which the output was 0."""
    q, k = (8 * torch.rand(1, 600, 1, 16) for _ in range(2))
    rows = [x.half() for x in (q, k, torch.randn(1, 600, 1, 16))]
    q, k, v = (x.double()[0, :, 0] for x in rows)
    weights = (q @ k.T).tril()
    assert weights.sum(1).max() > 2 * torch.finfo(torch.float16).max
    o = linear_attention(*rows, a=0, normalize_qk=False, backend=backend)
    assert o.dtype == torch.float16
    expected = weights @ v / weights.sum(1, keepdim=True)
    torch.testing.assert_close(o[0, :, 0].double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "a=0 under the normaliser needs causal=True"),
        ({"context": object()}, "takes no context"),
        ({"log_decay": [0.5] * H}, "for each head a finite number of at most 0"),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
    ],
)
def test_a_mistake_is_a_line(change, message):
    rows, _ = inputs(None)
    with pytest.raises(UserError, match=message) as error:
        linear_attention(*rows, a=0, **change)
    assert "\n" not in str(error.value)


def test_packed_projections_are_refused():
    """Guards: a kernel that divides by a."""
    with pytest.raises(UserError, match="a=0 under the normaliser needs q, k and v by themselves"):
        linear_attention_qkv(torch.ones(B, N, 3, H, D), torch.ones(N, 4), torch.zeros(N, 4), a=0)


def test_a_decay_of_each_channel_of_packed_projections_is_what_is_refused():
    """Guards: the message for a = 0 where the decay is the mistake."""
    with pytest.raises(UserError, match=r"log_decay must be .* \[H = 3\] or \[B, N, H\] = \S+ \S+ \S+; got"):
        linear_attention_qkv(
            torch.ones(B, N, 3, H, D), torch.ones(N, 4), torch.zeros(N, 4), log_decay=-torch.ones(B, N, H, D)
        )
