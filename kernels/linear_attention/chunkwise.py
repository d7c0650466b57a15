"""Chunkwise linear attention in plain PyTorch, forward and backward: any device, memory linear in N.

The normaliser is an additional column. With the rows

    q' = [b q̂, 1],   k' = [k̂, 1],   v' = [v, 1]          of width E = D + 1

a weight is 1 + b q̂ᵢ·k̂ⱼ = q'ᵢ·k'ⱼ, so numerator and normaliser are one sum, and S' = Σ k'ⱼ v'ⱼᵀ is the
whole state: S, z, c and n are its four blocks. h' = [do/g, −(do·o)/g] is the gradient of that sum. Without
the normaliser q' = [b q̂, a], v' = v and h' = do, and S and c are the state. The backward pass is three more
sums of the same form ("Unifying Forward & Backward Propagation", Qin et al.):

    [uᵢ, gᵢ] = Σ_{j≤i} γ^(i−j) (q'ᵢ·k'ⱼ) v'ⱼ              dq'ᵢ = Σ_{j≤i} γ^(i−j) (h'ᵢ·v'ⱼ) k'ⱼ
         dk'ⱼ = Σ_{i≥j} γ^(i−j) (v'ⱼ·h'ᵢ) q'ᵢ             dv'ⱼ = Σ_{i≥j} γ^(i−j) (k'ⱼ·q'ᵢ) h'ᵢ

Each splits into products of [C, E] matrices under a triangular mask within a chunk of C tokens, and
products with the state before the chunk (the sums over j ≤ i) or its adjoint after the chunk (the sums over
i ≥ j). The rows are stored by chunk, [B, H, chunks, C, E], so that one batched product serves every chunk of
every head; the last chunk is padded with zeros, which add nothing. Without a causal mask the whole sequence
is one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    Exchange,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
)
from lingpt.kernels.numerics import (
    LOG_ZERO,
    pad_to_chunks,
    per_head,
    reciprocal_norm,
    reverse_running_sum,
    rotate_backward,
    state_dtype,
    to_tokens,
    true_fp32,
)

FALLBACK = "on the chunkwise backend, 20 to 40 times slower than on tensor cores"
CHUNK = 64


def unsupported_reason(call: Call) -> str | None:
    """None: this backend serves every call."""
    return None


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`. No autograd graph is recorded."""
    with torch.no_grad(), true_fp32(call.device):
        rows, decay = Rows.of(call, _chunk_size(call)), _Decay.of(call, _chunk_size(call))
        if exchange is not None:
            _, own = _states(rows, pack(None, call), decay)
            call = call._replace(**exchange(unpack(own))._asdict())
        before, final = _states(rows, pack(call.initial_state, call), decay)
        P = _masked(_bmm(rows.Q, rows.K.mT), decay) if call.causal else None
        U = to_tokens(_weighted_sums(P, rows, before, final, decay), call.shape[1])
        return rows.outputs(call, U, final)


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """Writes dq, dk and dv into `out`; returns the other gradients, as in `operator.Backend`.

    `out`: three [B, N, H, D] in the inputs' dtype, or views of dqkv. The final state is recomputed, not read.
    """
    (o, stats, _), (do, dstate) = saved, gradients
    with torch.no_grad(), true_fp32(call.device):
        rows, decay = Rows.of(call, _chunk_size(call), stats), _Decay.of(call, _chunk_size(call))
        (Q, K, V, *_), do = rows, do.to(stats.dtype)
        before, final = _states(rows, pack(call.initial_state, call), decay)
        P = _masked(_bmm(Q, K.mT), decay) if call.causal else None
        if call.normalize and o.dtype != do.dtype:
            # o's rounding error, relative to v's mean, would be in every row of e
            U = to_tokens(_weighted_sums(P, rows, before, final, decay), call.shape[1])
            o = U[..., :-1] / per_token(stats)[0]
        G = rows.output_gradient(call, do, o)
        if exchange is not None:
            _, own = _adjoints(Q, G, pack(None, call), decay)
            dstate = exchange(unpack(own))
        after, initial = _adjoints(Q, G, pack(dstate, call), decay)

        if P is not None:
            dP = _masked(_bmm(G, V.mT), decay)
            dQ, dK, dV = _bmm(dP, K), _bmm(dP.mT, Q), _bmm(P.mT, G)
            _add_bmm(dQ, _times(G, decay and decay.from_start), before.mT)
            _add_bmm(dK, _times(V, decay and decay.to_end), after.mT)
            _add_bmm(dV, _times(K, decay and decay.to_end), after)
        else:
            whole, from_all = final[:, :, None], initial[:, :, None]
            dQ, dK, dV = G @ whole.mT, V @ from_all.mT, K @ from_all

        d_token_log_decay = _decay_gradient(call, (Q, dQ), (K, dK), before, final, after)
        da, db = rows.input_gradients(call, dQ, dK, dV, out)
        return InputGradients(da, db, d_token_log_decay, None if call.S is None else unpack(initial))


