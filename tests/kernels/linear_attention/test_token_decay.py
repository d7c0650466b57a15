"""A decay of each token's own, log_decay [B, N, H]: every form against the definition, gradients, resets."""

from itertools import pairwise, starmap

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_qkv,
    linear_attention_qkv_with_state,
    linear_attention_with_state,
)
from lingpt.kernels.linear_attention.chunkwise import CHUNK
from lingpt.tests import oracles
from lingpt.tests.oracles import FORMS, assert_same, by_definition, randn

B, H, D = 2, 3, 8
LENGTHS = (1, 5, CHUNK, CHUNK + 1, 3 * CHUNK + 7)
RESET = float("-inf")


def inputs(N):
    """q, k, v and gates like a model's: log σ(x), around −0.7."""
    q, k, v, _ = oracles.inputs(B, N, H, D, torch.float64)
    return q, k, v, torch.nn.functional.logsigmoid(randn(B, N, H, seed=4, dtype=torch.float64))


def some_state():
    return oracles.some_state(B, H, D, torch.float64)


def test_the_reference_is_the_definition():
    q, k, v, gate = inputs(23)
    gate[:, 7] = RESET
    o = linear_attention(q, k, v, log_decay=gate, backend="reference")
    torch.testing.assert_close(o, by_definition(q, k, v, 1.0, gate.exp()))


