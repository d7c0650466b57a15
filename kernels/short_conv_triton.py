"""A causal depthwise convolution of four taps along the sequence, and a SiLU behind it: Triton, one kernel
each for both passes.

A block processes a range of tokens of a few hundred channels, with the last three tokens in registers: each
pass reads and writes every tensor once, except for three tokens per range. The compiled PyTorch form reads x
and the gradient once more for the filter's gradient.
"""

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
    x_BNC: torch.Tensor, weight_4C: torch.Tensor, silu_channels: int = 0, first_BN: torch.Tensor | None = None
) -> torch.Tensor:
    """z_t = Σ_k w_k x_{t−3+k}, zeros before the first token, summed in fp32, and of the first `silu_channels`
    channels silu(z_t); differentiable once.

    x_BNC: [B, N, C] on CUDA, one of DTYPES, channels contiguous. weight_4C: [4, C], floating point; the last
    row is the weight of the token itself. first_BN: bool, the first tokens of packed sequences. Returns
    [B, N, C] in x's dtype, contiguous.
    """
    refuse_forward_mode("the convolution has no forward mode", x_BNC, weight_4C)
    return _convolve(x_BNC, weight_4C, silu_channels, first_BN)


@torch.library.custom_op("lingpt::short_conv_fwd", mutates_args=(), device_types="cuda")
def _convolve(
    x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, sizes = _grid(x, FORWARD)
    if y.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current one
            _forward[grid](
                x, weight.contiguous(), first, y, *x.stride()[:2], *x.shape[1:], silu_channels, *sizes,
                SILU=silu_channels > 0, PACKED=first is not None, num_warps=FORWARD.warps,
            )  # fmt: skip
    return y


@torch.library.custom_op("lingpt::short_conv_bwd", mutates_args=(), device_types="cuda")
def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, dx = dy.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, sizes = _grid(x, BACKWARD)
    parts = torch.empty(grid[0] * grid[1], *weight.shape, dtype=torch.float32, device=x.device)
    if dx.numel():
        strides = *x.stride()[:2], *x.shape[1:]
        with torch.cuda.device_of(x):
            _backward[grid](
                dy, x, weight.contiguous(), first, dx, parts, *strides, silu_channels, *sizes,
                SILU=silu_channels > 0, PACKED=first is not None, num_warps=BACKWARD.warps,
            )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)  # in a fixed order: deterministic


def _grid(x: torch.Tensor, blocks: Blocks) -> tuple[tuple[int, int, int], tuple[int, int]]:
    B, N, C = x.shape
    grid = triton.cdiv(N, blocks.tokens), B, triton.cdiv(C, blocks.channels)
    return grid, (blocks.tokens, blocks.channels)


@_convolve.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape)


@_gradients.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, silu_channels: int, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, ctx.silu_channels, first = inputs
    ctx.save_for_backward(x, weight, first)


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    x, weight, first = ctx.saved_tensors
    return *_gradients(dy, x, weight, ctx.silu_channels, first), None, None


_convolve.register_autograd(_autograd, setup_context=_setup_context)


