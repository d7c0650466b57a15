"""The short convolution against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from lingpt.kernels.short_conv import short_convolution
from lingpt.models.attention import short_conv
from lingpt.models.attention.base import RecurrentState
from lingpt.models.attention.short_conv import WIDTH, apply_short_conv


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 9])
def test_is_a_causal_depthwise_convolution(N):
    """Values and gradients, of sequences shorter than the filter too."""
    leaves = x, weight = drawn(2, N, 5), drawn(WIDTH, 5)
    y = short_convolution(x, weight)
    expected = F.conv1d(F.pad(x, (0, 0, WIDTH - 1, 0)).mT, weight.T[:, None], groups=5).mT
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(o, leaves, dy) for o in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("pieces", [[1, 1, 1, 1, 5], [9], [0, 2, 7], [6, 3]], ids=str)
def test_a_state_goes_on(pieces):
    """Guards: what decoding sees, piece by piece, is the whole, with gradients through the state; the state
    holds the last tokens alone."""
    leaves = x, weight = drawn(2, 9, 5), drawn(WIDTH, 5)
    state, parts = RecurrentState(), []
    for piece in x.split(pieces, dim=1):
        parts.append(apply_short_conv(piece, weight, state))
        assert state.conv.untyped_storage().nbytes() == 2 * (WIDTH - 1) * 5 * 8
    y, expected = torch.cat(parts, 1), short_convolution(x, weight)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(o, leaves, dy) for o in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_token_is_not_padded(monkeypatch):
    """Guards: decoding through the form that is made for the compiler, five times as slow without it."""
    state, weight = RecurrentState(), torch.randn(WIDTH, 5)
    apply_short_conv(torch.randn(2, 4, 5), weight, state)
    monkeypatch.delattr(short_conv, "short_convolution")
    assert apply_short_conv(torch.randn(2, 1, 5), weight, state).shape == (2, 1, 5)


def test_it_answers_in_the_dtype_of_its_tokens():
    """Guards: a prompt in fp32, then a step under autocast in bf16."""
    state, weight = RecurrentState(), torch.randn(WIDTH, 5)
    apply_short_conv(torch.randn(2, 4, 5), weight, state)
    assert apply_short_conv(torch.randn(2, 1, 5).bfloat16(), weight, state).dtype == torch.bfloat16


def test_its_sums_are_in_fp32():
    """Guards: values and gradients of a model in bf16 that are rounded at each term."""
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((2, 64, 5), (WIDTH, 5))]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    dy = torch.randn(2, 64, 5).bfloat16()
    y, y_exact = short_convolution(*leaves), short_convolution(*exact)
    found = y, *torch.autograd.grad(y, leaves, dy)
    expected = y_exact, *torch.autograd.grad(y_exact, exact, dy.float())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.bfloat16(), rtol=2**-7, atol=1e-6)


def test_it_may_be_mapped():
    x, weight = drawn(3, 2, 9, 5), drawn(WIDTH, 5)
    mapped = torch.vmap(short_convolution, (0, None))(x, weight)
    assert torch.equal(mapped, torch.stack([short_convolution(one, weight) for one in x]))


@pytest.mark.slow
def test_compiled_it_keeps_its_input_alone():
    """Guards: no padded or fp32 copy of q, k and v is written forward and read backward."""
    x = torch.randn(2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(WIDTH, 32, requires_grad=True)
    y = torch.compile(lambda x, w: short_convolution(2 * x, w), fullgraph=True)(x, weight)
    kept = [t for t in y.grad_fn.saved_tensors if t.numel() > weight.numel()]
    assert [(t.shape, t.dtype) for t in kept] == [(x.shape, x.dtype)]