@pytest.mark.parametrize("backend", [form for form in FORMS if form != "reference"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("N", LENGTHS)
def test_every_form_equals_the_reference(backend, N, with_state):
    q, k, v, gate = inputs(N)
    options = dict(log_decay=gate, initial_state=some_state() if with_state else None)
    found, expected = (
        linear_attention_with_state(q, k, v, 0.7, backend=x, **options) for x in (backend, "reference")
    )
    assert_same(found, expected)


@pytest.mark.parametrize("backend", FORMS)
def test_equal_gates_are_a_constant_decay(backend):
    q, k, v, _ = inputs(2 * CHUNK + 3)
    constant = torch.tensor([-0.3, -0.01, 0.0], dtype=torch.float64)
    options = dict(backend=backend)
    found = linear_attention_with_state(q, k, v, log_decay=constant.expand(B, q.shape[1], H), **options)
    assert_same(found, linear_attention_with_state(q, k, v, log_decay=constant, **options))


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("at", [0, 3, CHUNK - 1, CHUNK, CHUNK + 30])
def test_a_reset_is_a_new_beginning_exactly(backend, at):
    """Guards: packed documents are kept apart: nothing before a −inf weighs anything, and there is no NaN."""
    q, k, v, gate = inputs(2 * CHUNK + 9)
    gate[:, at] = RESET
    options = dict(backend=backend)
    o, state = linear_attention_with_state(q, k, v, log_decay=gate, initial_state=some_state(), **options)
    rest = [x[:, at:] for x in (q, k, v)]
    o_rest, state_rest = linear_attention_with_state(*rest, log_decay=gate[:, at:], **options)
    assert_same((o[:, at:], state), (o_rest, state_rest))
    others = [x.clone() for x in (q, k, v)]
    for x in others:
        x[:, :at] = 1e30
    o_other, state_other = linear_attention_with_state(*others, log_decay=gate, **options)
    o_same, state_same = linear_attention_with_state(q, k, v, log_decay=gate, **options)
    assert torch.equal(o_other[:, at:], o_same[:, at:])
    assert all(torch.equal(x, y) for x, y in zip(state_other, state_same, strict=True))


@pytest.mark.parametrize("decay", ["none", "head", "token"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("backend", FORMS)
def test_packed_sequences_are_as_separate_calls(backend, normalize, decay):
    """`cu_seqlens`: outputs and all gradients, sequences of one token, over a chunk's edge and, at the end,
    of none among them."""
    total = 2 * CHUNK + 33
    cu_seqlens = torch.tensor(
        [0, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 30, total, total], dtype=torch.int32
    )
    q, k, v, gate = (x.flatten(0, 1)[None, :total].detach().requires_grad_() for x in inputs(2 * CHUNK))
    b = torch.tensor([0.9, -0.5, 0.2], dtype=torch.float64, requires_grad=True)
    options = dict(normalize=normalize, backend=backend)
    of_head = torch.tensor([-0.01, -0.1, 0.0], dtype=torch.float64) if decay == "head" else None

    def log_decay(part: slice) -> torch.Tensor | None:
        return gate[:, part] if decay == "token" else of_head

    everything = slice(None)
    packed = linear_attention(q, k, v, b, log_decay=log_decay(everything), cu_seqlens=cu_seqlens, **options)
    separate = [
        linear_attention(*(x[:, part] for x in (q, k, v)), b, log_decay=log_decay(part), **options)
        for part in starmap(slice, pairwise(cu_seqlens.tolist()))
    ]
    do, leaves = (
        randn(*packed.shape, seed=5, dtype=torch.float64),
        [q, k, v, b, *([gate] * (decay == "token"))],
    )
    found, expected = ((o, *torch.autograd.grad(o, leaves, do)) for o in (packed, torch.cat(separate, 1)))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", FORMS)
def test_rows_of_packed_sequences_have_states_of_their_own(backend):
    """The initial state goes to a row's first tokens if no border is before them, as in the second row; the
    returned one is that of the row's last sequence."""
    q, k, v, gate = inputs(CHUNK + 9)
    N, state = q.shape[1], some_state()
    borders = torch.tensor([0, 20, N + 30, 2 * N], dtype=torch.int32)
    o, final = linear_attention_with_state(
        q, k, v, log_decay=gate, cu_seqlens=borders, initial_state=state, backend=backend
    )
    for row, (first, at) in enumerate([(None, 20), (LinearAttentionState(*(x[1:] for x in state)), 30)]):
        (q1, k1, v1, gate1), one = (x[row : row + 1] for x in (q, k, v, gate)), slice(row, row + 1)
        begun = linear_attention(
            *(x[:, :at] for x in (q1, k1, v1)), log_decay=gate1[:, :at], initial_state=first, backend=backend
        )
        rest, after = linear_attention_with_state(
            *(x[:, at:] for x in (q1, k1, v1)), log_decay=gate1[:, at:], backend=backend
        )
        assert_same(
            (o[one], LinearAttentionState(*(x[one] for x in final))), (torch.cat((begun, rest), 1), after)
        )


@pytest.mark.parametrize("gated", [False, True])
def test_packed_sequences_need_no_positions_of_their_own(gated):
    """RoPE's positions may run on: only distances within a sequence matter; with gates in the projection,
    too."""
    qkv, angle = randn(1, 50, 3, H, D, seed=6, dtype=torch.float64), torch.arange(50.0)[:, None] / 7
    cos, sin = angle.cos().expand(50, 4), angle.sin().expand(50, 4)
    options = {}
    if gated:
        gates = randn(1, 50, H, seed=7, dtype=torch.float64)
        qkv = torch.cat([qkv.flatten(2), gates], 2)
        options = dict(gate_bias=torch.linspace(0, 3, H, dtype=torch.float64), head_size=D)
    packed = linear_attention_qkv(qkv, cos, sin, cu_seqlens=torch.tensor([0, 20, 50]), **options)
    for part in (slice(0, 20), slice(20, 50)):
        length = part.stop - part.start
        alone = linear_attention_qkv(qkv[:, part], cos[:length], sin[:length], **options)
        torch.testing.assert_close(packed[:, part], alone)


def test_packed_sequences_compile_into_one_graph():
    qkv = [randn(1, 50, H, D, seed=seed, dtype=torch.float32) for seed in range(3)]
    cu_seqlens = torch.tensor([0, 20, 50])
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    expected = linear_attention(*qkv, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(compiled(*qkv, cu_seqlens=cu_seqlens), expected)


def test_a_learned_constant_is_not_taken_for_a_fixed_one():
    """Guards: a parameter [H] as log_decay, which never got a gradient, and nobody was told."""
    q, k, v, _ = inputs(9)
    learned = torch.full((H,), -0.1, requires_grad=True)
    with pytest.raises(UserError, match=r"give log_decay.expand\(B, N, H\), or detach it"):
        linear_attention(q, k, v, log_decay=learned)
    linear_attention(q, k, v, log_decay=learned.expand(B, 9, H)).sum().backward()
    assert learned.grad.abs().min() > 0
    with torch.no_grad():
        linear_attention(q, k, v, log_decay=learned)


@pytest.mark.parametrize("backend", FORMS)
def test_gradients_at_a_reset_are_zero_and_finite(backend):
    q, k, v, gate = (x.requires_grad_() for x in inputs(CHUNK + 20))
    resets = torch.zeros_like(gate)
    resets[:, [0, 9, 10, CHUNK]] = RESET
    o = linear_attention(q, k, v, log_decay=gate + resets, backend=backend)
    gradients = torch.autograd.grad(o.square().sum(), (q, k, v, gate))
    assert all(x.isfinite().all() for x in gradients)
    assert torch.equal(gradients[3][resets == RESET], torch.zeros_like(gate)[resets == RESET])
    assert gradients[3].abs().sum() > 0


@pytest.mark.parametrize("value", [0.0, -1e-4, -20.0, -1000.0])
def test_flat_and_steep_gates(value):
    """Only differences within a chunk are exponentiated: no overflow, whatever the sum over the sequence."""
    q, k, v, _ = (x.float() for x in inputs(5 * CHUNK))
    gate = torch.full(q.shape[:3], value)
    gate[:, ::7] = -0.1
    o, state = linear_attention_with_state(q, k, v, log_decay=gate, backend="chunkwise")
    exact = linear_attention_with_state(*(x.double() for x in (q, k, v)), log_decay=gate.double())
    assert_same((o, state), (exact[0].float(), LinearAttentionState(*(x.float() for x in exact[1]))))


def test_a_long_sequence_of_small_decays_does_not_drift():
    """G itself reaches −100: sums that start again in every chunk keep its differences exact."""
    N = 100_000
    q, k, v, _ = oracles.inputs(1, N, 1, 4, torch.float32)
    gate = torch.full((1, N, 1), -1e-3)
    o = linear_attention(q, k, v + 1, log_decay=gate)
    exact = linear_attention(q.double(), k.double(), v.double() + 1, log_decay=gate.double())
    assert (o - exact).abs().max() < 1e-5


@pytest.mark.parametrize("backend", [form for form in FORMS if form != "reference"])
def test_pieces_with_the_state_carried_equal_the_whole(backend):
    q, k, v, gate = inputs(2 * CHUNK + 5)
    whole = linear_attention_with_state(q, k, v, log_decay=gate, backend="reference")
    state, outputs = None, []
    for piece in (slice(0, 50), slice(50, 51), slice(51, None)):
        x = (q[:, piece], k[:, piece], v[:, piece])
        options = dict(log_decay=gate[:, piece], initial_state=state, backend=backend)
        o, state = linear_attention_with_state(*x, **options)
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), state), whole)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_autograd_through_the_definition(packed, with_state):
    """All of them: q, k, v, b, the gates, the initial state, from o and from the final state."""
    N = 2 * CHUNK + 11
    q, k, v, gate = inputs(N)
    gate[:, 40] = RESET
    leaves = [q, k, v, gate, torch.tensor([0.9, -0.5, 0.2], dtype=torch.float64)]
    leaves = [x.detach().requires_grad_() for x in (*leaves, *(some_state() if with_state else ()))]
    angle = torch.arange(N)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    weights = [torch.randn_like(x) for x in (q, *some_state())]

    def gradients(backend):
        q, k, v, gate, b, *parts = leaves
        options = dict(log_decay=gate, backend=backend)
        options["initial_state"] = LinearAttentionState(*parts) if parts else None
        if packed:
            o, state = linear_attention_qkv_with_state(
                torch.stack((q, k, v), 2), angle.cos(), angle.sin(), b, **options
            )
        else:
            o, state = linear_attention_with_state(q, k, v, b, **options)
        loss = sum((w * x).sum() for w, x in zip(weights, (o, *state), strict=True))
        return torch.autograd.grad(loss, leaves)

    for found, expected in zip(gradients("chunkwise"), gradients("reference"), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("N", [1, 5, CHUNK + 2])
def test_gradcheck(N):
    q, k, v, gate = (
        x[:1, :, :1, :2].requires_grad_() for x in inputs(N) if x.ndim == 4 or x.unsqueeze_(-1).ndim
    )

    def attention(q, k, v, gate):
        return linear_attention(q, k, v, log_decay=gate[..., 0], backend="chunkwise")

    assert torch.autograd.gradcheck(attention, (q, k, v, gate), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_keep_fp32_gates(dtype):
    q, k, v, gate = inputs(200)
    low, gate32 = [x.to(dtype) for x in (q, k, v)], gate.float().requires_grad_()
    o = linear_attention(*low, log_decay=gate32)
    assert o.dtype == dtype
    o.float().sum().backward()
    assert gate32.grad.dtype == torch.float32
    exact = linear_attention(*(x.double() for x in low), log_decay=gate)
    torch.testing.assert_close(o.double(), exact, rtol=2**-7, atol=1e-3)


def test_one_graph():
    q, k, v, gate = (x.float().requires_grad_() for x in inputs(70))

    def block(q, k, v, x):
        o, state = linear_attention_with_state(q, k, v, log_decay=torch.nn.functional.logsigmoid(x))
        return o.sum() + state.S.square().sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(q, k, v, gate), (q, gate)) for f in (compiled, block))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("log_decay", "message"),
    [
        (torch.zeros(B, 5, H + 1), r"\[B, N, H\] = \[2, 5, 3\], or with a=0 \[B, N, H, D\] = "),
        (torch.zeros(B, 4, H), r"\[B, N, H\] = \[2, 5, 3\]"),
        (torch.zeros(5, H), "log_decay must be"),
        (torch.zeros(B, 5, H, dtype=torch.int32), "floating point"),
        (torch.zeros(B, 5, H, device="meta"), "log_decay must be on cpu"),
    ],
)
def test_a_mistake_is_one_line(log_decay, message):
    q, k, v, _ = inputs(5)
    with pytest.raises(UserError, match=message):
        linear_attention(q, k, v, log_decay=log_decay)
    with pytest.raises(UserError, match="causal"):
        linear_attention(q, k, v, log_decay=torch.zeros(B, 5, H), causal=False)


def test_the_gradient_of_gates_does_not_drift():
    """Guards: what tokens after t have with each other leaves nothing in the sum over j ≥ t, though o is
    rounded. Where row sums were taken for the zeros that they should be, 3 % were off here."""
    q, k, v, do = oracles.inputs(1, 2000, 1, 16, torch.bfloat16)
    gate = torch.nn.functional.logsigmoid(randn(1, 2000, 1, seed=4) + 2).requires_grad_()
    (found,) = torch.autograd.grad(linear_attention(q, k, v, log_decay=gate), gate, do)
    o = linear_attention(q.double(), k.double(), v.double(), log_decay=gate.double())
    (exact,) = torch.autograd.grad(o, gate, do.double())
    assert oracles.relative(found, exact.double()) < 5e-3


def test_the_gradient_of_gates_sums_no_further_than_a_chunk():
    """Guards: what later chunks have comes from the states. Summed over all tokens, where values have a mean,
    what fp32 leaves in each adds up: 4e-5 here, and fifteen per cent after a million."""
    q, k, v, do = oracles.inputs(1, 32768, 1, 8, torch.float32)
    found, exact = (
        torch.autograd.grad(
            linear_attention(*(x.to(dtype) for x in (q, k, v + 1)), log_decay=gate, backend="chunkwise"),
            gate,
            do.to(dtype),
        )[0]
        for dtype in (torch.float32, torch.float64)
        for gate in [torch.full((1, 32768, 1), -1.0, dtype=dtype, requires_grad=True)]
    )
    assert oracles.relative(found, exact) < 5e-6


def test_o_is_not_rounded_where_a_gates_gradient_is_found():
    """Where values have a mean, as in a trained model, bf16's rounding of o would be 4 % of it."""
    q, k, v, do = oracles.inputs(1, 320, 2, 64, torch.bfloat16)
    x, gates = (q + 1.5, k + 1.5, v + 3), torch.nn.functional.logsigmoid(randn(1, 320, 2, seed=9) + 5)
    exact = oracles.in_float64(*x, do, log_decay=gates)["dlog_decay"]
    gates.requires_grad_()
    linear_attention(*x, log_decay=gates, backend="chunkwise").backward(do)
    assert oracles.relative(gates.grad, exact) < 1e-4
