"""A causal depthwise convolution of four taps along the sequence, of columns into which others may be mixed,
and a SiLU behind it: Triton, one kernel each for both passes.

A block processes a range of tokens of a few hundred channels, with the last three tokens in registers: each
pass reads and writes every tensor once, except for three tokens per range. The compiled PyTorch form reads x
and the gradient once more for the filter's gradient.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lingpt.kernels.checks import refuse_forward_mode

DTYPES = torch.bfloat16, torch.float16, torch.float32


class Blocks(NamedTuple):
    """The size of a block: `tokens`, a multiple of four; `channels`, a power of two; `warps`."""

    tokens: int
    channels: int
    warps: int


# The fastest sizes in docs/results/training/short-conv.json.
FORWARD, BACKWARD = Blocks(128, 256, 1), Blocks(128, 128, 1)


def takes(x_BNC: torch.Tensor) -> bool:
    """Whether `convolve` supports this CUDA tensor."""
    return x_BNC.dtype in DTYPES and x_BNC.stride(-1) == 1


def convolve(
    x_BNC: torch.Tensor,
    weight_4C: torch.Tensor,
    silu_channels: int = 0,
    first_BN: torch.Tensor | None = None,
    column: int = 0,
    values_BNV: torch.Tensor | None = None,
    share_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """z_t = Σ_k w_k x_{t−3+k}, zeros before the first token, summed in fp32, and of the first `silu_channels`
    channels silu(z_t); differentiable once.

    x_BNC: [B, N, C] on CUDA, one of DTYPES, channels contiguous. weight_4C: [4, C], floating point; the last
    row is the weight of the token itself. first_BN: bool, the first tokens of packed sequences. With
    values, of x's dtype, columns contiguous, and share [V]: V columns of x, from `column` on, are
    x + share·(values − x). Returns [B, N, C] in x's dtype, contiguous.
    """
    refuse_forward_mode("the convolution has no forward mode", x_BNC, weight_4C)
    return _convolve(x_BNC, weight_4C, silu_channels, first_BN, column, values_BNV, share_V)


@torch.library.custom_op("lingpt::short_conv_fwd", mutates_args=(), device_types="cuda")
def _convolve(
    x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None,
    column: int, values: torch.Tensor | None, share: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    y, weight = torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current one
        for begin, end, mixed in _ranges(x, column, values):
            grid, sizes = _grid(x, begin, end, FORWARD)
            _forward[grid](
                x, weight, first, values, share, y, *_strides(x, values), *x.shape[1:], silu_channels,
                begin, end, *sizes, SILU=silu_channels > begin, PACKED=first is not None, MIXED=mixed,
                num_warps=FORWARD.warps,
            )  # fmt: skip
    return y


@torch.library.custom_op("lingpt::short_conv_bwd", mutates_args=(), device_types="cuda")
def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None,
    column: int, values: torch.Tensor | None, share: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of x, weight, values and share; empty ones of what is None."""
    dy, dx = dy.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dvalues = x.new_empty(0 if values is None else values.shape)
    B, N, C = x.shape
    blocks = triton.cdiv(N, BACKWARD.tokens) * B
    sums = torch.empty(blocks, 4 if values is None else 5, C, dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    with torch.cuda.device_of(x):
        for begin, end, mixed in _ranges(x, column, values):
            grid, sizes = _grid(x, begin, end, BACKWARD)
            _backward[grid](
                dy, x, weight, first, values, share, dx, dvalues, sums, *_strides(x, values), N, C,
                silu_channels, begin, end, sums.shape[1], *sizes, SILU=silu_channels > begin,
                PACKED=first is not None, MIXED=mixed, num_warps=BACKWARD.warps,
            )  # fmt: skip
    sum_ = sums.sum(0)  # in a fixed order: deterministic
    dshare = (
        x.new_empty(0) if share is None else sum_[4, column : column + len(share)].to(share.dtype, copy=True)
    )
    return dx, sum_[:4].to(weight.dtype), dvalues, dshare


def _ranges(x: torch.Tensor, column: int, values: torch.Tensor | None) -> Iterator[tuple[int, int, bool]]:
    """The ranges of channels that a launch each has, and whether they are mixed; none without an element."""
    ends = [0, x.shape[2]] if values is None else [0, column, column + values.shape[2], x.shape[2]]
    for index, (begin, end) in enumerate(pairwise(ends)):
        if begin < end and x.numel():
            yield begin, end, index == 1


def _grid(
    x: torch.Tensor, begin: int, end: int, blocks: Blocks
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    grid = triton.cdiv(x.shape[1], blocks.tokens), x.shape[0], triton.cdiv(end - begin, blocks.channels)
    return grid, (blocks.tokens, blocks.channels)


def _strides(x: torch.Tensor, values: torch.Tensor | None) -> tuple[int, ...]:
    """Those of x's sequences and tokens, those of values, and the number of its columns."""
    return *x.stride()[:2], *((0, 0, 0) if values is None else (*values.stride()[:2], values.shape[2]))


@_convolve.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, silu_channels: int, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@_gradients.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None,
    column: int, values: torch.Tensor | None, share: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dvalues = x.new_empty(0 if values is None else values.shape)
    dshare = x.new_empty(0) if share is None else share.new_empty(share.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dvalues, dshare


def _setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, ctx.silu_channels, first, ctx.column, values, share = inputs
    ctx.save_for_backward(x, weight, first, values, share)


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, first, values, share = ctx.saved_tensors
    dx, dweight, *dmixed = _gradients(dy, x, weight, ctx.silu_channels, first, ctx.column, values, share)
    return dx, dweight, None, None, None, *((None, None) if values is None else dmixed)


_convolve.register_autograd(_autograd, setup_context=_setup_context)


@triton.jit
def _forward(
    x, weight, first_tokens, values, share, y, stride_b, stride_n, values_b, values_n, V, N, C,
    silu_channels, begin, end, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    SILU: tl.constexpr, PACKED: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * TOKENS
    batch = tl.program_id(1).to(tl.int64)
    c = begin + tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, with_silu = c < end, c < silu_channels
    w0, w1, w2, w3 = _filters(weight + c, C, inside)
    x += batch * stride_b + c
    u, s = values, 0.0
    if MIXED:
        u += batch * values_b + c - begin
        s = tl.load(share + c - begin, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        first_tokens += batch * N
    y += batch * N * C + c
    x0 = _input(x, u, s, first - 3, stride_n, values_n, N, inside, MIXED)
    x1 = _input(x, u, s, first - 2, stride_n, values_n, N, inside, MIXED)
    x2 = _input(x, u, s, first - 1, stride_n, values_n, N, inside, MIXED)
    for t in range(first, tl.minimum(first + TOKENS, N), 4):
        x3 = _input(x, u, s, t, stride_n, values_n, N, inside, MIXED)
        x4 = _input(x, u, s, t + 1, stride_n, values_n, N, inside, MIXED)
        x5 = _input(x, u, s, t + 2, stride_n, values_n, N, inside, MIXED)
        x6 = _input(x, u, s, t + 3, stride_n, values_n, N, inside, MIXED)
        r1, r2, r3 = _three_follow(first_tokens, t - 2, N, PACKED)
        r4, r5, r6 = _three_follow(first_tokens, t + 1, N, PACKED)
        z0 = _weighted_sum(w0, w1, w2, w3, x0, x1, x2, x3, r1, r2, r3)
        z1 = _weighted_sum(w0, w1, w2, w3, x1, x2, x3, x4, r2, r3, r4)
        z2 = _weighted_sum(w0, w1, w2, w3, x2, x3, x4, x5, r3, r4, r5)
        z3 = _weighted_sum(w0, w1, w2, w3, x3, x4, x5, x6, r4, r5, r6)
        if SILU:
            z0 = _silu(z0, with_silu)
            z1 = _silu(z1, with_silu)
            z2 = _silu(z2, with_silu)
            z3 = _silu(z3, with_silu)
        _store(y, t, C, N, inside, z0)
        _store(y, t + 1, C, N, inside, z1)
        _store(y, t + 2, C, N, inside, z2)
        _store(y, t + 3, C, N, inside, z3)
        x0, x1, x2 = x4, x5, x6


@triton.jit
def _backward(
    dy, x, weight, first_tokens, values, share, dx, dvalues, sums, stride_b, stride_n, values_b, values_n, V,
    N, C, silu_channels, begin, end, rows, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    SILU: tl.constexpr, PACKED: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """With dz_t = dy_t silu'(z_t), or dy_t: dx_t = Σ_k w_k dz_{t+3−k}; and the block's part of
    dw_k = Σ_t dz_t x_{t−3+k}, over its own tokens t. Of xi, ri and di, x3, r3 and d0 are token t's.
    With MIXED, x + share·(values − x) takes x's place, and values and share have gradients, too."""
    first = tl.program_id(0) * TOKENS
    batch = tl.program_id(1).to(tl.int64)
    c = begin + tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, with_silu = c < end, c < silu_channels
    w0, w1, w2, w3 = _filters(weight + c, C, inside)
    x += batch * stride_b + c
    u, s = values, 0.0
    if MIXED:
        u += batch * values_b + c - begin
        s = tl.load(share + c - begin, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        first_tokens += batch * N
    dx += batch * N * C + c
    dy += batch * N * C + c
    if MIXED:
        dvalues += batch * N * V + c - begin
    x0 = _input(x, u, s, first - 3, stride_n, values_n, N, inside, MIXED)
    x1 = _input(x, u, s, first - 2, stride_n, values_n, N, inside, MIXED)
    x2 = _input(x, u, s, first - 1, stride_n, values_n, N, inside, MIXED)
    d0 = _token(dy, first, C, N, inside)
    d1 = _token(dy, first + 1, C, N, inside)
    d2 = _token(dy, first + 2, C, N, inside)
    if SILU:
        x3 = _input(x, u, s, first, stride_n, values_n, N, inside, MIXED)
        x4 = _input(x, u, s, first + 1, stride_n, values_n, N, inside, MIXED)
        x5 = _input(x, u, s, first + 2, stride_n, values_n, N, inside, MIXED)
        r1, r2, r3 = _three_follow(first_tokens, first - 2, N, PACKED)
        r4, r5, r6 = _three_follow(first_tokens, first + 1, N, PACKED)
        d0 = _silu_backward(d0, _weighted_sum(w0, w1, w2, w3, x0, x1, x2, x3, r1, r2, r3), with_silu)
        d1 = _silu_backward(d1, _weighted_sum(w0, w1, w2, w3, x1, x2, x3, x4, r2, r3, r4), with_silu)
        d2 = _silu_backward(d2, _weighted_sum(w0, w1, w2, w3, x2, x3, x4, x5, r3, r4, r5), with_silu)
    dw0 = tl.zeros([CHANNELS], tl.float32)
    dw1 = tl.zeros([CHANNELS], tl.float32)
    dw2 = tl.zeros([CHANNELS], tl.float32)
    dw3 = tl.zeros([CHANNELS], tl.float32)
    ds = tl.zeros([CHANNELS], tl.float32)
    for t in range(first, tl.minimum(first + TOKENS, N), 4):
        if not SILU:  # else they were read ahead, for z
            x3 = _input(x, u, s, t, stride_n, values_n, N, inside, MIXED)
            x4 = _input(x, u, s, t + 1, stride_n, values_n, N, inside, MIXED)
            x5 = _input(x, u, s, t + 2, stride_n, values_n, N, inside, MIXED)
        x6 = _input(x, u, s, t + 3, stride_n, values_n, N, inside, MIXED)
        d3 = _token(dy, t + 3, C, N, inside)
        d4 = _token(dy, t + 4, C, N, inside)
        d5 = _token(dy, t + 5, C, N, inside)
        d6 = _token(dy, t + 6, C, N, inside)
        r1, r2, r3 = _three_follow(first_tokens, t - 2, N, PACKED)
        r4, r5, r6 = _three_follow(first_tokens, t + 1, N, PACKED)
        r7, r8, r9 = _three_follow(first_tokens, t + 4, N, PACKED)
        if SILU:
            x7 = _input(x, u, s, t + 4, stride_n, values_n, N, inside, MIXED)
            x8 = _input(x, u, s, t + 5, stride_n, values_n, N, inside, MIXED)
            x9 = _input(x, u, s, t + 6, stride_n, values_n, N, inside, MIXED)
            d3 = _silu_backward(d3, _weighted_sum(w0, w1, w2, w3, x3, x4, x5, x6, r4, r5, r6), with_silu)
            d4 = _silu_backward(d4, _weighted_sum(w0, w1, w2, w3, x4, x5, x6, x7, r5, r6, r7), with_silu)
            d5 = _silu_backward(d5, _weighted_sum(w0, w1, w2, w3, x5, x6, x7, x8, r6, r7, r8), with_silu)
            d6 = _silu_backward(d6, _weighted_sum(w0, w1, w2, w3, x6, x7, x8, x9, r7, r8, r9), with_silu)
        g0 = w3 * d0 + r4 * (w2 * d1 + r5 * (w1 * d2 + r6 * (w0 * d3)))
        g1 = w3 * d1 + r5 * (w2 * d2 + r6 * (w1 * d3 + r7 * (w0 * d4)))
        g2 = w3 * d2 + r6 * (w2 * d3 + r7 * (w1 * d4 + r8 * (w0 * d5)))
        g3 = w3 * d3 + r7 * (w2 * d4 + r8 * (w1 * d5 + r9 * (w0 * d6)))
        if MIXED:
            g0, ds = _unmix(x, u, s, t, stride_n, values_n, V, N, inside, dvalues, g0, ds)
            g1, ds = _unmix(x, u, s, t + 1, stride_n, values_n, V, N, inside, dvalues, g1, ds)
            g2, ds = _unmix(x, u, s, t + 2, stride_n, values_n, V, N, inside, dvalues, g2, ds)
            g3, ds = _unmix(x, u, s, t + 3, stride_n, values_n, V, N, inside, dvalues, g3, ds)
        _store(dx, t, C, N, inside, g0)
        _store(dx, t + 1, C, N, inside, g1)
        _store(dx, t + 2, C, N, inside, g2)
        _store(dx, t + 3, C, N, inside, g3)
        r1, r2 = r1 * r2 * r3, r2 * r3  # now: as far back as t − 3, t − 2
        dw0 += r1 * d0 * x0 + r2 * r4 * d1 * x1 + r3 * r4 * r5 * d2 * x2 + r4 * r5 * r6 * d3 * x3
        dw1 += r2 * d0 * x1 + r3 * r4 * d1 * x2 + r4 * r5 * d2 * x3 + r5 * r6 * d3 * x4
        dw2 += r3 * d0 * x2 + r4 * d1 * x3 + r5 * d2 * x4 + r6 * d3 * x5
        dw3 += d0 * x3 + d1 * x4 + d2 * x5 + d3 * x6
        x0, x1, x2 = x4, x5, x6
        if SILU:
            x3, x4, x5 = x7, x8, x9
        d0, d1, d2 = d4, d5, d6
    block = batch * tl.num_programs(0) + tl.program_id(0)
    sums += block * rows * C + c
    tl.store(sums, dw0, mask=inside)
    tl.store(sums + C, dw1, mask=inside)
    tl.store(sums + 2 * C, dw2, mask=inside)
    tl.store(sums + 3 * C, dw3, mask=inside)
    if MIXED:
        tl.store(sums + 4 * C, ds, mask=inside)


@triton.jit
def _filters(weight, C, inside):
    """The four taps of a block's channels in fp32."""
    w0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + C, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + 2 * C, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + 3 * C, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _input(x, u, s, t, stride, values_stride, N, inside, MIXED: tl.constexpr):
    """Token t in fp32, mixed; zeros outside of the sequence."""
    v = _token(x, t, stride, N, inside)
    return v + s * (_token(u, t, values_stride, N, inside) - v) if MIXED else v


@triton.jit
def _unmix(x, u, s, t, stride, values_stride, V, N, inside, dvalues, dmixed, ds):
    """Stores the gradient of token t's values; returns that of its x, given that of `_input`, and the sum of
    the share's gradient."""
    ds += dmixed * (_token(u, t, values_stride, N, inside) - _token(x, t, stride, N, inside))
    _store(dvalues, t, V, N, inside, s * dmixed)
    return dmixed - s * dmixed, ds


@triton.jit
def _token(rows, t, stride, N, inside):
    """Token t in fp32; zeros outside of the sequence."""
    at = tl.cast(t, tl.int64) * stride
    return tl.load(rows + at, mask=inside & (t >= 0) & (t < N), other=0.0).to(tl.float32)


@triton.jit
def _three_follow(first_tokens, t, N, PACKED: tl.constexpr):
    """`_follows` of tokens t to t + 2; 1.0 where sequences are not packed."""
    if PACKED:
        return (
            _follows(first_tokens, t, N),
            _follows(first_tokens, t + 1, N),
            _follows(first_tokens, t + 2, N),
        )
    else:
        return 1.0, 1.0, 1.0


@triton.jit
def _follows(first_tokens, t, N):
    """1.0 if token t follows another of its sequence, 0.0 if it is the first."""
    inside = (t > 0) & (t < N)
    return 1.0 - tl.load(first_tokens + t, mask=inside, other=True).to(tl.float32)


@triton.jit
def _weighted_sum(w0, w1, w2, w3, x0, x1, x2, x3, r1, r2, r3):
    """The convolution at x3's token; ri is `_follows` of xi's token."""
    return w3 * x3 + r3 * (w2 * x2 + r2 * (w1 * x1 + r1 * (w0 * x0)))


@triton.jit
def _silu(z, with_silu):
    return tl.where(with_silu, z * tl.sigmoid(z), z)


@triton.jit
def _silu_backward(dy, z, with_silu):
    """The gradient of z, given that of `_silu`."""
    s = tl.sigmoid(z)
    return tl.where(with_silu, dy * s * (1.0 + z * (1.0 - s)), dy)


@triton.jit
def _store(rows, t, stride, N, inside, value):
    tl.store(rows + tl.cast(t, tl.int64) * stride, value, mask=inside & (t < N))
