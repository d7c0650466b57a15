"""Linear attention with any decay, where one function is forward and backward (Qin et al., eq. 2, 8 and 9).

    S_i = diag(exp l_i) S_{i−1} diag(exp r_i) + k_i v_iᵀ,    y_i = S_iᵀ q_i

with log decays l of the key's and r of the value's dimension, each per head, per token or per channel. With L
and R their cumulative sums

    y_i = Σ_{j≤i} [(q_i ⊙ exp(L_i − L_j))·k_j] (v_j ⊙ exp(R_i − R_j)) =: f(q, k, v; L, R, →)

and with ←, the same over j ≥ i with exp(L_j − L_i), exp(R_j − R_i), the backward pass is

    dq = f(dy, v, k; R, L, →)      dk = f(v, dy, q; R, L, ←)      dv = f(k, q, dy; L, R, ←)
    dL = q ⊙ dq − k ⊙ dk           dR = dy ⊙ y − v ⊙ dv           dl_t = Σ_{i≥t} dL_i,  dr_t = Σ_{i≥t} dR_i

RetNet and lightning attention have one l per head, Mamba-2, mLSTM and gated retention one per token, GLA and
HGRN-2 one per channel, decaying fast weights also an r per channel. Implementations:

- the definition, and the recurrence for decoding;
- a chunkwise form in plain PyTorch, on any device, in fp32 (float64 for float64 inputs), memory O(N),
  differentiable any number of times;
- linear_attention/cuda/channel_decay.cu, on tensor cores, for 16-bit inputs and an r that channels share;
- linear_attention/cuda/recurrence.cu, in fp32, for all else on a GPU, in the chunkwise form's place.

Every exponent is a difference that is ≤ 0. For decays per channel that takes two levels of chunks (GLA, Yang
et al., §4.3): rows in blocks of 16 refer to the block's first row, the diagonal block is computed from the
differences themselves.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lingpt.common.errors import UserError, unknown
from lingpt.kernels import channel_decay_operator
from lingpt.kernels.checks import NUMBERS, check_are_tensors, check_cu_seqlens, check_flags
from lingpt.kernels.linear_attention.cuda import recurrence
from lingpt.kernels.numerics import (
    LOG_ZERO,
    decay_gradient,
    first_tokens,
    pad_to_chunks,
    state_dtype,
    to_tokens,
    true_fp32,
)

BACKENDS = ("auto", "reference", "chunkwise", "recurrent", "cuda")
BLOCK = 16  # rows that share a reference row, if decays are per channel


def unified_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: float | Tensor | None = None,
    right: float | Tensor | None = None,
    *,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> Tensor:
    """y_i = Σ_{j≤i} [(q_i ⊙ exp(L_i − L_j))·k_j] (v_j ⊙ exp(R_i − R_j)), with L and R the cumulative sums of
    `left` and `right`.

    Args:
        q, k: [B, N, H, Dk]; v: [B, N, H, Dv]; one floating-point dtype and device.
        left, right: log decays ≤ 0 (of tensors values are not checked): a number, [H], [B, N, H], or per
            channel [B, N, H, Dk] and [B, N, H, Dv]. −inf is a reset: nothing before the token has weight.
        reverse: sums over j ≥ i instead, with exp(L_j − L_i) and exp(R_j − R_i).
        initial_state: [B, H, Dk, Dv], fp32 (float64 for float64 inputs): S before the first token; with
            `reverse`, after the last.
        cu_seqlens: int32 or int64 [sequences + 1]: borders of sequences packed into the B·N tokens, row after
            row, as in `linear_attention`; each row begins a sequence.
        chunk_size: tokens that the chunkwise form computes as one matrix product; a multiple of 16.
        backend: one of
            "reference"  the definition, quadratic, float64 inside;
            "chunkwise"  plain PyTorch on any device, whose backward pass is the function itself;
            "recurrent"  token by token, for decoding;
            "cuda"       kernels. On tensor cores, once differentiable: bf16 and fp16, Dk ≤ 256 and Dv ≤ 512,
                         `right` not per channel; they read a decay for each channel, a coarser one is copied
                         to all. In fp32, token by token: all else with Dk and Dv ≤ 288, but float64;
            "auto"       recurrent for one token; cuda where it can run; else chunkwise. On CUDA devices it
                         warns of chunkwise, and of 16-bit inputs in fp32, and says how much slower they are.

    Returns:
        y [B, N, H, Dv] in q's dtype. Every tensor argument gets a gradient.

    Raises:
        UserError: for shapes, dtypes, devices or numbers that do not fit.
    """
    return unified_linear_attention_with_state(
        q, k, v, left, right,
        reverse=reverse, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        backend=backend,
    )[0]  # fmt: skip


def unified_linear_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: float | Tensor | None = None,
    right: float | Tensor | None = None,
    *,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`unified_linear_attention`, and the state after the last token, [B, H, Dk, Dv] in fp32 (float64).

    With `reverse` it is the state before the first token, Σ_j diag(exp L_j) k_j v_jᵀ diag(exp R_j).
    """
    check_inputs(q, k, v, initial_state, cu_seqlens)
    check_flags(reverse=reverse)
    if not isinstance(chunk_size, int) or chunk_size < BLOCK or chunk_size % BLOCK:
        raise UserError(f"chunk_size={chunk_size} must be a multiple of {BLOCK}")
    l, r = _log_decay("left", left, q), _log_decay("right", right, v)
    if cu_seqlens is not None:
        first = first_tokens(cu_seqlens, *q.shape[:2])
        l = l.masked_fill(first[..., None, None], LOG_ZERO[l.dtype])
    backend = choose(backend, q, v.shape[-1], r.shape[-1] > 1)
    if backend == "cuda" and right is not None and r.shape[-1] == 1:
        l, r = l + r, torch.zeros_like(r)  # a decay that all of v's channels share is one of k's, too
    if not reverse:
        return _attend(backend, q, k, v, l, r, initial_state, chunk_size)
    # From the other end a token carries the decay of the one after it; the first token's is applied last.
    q, k, v, l, r = (x.flip(1) for x in (q, k, v, l, r))
    y, state = _attend(backend, q, k, v, _one_later(l), _one_later(r), initial_state, chunk_size)
    if l.shape[1]:
        state = l[:, -1].exp().unsqueeze(-1) * state * r[:, -1].exp().unsqueeze(-2)
    return y.flip(1), state


