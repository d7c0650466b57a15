"""The analytical backward: against finite differences, against autograd of the definition, at the edges."""

import pytest
import torch
from torch.autograd import gradcheck

from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_with_state,
)
from lingpt.kernels.linear_attention.chunkwise import CHUNK
from lingpt.tests.oracles import FORMS, randn


def leaf(*shape, seed, dtype=torch.float64, factor=1.0, offset=0.0):
    return (factor * randn(*shape, seed=seed, dtype=dtype) + offset).requires_grad_()


def leaves(N, B=1, H=2, D=2, dtype=torch.float64, normalize_qk=True):
    """q, k, v, b and an initial state whose count is large enough for a positive normaliser."""
    factor = 1.0 if normalize_qk else 0.2
    q, k = (leaf(B, N, H, D, seed=s, dtype=dtype, factor=factor) for s in (0, 1))
    v = leaf(B, N, H, D, seed=2, dtype=dtype)
    b = torch.linspace(-0.7, 0.9, H, dtype=dtype).requires_grad_()
    shapes = (B, H, D, D), (B, H, D), (B, H, D), (B, H)
    state = [leaf(*s, seed=3 + i, dtype=dtype, offset=10.0 * (i == 3)) for i, s in enumerate(shapes)]
    return q, k, v, b, state


@pytest.mark.parametrize("N", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("normalize_qk", [True, False])
def test_gradcheck_of_everything_at_once(N, decay, normalize_qk):
    """q, k, v, b and the four parts of the initial state, through the output and the final state."""
    q, k, v, b, state = leaves(N, normalize_qk=normalize_qk)
    log_decay = torch.tensor([-0.3, -0.01], dtype=torch.float64) if decay else None

    def f(q, k, v, b, *state):
        options = dict(
            log_decay=log_decay, normalize_qk=normalize_qk, initial_state=LinearAttentionState(*state)
        )
        o, final = linear_attention_with_state(q, k, v, b, backend="chunkwise", **options)
        return o, *final

    assert gradcheck(f, (q, k, v, b, *state), fast_mode=N > 2)


@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("normalize_qk", [True, False])
def test_gradcheck_without_a_causal_mask(N, normalize_qk):
    q, k, v, b, state = leaves(N, normalize_qk=normalize_qk)

    def f(q, k, v, b, *state):
        options = dict(normalize_qk=normalize_qk, causal=False, initial_state=LinearAttentionState(*state))
        o, final = linear_attention_with_state(q, k, v, b, backend="chunkwise", **options)
        return o, *final

    assert gradcheck(f, (q, k, v, b, *state))


@pytest.mark.parametrize("decay", [False, True])
def test_gradcheck_of_the_plain_call(decay):
    """No state in or out, b a number: the call that training makes."""
    q, k, v, *_ = leaves(6)
    log_decay = [-0.3, -0.01] if decay else None
    assert gradcheck(
        lambda q, k, v: linear_attention(q, k, v, log_decay=log_decay, backend="chunkwise"), (q, k, v)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_autograd_through_the_definition(dtype, decay, causal):
    if decay and not causal:
        return  # refused, see test_interface.py
    q, k, v, b, state = leaves(150, B=2, H=3, D=8, dtype=dtype)
    options = dict(log_decay=[-0.1, 0.0, -0.01] if decay else None, causal=causal)
    gradients = {}
    for backend in ("reference", "chunkwise"):
        o, final = linear_attention_with_state(
            q, k, v, b, initial_state=LinearAttentionState(*state), backend=backend, **options
        )
        parts = [(randn(*x.shape, seed=9, dtype=dtype) * x).sum() for x in (o, *final)]
        gradients[backend] = torch.autograd.grad(sum(parts), (q, k, v, b, *state))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for ours, autograd in zip(gradients["chunkwise"], gradients["reference"], strict=True):
        torch.testing.assert_close(ours, autograd, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", FORMS)
def test_gradients_of_zero_and_opposite_rows_are_finite_and_the_same(backend):
    q, k, v, b, _ = leaves(CHUNK + 3, H=3, D=4, dtype=torch.float32)
    with torch.no_grad():
        b.fill_(1.0)
        q[:, :, 0] = -k[:, :, 0]
        q[:, ::2, 1] = 0
        k[:, ::3, 1] = 0
        q[:, :, 2] = k[:, :, 2] = 0
    do = randn(*q.shape, seed=9)
    o = linear_attention(q, k, v, b, backend=backend)
    gradients = torch.autograd.grad(o, (q, k, v, b), do)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v, b)]
    expected = torch.autograd.grad(linear_attention(*doubles, backend="reference"), doubles, do.double())
    for x, y in zip(gradients, expected, strict=True):
        assert x.isfinite().all()
        # A zero row's own gradient is that of a row of norm 1e-6, and large: compare with the tensor's scale.
        torch.testing.assert_close(x.double() / y.abs().max(), y / y.abs().max(), rtol=1e-3, atol=1e-4)


def test_only_what_requires_a_gradient_gets_one():
    q, k, v, b, state = leaves(5)
    o = linear_attention(q.detach(), k, v.detach(), b.detach(), initial_state=LinearAttentionState(*state))
    (dk,) = torch.autograd.grad(o.sum(), (k,), retain_graph=True)
    assert dk.shape == k.shape
    assert all(x is not None for x in torch.autograd.grad(o.sum(), state))


def test_a_loss_on_the_state_alone():
    """The output's gradient is missing, as in truncated back-propagation through the last piece's state."""
    q, k, v, *_ = leaves(5)
    _, state = linear_attention_with_state(q, k, v, backend="chunkwise")
    dk, dq = torch.autograd.grad(state.S.sum(), (k, q))
    reference_state = linear_attention_with_state(q, k, v, backend="reference")[1]
    torch.testing.assert_close(dk, torch.autograd.grad(reference_state.S.sum(), k)[0])
    assert not dq.any()


def test_a_second_derivative_is_refused_and_not_silently_wrong():
    q, k, v, *_ = leaves(5)
    o = linear_attention(q, k, v, backend="chunkwise")
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (o.sum() + dq.square().sum()).backward()
    (dq,) = torch.autograd.grad(linear_attention(q, k, v, backend="reference").sum(), q, create_graph=True)
    dq.square().sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "recurrent"])
