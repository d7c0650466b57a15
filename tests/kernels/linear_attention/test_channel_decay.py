"""`linear_attention` with a decay of each channel is a call of `unified_linear_attention`."""

import pytest
import torch
import torch.nn.functional as F

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_with_state,
)
from lingpt.kernels.unified_linear_attention import unified_linear_attention_with_state
from lingpt.tests import oracles
from lingpt.tests.oracles import FORMS, gated_by_definition, randn

B, N, H, D = 2, 23, 3, 8
OPTIONS = {"a": 0, "normalize": False}


def inputs() -> list[torch.Tensor]:
    """q, k, v, and log decays with a reset."""
    q, k, v = oracles.inputs(B, N, H, D, torch.float64)[:3]
    decay = F.logsigmoid(randn(B, N, H, D, seed=4, dtype=torch.float64))
    decay[:, 9] = float("-inf")
    return [x.requires_grad_() for x in (q, k, v, decay)]


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("unit", [False, True])
def test_it_is_gated_linear_attention(unit, backend):
    q, k, v, decay = inputs()
    b = randn(H, seed=5, dtype=torch.float64).requires_grad_()
    o = linear_attention(q, k, v, b, log_decay=decay, normalize_qk=unit, backend=backend, **OPTIONS)
    rows = (F.normalize(x, dim=-1) if unit else x for x in (q, k))
    exact = gated_by_definition(*rows, v, decay.exp(), scale=1.0) * b[:, None]
    torch.testing.assert_close(o, exact)
    leaves, do = (q, k, v, decay, b), randn(B, N, H, D, seed=6, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(x, leaves, do) for x in (o, exact)), strict=True):
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("backend", [*FORMS, "auto"])
def test_it_is_the_same_call(backend):
    """Guards: another result, to the bit, than the function it is a name of; a state that goes on as one."""
    *rows, decay = (x.detach().float() for x in inputs())
    S = randn(B, H, D, D, seed=7)
    state = LinearAttentionState.zeros(B, H, D)._replace(S=S)
    borders = torch.tensor([0, 11, 30, B * N])
    for cu_seqlens in (None, borders):
        options = {"cu_seqlens": cu_seqlens, "backend": backend}
        o, after = linear_attention_with_state(
            *rows, log_decay=decay, normalize_qk=False, initial_state=state, **OPTIONS, **options
        )
        y, S_after = unified_linear_attention_with_state(*rows, decay, initial_state=S, **options)
        assert torch.equal(o, y) and torch.equal(after.S, S_after)
        assert not any(x.any() for x in (after.z, after.c, after.n))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize": True, "a": 1}, r"log_decay \[B, N, H, D\] needs a=0: "),
        ({"a": 1}, "needs a=0"),
        ({"a": torch.zeros(H)}, "needs a=0"),
        ({"causal": False}, "log_decay needs causal=True"),
        ({"log_decay": torch.zeros(B, N, H, 1)}, r"log_decay must be floating point \[2, 23, 3, 8\] on cpu"),
        ({"log_decay": torch.zeros(B, N, H, D, dtype=torch.int)}, "log_decay must be floating point"),
        ({"b": float("inf")}, "b must be finite"),
        ({"context": object()}, "takes no context; gated_linear_attention does"),
        ({"initial_state": (1, 2, 3)}, "initial_state must be a LinearAttentionState"),
        ({"backend": "cuda"}, "backend='cuda' cannot run this: the tensors are on cpu"),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_a_mistake_is_a_line(change, message):
    q, k, v, decay = inputs()
    with pytest.raises(UserError, match=message) as error:
        linear_attention(q, k, v, **({"log_decay": decay} | OPTIONS | change))
    assert "\n" not in str(error.value)
