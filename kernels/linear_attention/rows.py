"""The rows of which forward and backward are sums, and what is elementwise before and after those sums.

The normaliser is an additional column. With the rows

    q' = [b q̂, 1],   k' = [k̂, 1],   v' = [v, 1]          of width E = D + 1

a weight is 1 + b q̂ᵢ·k̂ⱼ = q'ᵢ·k'ⱼ, so numerator and normaliser are one sum, and S' = Σ k'ⱼ v'ⱼᵀ is the
whole state: S, z, c and n are its four blocks. h' = [do/g, −(do·o)/g] is the gradient of that sum. Without
the normaliser q' = [b q̂, a], v' = v and h' = do, and S and c are the state.

Rows are stored by chunks of C tokens, [B, H, chunks, C, ·]; the last chunk is padded with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, LinearAttentionState, Outputs
from lingpt.kernels.numerics import (
    per_head,
    reciprocal_norm,
    rotate,
    rotate_backward,
    state_dtype,
    to_tokens,
)


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
        q, k = _rotated(q, call), _rotated(k, call)
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


def _rotated(x: Tensor, call: Call) -> Tensor:
    """x [B, N, H, D] in fp32 (float64), rotated if the call has RoPE."""
    x = x.to(state_dtype(x.dtype))
    return x if call.cos is None or call.sin is None else rotate(x, call.cos, call.sin)


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


# The state S', [E, E], without the normaliser [E, D].


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
