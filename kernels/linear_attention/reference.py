"""Linear attention by its definition: quadratic in the length, the oracle of the other forms."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import Call
from lingpt.kernels.linear_attention.numerics import effective_b, per_head, reciprocal_norm
from lingpt.kernels.linear_attention.rope import rotate
from lingpt.kernels.linear_attention.state import LinearAttentionState
from lingpt.kernels.precision import state_dtype, true_fp32


def forward(call: Call) -> tuple[Tensor, LinearAttentionState]:
    """o_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = (1 + b q̂_i·k̂_j) γ^(i−j) over j ≤ i (all j where not causal);
    and the final state.

    Any dtype and device, differentiable by autograd; fp32 inside (float64 for float64 inputs). Memory O(N²).
    """
    with true_fp32(call.device):
        dtype, (B, N, H, _) = state_dtype(call.dtype), call.shape
        q, k, v = (x.to(dtype) for x in call.views)
        if call.cos is not None and call.sin is not None:
            q, k = rotate(q, call.cos, call.sin), rotate(k, call.cos, call.sin)
        q_hat, k_hat, values = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        if call.normalize_qk:
            q_hat, k_hat = q_hat * reciprocal_norm(q_hat), k_hat * reciprocal_norm(k_hat)
        b = per_head(effective_b(call.coefficient, call.normalize_qk), ndim=4, dim=1, dtype=dtype)
        decay = q.new_zeros(H) if call.log_decay is None else call.log_decay
        position = torch.arange(N, device=call.device)

        # Token j's weight in row i.
        w = 1 + b * (q_hat @ k_hat.mT)  # [B, H, N, N]
        if call.causal:
            age = position[:, None] - position
            w = w * torch.exp(decay[:, None, None] * age.clamp(min=0)) * (age >= 0)
        u, g = w @ values, w.sum(-1, keepdim=True)

        # What came before the first token: it weighs γ^(i+1) in row i.
        since = torch.exp(decay[:, None] * (position + 1))[..., None]  # [H, N, 1]
        if call.initial_state is not None:
            S, z, c, n = call.initial_state
            u = u + since * (c[:, :, None] + b * (q_hat @ S))
            g = g + since * (n[:, :, None, None] + b * (q_hat @ z[..., None]))

        # The sums at the end: token j weighs γ^(N−1−j), the initial state γ^N.
        left = torch.exp(decay[:, None] * (N - 1 - position))[..., None]  # [H, N, 1]
        state = LinearAttentionState(
            S=(left * k_hat).mT @ values,
            z=(left * k_hat).sum(2),
            c=(left * values).sum(2),
            n=left.sum((1, 2)).expand(B, H),
        )
        if call.initial_state is not None:
            faded = torch.exp(decay * N)
            pairs = zip(state, call.initial_state, strict=True)
            state = LinearAttentionState(*(x + per_head(faded, x.ndim, 1, dtype) * old for x, old in pairs))
        return (u / g).transpose(1, 2).to(call.dtype), state