@triton.jit
def _forward(
    x, weight, first_tokens, y, stride_b, stride_n, N, C, silu_channels,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * TOKENS
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, with_silu = c < C, c < silu_channels
    w0, w1, w2, w3 = _filters(weight + c, C, inside)
    x += batch * stride_b + c
    if PACKED:
        first_tokens += batch * N
    y += batch * N * C + c
    x0 = _token(x, first - 3, stride_n, N, inside)
    x1 = _token(x, first - 2, stride_n, N, inside)
    x2 = _token(x, first - 1, stride_n, N, inside)
    for t in range(first, tl.minimum(first + TOKENS, N), 4):
        x3 = _token(x, t, stride_n, N, inside)
        x4 = _token(x, t + 1, stride_n, N, inside)
        x5 = _token(x, t + 2, stride_n, N, inside)
        x6 = _token(x, t + 3, stride_n, N, inside)
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
    dy, x, weight, first_tokens, dx, parts, stride_b, stride_n, N, C, silu_channels,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """With dz_t = dy_t silu'(z_t), or dy_t: dx_t = Σ_k w_k dz_{t+3−k}; and the block's part of
    dw_k = Σ_t dz_t x_{t−3+k}, over its own tokens t. Of xi, ri and di, x3, r3 and d0 are token t's."""
    first = tl.program_id(0) * TOKENS
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, with_silu = c < C, c < silu_channels
    w0, w1, w2, w3 = _filters(weight + c, C, inside)
    x += batch * stride_b + c
    if PACKED:
        first_tokens += batch * N
    dx += batch * N * C + c
    dy += batch * N * C + c
    x0 = _token(x, first - 3, stride_n, N, inside)
    x1 = _token(x, first - 2, stride_n, N, inside)
    x2 = _token(x, first - 1, stride_n, N, inside)
    d0 = _token(dy, first, C, N, inside)
    d1 = _token(dy, first + 1, C, N, inside)
    d2 = _token(dy, first + 2, C, N, inside)
    if SILU:
        x3 = _token(x, first, stride_n, N, inside)
        x4 = _token(x, first + 1, stride_n, N, inside)
        x5 = _token(x, first + 2, stride_n, N, inside)
        r1, r2, r3 = _three_follow(first_tokens, first - 2, N, PACKED)
        r4, r5, r6 = _three_follow(first_tokens, first + 1, N, PACKED)
        d0 = _silu_backward(d0, _weighted_sum(w0, w1, w2, w3, x0, x1, x2, x3, r1, r2, r3), with_silu)
        d1 = _silu_backward(d1, _weighted_sum(w0, w1, w2, w3, x1, x2, x3, x4, r2, r3, r4), with_silu)
        d2 = _silu_backward(d2, _weighted_sum(w0, w1, w2, w3, x2, x3, x4, x5, r3, r4, r5), with_silu)
    dw0 = tl.zeros([CHANNELS], tl.float32)
    dw1 = tl.zeros([CHANNELS], tl.float32)
    dw2 = tl.zeros([CHANNELS], tl.float32)
    dw3 = tl.zeros([CHANNELS], tl.float32)
    for t in range(first, tl.minimum(first + TOKENS, N), 4):
        if not SILU:  # else they were read ahead, for z
            x3 = _token(x, t, stride_n, N, inside)
            x4 = _token(x, t + 1, stride_n, N, inside)
            x5 = _token(x, t + 2, stride_n, N, inside)
        x6 = _token(x, t + 3, stride_n, N, inside)
        d3 = _token(dy, t + 3, C, N, inside)
        d4 = _token(dy, t + 4, C, N, inside)
        d5 = _token(dy, t + 5, C, N, inside)
        d6 = _token(dy, t + 6, C, N, inside)
        r1, r2, r3 = _three_follow(first_tokens, t - 2, N, PACKED)
        r4, r5, r6 = _three_follow(first_tokens, t + 1, N, PACKED)
        r7, r8, r9 = _three_follow(first_tokens, t + 4, N, PACKED)
        if SILU:
            x7 = _token(x, t + 4, stride_n, N, inside)
            x8 = _token(x, t + 5, stride_n, N, inside)
            x9 = _token(x, t + 6, stride_n, N, inside)
            d3 = _silu_backward(d3, _weighted_sum(w0, w1, w2, w3, x3, x4, x5, x6, r4, r5, r6), with_silu)
            d4 = _silu_backward(d4, _weighted_sum(w0, w1, w2, w3, x4, x5, x6, x7, r5, r6, r7), with_silu)
            d5 = _silu_backward(d5, _weighted_sum(w0, w1, w2, w3, x5, x6, x7, x8, r6, r7, r8), with_silu)
            d6 = _silu_backward(d6, _weighted_sum(w0, w1, w2, w3, x6, x7, x8, x9, r7, r8, r9), with_silu)
        _store(dx, t, C, N, inside, w3 * d0 + r4 * (w2 * d1 + r5 * (w1 * d2 + r6 * (w0 * d3))))
        _store(dx, t + 1, C, N, inside, w3 * d1 + r5 * (w2 * d2 + r6 * (w1 * d3 + r7 * (w0 * d4))))
        _store(dx, t + 2, C, N, inside, w3 * d2 + r6 * (w2 * d3 + r7 * (w1 * d4 + r8 * (w0 * d5))))
        _store(dx, t + 3, C, N, inside, w3 * d3 + r7 * (w2 * d4 + r8 * (w1 * d5 + r9 * (w0 * d6))))
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
    parts += block * 4 * C + c
    tl.store(parts, dw0, mask=inside)
    tl.store(parts + C, dw1, mask=inside)
    tl.store(parts + 2 * C, dw2, mask=inside)
    tl.store(parts + 3 * C, dw3, mask=inside)


@triton.jit
def _filters(weight, C, inside):
    """The four taps of a block's channels in fp32."""
    w0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + C, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + 2 * C, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + 3 * C, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


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
