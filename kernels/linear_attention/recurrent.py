"""Linear attention one token at a time: the form for decoding, with constant memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.kernels.linear_attention import reference
from lingpt.kernels.linear_attention.call import Call, LinearAttentionState
from lingpt.kernels.linear_attention.reference import unit_rows
from lingpt.kernels.numerics import per_head, state_dtype


def forward(call: Call) -> tuple[Tensor, LinearAttentionState]:
    """S ← γS + k̂vᵀ, likewise z, c and n; then o = (c + b Sᵀq̂) / (n + b z·q̂), and without the normaliser
    o = a c + b Sᵀq̂. Returns o and the final state.

    Differentiable by autograd, which keeps one state per token, but meant for inference. Written as
    elementwise products and sums, whose precision autocast and TF32 do not reduce; a matrix-vector product is
    memory-bound anyway.
    """
    dtype, (B, N, H, D) = state_dtype(call.dtype), call.shape
    if N == 0:
        return reference.forward(call)
    q, k, v = call.views
    q_hat, k_hat, values = call.rotated(q), call.rotated(k), v.to(dtype)
    if call.normalize_qk:
        q_hat, k_hat = unit_rows(q_hat), unit_rows(k_hat)
    q_hat = per_head(call.coefficient, ndim=4, dim=2, dtype=dtype) * q_hat
    a = per_head(call.constant, ndim=3, dim=1, dtype=dtype)

    state = call.initial_state or LinearAttentionState.zeros(B, H, D, device=call.device, dtype=dtype)
    if not call.normalize:
        state = state.without_normaliser()
    fade = None if call.head_log_decay is None else call.head_log_decay.exp()  # [H]
    decays = None if call.token_log_decay is None else call.token_log_decay.exp()  # [B, N, H]
    outputs = []
    for t in range(N):
        if fade is not None:
            state = LinearAttentionState(*(per_head(fade, x.ndim, 1, dtype) * x for x in state))
        if decays is not None:
            state = LinearAttentionState(*(decays[:, t].view(B, H, *[1] * (x.ndim - 2)) * x for x in state))
        S, z, c, n = state
        k_t, v_t, q_t = k_hat[:, t], values[:, t], q_hat[:, t]  # [B, H, D]
        S, c = S + k_t[..., None] * v_t[:, :, None], c + v_t
        u = a * c + (q_t[..., None] * S).sum(-2)
        if call.normalize:
            z, n = z + k_t, n + 1
            u = u / (n + (q_t * z).sum(-1))[..., None]
        state = LinearAttentionState(S, z, c, n)
        outputs.append(u)
    return torch.stack(outputs, dim=1).to(call.dtype), state
