"""Tensor cores against plain matrix products: fragments, descriptors, and what a product in flight guards."""

import pytest
import torch

from lingpt.ptx_emulator import MemcheckError, ProxyError, RaceError

pytestmark = pytest.mark.nvrtc

BF16, FP16 = torch.bfloat16, torch.float16


def matrices(*shapes: tuple[int, int], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(BF16).to(dtype) for shape in shapes]


def test_fragments_make_a_matrix_product(launch) -> None:
    """Guards: ldmatrix (.trans), mma and stmatrix (.trans) against a plain product."""
    a, b = matrices((16, 16), (16, 8))
    c, back = torch.zeros(16, 8), torch.zeros(8, 8, dtype=BF16)
    launch("multiply", a, b, c, back, threads=32)
    torch.testing.assert_close(c, a.float() @ b.float())
    assert torch.equal(back, a[:8, :8].T)


def test_a_product_in_tf32(launch) -> None:
    """Guards: the fragments of m16n8k8, and that the lowest 13 bits of fp32 numbers are not read."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((16, 8), (8, 8)))
    c = torch.zeros(16, 8)
    launch("multiply_tf32", a, b, c, threads=32)
    a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    torch.testing.assert_close(c, a @ b)


def test_a_warpgroups_product(launch) -> None:
    """Guards: descriptors with the 128-byte swizzle, of a matrix and of its transpose."""
    (a, b), c = matrices((64, 64), (64, 64)), torch.zeros(64, 64)
    launch("group_multiply", a, b, c, 0, shared=16384)
    torch.testing.assert_close(c, a.float() @ b.float().T)
    launch("group_multiply_transposed", a, b, c, 0, shared=16384)
    torch.testing.assert_close(c, a.float().T @ b.float())


def test_mistakes_around_a_warpgroups_product(launch) -> None:
    """Guards: no fence of the proxies, an operand overwritten, accumulators (NaN) read before the wait."""
    (a, b), c = matrices((64, 64), (64, 64)), torch.zeros(64, 64)
    with pytest.raises(ProxyError, match=r"no fence\.proxy\.async"):
        launch("group_multiply", a, b, c, 1, shared=16384)
    with pytest.raises(RaceError, match=r"writes .* still in flight"):
        launch("group_multiply", a, b, c, 3, shared=16384)
    launch("group_multiply", a, b, c, 2, shared=16384)
    first = torch.zeros(64, 64, dtype=torch.bool)  # each thread's first accumulator
    first.view(4, 2, 8, 64)[:, 0, :, :8:2] = True
    assert torch.equal(c.isnan(), first)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("form", range(3), ids=["registers", "rows", "columns"])
def test_a_narrow_product(launch, form: int, dtype: torch.dtype) -> None:
    """Guards: eight columns, a in registers, K-contiguous or transposed; of shared memory, the operands are
    watched, and nothing else.
    """
    a, b = matrices((64, 128), (8, 128), dtype=dtype)
    c, given = torch.zeros(64, 8), a.T.contiguous() if form == 2 else a
    size = 9216 if form else 1024  # numbers of 16 bits: b, a behind it

    def narrow(first: int, end: int, fence: int = 1, poked=slice(0)) -> None:
        marks = torch.zeros(size, dtype=torch.int16)
        marks[poked] = 1
        name = f"narrow<{form}, {str(dtype is FP16).lower()}>"
        launch(name, given, b, c, first, end, fence, marks, shared=2 * size)

    def exact(first: int, end: int) -> torch.Tensor:
        k = slice(16 * first, 16 * end)
        return (a[:, k].double() @ b[:, k].double().T).float()

    narrow(0, 8)
    torch.testing.assert_close(c, exact(0, 8))
    with pytest.raises(ProxyError, match=r"no fence\.proxy\.async"):
        narrow(0, 8, fence=0)
    with pytest.raises(MemcheckError, match=r"probes\.cu.*2 bytes at shared address .* outside"):
        narrow(8, 9)
    for step in (2, 7):
        operands = [swizzled(8, 128)[:, 16 * step : 16 * step + 16]]
        if form:
            left = swizzled(64, 128) if form == 1 else swizzled(128, 64).T
            operands.append(1024 + left[:, 16 * step : 16 * step + 16])
        others = torch.ones(size, dtype=torch.bool)
        for x in operands:
            others[x] = False
        narrow(step, step + 1, poked=others)
        torch.testing.assert_close(c, exact(step, step + 1))
        for at in (int(x[i, k]) for x in operands for i in (0, -1) for k in (0, -1)):
            with pytest.raises(RaceError, match=r"writes .* still in flight"):
                narrow(step, step + 1, poked=at)


def swizzled(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns]: where the numbers of a tile lie, panels of 64 columns with the 128-byte swizzle."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return column // 64 * rows * 64 + row * 64 + (column % 64 ^ row % 8 * 8)
