"""The public operators of linear attention: their arguments, checked here, become a `Call` of a backend.

Only shapes, dtypes and Python numbers are checked. A tensor's values are never read: that would synchronise
with the GPU and break a graph. All errors are UserErrors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.common.errors import UserError, unknown
from lingpt.kernels.checks import NUMBERS, check_are_tensors, check_cu_seqlens, check_flags, shown
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.linear_attention import recurrent, reference
from lingpt.kernels.linear_attention.call import (
    Call,
    LinearAttentionState,
    split_projection,
    state_shapes,
)
from lingpt.kernels.linear_attention.operator import attend, attend_in_pieces
from lingpt.kernels.numerics import per_head, reciprocal_norm, state_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BACKENDS = ("auto", "reference", "chunkwise", "recurrent", "cuda")
_DIFFERENTIATED = {"reference": reference, "recurrent": recurrent}  # by autograd; others have a backward
NEEDS_CAUSAL = "log_decay needs causal=True: a decay runs from the past to the present"


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
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor:
    """Linear attention with the kernel f(x) = 1 + b·x and a normaliser, or f(x) = a + b·x without one.

    o_i = Σ_j w_ij v_j / Σ_j w_ij over j ≤ i, w_ij = (1 + b q̂_i·k̂_j) γ_{j+1} ⋯ γ_i, with unit rows q̂ and
    k̂.

    No weight is negative for |b| ≤ 1, so o is a convex combination of the values. To keep it one in floating
    point, also for q = −k, the effective coefficient is b·(1 − 2⁻⁶), and norms are √(‖x‖² + 10⁻¹²): a row of
    zeros gives weight 1 to all tokens. State and normaliser are summed in fp32.

    Without the normaliser o_i = Σ_j w_ij v_j, w_ij = (a + b q̂_i·k̂_j) γ_{j+1} ⋯ γ_i, with a and b unchanged:
    for layers that normalise each head's output afterwards, which removes any factor per token. With a = 0, b
    = 1 it is RetNet's retention, lightning attention, simple GLA and Mamba-2's SSD.

    With a = 0 and the normaliser o_i = Σ_j w_ij v_j / Σ_j w_ij, w_ij = q̂_i·k̂_j γ_{j+1} ⋯ γ_i: for features
    that are positive, as 1 + elu; the caller sees to that. b cancels.

    Args:
        q, k, v: [B, N, H, D] of one dtype (bf16, fp16, fp32, float64) and device; strided views are fine.
        b: a number, |b| ≤ 1, or a tensor [H], which gets a gradient and whose values are not checked.
        a: with `normalize=False` a number or a tensor [H]; a and b may then have any size and sign. With the
            normaliser only b/a matters, and a is 1, or 0.
        log_decay: ln γ ≤ 0 (not checked in a tensor: above 0 the past grows, and may overflow); None is
            γ = 1. Needs `causal`. Its shape is one of:
            [H]        a finite constant per head, without a gradient (log_decay.expand(B, N, H) has one);
            [B, N, H]  a decay per token, with a gradient: everything before token t decays by γ_t. −inf is a
                       reset: finite values before that token have weight exactly 0. A NaN or infinity there
                       still spreads, as 0 · NaN is NaN: padding of packed sequences must be finite.
            [B, N, H, D]  likewise for each channel of k, with a = 0 alone.
            With [B, N, H, D], or a = 0 under the normaliser, it is the call of
            `unified_linear_attention(b·q̂, k̂, v, left=log_decay)`, with its backends; the normaliser is a
            column of ones in v, and fp16, which large sums exceed, is computed in fp32. Of a state S is read,
            and z under the normaliser; the rest is zeros.
        cu_seqlens: int32 or int64 [sequences + 1], from 0 to B·N, not decreasing (not checked), as in
            FlashAttention: the B·N tokens, row after row, are sequences of different lengths, one after the
            other; each row begins with one. Outputs and gradients are those of separate calls: each sequence
            begins with a reset. Repeated numbers are empty sequences. States are one a row: the initial one
            goes on with the row's first sequence if no border is before its first token.
        normalize: divide by the sum of the weights. False: z and n of a state are zeros and are not read.
        normalize_qk: False uses q, k and b unchanged. A normaliser may then be near zero or change sign, with
            meaningless o: the caller must prevent that.
        causal: False sums over all j.
        initial_state: the state of an earlier part of the sequence; fp32 (float64 for float64 inputs). It
            gets gradients, as q, k and v do.
        context: q, k and v are this process's piece of sequences whose pieces are on several processes, all
            of one length (kernels/context_parallel.py); cu_seqlens are the borders in this piece, which
            begins a sequence only if it is the first or 0 is one of them.
        backend: one of
            "reference"  the definition, quadratic; also for second derivatives, forward mode and torch.func;
            "chunkwise"  plain PyTorch on any device, with an analytical backward;
            "recurrent"  token by token, for decoding;
            "cuda"       kernels, causal: on tensor cores bf16 with D ≤ 256 and fp16 with D ≤ 128 (fastest if
                         64 or 128); else in fp32, all but float64 with D ≤ 288 (padded to a multiple of
                         8), with one warning for 16-bit inputs; products of fp32 inputs are as exact as
                         fp32, or TF32 where `torch.set_float32_matmul_precision` or
                         `torch.backends.cuda.matmul` allows it;
            "auto"       cuda if it can run, else chunkwise, with one warning unless it is for float64;
                         recurrent for one token with a state on a CPU.

    Returns:
        o [B, N, H, D] in q's dtype. `linear_attention_with_state` also returns the final state.

    Raises:
        UserError: for wrong shapes, dtypes or devices, or numbers out of range, before any work.

    Rows of q and k must have a norm below 10¹⁹ (fp32's ‖x‖² ends there). A NaN or infinity in v may spread to
    earlier tokens of its head, one in q or k to later ones.

    Source: "Linear Attention Optimized GPU Kernel Implementation", eq. 5 and 22 with a = 1; RetNet's decay.
    """
    options: dict[str, Any] = dict(
        a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens, causal=causal, normalize=normalize,
        normalize_qk=normalize_qk, initial_state=initial_state, backend=backend,
    )  # fmt: skip
    if _is_by_channel(log_decay) or _has_zero_constant(a, normalize):
        return _unified(q, k, v, context, **options)[0]
    return _run(_call(q, k, v, return_state=False, **options), context)[0]


def linear_attention_with_state(
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
    backend: str = "auto",
) -> tuple[Tensor, LinearAttentionState]:
    """`linear_attention` and the state after the last token: (o, state).

    Given as `initial_state` of the next call, the state continues the sequence: for decoding, or for long
    sequences in parts. With cu_seqlens there is one a row: that of the row's last sequence.
    """
    options: dict[str, Any] = dict(
        a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens, causal=causal, normalize=normalize,
        normalize_qk=normalize_qk, initial_state=initial_state, backend=backend,
    )  # fmt: skip
    if _is_by_channel(log_decay) or _has_zero_constant(a, normalize):
        return _unified(q, k, v, None, **options)
    return _run(_call(q, k, v, return_state=True, **options))


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
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor:
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
        o [B, N, H, D] in qkv's dtype. `linear_attention_qkv_with_state` also returns the state.

    Raises:
        UserError: for wrong shapes, dtypes or devices, or numbers out of range, before any work.
    """
    return _run(_packed_call(
        qkv, cos, sin, gate_bias, head_size, a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens,
        normalize=normalize, normalize_qk=normalize_qk, initial_state=initial_state, return_state=False,
        backend=backend,
    ), context)[0]  # fmt: skip


def linear_attention_qkv_with_state(
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
    backend: str = "auto",
) -> tuple[Tensor, LinearAttentionState]:
    """`linear_attention_qkv` and the state after the last token: (o, state)."""
    return _run(_packed_call(
        qkv, cos, sin, gate_bias, head_size, a=a, b=b, log_decay=log_decay, cu_seqlens=cu_seqlens,
        normalize=normalize, normalize_qk=normalize_qk, initial_state=initial_state, return_state=True,
        backend=backend,
    ))  # fmt: skip


def _run(call: Call, context: Context | None = None) -> tuple[Tensor, Any]:
    """o and the final state, whose parts mean nothing if the call does not ask for it."""
    if context is not None:
        if call.backend in _DIFFERENTIATED or call.initial_state is not None or not call.causal:
            raise UserError("context needs causal=True, no initial_state, and backend 'chunkwise' or 'cuda'")
        return attend_in_pieces(call, context), None
    if call.backend in _DIFFERENTIATED:
        return _DIFFERENTIATED[call.backend].forward(call.unpacked())
    o, _, *parts = attend(call)
    return o, LinearAttentionState(*parts)


def _is_by_channel(log_decay: object) -> bool:
    return isinstance(log_decay, Tensor) and log_decay.ndim == 4


def _has_zero_constant(a: object, normalize: object) -> bool:
    """Whether a is 0 under the normaliser: the kernels divide by a."""
    return normalize is True and isinstance(a, NUMBERS) and a == 0


def _unified(
    q: Tensor, k: Tensor, v: Tensor, context: Context | None, *, log_decay: Any, **options: Any
) -> tuple[Tensor, LinearAttentionState]:
    """o and the final state of the call of `unified_linear_attention` that a decay of each channel is, or
    a = 0 under the normaliser."""
    # Imported here, as its operators take longer to register than all else that `linear_attention` needs.
    from lingpt.kernels.unified_linear_attention import unified_linear_attention_with_state

    _check_qkv(q, k, v)
    log_decay = _unified_decay(q, context, log_decay, **options)
    normalize, state = options["normalize"], options["initial_state"]
    (B, _, H, D), dtype = q.shape, state_dtype(q.dtype)
    if options["normalize_qk"]:
        q, k = (x * reciprocal_norm(x) for x in (q.to(dtype), k.to(dtype)))
    b = options["b"]
    q = per_head(b if isinstance(b, Tensor) else float(b), 4, 2, dtype) * q
    S = None if state is None else state.S
    if normalize:  # the sum of the weights is that of a column of ones
        v = F.pad(v, (0, 1), value=1.0)
        S = None if state is None else torch.cat((state.S, state.z.unsqueeze(-1)), dim=-1)
    inner = dtype if normalize and v.dtype == torch.float16 else v.dtype  # sums may exceed fp16's 65,504
    o, S = unified_linear_attention_with_state(
        q.to(inner), k.to(inner), v.to(inner), log_decay, initial_state=S,
        cu_seqlens=options["cu_seqlens"], backend=options["backend"],
    )  # fmt: skip
    after = LinearAttentionState.zeros(B, H, D, device=q.device, dtype=dtype)
    if not normalize:
        return o, after._replace(S=S)
    return (o[..., :D] / o[..., D:]).to(v.dtype), after._replace(S=S[..., :D], z=S[..., D])


def _unified_decay(q: Tensor, context: Context | None, log_decay: Any, **options: Any) -> Tensor | None:
    """Checks the arguments of `_unified` besides q, k and v; returns the decay as a tensor."""
    by_channel = _is_by_channel(log_decay)
    if isinstance(options["a"], Tensor) or options["a"] != 0:
        raise UserError("log_decay [B, N, H, D] needs a=0: it decays the channels of k")
    what = "log_decay [B, N, H, D]" if by_channel else "a=0 under the normaliser"
    if not options["causal"]:
        raise UserError(NEEDS_CAUSAL if by_channel else f"{what} needs causal=True")
    if context is not None:
        raise UserError(f"{what} takes no context; gated_linear_attention does")
    checked = _checked_options(q, log_decay=None if by_channel else log_decay, return_state=True, **options)
    if not by_channel:
        head_decay = checked["head_log_decay"]
        return checked["token_log_decay"] if head_decay is None else head_decay
    if log_decay.shape != q.shape or not log_decay.is_floating_point() or log_decay.device != q.device:
        got = f"{log_decay.dtype} {list(log_decay.shape)} on {log_decay.device}"
        raise UserError(f"log_decay must be floating point {list(q.shape)} on {q.device}; got {got}")
    return log_decay


# The calls that the arguments make.


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    _check_qkv(q, k, v)
    return Call(q=q, k=k, v=v, **_checked_options(q, **options))


def _packed_call(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    gate_bias: Tensor | None,
    head_size: int | None,
    *,
    log_decay: Tensor | Sequence[float] | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Call:
    projected = None
    if gate_bias is not None:
        projected, qkv = qkv, _check_projected(qkv, gate_bias, head_size, log_decay)
        gate_bias = gate_bias.to(state_dtype(qkv.dtype)).contiguous()
    elif head_size is not None:
        raise UserError("head_size is for a projection that has gates: give their gate_bias, too")
    _check_packed(qkv, cos, sin)
    if _has_zero_constant(options["a"], options["normalize"]):
        raise UserError("a=0 under the normaliser needs q, k and v by themselves: linear_attention")
    checked = _checked_options(qkv, log_decay=log_decay, cu_seqlens=cu_seqlens, causal=True, **options)
    needs_gradient = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if needs_gradient and checked["backend"] not in _DIFFERENTIATED:
        raise UserError("cos and sin get no gradient here: detach them, or take backend='reference'")
    tensors = {"qkv": qkv} if projected is None else {"projected": projected, "gate_bias": gate_bias}
    return Call(**tensors, cos=cos, sin=sin, head_size=head_size or 0, **checked)


# Checks.


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_are_tensors(q=q, k=k, v=v)
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 4 or k.shape != shape or v.shape != shape:
        shapes = f"{list(shape)}, {list(k.shape)}, {list(v.shape)}"
        ways = _ways_to_one_shape(q, k, v)
        raise UserError(f"q, k and v must have one shape [B, N, H, D]; got {shapes}{ways}")
    if dtype not in DTYPES or k.dtype != dtype or v.dtype != dtype:
        dtypes = f"{dtype}, {k.dtype}, {v.dtype}"
        raise UserError(f"q, k and v must have one dtype, bf16, fp16, fp32 or float64; got {dtypes}")
    if k.device != device or v.device != device:
        raise UserError(f"q, k and v must be on one device; got {device}, {k.device}, {v.device}")


def _ways_to_one_shape(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Advice for grouped heads and different head sizes; empty for other shapes."""
    if any(x.ndim != 4 or x.shape[:2] != q.shape[:2] for x in (q, k, v)):
        return ""
    ways = []
    if q.shape[2] != k.shape[2] or q.shape[2] != v.shape[2]:
        ways.append("repeat_interleave k and v along dim 2")
    if q.shape[3] != k.shape[3] or q.shape[3] != v.shape[3]:
        ways.append("pad the smaller heads with zeros, then cut o")
    return f": {', '.join(ways)}"


def _check_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_are_tensors(qkv=qkv, cos=cos, sin=sin)
    shape, rope, device = qkv.shape, cos.shape, qkv.device
    if len(shape) != 5 or shape[2] != 3 or qkv.dtype not in DTYPES:
        wanted = "[B, N, 3, H, D] in bf16, fp16, fp32 or float64"
        raise UserError(f"qkv must be {wanted}; got {qkv.dtype} {list(shape)}")
    N, D = shape[1], shape[-1]
    if sin.shape != rope or len(rope) != 2 or rope[0] != N or rope[1] % 2 or rope[1] > D:
        shapes = f"{list(rope)} and {list(sin.shape)}"
        raise UserError(f"cos and sin must be [N = {N}, R], R even and at most D = {D}; got {shapes}")
    if not cos.is_floating_point() or not sin.is_floating_point():
        raise UserError(f"cos and sin must be floating point; got {cos.dtype} and {sin.dtype}")
    if cos.device != device or sin.device != device:
        devices = f"{device}, {cos.device}, {sin.device}"
        raise UserError(f"qkv, cos and sin must be on one device; got {devices}")


def _check_projected(
    projected: Tensor, gate_bias: Tensor, head_size: int | None, log_decay: object
) -> Tensor:
    """Checks a projection with gates, [B, N, 3·H·D + P]; returns its view qkv [B, N, 3, H, D]."""
    if log_decay is not None:
        raise UserError("gate_bias says that the decay is in the projection: leave log_decay at None")
    check_are_tensors(qkv=projected, gate_bias=gate_bias)
    if gate_bias.ndim != 1 or not gate_bias.is_floating_point() or gate_bias.device != projected.device:
        got = f"{gate_bias.dtype} {list(gate_bias.shape)} on {gate_bias.device}"
        raise UserError(f"gate_bias must be floating point [H] on {projected.device}; got {got}")
    whole = isinstance(head_size, (int, torch.SymInt)) and not isinstance(head_size, bool)
    if head_size is None or not whole or head_size < 1:
        raise UserError(f"gate_bias needs head_size, the D of q, k and v in each row; got {head_size!r}")
    H, shape = gate_bias.shape[0], projected.shape
    if len(shape) != 3 or shape[2] < (3 * head_size + 1) * H or not projected.is_floating_point():
        sizes, got = f"H = {H}, D = {head_size}, P ≥ H", f"{projected.dtype} {list(shape)}"
        raise UserError(f"with gates qkv must be floating point [B, N, 3·H·D + P], {sizes}; got {got}")
    return split_projection(projected, H, head_size)[0]


def _checked_options(
    like: Tensor,
    *,
    a: float | Tensor,
    b: float | Tensor,
    log_decay: Tensor | Sequence[float] | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    normalize_qk: bool,
    causal: bool,
    initial_state: LinearAttentionState | None,
    return_state: bool,
    backend: str,
) -> dict[str, Any]:
    """The fields of a `Call` besides its inputs; `like` is q [B, N, H, D] or qkv [B, N, 3, H, D], checked."""
    check_flags(normalize=normalize, normalize_qk=normalize_qk, causal=causal)
    _check_sequences(cu_seqlens, like, causal)
    _check_coefficients(a, b, normalize, normalize_qk)
    head_decay, token_decay = _decay(log_decay, like, causal)
    S, z, c, n = _state(initial_state, like)
    return {
        "a": _per_head_or_none(a, like, "a"), "b": _per_head_or_none(b, like, "b"),
        "a_value": _number(a), "b_value": _number(b),
        "head_log_decay": head_decay, "token_log_decay": token_decay, "cu_seqlens": cu_seqlens,
        "S": S, "z": z, "c": c, "n": n,
        "normalize": normalize, "normalize_qk": normalize_qk, "causal": causal, "return_state": return_state,
        "backend": _backend(backend, like, causal, initial_state is not None),
    }  # fmt: skip


def _check_coefficients(a: float | Tensor, b: float | Tensor, normalize: bool, normalize_qk: bool) -> None:
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Tensor):
            continue
        if not isinstance(x, NUMBERS):
            raise UserError(f"{name} must be a number or a tensor [H]; got {shown(x)}")
        if not -math.inf < x < math.inf:
            raise UserError(f"{name} must be finite; got {shown(x)}")
    if not normalize:
        return
    if isinstance(a, Tensor) or a not in (0, 1):
        raise UserError("under the normaliser only b/a counts: a is 1 or 0, or pass normalize=False")
    if a and normalize_qk and not isinstance(b, Tensor) and not -1.0 <= b <= 1.0:
        raise UserError(f"|b| must be at most 1 with normalize_qk, or weights turn negative; got {b}")


def _number(x: float | Tensor) -> float:
    return 1.0 if isinstance(x, Tensor) else float(x)


def _per_head_or_none(x: float | Tensor, like: Tensor, name: str) -> Tensor | None:
    return _per_head(x, like, name) if isinstance(x, Tensor) else None


def _per_head(x: Tensor, like: Tensor, name: str) -> Tensor:
    """A tensor [H] in the dtype of the sums, contiguous, as the kernels need it."""
    if x.shape != like.shape[-2:-1] or not x.is_floating_point() or x.device != like.device:
        got = f"{x.dtype} {list(x.shape)} on {x.device}"
        raise UserError(f"{name} must be floating point [H = {like.shape[-2]}] on {like.device}; got {got}")
    return x.to(state_dtype(like.dtype)).contiguous()


def _decay(
    log_decay: Tensor | Sequence[float] | None, like: Tensor, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(decay per head [H], decay per token [B, N, H]) in the sums' dtype, at most one of them not None."""
    if log_decay is None:
        return None, None
    if not causal:
        raise UserError(NEEDS_CAUSAL)
    if not isinstance(log_decay, Tensor):
        if not isinstance(log_decay, Sequence) or not all(_is_finite_decay(x) for x in log_decay):
            wanted = "a tensor, or for each head a finite number of at most 0"
            raise UserError(f"log_decay must be {wanted}; got {shown(log_decay)}")
        log_decay = torch.tensor(log_decay, dtype=state_dtype(like.dtype), device=like.device)
    per_token = (*like.shape[:2], like.shape[-2])
    if log_decay.shape not in (per_token[2:], per_token) or not log_decay.is_floating_point():
        shapes = f"[H = {per_token[2]}] or [B, N, H] = {list(per_token)}"
        shapes += f", or with a=0 [B, N, H, D] = {list(like.shape)}" if like.ndim == 4 else ""
        got = f"{log_decay.dtype} {list(log_decay.shape)}"
        raise UserError(f"log_decay must be floating point {shapes}; got {got}")
    if log_decay.device != like.device:
        raise UserError(f"log_decay must be on {like.device}; got {log_decay.device}")
    if log_decay.ndim == 1 and log_decay.requires_grad and torch.is_grad_enabled():
        ways = "give log_decay.expand(B, N, H), or detach it"
        raise UserError(f"log_decay [H] is a constant and would never get its gradient: {ways}")
    log_decay = log_decay.to(state_dtype(like.dtype))
    return (log_decay.contiguous(), None) if log_decay.ndim == 1 else (None, log_decay)


def _is_finite_decay(x: object) -> bool:
    return isinstance(x, NUMBERS) and -math.inf < float(x) <= 0


def _check_sequences(cu_seqlens: object, like: Tensor, causal: bool) -> None:
    if cu_seqlens is None:
        return
    check_cu_seqlens(cu_seqlens, like)
    if not causal:
        raise UserError("cu_seqlens needs causal=True: call each sequence by itself")


def _state(state: LinearAttentionState | None, like: Tensor) -> tuple[Tensor | None, ...]:
    if state is None:
        return (None,) * 4
    if not isinstance(state, tuple) or len(state) != 4:
        got = f"{len(state)} parts" if isinstance(state, tuple) else shown(state)
        raise UserError(f"initial_state must be a LinearAttentionState (S, z, c, n); got {got}")
    shapes = state_shapes(like.shape[0], *like.shape[-2:])
    dtype, device = state_dtype(like.dtype), like.device
    for name, x, shape in zip("Szcn", state, shapes, strict=True):
        check_are_tensors(**{f"initial_state.{name}": x})
        if x.shape != shape or x.dtype != dtype or x.device != device:
            got = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise UserError(f"initial_state.{name} must be {dtype} {list(shape)} on {device}; got {got}")
    return tuple(state)


def _backend(backend: str, like: Tensor, causal: bool, has_state: bool) -> str:
    """`backend`, with "auto" resolved to "recurrent" if that applies; operator.py decides the rest."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "recurrent" and not causal:
        raise UserError("the recurrent backend is causal; causal=False needs 'chunkwise' or 'reference'")
    if backend == "auto" and causal and has_state and like.shape[1] == 1 and like.device.type == "cpu":
        return "recurrent"
    return backend