def test_a_second_derivative_at_a_row_of_zeros(backend):
    """Guards: it was NaN: a norm, which is squared again, has none there."""
    q, k, v, *_ = leaves(5)
    with torch.no_grad():
        q[0, 2, 0], k[0, 3, 1] = 0.0, 0.0
    o = linear_attention(q, k, v, backend=backend)
    first = torch.autograd.grad(o.square().sum(), (q, k), create_graph=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(sum(x.square().sum() for x in first), (q, k)))


def test_gradients_of_a_batch_of_losses():
    """`is_grads_batched`, which jacobians use. Guards: it reached the analytical backward unmapped."""
    q, k, v, *_ = leaves(5)
    o = linear_attention(q, k, v, backend="chunkwise")
    do = torch.stack([o.detach(), torch.ones_like(o)])
    batched = torch.autograd.grad(o, (q, k, v), do, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        alone = torch.autograd.grad(o, (q, k, v), do[i], retain_graph=True)
        torch.testing.assert_close(tuple(x[i] for x in batched), alone)


def test_what_only_the_definition_can_do_is_refused_with_its_name():
    """Forward mode and torch.func. Guards: PyTorch's own message named neither the operator nor a way out."""
    q, k, v = (x.detach() for x in leaves(5)[:3])

    def loss(q, backend="chunkwise"):
        return linear_attention(q, k, v, backend=backend).sum()

    for derive in (
        lambda: torch.func.grad(loss)(q),
        lambda: torch.func.jvp(loss, (q,), (q,)),
        lambda: torch.vmap(torch.func.grad(loss))(torch.stack([q, q])),
    ):
        with pytest.raises(RuntimeError, match=r"linear_attention has neither .* backend='reference' has"):
            derive()
    assert torch.func.grad(loss)(q, "reference").isfinite().all()


@pytest.mark.parametrize("backend", FORMS)
def test_no_tokens_have_gradients_and_their_own_state(backend):
    """Guards: token by token, o was v itself, and the state the one that was given."""
    q, k, v, _, state = leaves(0)
    given = LinearAttentionState(*state)
    o, final = linear_attention_with_state(q, k, v, initial_state=given, backend=backend)
    (o.sum() + sum(x.sum() for x in final)).backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))
    for x, old in zip(final, given, strict=True):
        assert torch.equal(x, old) and x.data_ptr() != old.data_ptr() and old.grad.eq(1).all()


def test_saved_for_backward_is_linear_in_the_length():
    """q, k, v and o of N·D each, normaliser and norms of N: no state per chunk, no weights."""
    q, k, v, *_ = leaves(512, H=2, D=16, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_attention(q, k, v, backend="chunkwise")
    assert sum(saved) == 4 * q.numel() + 3 * q.numel() // 16
