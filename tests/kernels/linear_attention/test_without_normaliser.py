"""`normalize=False`: o_i = Σ_j (a + b q̂_i·k̂_j) (decay) v_j, with a and b free; every form, every gradient."""

import pytest
import torch
from torch.library import opcheck

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_qkv_with_state,
    linear_attention_with_state,
)
from lingpt.kernels.linear_attention.call import Call
from lingpt.kernels.linear_attention.chunkwise import CHUNK
from lingpt.kernels.linear_attention.cuda import backend as cuda
from lingpt.tests import oracles
from lingpt.tests.oracles import FORMS, assert_same, randn

B, H, D = 2, 3, 8
A, COEFFICIENTS = torch.tensor([[0.6, 0.0, -3.0], [1.0, -0.4, 2.0]], dtype=torch.float64)
DECAYS = ("none", "of heads", "of tokens")


def inputs(N):
    return oracles.inputs(B, N, H, D, torch.float64)[:3]


def log_decay(kind, N):
    heads = torch.tensor([-0.3, -0.01, 0.0], dtype=torch.float64)
    tokens = torch.nn.functional.logsigmoid(randn(B, N, H, seed=4, dtype=torch.float64))
    tokens[:, N // 2] = float("-inf")
    return {"none": None, "of heads": heads, "of tokens": tokens}[kind]


def some_state():
    return oracles.some_state(B, H, D, torch.float64)


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("name", ["retention", "lightning_attention", "simple_gla", "ssd"])
def test_with_a_0_it_is(name, unit, backend):
    """Each one's own definition, on rows as they are and on unit rows."""
    N = 23
    q, k, v = inputs(N)
    decay = log_decay("of heads" if name in ("retention", "lightning_attention") else "of tokens", N)
    found = linear_attention(
        q, k, v, a=0, log_decay=decay, normalize=False, normalize_qk=unit, backend=backend
    )
    if unit:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    torch.testing.assert_close(found, getattr(oracles, name)(q, k, v, decay.exp()))


@pytest.mark.parametrize("backend", FORMS)
def test_a_weighs_the_sum_of_the_values(backend):
    """o is linear in the weights: that of (a, b) is a times that of (1, 0) and b times that of (0, 1)."""
    q, k, v = inputs(CHUNK + 9)
    options = dict(log_decay=log_decay("of tokens", CHUNK + 9), normalize=False, backend=backend)
    o = linear_attention(q, k, v, COEFFICIENTS, a=A, **options)
    of_a, of_b = (linear_attention(q, k, v, b, a=a, **options) for a, b in ((1, 0), (0, 1)))
    torch.testing.assert_close(o, A[:, None] * of_a + COEFFICIENTS[:, None] * of_b)


@pytest.mark.parametrize("backend", [form for form in FORMS if form != "reference"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("N", [1, CHUNK, 2 * CHUNK + 7])
def test_every_form_equals_the_reference(backend, N, with_state, decay):
    q, k, v = inputs(N)
    options = dict(
        a=A, b=COEFFICIENTS, log_decay=log_decay(decay, N), normalize=False,
        initial_state=some_state() if with_state else None,
    )  # fmt: skip
    found, expected = (
        linear_attention_with_state(q, k, v, backend=x, **options) for x in (backend, "reference")
    )
    assert_same(found, expected)
    assert not found[1].z.any() and not found[1].n.any()


@pytest.mark.parametrize("backend", FORMS)
def test_pieces_with_the_state_carried_equal_the_whole(backend):
    """A normalised run's state will do, too: z and n are not read."""
    N = CHUNK + 20
    q, k, v = inputs(N)
    gate, options = log_decay("of tokens", N), dict(a=A, b=COEFFICIENTS, normalize=False)
    gate = gate.clamp(min=-3)  # without the reset, which would hide the state
    whole = linear_attention_with_state(
        q, k, v, log_decay=gate, initial_state=some_state(), backend=backend, **options
    )
    state, outputs = some_state(), []
    for piece in (slice(0, 50), slice(50, 51), slice(51, None)):
        o, state = linear_attention_with_state(
            *(x[:, piece] for x in (q, k, v)), log_decay=gate[:, piece], initial_state=state, backend=backend,
            **options,
        )  # fmt: skip
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), state), whole)


