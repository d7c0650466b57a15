"""The short convolution against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from lingpt.models.attention.short_conv import WIDTH, short_convolution


@pytest.mark.parametrize("N", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("continued", [False, True])
def test_is_a_causal_depthwise_convolution(N, continued):
    """Guards: values, all gradients, and the tokens to go on with, for pieces shorter than the filter too."""
    B, C = 2, 5
    x, before = torch.randn(B, N, C, dtype=torch.float64), torch.randn(B, WIDTH - 1, C, dtype=torch.float64)
    before = before if continued else before * 0
    leaves = [t.requires_grad_() for t in (x, torch.randn(WIDTH, C, dtype=torch.float64), before)]
    whole = torch.cat((before, x), 1)
    expected = F.conv1d(whole.mT, leaves[1].T[:, None], groups=C).mT
    y, last = short_convolution(x, leaves[1], before if continued else None)
    torch.testing.assert_close(y, expected)
    assert torch.equal(last, whole[:, N:])
    dy = torch.randn_like(y)
    leaves = leaves if continued else leaves[:2]
    for ours, theirs in zip(*(torch.autograd.grad(o, leaves, dy) for o in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_it_keeps_its_input_alone():
    """Guards: no padded or fp32 copy of q, k and v is written forward and read backward."""
    x = torch.randn(2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(WIDTH, 32, requires_grad=True)
    y = torch.compile(lambda x, w: short_convolution(2 * x, w)[0], fullgraph=True)(x, weight)
    kept = [t for t in y.grad_fn.saved_tensors if t.numel() > weight.numel()]
    assert [(t.shape, t.dtype) for t in kept] == [(x.shape, x.dtype)]
