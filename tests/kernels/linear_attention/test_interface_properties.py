"""The operator with any arguments: what its definition says, or one line; never another error, never NaN."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lingpt import linear_attention
from lingpt.tests.oracles import by_definition
from lingpt.tests.properties import examples, result_or_line

DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5)
GOOD = st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 3), st.sampled_from([1, 2, 8, 16]))


def tensor(shape, dtype, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    return values.to(dtype)


@pytest.mark.fault("the operator, with any arguments", "a finite result, or one line")
@examples(30)
@given(
    SHAPES | GOOD,
    SHAPES | GOOD,
    DTYPES,
    DTYPES,
    st.sampled_from([1.0, 0.0, -1.0, 2.0, float("nan"), "x", None]),
)
def test_any_arguments_give_a_result_or_a_line(figures, q_shape, v_shape, q_dtype, v_dtype, b):
    figures["faults"] += 1
    q, k, v = tensor(q_shape, q_dtype), tensor(q_shape, q_dtype), tensor(v_shape, v_dtype)
    o = result_or_line(linear_attention, q, k, v, b)
    if o is not None:
        assert o.shape == v.shape and o.dtype == v.dtype
        assert bool(o.isfinite().all())


@pytest.mark.fault("the operator, at any size and scale", "what its definition says")
@examples(30)
@given(GOOD, st.sampled_from([1.0, 0.5, 0.0, -0.9]), st.sampled_from([0.1, 1.0, 1e4]), st.booleans())
def test_any_sizes_and_scales_are_the_definition(figures, shape, b, scale, alike):
    """The weights 1 + b q·k of unit q and k, over their sum, token by token."""
    figures["faults"] += 1
    q, v = tensor(shape, torch.float32, scale), tensor(shape, torch.float32)
    k = q if alike else q.flip(1)
    o = linear_attention(q, k, v, b)
    expected = by_definition(q.double(), k.double(), v.double(), b, torch.ones(shape[2]))
    torch.testing.assert_close(o.double(), expected, rtol=2e-3, atol=2e-3)
