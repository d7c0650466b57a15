"""The loss and its kernel against float64."""

import pytest
import torch

from lingpt.train.loss import loss_and_gradient

gpu = pytest.mark.gpu
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("V", [5, 1000, 50304])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_loss_and_gradient_are_those_of_float64(dtype, V, scale):
    """Rows that one logit rules, that are all alike and far from 0; a vocabulary that fills no block."""
    from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place

    generator = torch.Generator("cuda").manual_seed(0)
    logits = (scale * torch.randn(70, V, device="cuda", generator=generator)).to(dtype)
    targets = torch.randint(V, (70,), device="cuda", generator=generator)
    logits[1, targets[1]], logits[2, targets[2] - 1], logits[3] = 300.0, 300.0, -5000.0
    p = logits.double().softmax(-1)
    rows = torch.arange(70, device="cuda")
    expected = -logits.double().log_softmax(-1)[rows, targets].sum()
    p[rows, targets] -= 1
    loss, gradient = cross_entropy_in_place(logits, targets)
    assert loss.dtype == torch.float32 and gradient is logits
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), p, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("V", [5, 1000])
def test_an_ignored_target_adds_nothing(where, V):
    """Guards: −100, PyTorch's mark for padding and prompts, read and written before the row in the kernel;
    the gradient of the softmax alone in PyTorch's form."""
    if where == "cuda":
        from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place as loss_of
    else:
        loss_of = loss_and_gradient
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, V, generator=generator), torch.randint(V, (6,), generator=generator)
    targets[::2] = -100
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum")
    (d_expected,) = torch.autograd.grad(expected, leaf)
    loss, gradient = loss_of(logits.to(where), targets.to(where))
    torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), d_expected, rtol=2e-6, atol=1e-6)
    assert not gradient[::2].any()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_z_loss_is_in_the_gradient_alone(where, dtype):
    """Against autograd in float64, of logits far from 0 too; without it, the same bits as before."""
    if where == "cuda":
        from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place as loss_of
    else:
        loss_of = loss_and_gradient
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(6, 1000, generator=generator) + 20).to(dtype)
    targets = torch.randint(1000, (6,), generator=generator)
    targets[0] = -100
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum")
    z = leaf.logsumexp(-1)[targets != -100].square().sum()
    (d_expected,) = torch.autograd.grad(expected + 0.01 * z, leaf)
    loss, gradient = loss_of(logits.clone().to(where), targets.to(where), z_loss=0.01)
    torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), d_expected, rtol=ROUNDING[dtype], atol=1e-6)
    plain, zero = (loss_of(logits.clone().to(where), targets.to(where), *z) for z in ((), (0.0,)))
    assert torch.equal(plain[1], zero[1]) and torch.equal(plain[0], loss)


@gpu
def test_what_is_not_finite_is_not_hidden():
    """Such a step is skipped: its loss has to say so."""
    from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place

    for wrong in (torch.nan, torch.inf):
        logits = torch.zeros(3, 50304, device="cuda", dtype=torch.bfloat16)
        logits[1, 40000] = wrong
        loss, gradient = cross_entropy_in_place(logits, torch.zeros(3, device="cuda", dtype=torch.int64))
        assert not loss.isfinite() and gradient.isfinite().all(1).tolist() == [True, False, True]
