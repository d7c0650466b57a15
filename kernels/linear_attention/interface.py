"""The public operators of linear attention: their arguments, checked, become a `Call` of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import arguments, recurrent, reference
from lingpt.kernels.linear_attention.call import Call, logarithm_of_gate, split_projection
from lingpt.kernels.linear_attention.registration import attend
from lingpt.kernels.linear_attention.state import LinearAttentionState
from lingpt.kernels.precision import state_dtype

_DIFFERENTIATED = {"reference": reference, "recurrent": recurrent}  # by autograd; others have a backward


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., normalize: bool = ..., normalize_qk: bool = ..., causal: bool = ...,
    initial_state: LinearAttentionState | None = ...,
    return_state: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., normalize: bool = ..., normalize_qk: bool = ..., causal: bool = ...,
    initial_state: LinearAttentionState | None = ...,
    return_state: Literal[True], backend: str = ...,
) -> tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., normalize: bool = ..., normalize_qk: bool = ..., causal: bool = ...,
    initial_state: LinearAttentionState | None = ...,
    return_state: bool, backend: str = ...,
) -> Tensor | tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: float | Tensor = 1.0,
    *,
    a: float | Tensor = 1.0,
    log_decay: Tensor | Sequence[float] | None = None,
    cu_seqlens: Tensor | None = None,
    normalize: bool = True,
    normalize_qk: bool = True,
    causal: bool = True,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention with the kernel f(x) = 1 + b·x and a normaliser, or f(x) = a + b·x without one.

    o_i = Σ_j w_ij v_j / Σ_j w_ij over j ≤ i, w_ij = (1 + b q̂_i·k̂_j) γ_{j+1} ⋯ γ_i, with unit rows q̂ and
    k̂.

    No weight is negative for |b| ≤ 1, so o is a convex combination of the values. To keep it one in floating
    point, also for q = −k, the effective coefficient is b·(1 − 2⁻⁶), and norms are √(‖x‖² + 10⁻¹²): a row of
    zeros gives weight 1 to all tokens. State and normaliser are summed in fp32.

    Without the normaliser o_i = Σ_j w_ij v_j, w_ij = (a + b q̂_i·k̂_j) γ_{j+1} ⋯ γ_i, with a and b unchanged:
    for layers that normalise each head's output afterwards, which removes any factor per token. With a = 0, b
    = 1 it is RetNet's retention, lightning attention, simple GLA and Mamba-2's SSD.

    Args:
        q, k, v: [B, N, H, D] of one dtype (bf16, fp16, fp32, float64) and device; strided views are fine.
        b: a number, |b| ≤ 1, or a tensor [H], which gets a gradient and whose values are not checked.
        a: only with `normalize=False`: a number or a tensor [H]; a and b may then have any size and sign.
            With the normaliser only b/a matters, and a is 1.
        log_decay: ln γ ≤ 0 (not checked in a tensor: above 0 the past grows, and may overflow); None is
            γ = 1. Needs `causal`. Its shape is one of:
            [H]        a finite constant per head, without a gradient (log_decay.expand(B, N, H) has one);
            [B, N, H]  a decay per token, with a gradient: everything before token t decays by γ_t. −inf is a
                       reset: finite values before that token have weight exactly 0. A NaN or infinity there
                       still spreads, as 0 · NaN is NaN: padding of packed sequences must be finite.
        cu_seqlens: int32 or int64 [sequences + 1], from 0 to N, not decreasing (not checked), as in
            FlashAttention: q, k and v [1, N, H, D] hold sequences of different lengths, one after the other.
            Outputs and gradients are those of separate calls: each sequence begins with a reset. Not together
            with initial_state or return_state.
        normalize: divide by the sum of the weights. False: z and n of a state are zeros and are not read.
        normalize_qk: False uses q, k and b unchanged. A normaliser may then be near zero or change sign, with
            meaningless o: the caller must prevent that.
        causal: False sums over all j.
        initial_state: the state of an earlier part of the sequence; fp32 (float64 for float64 inputs). It
            gets gradients, as q, k and v do.
        return_state: return the state after the last token as well.
        backend: one of
            "reference"  the definition, quadratic; also for second derivatives, forward mode and torch.func;
            "chunkwise"  plain PyTorch on any device, with an analytical backward;
            "recurrent"  token by token, for decoding;
            "cuda"       bf16 and fp16 on tensor cores;
            "auto"       the CUDA kernel if it can run, else chunkwise, with one warning if the CUDA kernel
                         would have been expected; recurrent for one token with a state on a CPU.

    Returns:
        o [B, N, H, D] in q's dtype; with `return_state`, (o, state).

    Raises:
        UserError: for wrong shapes, dtypes or devices, or numbers out of range, before any work.

    Rows of q and k must have a norm below 10¹⁹ (fp32's ‖x‖² ends there). A NaN or infinity in v may spread to
    earlier tokens of its head, one in q or k to later ones.

    Source: "Linear Attention Optimized GPU Kernel Implementation", eq. 5 and 22 with a = 1; RetNet's decay.
    """
    arguments.check_tensors(q, k, v)
    options = arguments.check_options(
        q, a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens, causal=causal, normalize=normalize,
        normalize_qk=normalize_qk, initial_state=initial_state, return_state=return_state, backend=backend,
    )  # fmt: skip
    return _run(Call(q=q, k=k, v=v, **options))


