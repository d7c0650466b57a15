"""The packed form: RoPE as LitGPT does it, the same function as the separate one, one gradient buffer."""

import pytest
import torch
from litgpt.model import build_rope_cache
from torch.autograd import gradcheck

from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention_qkv,
    linear_attention_qkv_with_state,
    linear_attention_with_state,
)
from lingpt.kernels.numerics import rotate, rotate_backward
from lingpt.tests.oracles import FORMS, randn, relative, rotated


def packed(N, B=2, H=3, D=8, R=4, dtype=torch.float64):
    """qkv, cos and sin."""
    cos, sin = build_rope_cache(N, R) if R else (torch.empty(N, 0),) * 2
    return randn(B, N, 3, H, D, seed=0, dtype=dtype).requires_grad_(), cos.to(dtype), sin.to(dtype)


def separately(qkv, cos, sin, *args, **options):
    """LitGPT's rotation and the separate form."""
    q, k, v = qkv.unbind(2)
    return linear_attention_with_state(rotated(q, cos, sin), rotated(k, cos, sin), v, *args, **options)


@pytest.mark.parametrize("R", [0, 4, 8])
def test_rotation_is_litgpt_s_and_its_backward_the_transpose(R):
    qkv, cos, sin = packed(7, R=R)
    x = qkv.detach()[:, :, 0].requires_grad_()
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned, rotated(x, cos, sin) if R else x)
    dy = torch.randn_like(x)
    torch.testing.assert_close(rotate_backward(dy, cos, sin), torch.autograd.grad(turned, x, dy)[0])


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("N", [0, 1, 70])
@pytest.mark.parametrize("decay", [False, True])
def test_packed_equals_separate(backend, N, decay):
    qkv, cos, sin = packed(N)
    b = torch.tensor([0.5, 1.0, -0.9], dtype=torch.float64).requires_grad_()
    options = dict(log_decay=[-0.1, 0.0, -0.5] if decay else None)
    o, state = linear_attention_qkv_with_state(qkv, cos, sin, b, backend=backend, **options)
    o_expected, state_expected = separately(qkv, cos, sin, b, backend="reference", **options)
    for x, y in zip((o, *state), (o_expected, *state_expected), strict=True):
        torch.testing.assert_close(x, y)
    if N:
        do = torch.randn_like(o)
        ours, expected = (torch.autograd.grad(x, (qkv, b), do) for x in (o, o_expected))
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("N", [1, 70])
@pytest.mark.parametrize("P", [3, 8])
def test_gates_in_the_projection_are_log_decay(backend, N, P):
    """Forward, state and all gradients; what follows the gates is neither read nor given one."""
    (qkv, cos, sin), (B, H, D) = packed(N), (2, 3, 8)
    behind = randn(B, N, P, seed=1, dtype=torch.float64)
    behind[..., H:] = torch.nan
    projected = torch.cat((qkv.detach().flatten(2), behind), 2).requires_grad_()
    bias = torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64).requires_grad_()
    options = dict(backend=backend)
    o, state = linear_attention_qkv_with_state(
        projected, cos, sin, 0.9, gate_bias=bias, head_size=D, **options
    )
    log_decay = torch.nn.functional.logsigmoid(projected[..., 3 * H * D : 3 * H * D + H] + bias)
    o_expected, state_expected = linear_attention_qkv_with_state(
        qkv, cos, sin, 0.9, log_decay=log_decay, **options
    )
    for x, y in zip((o, *state), (o_expected, *state_expected), strict=True):
        torch.testing.assert_close(x, y)
    do = randn(*o.shape, seed=2, dtype=torch.float64)
    ours = torch.autograd.grad(o, (projected, bias), do)
    *expected, dqkv = torch.autograd.grad(o_expected, (projected, bias, qkv), do)
    expected[0][..., : 3 * H * D] = dqkv.flatten(2)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert ours[0].is_contiguous() and not ours[0][..., 3 * H * D + H :].any()


@pytest.mark.parametrize("normalize_qk", [True, False])
def test_gradcheck_with_states(normalize_qk):
    B, N, H, D = 1, 5, 2, 4
    qkv, cos, sin = packed(N, B, H, D, R=2)
    state = [torch.rand(s, dtype=torch.float64) for s in ((B, H, D, D), (B, H, D), (B, H, D))]
    state.append(torch.full((B, H), 30.0, dtype=torch.float64))
    b = torch.tensor([0.5, 0.9], dtype=torch.float64)

    def f(qkv, b, *state):
        options = dict(normalize_qk=normalize_qk, initial_state=LinearAttentionState(*state))
        o, final = linear_attention_qkv_with_state(qkv, cos, sin, b, backend="chunkwise", **options)
        return o, *final

    assert gradcheck(f, [x.requires_grad_() for x in (qkv, b, *state)])


def test_decoding_a_prompt_and_then_tokens_equals_the_whole():
    qkv, cos, sin = packed(30)
    whole = linear_attention_qkv(qkv, cos, sin)
    o, state = linear_attention_qkv_with_state(qkv[:, :20], cos[:20], sin[:20])
    outputs = [o]
    for t in range(20, 30):
        at = slice(t, t + 1)
        o, state = linear_attention_qkv_with_state(qkv[:, at], cos[at], sin[at], initial_state=state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


def test_backward_is_one_operator_with_one_buffer():
    """No split or unbind is left for autograd to undo by concatenation: qkv's gradient comes out as it is."""
    qkv, cos, sin = packed(70, dtype=torch.bfloat16)
    o = linear_attention_qkv(qkv, cos, sin)
    assert [node for node, _ in o.grad_fn.next_functions if node is not None] == [
        torch.autograd.graph.get_gradient_edge(qkv).node
    ]
    (dqkv,) = torch.autograd.grad(o.sum(), qkv)
    assert dqkv.is_contiguous() and dqkv.dtype == torch.bfloat16


def test_bf16_is_as_close_as_its_rounding():
    qkv, cos, sin = packed(200, dtype=torch.float32)
    low = qkv.detach().bfloat16().requires_grad_()
    exact = low.detach().double().requires_grad_()
    o = linear_attention_qkv(low, cos, sin)
    o_exact, _ = separately(exact, cos.double(), sin.double(), backend="reference")
    do = torch.randn_like(o)
    (d,), (d_exact,) = torch.autograd.grad(o, low, do), torch.autograd.grad(o_exact, exact, do.double())
    for x, y in ((o, o_exact), (d, d_exact)):
        assert relative(x, y) < 5e-3
