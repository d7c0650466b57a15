"""The convolution's kernels on a GPU against PyTorch's convolution in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lingpt.kernels import short_conv

pytestmark = pytest.mark.gpu


def exact(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, silu: bool = False) -> list[torch.Tensor]:
    """y, dx and dw in float64 of the first C columns of x, C filters."""
    C = weight.shape[1]
    leaves = x, weight = (
        x[..., :C].detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
    )
    y = F.conv1d(F.pad(x, (0, 0, 3, 0)).mT, weight.T[:, None], groups=C).mT
    y = F.silu(y) if silu else y
    return [y, *torch.autograd.grad(y, leaves, dy[..., :C].double())]


def drawn(B: int, N: int, W: int, C: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(N)
    x, dy = (torch.randn(B, N, W, device="cuda", generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), torch.randn(4, C, device="cuda", generator=generator).requires_grad_(), dy


def is_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """To within the rounding of the result; in fp32 of the sum's four terms and the SiLU."""
    error = (found.double() - expected).abs().max()
    roundings = 4 if dtype == torch.float32 else 1
    return bool(error <= roundings * torch.finfo(dtype).eps * expected.abs().max())


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("N", [1, 2, 3, 5, 63, 64, 65, 128, 131, 1000])
def test_values_and_gradients(N, dtype, silu):
    """Guards: ends of sequences and of blocks, channels that fill no block, no leak from one sequence to the
    next, columns behind the channels, which pass as they are."""
    x, weight, dy = drawn(3, N, 840, 776, dtype)
    y = short_conv.convolve_columns(x, weight, silu)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    y_exact, dx_exact, dw_exact = exact(x, weight, dy, silu)
    assert is_close(y[..., :776], y_exact, dtype) and torch.equal(y[..., 776:], x[..., 776:])
    assert is_close(dx[..., :776], dx_exact, dtype) and torch.equal(dx[..., 776:], dy[..., 776:])
    assert (dw - dw_exact).norm() < 1e-6 * dw_exact.norm()  # fp32 sums of the rounded x and dy
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(short_conv.convolve_columns(x, weight, silu), (x, weight), dy),
            (dx, dw),
        )
    )


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_sequences(dtype, silu):
    """Guards: a leak across a border, forward or back, at the borders of blocks and of tokens taken together;
    sequences shorter than the filter, rows that begin with one."""
    x, weight, dy = drawn(2, 300, 840, 776, dtype)
    borders = [0, 1, 2, 5, 126, 128, 129, 200, 300, 303, 427, 428, 600]
    cu_seqlens = torch.tensor([*borders, 600], dtype=torch.int32, device="cuda")
    y = short_conv.convolve_columns(x, weight, silu, cu_seqlens)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    pieces = [
        exact(x.flatten(0, 1)[None, a:b], weight, dy.flatten(0, 1)[None, a:b], silu)
        for a, b in pairwise(borders)
    ]
    y_exact, dx_exact = (
        torch.cat(parts, 1).view(2, 300, 776) for parts in list(zip(*pieces, strict=True))[:2]
    )
    dw_exact = sum(dw for _, _, dw in pieces)
    assert is_close(y[..., :776], y_exact, dtype) and is_close(dx[..., :776], dx_exact, dtype)
    assert (dw - dw_exact).norm() < 1e-6 * dw_exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N", [1, 5, 128, 300])
def test_a_mixture(N, dtype):
    """Guards: mixed columns that begin within a block, columns beside them, values that are a part of a wider
    tensor, the gradients of what is mixed in."""
    x, weight, dy = drawn(2, N, 840, 776, dtype)
    values = torch.randn(2, N, 300, device="cuda").to(dtype)[..., 20:284].requires_grad_()
    share = torch.rand(264, device="cuda").requires_grad_()
    y = short_conv.convolve_columns(x, weight, True, mixture=short_conv.Mixture(500, values, share))
    found = torch.autograd.grad(y, (x, weight, values, share), dy)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight, values, share)]
    mixed = short_conv.mix_columns(leaves[0], short_conv.Mixture(500, *leaves[2:]))
    y_exact = F.silu(short_conv.short_convolution(mixed[..., :776], leaves[1]))
    dx, dw, du, ds = torch.autograd.grad(y_exact, leaves, dy[..., :776].double())
    assert is_close(y[..., :776], y_exact, dtype) and torch.equal(y[..., 776:], x[..., 776:])
    assert is_close(found[0][..., :776], dx[..., :776], dtype) and is_close(found[2], du, dtype)
    for sums, exact_sums in ((found[1], dw), (found[3], ds)):
        assert (sums - exact_sums).norm() < 1e-6 * exact_sums.norm()
    fused = torch.ops.lingpt.short_conv_fwd
    torch.library.opcheck(fused, (x, F.pad(weight, (0, 64)), 776, None, 500, values, share))


def test_views_and_no_tokens():
    """Guards: columns of a wider projection, read where they lie; a gradient that is no contiguous tensor."""
    x, weight, dy = drawn(2, 70, 512, 256, torch.bfloat16)
    for columns, given in (
        (x[..., :256], dy[..., 128:384]),
        (x[..., 128:384], dy[:1, :, :1].expand(2, 70, 256)),
    ):
        y = short_conv.convolve_columns(columns, weight)
        (dx,) = torch.autograd.grad(y, columns, given)
        y_exact, dx_exact, _ = exact(columns, weight, given)
        assert is_close(y, y_exact, torch.bfloat16) and is_close(dx, dx_exact, torch.bfloat16)
    assert short_conv.convolve_columns(x[:, :0], weight).shape == (2, 0, 512)


def test_in_a_compiled_block():
    """Guards: a graph break, and the operator's fake result."""
    x, weight, dy = drawn(2, 200, 320, 256, torch.bfloat16)

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * short_conv.convolve_columns(x + 1, weight, silu=True)

    y = torch.compile(block, fullgraph=True)(x, weight)
    assert torch.equal(y, block(x, weight))
    for found, expected in zip(
        torch.autograd.grad(y, (x, weight), dy),
        torch.autograd.grad(block(x, weight), (x, weight), dy),
        strict=True,
    ):
        assert torch.equal(found, expected)
    torch.library.opcheck(
        torch.ops.lingpt.short_conv_fwd, (x, F.pad(weight, (0, 64)), 256, None, 0, None, None)
    )


def test_forward_mode_is_refused():
    """Guards: tangents of zero."""
    x, weight, _ = drawn(1, 5, 64, 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="the convolution has no forward mode"):
        torch.func.jvp(lambda x: short_conv.convolve_columns(x, weight), (x,), (x,))


def test_more_than_two_billion_elements():
    """Guards: offsets of 32 bits."""
    x = torch.zeros(1, 2**20 + 100, 2048 + 64, device="cuda", dtype=torch.bfloat16)
    x[0, -5:] = 1.0
    weight = torch.ones(4, x.shape[2], device="cuda")
    assert short_conv.convolve_columns(x, weight)[0, -6:, -1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
