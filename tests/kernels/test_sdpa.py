"""Softmax attention of packed sequences and with a window, against its definition."""

import pytest
import torch

from lingpt.kernels.sdpa import packed_attention


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("borders", [None, [0, 1, 30, 100, 170, 200, 200]])
@pytest.mark.parametrize("window", [None, 1, 20, 150])
def test_a_token_sees_its_own_sequence_up_to_a_window(where, borders, window):
    """Value and gradients, in the kernel's dtype, once with two heads of q for each of k and v. Guards: a
    window that is one token too long, as FlashAttention counts the tokens before a token."""
    B, N, H, D = 2, 100, 4, 64
    repeats = 2 if window == 20 else 1
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if where == "cuda" else torch.float64
    q, k, v, do = torch.randn(4, B, N, H, D, generator=generator, dtype=torch.float64).to(dtype).unbind()
    k, v = (x[:, :, : H // repeats] for x in (k, v))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    at = torch.arange(B * N)
    sequence = torch.bucketize(at, torch.tensor(borders or [0, N]), right=True)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or N)) & (sequence[:, None] == sequence)
    q_, k_, v_ = (x.flatten(0, 1).transpose(0, 1) for x in exact)
    k_, v_ = (x.repeat_interleave(repeats, 0) for x in (k_, v_))
    scores = (0.3 * q_ @ k_.mT).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ v_).transpose(0, 1).unflatten(0, (B, N))
    leaves = [x.detach().to(where).requires_grad_() for x in (q, k, v)]
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=where)
    found = packed_attention(*leaves, cu_seqlens, 0.3, window)
    ways = [
        [found, *torch.autograd.grad(found, leaves, do.to(where))],
        [expected, *torch.autograd.grad(expected, exact, do.double())],
    ]
    for x, y in zip(*ways, strict=True):
        bound = 0.03 if where == "cuda" else 1e-12
        assert (x.cpu().double() - y).norm() <= bound * max(1.0, y.norm())
