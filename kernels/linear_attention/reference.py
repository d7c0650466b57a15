"""Linear attention by its definition: quadratic in the length, the oracle for the other forms."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, LinearAttentionState
from lingpt.kernels.numerics import LOG_ZERO, NORM_EPS, per_head, state_dtype, true_fp32


def forward(call: Call) -> tuple[Tensor, LinearAttentionState]:
    """o_i = Σ_j w_ij v_j / Σ_j w_ij with w_ij = (a + b q̂_i·k̂_j) exp(G_i − G_j) over j ≤ i (all j if not
    causal), G the cumulative sum of the log decays; without the normaliser o_i = Σ_j w_ij v_j. Returns o and
    the final state.

    Any dtype and device, differentiable by autograd; fp32 inside (float64 for float64 inputs), the backward
    pass too where autocast does not include it. Memory O(N²).
    """
    with true_fp32(call.device):
        dtype, (B, N, H, _) = state_dtype(call.dtype), call.shape
        q, k, v = call.views
        tokens = call.rotated(q), call.rotated(k), v.to(dtype)
        q_hat, k_hat, values = (x.transpose(1, 2) for x in tokens)  # [B, H, N, D]
        if call.normalize_qk:
            q_hat, k_hat = unit_rows(q_hat), unit_rows(k_hat)
        a, b = (per_head(x, ndim=4, dim=1, dtype=dtype) for x in (call.constant, call.coefficient))
        G, total = _running_log_decay(call)

        # The weight of token j in row i.
        w = a + b * (q_hat @ k_hat.mT)  # [B, H, N, N]
        if call.causal:
            causal = torch.ones(N, N, dtype=torch.bool, device=call.device).tril()
            w = w * (G - G.mT).masked_fill(~causal, float("-inf")).exp().to(dtype)
            w = w.masked_fill(~causal, 0.0)  # selected: 0 · NaN would bring a later key's NaN here
        o, g = w @ values, w.sum(-1, keepdim=True)

        # The initial state has weight exp(G_i) in row i.
        from_start = G.exp().to(dtype)
        if call.initial_state is not None:
            S, z, c, n = call.initial_state
            o = o + from_start * (a * c[:, :, None] + b * (q_hat @ S))
            g = g + from_start * (n[:, :, None, None] + b * (q_hat @ z[..., None]))

        if call.normalize:
            o = o / g

        # The final sums: token j has weight exp(G_N − G_j), the initial state exp(G_N).
        to_end = (total - G).exp().to(dtype)
        state = LinearAttentionState(
            S=(to_end * k_hat).mT @ values,
            z=(to_end * k_hat).sum(2),
            c=(to_end * values).sum(2),
            n=to_end.sum((2, 3)).expand(B, H).clone(),
        )
        if call.initial_state is not None:
            whole = total.exp().to(dtype).flatten(1)  # [B or 1, H]
            state = LinearAttentionState(
                *(
                    x + whole.view(*whole.shape, *[1] * (x.ndim - 2)) * old
                    for x, old in zip(state, call.initial_state, strict=True)
                )
            )
        if not call.normalize:
            state = state.without_normaliser()
        return o.transpose(1, 2).to(call.dtype).contiguous(), state


def unit_rows(x: Tensor) -> Tensor:
    """x/√(‖x‖² + NORM_EPS) over the last dimension, twice differentiable at a row of zeros as well."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _running_log_decay(call: Call) -> tuple[Tensor, Tensor]:
    """The cumulative log decays G_i, [B or 1, H, N, 1], and G_N, [B or 1, H, 1, 1]; in float64, as only their
    differences are used."""
    _, N, H, _ = call.shape
    if call.token_log_decay is not None:
        steps = call.token_log_decay.double().clamp(min=LOG_ZERO[torch.float64]).transpose(1, 2)
    elif call.head_log_decay is not None:
        steps = call.head_log_decay.double()[None, :, None].expand(1, H, N)
    else:
        steps = torch.zeros(1, H, N, dtype=torch.float64, device=call.device)
    return steps.cumsum(2).unsqueeze(-1), steps.sum(2)[..., None, None]