@overload
def linear_attention_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., gate_bias: Tensor | None = ..., head_size: int | None = ...,
    normalize: bool = ..., normalize_qk: bool = ...,
    initial_state: LinearAttentionState | None = ..., return_state: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., gate_bias: Tensor | None = ..., head_size: int | None = ...,
    normalize: bool = ..., normalize_qk: bool = ...,
    initial_state: LinearAttentionState | None = ..., return_state: Literal[True], backend: str = ...,
) -> tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
@overload
def linear_attention_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, b: float | Tensor = ..., *,
    a: float | Tensor = ..., log_decay: Tensor | Sequence[float] | None = ...,
    cu_seqlens: Tensor | None = ..., gate_bias: Tensor | None = ..., head_size: int | None = ...,
    normalize: bool = ..., normalize_qk: bool = ...,
    initial_state: LinearAttentionState | None = ..., return_state: bool, backend: str = ...,
) -> Tensor | tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
def linear_attention_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    b: float | Tensor = 1.0,
    *,
    a: float | Tensor = 1.0,
    log_decay: Tensor | Sequence[float] | None = None,
    cu_seqlens: Tensor | None = None,
    gate_bias: Tensor | None = None,
    head_size: int | None = None,
    normalize: bool = True,
    normalize_qk: bool = True,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Causal `linear_attention` of a fused projection, with RoPE applied inside; backward writes one buffer.

    Args:
        qkv: [B, N, 3, H, D]: q, k and v of each token.
        cos, sin: [N, R], R even and at most D: the leading R dimensions of q and k are rotated as LitGPT does
            (`litgpt.model.build_rope_cache`). When decoding, slice them at the first token's position.
            Positions of packed sequences need not restart at 0: only distances within a sequence matter. They
            are constants (no gradient), except in the backends "reference" and "recurrent".
        gate_bias: [H]. If given, the projection also holds the gates of each token: qkv is [B, N, 3·H·D + P],
            the first H of the P numbers after q, k and v are z, and log_decay is logsigmoid(z + gate_bias),
            in fp32 (float64); the argument `log_decay` must be None. The numbers after z are not read, and
            their gradient is zero: pad rows to a multiple of 16 bytes to let the CUDA kernel read them
            without a copy.
        head_size: D, required with gate_bias (the shape of such a row does not give it), else None.
        The others are those of `linear_attention`.

    Returns:
        o [B, N, H, D] in qkv's dtype; with `return_state`, (o, state).

    Raises:
        UserError: for wrong shapes, dtypes or devices, or numbers out of range, before any work.
    """
    projected = None
    if gate_bias is not None:
        projected, qkv = qkv, arguments.check_projected(qkv, gate_bias, head_size, log_decay)
        gate_bias = gate_bias.to(state_dtype(qkv.dtype)).contiguous()
        if cu_seqlens is not None:  # the resets go into log_decay
            gate = split_projection(projected, *qkv.shape[-2:])[1]
            log_decay = logarithm_of_gate(gate, gate_bias)
            projected = gate_bias = head_size = None
    elif head_size is not None:
        raise UserError("head_size is for a projection that has gates: give their gate_bias, too")
    arguments.check_packed(qkv, cos, sin)
    options = arguments.check_options(
        qkv, a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens, causal=True, normalize=normalize,
        normalize_qk=normalize_qk, initial_state=initial_state, return_state=return_state, backend=backend,
    )  # fmt: skip
    needs_gradient = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if needs_gradient and options["backend"] not in _DIFFERENTIATED:
        raise UserError("cos and sin get no gradient here: detach them, or take backend='reference'")
    tensors = {"qkv": qkv} if projected is None else {"projected": projected, "gate_bias": gate_bias}
    return _run(Call(**tensors, cos=cos, sin=sin, head_size=head_size or 0, **options))


def _run(call: Call) -> Tensor | tuple[Tensor, LinearAttentionState]:
    if call.backend in _DIFFERENTIATED:
        o, state = _DIFFERENTIATED[call.backend].forward(call.unpacked())
        return (o, state) if call.return_state else o
    o, _, *parts = attend(call)
    return (o, LinearAttentionState(*parts)) if call.return_state else o