def choose(backend: str, q: Tensor, Dv: int, right_per_channel: bool = False) -> str:
    """The backend to use, for `auto` by what the machine has; UserError if it cannot run here. Dv: v's last
    dimension. right_per_channel: is there such a decay, which tensor cores do not compute?"""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "auto" and q.shape[1] == 1:
        return "recurrent"
    if backend not in ("auto", "cuda"):
        return backend
    off_tensor_cores = (
        "tensor cores compute no decay of each channel of v"
        if right_per_channel
        else channel_decay_operator.unsupported_reason(q, Dv)
    )
    if off_tensor_cores is None:
        return "cuda"
    reason = recurrence.unsupported_reason(q, Dv)
    if reason is not None and backend == "cuda":
        raise UserError(f"backend='cuda' cannot run this: {reason}")
    slower = ""
    if reason is not None:
        slower = f"on the chunkwise backend, 19 to 107 times slower than on tensor cores: {reason}"
    elif q.dtype != torch.float32:
        slower = f"in fp32, 4 to 23 times slower than on tensor cores: {off_tensor_cores}"
    if slower and q.device.type == "cuda" and not torch.compiler.is_compiling():
        warnings.warn(f"these decays run {slower}", stacklevel=4)
    return "cuda" if reason is None else "chunkwise"