def test_without_a_causal_mask_every_token_sees_all():
    q, k, v = inputs(9)
    options = dict(a=A, b=COEFFICIENTS, normalize=False, causal=False)
    found, expected = (
        linear_attention_with_state(q, k, v, backend=x, **options) for x in ("chunkwise", "reference")
    )
    assert_same(found, expected)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_gradients_equal_autograd_through_the_definition(with_state, packed, decay):
    """All of them: q, k, v, a, b, the gates, the initial state, from o and from the final state."""
    N = 2 * CHUNK + 11
    fade = log_decay(decay, N)
    leaves = [*inputs(N), A, COEFFICIENTS, *(some_state() if with_state else ())]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    if decay == "of tokens":
        leaves.append(fade.requires_grad_())
    angle = torch.arange(N)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    weights = [torch.randn_like(x) for x in (leaves[0], *some_state())]

    def gradients(backend):
        q, k, v, a, b, *parts = leaves
        options = dict(a=a, b=b, log_decay=fade, normalize=False, backend=backend)
        options["initial_state"] = LinearAttentionState(*parts[:4]) if with_state else None
        if packed:
            o, state = linear_attention_qkv_with_state(
                torch.stack((q, k, v), 2), angle.cos(), angle.sin(), **options
            )
        else:
            o, state = linear_attention_with_state(q, k, v, **options)
        loss = sum((w * x).sum() for w, x in zip(weights, (o, *state), strict=True))
        return torch.autograd.grad(loss, leaves, materialize_grads=True)  # z and n are not read

    for found, expected in zip(gradients("chunkwise"), gradients("reference"), strict=True):
        torch.testing.assert_close(found, expected)


def test_rows_as_they_are_have_their_gradients():
    q, k, v = (x[:1, :, :1, :2].clone().requires_grad_() for x in inputs(CHUNK + 2))
    a, b = (x[:1].clone().requires_grad_() for x in (A, COEFFICIENTS))

    def attention(q, k, v, a, b):
        return linear_attention(q, k, v, b, a=a, normalize=False, normalize_qk=False, backend="chunkwise")

    assert torch.autograd.gradcheck(attention, (q, k, v, a, b), fast_mode=True)


def test_an_output_norm_sees_no_normaliser():
    """LN(u/g) = LN(u): why there may be none where a norm follows."""
    q, k, v = inputs(40)
    outputs = (
        linear_attention(q, k, v, 1 - 2**-6, normalize=False),
        linear_attention(q, k, v),  # which shrinks b to that
    )
    found, expected = (torch.nn.functional.layer_norm(o, (D,), eps=0) for o in outputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    q, k, v = (x.to(dtype) for x in inputs(150))
    gate = log_decay("of tokens", 150)
    o = linear_attention(q, k, v, a=A.float(), log_decay=gate.float(), normalize=False)
    exact = linear_attention(*(x.double() for x in (q, k, v)), a=A, log_decay=gate, normalize=False)
    assert o.dtype == dtype and oracles.relative(o, exact) < torch.finfo(dtype).eps / 2


def test_opcheck():
    q, k, v = (x.float().requires_grad_() for x in inputs(CHUNK + 5))
    a, b = (x.float().requires_grad_() for x in (A, COEFFICIENTS))
    gate = log_decay("of tokens", CHUNK + 5).float().requires_grad_()
    parts = dict(zip("Szcn", (x.float().requires_grad_() for x in some_state()), strict=True))
    call = Call(q=q, k=k, v=v, a=a, b=b, token_log_decay=gate, **parts, normalize=False, return_state=True)
    opcheck(torch.ops.lingpt.linear_attention_fwd, call)


def test_one_graph():
    q, k, v = (x.float().requires_grad_() for x in inputs(70))
    a, b = (x.float().requires_grad_() for x in (A, COEFFICIENTS))

    def block(q, k, v, a, b):
        o, state = linear_attention_with_state(q, k, v, 2 * b, a=2 * a, normalize=False)
        return o.sum() + state.S.square().sum()

    leaves = (q, k, v, a, b)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, block))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(a=0.5), "only b/a counts"),
        (dict(a=torch.ones(H)), "only b/a counts"),
        (dict(a="x", normalize=False), "a must be a number"),
        (dict(a=torch.ones(H + 1), normalize=False), r"a must be floating point \[H = 3\]"),
        (dict(b=torch.ones(H, dtype=torch.int32), normalize=False), "b must be floating point"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(UserError, match=message):
        linear_attention(*inputs(5), **options)


def test_the_cuda_kernel_takes_it(monkeypatch):
    """Guards: no form falls back to PyTorch on a card that has kernels."""
    monkeypatch.setattr(cuda, "device_unsupported_reason", lambda *_: None)
    q, k, v = (x.bfloat16() for x in inputs(5))
    gate = torch.zeros(q.shape[:3])
    for options in (
        {},
        dict(normalize=False),
        dict(token_log_decay=gate),
        dict(normalize=False, token_log_decay=gate),
    ):
        assert cuda.unsupported_reason(Call(q=q, k=k, v=v, **options)) is None
