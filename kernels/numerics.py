"""Numerics of the operators: constants of the definition, dtypes of sums, chunks of tokens, rotations.

Used by the PyTorch forms; NORM_EPS and LOG_ZERO are compiled into the CUDA kernels, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The norm of x is sqrt(‖x‖² + NORM_EPS): a row of zeros stays zeros, so it gives weight 1 to everything.
NORM_EPS = 1e-12

# With unit q and k a weight 1 + b·q̂·k̂ may be as small as 1 − |b|: 0 for q = −k, b = 1, where rounding alone
# would decide the normaliser's sign. So the effective coefficient is b·B_SHRINK, which keeps every weight at
# 2⁻⁶ or more for |b| ≤ 1, in every backend, forward and backward (`Call.shrink_b`).
B_SHRINK = 1.0 - 2.0**-6

# The log decay that counts as −inf (its exp is 0). Smaller ones, including −inf (a reset), are replaced by
# it: −inf − (−inf) is NaN, and the smaller the cumulative sums of a chunk, the more exact their differences.
LOG_ZERO = {torch.float32: -104.0, torch.float64: -1000.0}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, and of computation in the PyTorch forms: fp32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """Computes fp32 products in fp32: no autocast, no TF32 (CUDA), no bf16 (oneDNN), whatever the caller
    allows.

    These products contain the sums over a long sequence, and training runs often allow TF32 for speed.
    """
    if device.type == "meta":  # computes nothing, and has no autocast
        yield
        return
    with torch.autocast(device.type, enabled=False):
        if torch.compiler.is_compiling():  # a graph cannot change the backends' precision
            yield
            return
        with matmul_precision(device.type, "ieee"):
            yield


@contextmanager
def matmul_precision(device_type: str, precision: str) -> Iterator[None]:
    """Sets PyTorch's precision of fp32 products, "ieee" or "tf32", and back."""
    backend: Any = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    matmul = backend.matmul
    before = matmul.fp32_precision
    if before != precision:
        matmul.fp32_precision = precision
    try:
        yield
    finally:
        if before != precision:
            matmul.fp32_precision = before


def allows_tf32() -> bool:
    """Whether PyTorch's own products may be in TF32 on CUDA devices. To read `allow_tf32`, the older switch,
    raises if the newer one was set, too; this one has what either was set to last."""
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def per_head(x: float | Tensor, ndim: int, dim: int, dtype: torch.dtype) -> float | Tensor:
    """[H] reshaped to broadcast along dimension `dim` of an `ndim`-dimensional tensor; a number unchanged."""
    if not isinstance(x, Tensor):
        return x
    shape = [1] * ndim
    shape[dim] = -1
    return x.to(dtype).view(shape)


def first_tokens(cu_seqlens: Tensor, B: int, N: int) -> Tensor:
    """Where packed sequences begin, bool [B, N]; cu_seqlens are their borders in the B·N tokens."""
    first = torch.zeros(B * N + 1, dtype=torch.bool, device=cu_seqlens.device)  # empty ones begin at the end
    return first.index_fill(0, cu_seqlens.long(), True)[:-1].view(B, N)


def reciprocal_norm(x: Tensor) -> Tensor:
    """1/√(‖x‖² + NORM_EPS) over the last dimension: [..., D] → [..., 1], computed in x's dtype.

    Every backend computes it in fp32 (float64): in fp16 NORM_EPS would be 0.
    """
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + NORM_EPS).rsqrt()


def reverse_running_sum(x: Tensor, dim: int) -> Tensor:
    """Σ_{j≥i} x_j along `dim`, with x's shape and floating-point dtype, in which it is summed."""
    return x.flip(dim).cumsum(dim).flip(dim)


def decay_gradient(dG: Tensor, at_end: Tensor | None, log_decay: Tensor) -> Tensor:
    """The gradient of a log decay [B, N, ·], Σ_{j≥t} dL/dG_j; at_end [B, ·]: the final state's part, None for
    zeros. Both may have more channels than the decay, which is one for all of them.

    In float64, as pairs of tokens that are both ≥ t cancel in it.
    """
    B, _, *rest = log_decay.shape
    dG = dG.double().sum_to_size(log_decay.shape)
    # Along the last dimension: CUDA's running sums take ten times as long along another.
    sums = reverse_running_sum(dG.movedim(1, -1), -1).movedim(-1, 1)
    if at_end is not None:
        sums = sums + at_end.double().sum_to_size(B, *rest).unsqueeze(1)
    return sums.to(log_decay.dtype, memory_format=torch.contiguous_format)


def pad_to_chunks(x: Tensor, C: int) -> Tensor:
    """[B, N, H, D] → [B, H, chunks, C, D], a copy; the last chunk is padded with zeros."""
    B, N, H, D = x.shape
    chunks = -(-N // C)
    padded = x.new_zeros(B, H, chunks * C, D)
    padded[:, :, :N] = x.transpose(1, 2)
    return padded.unflatten(2, (chunks, C))


def to_tokens(x: Tensor, N: int) -> Tensor:
    """[B, H, chunks, C, D] → [B, N, H, D], a view without the padding of the last chunk."""
    return x.flatten(2, 3)[:, :, :N].transpose(1, 2)


# Rotary position embedding in LitGPT's half-split convention, and its transpose for the backward pass.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading R of x's dimensions: [x₁, x₂] → [x₁, x₂]·cos + [−x₂, x₁]·sin.

    Args:
        x: [B, N, H, D].
        cos, sin: [N, R], R even and at most D, as from `litgpt.model.build_rope_cache`; cast to x's dtype.

    Returns [B, N, H, D] in x's dtype.
    """
    return _turn(x, cos, sin, backward=False)


def rotate_backward(dx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of x, given that of `rotate(x, cos, sin)`: the transposed map.

    dx and the result: [B, N, H, D], of one dtype; cos, sin: [N, R].
    """
    return _turn(dx, cos, sin, backward=True)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    R = cos.shape[-1]
    cos, sin = (t.to(x.dtype).unsqueeze(1) for t in (cos, sin))  # [N, 1, R]: the same for every head
    first, second = x[..., : R // 2], x[..., R // 2 : R]
    cos1, cos2 = cos[..., : R // 2], cos[..., R // 2 :]
    sin1, sin2 = sin[..., : R // 2], sin[..., R // 2 :]
    if backward:
        turned = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        turned = first * cos1 - second * sin1, second * cos2 + first * sin2
    return torch.cat((*turned, x[..., R:]), dim=-1)