def _attend(backend, q, k, v, l, r, state, chunk_size):
    if backend == "reference":
        return reference(q, k, v, l, r, state)
    if backend == "recurrent":
        return recurrent(q, k, v, l, r, state)
    if backend == "cuda":
        return by_kernels(q, k, v, l, r, state)
    y, final = _Forward.apply(q, k, v, l, r, _or_zeros(state, q, v), backend, chunk_size)
    return y.to(q.dtype), final


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, r: Tensor | None, state: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`reference` by the CUDA kernels, for a call that `choose` gives to them."""
    shared = r is None or r.shape[-1] == 1
    if shared and channel_decay_operator.unsupported_reason(q, v.shape[-1]) is None:
        return channel_decay_operator.attend(q, k, v, l.expand_as(k), state, scale)
    r = torch.zeros_like(l[..., :1], dtype=torch.float32) if r is None else r
    rows = scale * q.float(), k.float(), v.float(), l.float(), r.float()
    y, final = _Forward.apply(*rows, _or_zeros(state, q, v), "cuda", None)
    return y.to(q.dtype), final


def _or_zeros(state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    if state is not None:
        return state
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=state_dtype(q.dtype))


def reference(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, r: Tensor | None, state: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """scale times y by its definition, and the final state; in float64. The oracle for the other backends.

    l, r: [B, N, H, 1 or D], finite; no r is one of zeros. Memory O(N²·(Dk + Dv)).
    """
    r = torch.zeros_like(l[..., :1]) if r is None else r
    q64, k64, v64, L, R = (x.double().transpose(1, 2) for x in (q, k, v, l, r))  # [B, H, N, ·]
    L, R = L.cumsum(2), R.cumsum(2)
    scores = (q64.unsqueeze(3) * k64.unsqueeze(2) * _decays_within(L, L.dtype)).sum(-1)  # [B, H, i, j]
    y = (scores.unsqueeze(-1) * v64.unsqueeze(2) * _decays_within(R, R.dtype)).sum(3)
    end_L, end_R = (X[:, :, -1:] if q.shape[1] else X.new_zeros(1, 1, 1, 1) for X in (L, R))
    final = (k64 * (end_L - L).exp()).mT @ (v64 * (end_R - R).exp())
    if state is not None:
        y = y + ((q64 * L.exp()) @ state.double()) * R.exp()
        final = final + end_L.exp().mT * state.double() * end_R.exp()
    return (scale * y).transpose(1, 2).to(q.dtype), final.to(state_dtype(q.dtype))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, r: Tensor | None, state: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`reference` token by token, in fp32 (float64): element-wise products and sums, whose precision autocast
    and TF32 do not reduce."""
    dtype, (B, N, H, Dk) = state_dtype(q.dtype), q.shape
    q_, k_, v_ = scale * q.to(dtype), k.to(dtype), v.to(dtype)
    decay = l.to(dtype).exp().unsqueeze(-1)  # [B, N, H, 1 or Dk, 1 or Dv]
    decay = decay if r is None else decay * r.to(dtype).exp().unsqueeze(-2)
    state = q_.new_zeros(B, H, Dk, v.shape[-1]) if state is None else state
    rows = []
    for t in range(N):
        state = decay[:, t] * state + k_[:, t, :, :, None] * v_[:, t, :, None]
        rows.append((q_[:, t, :, :, None] * state).sum(-2))
    y = torch.stack(rows, dim=1).to(q.dtype) if rows else torch.empty_like(v)
    return y, state


class _Forward(torch.autograd.Function):
    """y and the final state, both in the state's dtype, as dr is a difference of sums with y. The backward
    pass is the same function, with its arguments in other places."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, l, r, state, backend, chunk_size):
        with torch.no_grad(), true_fp32(q.device):
            if backend == "cuda":
                return _recurrence(q, k, v, l, r, state)
            return _chunkwise(q, k, v, l, r, state, chunk_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, backend, chunk_size = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.options = {"backend": backend} | ({"chunk_size": chunk_size} if chunk_size else {})

    @staticmethod
    def backward(ctx, dy, dfinal):
        q, k, v, l, r, state, y, final = ctx.saved_tensors
        wide, options = state.dtype, ctx.options
        # In fp32, as the gradients of the decays are differences of the others.
        q_, k_, v_ = (x.to(wide) for x in (q, k, v))
        dq = unified_linear_attention(dy, v_, k_, r, l, initial_state=state.mT, **options)
        dk = unified_linear_attention(v_, dy, q_, r, l, reverse=True, initial_state=dfinal.mT, **options)
        dv, dstate = unified_linear_attention_with_state(
            k_, q_, dy, l, r, reverse=True, initial_state=dfinal, **options
        )
        at_end = final * dfinal  # the last L and R are factors of the returned state, too
        dl = decay_gradient(q_ * dq - k_ * dk, at_end.sum(-1), l)
        dr = decay_gradient(dy * y - v_ * dv, at_end.sum(-2), r)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dl, dr, dstate, None, None


@torch.library.custom_op("lingpt::unified_linear_attention_cuda", mutates_args=())
def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, r: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the final state, in fp32."""
    return recurrence.forward(q, k, v, l, r, state)


