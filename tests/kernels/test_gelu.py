"""The GELU of compiled blocks against the exact one, for every 16-bit number."""

import math

import pytest
import torch

from lingpt.kernels.gelu import fast_gelu


def every(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 16-bit dtype."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x Φ(x) and its derivative, in float64."""
    x = x.double()
    cumulative = 0.5 * torch.erfc(-x / math.sqrt(2))
    return x * cumulative, cumulative + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("dtype", "others"), [(torch.bfloat16, 0.01), (torch.float16, 0.06)], ids=str)
def test_every_number(dtype, others):
    """Guards: the result is off by its rounding to 16 bits, and few are rounded to the other neighbour."""
    check_every_number(fast_gelu, every(dtype), others)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "others"), [(torch.bfloat16, 0.01), (torch.float16, 0.06)], ids=str)
def test_every_number_compiled_on_a_gpu(dtype, others):
    check_every_number(torch.compile(fast_gelu, fullgraph=True), every(dtype).cuda(), others)


def check_every_number(function, x, others):
    x.requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, -2))
    for found, wanted in zip((y, dx / -2), exact(x.detach()), strict=True):
        off = (found.double() - wanted).abs()
        assert (off <= (torch.finfo(x.dtype).eps / 2 + 1e-4) * wanted.abs() + 4e-5).all()
        matters = (wanted.abs() > 1e-3) & (wanted.abs() < 10)
        assert (found != wanted.to(x.dtype))[matters].double().mean() < others


def test_what_is_not_finite_stays_so():
    """Guards: a run that diverges is noticed."""
    x = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.bfloat16)
    assert fast_gelu(x).tolist()[1] == math.inf and fast_gelu(x)[[0, 2]].isnan().all()


@pytest.mark.slow
def test_compiled_it_keeps_its_input_alone():
    """What is kept is what the partitioner says, on any device."""
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: fast_gelu(2 * x), fullgraph=True, backend="aot_eager_decomp_partition")
    y = compiled(x)
    assert [(t.shape, t.dtype) for t in y.grad_fn.saved_tensors] == [(x.shape, x.dtype)]
    torch.testing.assert_close(y, torch.nn.functional.gelu(2 * x))
