"""Linear attention by its definition: quadratic in the length, the oracle of the other forms."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.common import (
    LinearAttentionState,
    effective,
    per_head,
    reciprocal_norm,
    state_dtype,
    true_fp32,
)


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: float | Tensor = 1.0,
    log_decay: Tensor | None = None,
    normalize_qk: bool = True,
    causal: bool = True,
    initial_state: LinearAttentionState | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """o_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = (1 + b q̂_i·k̂_j) γ^(i−j) over j ≤ i (all j where not
    causal).

    Any dtype and device, differentiable by autograd; fp32 inside (float64 for float64 inputs). Arguments as
    in `lingpt.kernels.linear_attention`. Memory O(N²).
    """
    with true_fp32(q.device):
        dtype, (N, H) = state_dtype(q.dtype), q.shape[1:3]
        q_hat, k_hat, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        if normalize_qk:
            q_hat, k_hat = q_hat * reciprocal_norm(q_hat), k_hat * reciprocal_norm(k_hat)
        b = per_head(effective(b, normalize_qk), ndim=4, dim=1, dtype=dtype)
        decay = q.new_zeros(H, dtype=dtype) if log_decay is None else log_decay.to(dtype)
        position = torch.arange(N, device=q.device)

        # Token j's weight in row i.
        w = 1 + b * (q_hat @ k_hat.mT)  # [B, H, N, N]
        if causal:
            age = position[:, None] - position
            w = w * torch.exp(decay[:, None, None] * age.clamp(min=0)) * (age >= 0)
        u, g = w @ values, w.sum(-1, keepdim=True)

        # What came before the first token: it weighs γ^(i+1) in row i.
        since = torch.exp(decay[:, None] * (position + 1))[..., None]  # [H, N, 1]
        if initial_state is not None:
            S, z, c, n = initial_state
            u = u + since * (c[:, :, None] + b * (q_hat @ S))
            g = g + since * (n[:, :, None, None] + b * (q_hat @ z[..., None]))

        # The sums at the end: token j weighs γ^(N−1−j), the initial state γ^N.
        left = torch.exp(decay[:, None] * (N - 1 - position))[..., None]  # [H, N, 1]
        state = LinearAttentionState(
            S=(left * k_hat).mT @ values,
            z=(left * k_hat).sum(2),
            c=(left * values).sum(2),
            n=left.sum((1, 2)).expand(q.shape[0], H),
        )
        if initial_state is not None:
            faded = torch.exp(decay * N)
            pairs = zip(state, initial_state, strict=True)
            state = LinearAttentionState(*(x + per_head(faded, x.ndim, 1, dtype) * old for x, old in pairs))
        return (u / g).transpose(1, 2).to(v.dtype), state