@_recurrence.register_fake
def _(q, k, v, l, r, state):
    return v.new_empty(v.shape), state.new_empty(state.shape)


register_flop_formula(torch.ops.lingpt.unified_linear_attention_cuda)(channel_decay_operator.forward_flops)


# The chunkwise form. [B, H, chunks, C, ·] throughout; L and R restart in every chunk.


def _chunkwise(q, k, v, l, r, state, chunk_size):
    dtype, N = state.dtype, q.shape[1]
    C = min(chunk_size, BLOCK * max(1, -(-N // BLOCK)))
    Q, K, V = (pad_to_chunks(x.to(dtype), C) for x in (q, k, v))
    L, R = (pad_to_chunks(x.double(), C).cumsum(3) for x in (l, r))
    from_start_L, from_start_R = L.to(dtype).exp(), R.to(dtype).exp()
    to_end_L, to_end_R = ((X[..., -1:, :] - X).to(dtype).exp() for X in (L, R))

    sums = (K * to_end_L).mT @ (V * to_end_R)  # [B, H, chunks, Dk, Dv]
    whole = from_start_L[..., -1:, :].mT * from_start_R[..., -1:, :]
    before = []
    for chunk in range(sums.shape[2]):
        before.append(state)
        state = whole[:, :, chunk] * state + sums[:, :, chunk]
    if not before:
        return v.to(dtype, copy=True), state.clone()
    past = ((Q * from_start_L) @ torch.stack(before, 2)) * from_start_R
    y = _weighted_sums(scores(Q, K, L), V, R) + past
    return to_tokens(y, N).contiguous(), state


def scores(Q: Tensor, K: Tensor, L: Tensor) -> Tensor:
    """Σ_d q_id k_jd exp(L_id − L_jd) for j ≤ i, else 0: [.., C, C]. C: a multiple of BLOCK."""
    C = Q.shape[-2]
    if L.shape[-1] == 1:
        return (Q @ K.mT) * _decays_within(L, Q.dtype).squeeze(-1)
    # Made of all three, so that vmap may batch any of them.
    P = (Q[..., :1] + K[..., :1] + L[..., :1]).new_zeros(*Q.shape[:-1], C, dtype=Q.dtype)
    for first in range(0, C, BLOCK):
        rows, past = slice(first, first + BLOCK), slice(0, first)
        q_fade, k_fade = _around(L, rows, past, Q.dtype)
        P[..., rows, past] = (Q[..., rows, :] * q_fade) @ (K[..., past, :] * k_fade).mT
        for j in range(first, first + BLOCK):  # a column at a time, so that memory stays O(N·Dk)
            column = slice(j, first + BLOCK)
            fade = (L[..., column, :] - L[..., j : j + 1, :]).to(Q.dtype).exp()
            P[..., column, j] = (Q[..., column, :] * K[..., j : j + 1, :] * fade).sum(-1)
    return P


def _weighted_sums(P: Tensor, V: Tensor, R: Tensor) -> Tensor:
    """Σ_{j≤i} P_ij v_jd exp(R_id − R_jd): [.., C, Dv], for P that is 0 above the diagonal."""
    C = V.shape[-2]
    if R.shape[-1] == 1:
        return (P * _decays_within(R, V.dtype).squeeze(-1)) @ V
    y = (P[..., :1] + V[..., :1] + R[..., :1]).new_empty(V.shape, dtype=V.dtype)
    for first in range(0, C, BLOCK):
        rows, past = slice(first, first + BLOCK), slice(0, first)
        fade = _decays_within(R[..., rows, :], V.dtype)
        block = torch.einsum("...ij,...jd,...ijd->...id", P[..., rows, rows], V[..., rows, :], fade)
        y_fade, v_fade = _around(R, rows, past, V.dtype)
        y[..., rows, :] = block + y_fade * (P[..., rows, past] @ (V[..., past, :] * v_fade))
    return y


def _decays_within(G: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(G_i − G_j) for j ≤ i, else 0: [.., C, C, D] for G [.., C, D]."""
    C = G.shape[-2]
    causal = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()[..., None]
    differences = G[..., :, None, :] - G[..., None, :, :]
    return differences.masked_fill(~causal, float("-inf")).to(dtype).exp()


def _around(G: Tensor, rows: slice, past: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(G_i − G_r) of `rows` and exp(G_r − G_j) of `past`, r the first row: neither exceeds 1."""
    reference = G[..., rows, :][..., :1, :]
    return (G[..., rows, :] - reference).to(dtype).exp(), (reference - G[..., past, :]).to(dtype).exp()


# The arguments.


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, **others: object
) -> None:
    """Raises UserError unless these fit each other. others: further arguments, by name, that must be tensors
    on q's device."""
    given: dict[str, Any] = {"q": q, "k": k, "v": v, **others}
    if state is not None:
        given["initial_state"] = state
    check_are_tensors(**given)
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:-1] != q.shape[:-1]:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in {"q": q, "k": k, "v": v}.items())
        raise UserError(f"q and k must be [B, N, H, Dk] and v [B, N, H, Dv]; got {shapes}")
    if not q.is_floating_point() or not (q.dtype == k.dtype == v.dtype):
        raise UserError(f"q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    for name, x in given.items():
        if x.device != q.device:
            raise UserError(f"{name} must be on q's device, {q.device}; it is on {x.device}")
    shape, dtype = (q.shape[0], q.shape[2], q.shape[3], v.shape[3]), state_dtype(q.dtype)
    if state is not None and (state.shape != shape or state.dtype != dtype):
        raise UserError(f"initial_state must be {dtype} {list(shape)}; got {state.dtype} {list(state.shape)}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)


def _log_decay(name: str, decay: float | Tensor | None, x: Tensor) -> Tensor:
    """The log decay as [B, N, H, 1 or D], at least LOG_ZERO, in fp32 (float64)."""
    B, N, H, D = x.shape
    dtype = state_dtype(x.dtype)
    if not isinstance(decay, Tensor):
        if decay is not None and not isinstance(decay, NUMBERS):
            raise UserError(f"{name} must be a number or a tensor, not of type {type(decay).__name__}")
        number = float(decay or 0.0)
        if not number <= 0:
            raise UserError(f"{name}={number} must be a log decay, at most 0")
        decay = x.new_full((), number, dtype=dtype).expand(H)
    if decay.shape == (H,):
        decay = decay.expand(B, N, H)
    if decay.shape == (B, N, H):
        decay = decay.unsqueeze(-1)
    # Not `shape in (…)`, which torch.compile gets wrong for a length that it does not know.
    fits = decay.ndim == 4 and decay.shape[:3] == (B, N, H) and (decay.shape[3] == 1 or decay.shape[3] == D)
    if not fits or not decay.is_floating_point():
        raise UserError(
            f"{name} must be a number, [H], [B, N, H] or [B, N, H, {D}] of floating point, with H = {H}; "
            f"got {decay.dtype} {list(decay.shape)}"
        )
    if decay.device != x.device:
        raise UserError(f"{name} must be on q's device, {x.device}; it is on {decay.device}")
    return decay.to(dtype).clamp(min=LOG_ZERO[dtype])


def _one_later(log_decay: Tensor) -> Tensor:
    """Token i's log decay at token i + 1; none at the first."""
    return torch.cat((torch.zeros_like(log_decay[:, :1]), log_decay[:, :-1]), 1)