def _weighted_sums(
    P: Tensor | None, rows: Rows, before: Tensor, final: Tensor, decay: _Decay | None
) -> Tensor:
    """Σ_j w_ij v'_j, [B, H, chunks, C, ·]; P: the weights within each chunk; None if not causal."""
    if P is None:
        return rows.Q @ final[:, :, None]
    U = _bmm(P, rows.V)
    _add_bmm(U, _times(rows.Q, decay and decay.from_start), before)
    return U


def _decay_gradient(
    call: Call,
    rows: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    before: Tensor,
    final: Tensor,
    after: Tensor,
) -> Tensor | None:
    """The gradient of token_log_decay [B, N, H], from `rows` q', dq', `columns` k', dk', and the states.

    dL/dG_j = q'_j·dq'_j − k'_j·dk'_j, and dL/dg_t = Σ_{j≥t} dL/dG_j. Pairs of tokens that are both ≥ t are in
    both terms and cancel, so both terms are computed, even if the first is 0 in exact arithmetic (with the
    normaliser). The sum runs within a chunk only, so that little rounding accumulates; later chunks
    contribute ⟨S', dS'⟩ at the chunk's end.
    """
    if call.token_log_decay is None:
        return None
    dG = torch.linalg.vecdot(*rows) - torch.linalg.vecdot(*columns)  # [B, H, chunks, C]
    later = dG.new_zeros(*dG.shape[:3], 1)
    later[:, :, :-1, 0] = _inner(before[:, :, 1:], after[:, :, :-1])
    later[:, :, -1:, 0] = _inner(final[:, :, None], after[:, :, -1:])
    gradient = to_tokens((reverse_running_sum(dG, 3) + later).unsqueeze(-1), call.shape[1]).squeeze(-1)
    return gradient.masked_fill(call.token_log_decay <= LOG_ZERO[gradient.dtype], 0.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product ⟨a, b⟩ of states, over the last two dimensions."""
    return torch.linalg.vecdot(a.flatten(-2), b.flatten(-2))


# The rows, and what is elementwise before and after the sums.


class Rows(NamedTuple):
    """q', k' and v' of a call, in fp32 (float64), and what they are made of."""

    Q: Tensor  # [B, H, chunks, C, E]
    K: Tensor
    V: Tensor  # [B, H, chunks, C, E], without the normaliser D instead of E
    q: Tensor  # q and k, rotated if the call has RoPE, [B, N, H, D]
    k: Tensor
    stats: Tensor  # as in Outputs; g is not yet known if the rows made them

    @classmethod
    def of(cls, call: Call, C: int, stats: Tensor | None = None) -> Rows:
        """`stats`: those of the forward pass."""
        (q, k, v), (B, N, H, _) = call.views, call.shape
        a, b = _coefficients(call)
        q, k = call.rotated(q), call.rotated(k)
        if stats is None:
            stats = q.new_ones(3, B, H, N)
            if call.normalize_qk:
                _, q_r, k_r = per_token(stats)
                q_r[:], k_r[:] = reciprocal_norm(q), reciprocal_norm(k)
        _, q_r, k_r = per_token(stats)
        Q, K = _to_chunks(q, q_r * b, a, C), _to_chunks(k, k_r, 1, C)
        return cls(Q, K, _to_chunks(v, None, 1 if call.normalize else None, C), q, k, stats)

    def outputs(self, call: Call, U: Tensor, final: Tensor) -> Outputs:
        """The results, from U = Σ_j w_ij v'_j [B, N, H, ·] and the final S'."""
        o = torch.empty(call.shape, dtype=call.dtype, device=call.device)
        if call.normalize:
            g, *_ = per_token(self.stats)
            g[:] = U[..., -1:]
            torch.div(U[..., :-1], U[..., -1:], out=o)
        else:
            o.copy_(U)
        return Outputs(o, self.stats, unpack(final) if call.return_state else None)

    def output_gradient(self, call: Call, do: Tensor, o: Tensor) -> Tensor:
        """The rows h'; do and o [B, N, H, D] in fp32 (float64), o is not read without the normaliser."""
        C = self.Q.shape[3]
        if not call.normalize:
            return _to_chunks(do, None, None, C)
        g, *_ = per_token(self.stats)
        return _to_chunks(do, 1 / g, -torch.linalg.vecdot(do, o) / g[..., 0], C)

    def input_gradients(
        self, call: Call, dQ: Tensor, dK: Tensor, dV: Tensor, out: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Writes dq, dk and dv into `out`, from the gradients of q', k' and v'; returns those of a and b."""
        (_, N, _, D), (dq, dk, dv), (_, b) = call.shape, out, _coefficients(call)
        _, q_r, k_r = per_token(self.stats)
        da = None if call.a is None else dQ[..., -1].sum((0, 2, 3))
        dQ, dK = (to_tokens(x, N)[..., :-1] for x in (dQ, dK))
        along_q = _input_gradient(call, dQ, self.q, b, q_r, dq)
        _input_gradient(call, dK, self.k, 1.0, k_r, dk)
        dv.copy_(to_tokens(dV, N)[..., :D])
        return da, None if call.b is None else call.shrink_b(along_q.sum((0, 1)))


def per_token(stats: Tensor) -> tuple[Tensor, ...]:
    """Views of g, 1/‖q‖ and 1/‖k‖ (1 if rows are not normalised), [B, N, H, 1] each."""
    return stats.transpose(2, 3).unsqueeze(-1).unbind()


def _coefficients(call: Call) -> tuple[float | Tensor, float | Tensor]:
    """a, a number or [1, 1, H], and b, a number or [1, 1, H, 1]."""
    dtype = state_dtype(call.dtype)
    return per_head(call.constant, 3, 2, dtype), per_head(call.coefficient, 4, 2, dtype)


def _to_chunks(x: Tensor, scale: float | Tensor | None, last: float | Tensor | None, C: int) -> Tensor:
    """[B, N, H, D] → [B, H, chunks, C, D + 1]: the rows `scale`·x and an additional column `last` [B, N, H],
    unless it is None."""
    B, N, H, D = x.shape
    chunks = -(-N // C)
    width = D if last is None else D + 1
    buffer = torch.empty(B, H, chunks * C, width, dtype=state_dtype(x.dtype), device=x.device)
    buffer[:, :, N:] = 0
    rows = buffer[:, :, :N].transpose(1, 2)
    if scale is None:
        rows[..., :D] = x
    else:
        torch.mul(x, scale, out=rows[..., :D])
    if last is not None:
        rows[..., D] = last
    return buffer.unflatten(2, (chunks, C))


def _input_gradient(call: Call, d: Tensor, x: Tensor, b: float | Tensor, r: Tensor, out: Tensor) -> Tensor:
    """Writes the gradient of x before rotation, given d, that of b x̂ with x̂ = r x; returns x̂·d [B, N, H].

    With dx̂ = b d, the gradient of x is r (dx̂ − x̂ (x̂·dx̂)) = r b (d − r² (x·d) x).
    """
    along = torch.linalg.vecdot(x, d).unsqueeze(-1) * r
    if call.normalize_qk:
        d = torch.addcmul(d, x, along * r, value=-1)
    if call.cos is None or call.sin is None:
        torch.mul(d, r * b, out=out)
    else:
        out.copy_(rotate_backward(d * (r * b), call.cos, call.sin))
    return along.squeeze(-1)


# Chunks.


def _chunk_size(call: Call) -> int:
    N = call.shape[1]
    return max(1, min(CHUNK, N) if call.causal else N)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over [B, H, chunks]."""
    return torch.bmm(a.flatten(0, 2), b.flatten(0, 2)).unflatten(0, a.shape[:3])


def _add_bmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place."""
    total.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


class _Decay(NamedTuple):
    """The decay factors exp(G_i − G_j) of token j in row i, G the cumulative sum of the chunk's log decays.

    Shapes [B, H, chunks, C, ·], or broadcastable to it.
    """

    within: Tensor  # from token j to token i ≥ j of a chunk, else 0           [.., C, C]
    from_start: Tensor  # from before the chunk to its token t                 [.., C, 1]
    to_end: Tensor  # from token t to the end of the chunk                     [.., C, 1]
    whole: Tensor  # from before the chunk to its end                          [.., 1, 1]

    @classmethod
    def of(cls, call: Call, C: int) -> _Decay | None:
        if call.token_log_decay is not None:
            return cls._of_token_decays(call.token_log_decay, C)
        if call.head_log_decay is not None:
            return cls._of_head_decays(call.head_log_decay, call.shape[1], C)
        return None

    @classmethod
    def _of_token_decays(cls, token_log_decay: Tensor, C: int) -> _Decay:
        """The factors for [B, N, H]. Only differences of G within a chunk, all ≤ 0, are exponentiated."""
        dtype = token_log_decay.dtype
        decays = pad_to_chunks(token_log_decay.clamp(min=LOG_ZERO[dtype]).unsqueeze(-1), C)
        G = decays.double().cumsum(3)  # [B, H, chunks, C, 1]; steep decays make it large
        causal = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()
        last = G[..., -1:, :]
        return cls(
            within=(G - G.mT).to(dtype).masked_fill_(~causal, float("-inf")).exp_(),
            from_start=G.to(dtype).exp(),
            to_end=(last - G).to(dtype).exp(),
            whole=last.to(dtype).exp(),
        )

    @classmethod
    def _of_head_decays(cls, log_decay: Tensor, N: int, C: int) -> _Decay:
        """The factors for [H]: powers of γ."""
        log_decay = log_decay.view(1, -1, 1, 1, 1)
        t = torch.arange(C, device=log_decay.device)
        length = (N - C * torch.arange(-(-N // C), device=log_decay.device)).clamp(max=C)[:, None, None]
        age = t[:, None] - t
        return cls(
            within=torch.exp(log_decay * age.clamp(min=0)) * (age >= 0),
            from_start=torch.exp(log_decay * (t[:, None] + 1)),
            to_end=torch.exp(log_decay * (length - 1 - t[:, None]).clamp(min=0)),
            whole=torch.exp(log_decay * length),
        )


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _masked(scores: Tensor, decay: _Decay | None) -> Tensor:
    """Applies the decay and the causal mask to a chunk's scores [.., C, C], in place."""
    if decay is not None:
        scores.mul_(decay.within)
    return scores.tril_()  # selected, although `within` is 0 there: 0 · NaN would reach earlier tokens


# States: S', [E, E] with E = D + 1, without the normaliser [E, D], and its adjoint.


def _states(rows: Rows, state: Tensor, decay: _Decay | None) -> tuple[Tensor, Tensor]:
    """S' before each chunk [B, H, chunks, E, ·] and after the last one [B, H, E, ·].

    `state`: the initial S'.
    """
    sums = _bmm(_times(rows.K, decay and decay.to_end).mT, rows.V)
    for chunk in range(sums.shape[2]):
        state = _carry(sums[:, :, chunk], state, decay, chunk)
    return sums, state


def _adjoints(Q: Tensor, G: Tensor, adjoint: Tensor, decay: _Decay | None) -> tuple[Tensor, Tensor]:
    """The gradients of S' after each chunk [B, H, chunks, E, ·] and before the first one [B, H, E, ·].

    `adjoint`: that of the final S'.
    """
    sums = _bmm(_times(Q, decay and decay.from_start).mT, G)
    for chunk in reversed(range(sums.shape[2])):
        adjoint = _carry(sums[:, :, chunk], adjoint, decay, chunk)
    return sums, adjoint


def _carry(own: Tensor, state: Tensor, decay: _Decay | None, chunk: int) -> Tensor:
    """Carries `state` across a chunk with the sum `own`; stores the incoming state in place of that sum."""
    carried = own + state if decay is None else torch.addcmul(own, decay.whole[:, :, chunk], state)
    own.copy_(state)
    return carried


def pack(state: LinearAttentionState | None, call: Call) -> Tensor:
    """S' = Σ [k̂, 1] v'ᵀ, with the state's sums as its blocks; zero for None. [B, H, E, ·]."""
    B, _, H, D = call.shape
    dtype = state_dtype(call.dtype)
    packed = torch.zeros(B, H, D + 1, D + call.normalize, dtype=dtype, device=call.device)
    if state is not None:
        packed[..., :D, :D], packed[..., D, :D] = state.S, state.c
        if call.normalize:
            packed[..., :D, D], packed[..., D, D] = state.z, state.n
    return packed


def unpack(packed: Tensor) -> LinearAttentionState:
    """The inverse of `pack`; z and n are zeros without the normaliser."""
    D = packed.shape[-2] - 1
    if packed.shape[-1] == D:
        packed = F.pad(packed, (0, 1))
    blocks = packed[..., :D, :D], packed[..., :D, D], packed[..., D, :D], packed[..., D, D]
    return LinearAttentionState(*(x.clone(memory_format=torch.contiguous_format) for x in blocks))
