"""What a thread computes on its registers, against Python's integers and PyTorch's floats."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.nvrtc

MASK = 0xFFFFFFFF


def test_integers(launch) -> None:
    """Guards: division toward zero, the high half of products, shifts beyond the width, shuffles, votes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-(2**31), 2**31, (2, 64))
    x[:20], y[:20] = rng.integers(-100, 100, (2, 20))
    y[y == 0] = 7
    x[32:] = x[32:] % 1000  # so that votes of the two warps differ
    out = torch.zeros(17, 64, dtype=torch.int32)
    launch("integers", *(torch.from_numpy(v.astype(np.int32)) for v in (x, y)), out, threads=64)
    for thread in range(64):
        expected = integers(thread, x.tolist(), y.tolist())
        assert [v & MASK for v in out[:, thread].tolist()] == [v & MASK for v in expected], thread


def integers(i: int, xs: list[int], ys: list[int]) -> list[int]:
    """What thread i of the probe computes."""
    x, y, warp = xs[i], ys[i], i - i % 32
    ux, uy = x & MASK, y & MASK
    of_warp = xs[warp : warp + 32]
    votes = all(v > -2000000000 for v in of_warp) + 2 * any(v > 2000000000 for v in of_warp)
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return [
        quotient, x - y * quotient, ux // uy, ux % uy, x * y >> 32, ux * uy >> 32, x * y >> 20,
        (uy << 32 | ux) << (ux & 31) >> 32, x >> min(uy & 63, 31), ux << (y & 31), min(x, y), max(ux, uy),
        xs[i ^ 5], xs[i if i % 8 > 5 else i + 2], xs[warp + i * 7 % 32], (x & y) | (~x ^ (y | 5)), votes,
    ]  # fmt: skip


def test_floats(launch) -> None:
    """Guards: one rounding, in the right direction; NaN; conversions, to 16 bits as PyTorch makes them."""
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 10
    x[0], y[1], x[2], x[3] = float("nan"), float("nan"), 70000.0, -1 - 2.0**-11
    out = torch.zeros(12, 64)
    launch("floats", x, y, out, threads=64)
    exact = x.double() * y.double() + np.float32(1 / 3)
    torch.testing.assert_close(out[0], exact.float(), rtol=0, atol=0, equal_nan=True)
    nan, error = exact.isnan(), exact - out[1]  # rounded down
    assert (nan | (error >= 0) & (error < exact.abs() * 2.0**-23)).all()
    whole = torch.nan_to_num(x)
    expected = {
        2: x / y, 3: torch.fmin(x, y), 4: whole.round(), 5: whole.floor(), 6: torch.exp2(y.double()).float(),
        7: 1 / x.abs(), 8: torch.where(x < y, x, -y),
    }  # fmt: skip
    for n, value in expected.items():
        torch.testing.assert_close(out[n], value, rtol=2e-7, atol=0, equal_nan=True)
    for n, dtype in ((9, torch.bfloat16), (11, torch.float16)):
        pairs = out[n].view(dtype).view(64, 2)
        for column, value in ((0, y), (1, x)):
            torch.testing.assert_close(pairs[:, column], value.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_sums_in_fp64(launch) -> None:
    """Guards: conversions, shuffles up and differences of large numbers in fp64."""
    a, out = torch.randn(32, generator=torch.Generator().manual_seed(0)), torch.zeros(32)
    a[::16] = 1e9
    launch("running_sum", a, out, threads=32)
    sums = a.double().view(2, 16).cumsum(1)
    torch.testing.assert_close(out, (sums - sums[:, :1]).float().flatten(), rtol=0, atol=1e-5)
