"""The loss's kernel against float64, on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


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


def test_what_is_not_finite_is_not_hidden():
    """Such a step is skipped: its loss has to say so."""
    from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place

    for wrong in (torch.nan, torch.inf):
        logits = torch.zeros(3, 50304, device="cuda", dtype=torch.bfloat16)
        logits[1, 40000] = wrong
        loss, gradient = cross_entropy_in_place(logits, torch.zeros(3, device="cuda", dtype=torch.int64))
        assert not loss.isfinite() and gradient.isfinite().all(1).tolist() == [True, False, True]
