"""Linear attention one token at a time: the form for decoding, with memory that does not grow."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.common import (
    LinearAttentionState,
    effective,
    per_head,
    reciprocal_norm,
    state_dtype,
)


def linear_attention_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: float | Tensor = 1.0,
    log_decay: Tensor | None = None,
    normalize_qk: bool = True,
    initial_state: LinearAttentionState | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """S ← γS + k̂vᵀ, likewise z, c and n; then o = (c + b Sᵀq̂) / (n + b z·q̂). Arguments as in
    `linear_attention`.

    Differentiable by autograd, which keeps a state a token: meant for inference. Written in elementwise
    products and sums: they are exact in fp32 under autocast and where TF32 is allowed, and a matrix-vector
    product is bound by memory anyway.
    """
    dtype, (B, N, H, D) = state_dtype(q.dtype), q.shape
    q_hat, k_hat, values = (x.to(dtype) for x in (q, k, v))
    if normalize_qk:
        q_hat, k_hat = q_hat * reciprocal_norm(q_hat), k_hat * reciprocal_norm(k_hat)
    q_hat = per_head(effective(b, normalize_qk), ndim=4, dim=2, dtype=dtype) * q_hat

    state = initial_state or LinearAttentionState.zeros(B, H, D, device=q.device, dtype=dtype)
    fade = None if log_decay is None else log_decay.exp()
    outputs = []
    for t in range(N):
        if fade is not None:
            state = LinearAttentionState(*(per_head(fade, x.ndim, 1, dtype) * x for x in state))
        S, z, c, n = state
        k_t, v_t, q_t = k_hat[:, t], values[:, t], q_hat[:, t]  # [B, H, D]
        state = LinearAttentionState(S + k_t[..., None] * v_t[:, :, None], z + k_t, c + v_t, n + 1)
        u = state.c + (q_t[..., None] * state.S).sum(-2)
        g = state.n + (q_t * state.z).sum(-1)
        outputs.append(u / g[..., None])
    o = torch.stack(outputs, dim=1).to(v.dtype) if outputs else torch.empty_like(v)
    return o, state
