"""The oracle of each baseline: its function, computed in the dtype of its inputs (float64)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, pad

from lingpt.bench.kernels.inputs import Inputs
from lingpt.kernels.gated_linear_attention import gated_linear_attention

CHUNK = 64


def linear(x: Inputs) -> Tensor:
    """Linear attention without normaliser: the gated form, with gates of 1 or a decay per head or token."""
    q, k, v = x["q"], x["k"], x["v"]
    decay = x.get("log_decay", torch.zeros_like(q[..., 0]))  # [H] or [B, N, H]
    return _gated(q, k, v, decay[..., None].expand_as(q), scale=1.0)


def normalised(x: Inputs) -> Tensor:
    return linear(x) / (x["q"] * x["k"].cumsum(1)).sum(-1, keepdim=True)


def augmented(x: Inputs) -> Tensor:
    """Spec. Dec. LA: o_i = Σ_{j≤i} (q̂_i·k̂_j) v_j + Σ_{t<T} w_t v_{i−t}, w_t = kernel_{T−1−t} of the head."""
    v, w = x["v"], x["kernel"].flip(1).unsqueeze(-1)  # [B, T, H, 1]
    o = linear(x | {n: normalize(x[n], dim=-1) for n in "qk"})
    for t in range(min(w.shape[1], v.shape[1])):
        o = o + pad(w[:, t, None] * v[:, : v.shape[1] - t], (0, 0, 0, 0, t, 0))
    return o


def mamba2(x: Inputs) -> Tensor:
    """SSD as Mamba-2 discretises it: h_t = exp(dt A) h_{t−1} + dt B xᵀ, y_t = h_tᵀ C; C, B, x = q, k, v."""
    return linear(x | {"log_decay": x["dt"] * x["A"], "v": x["v"] * x["dt"][..., None]})


def mlstm(x: Inputs) -> Tensor:
    """mLSTM with sigmoid input gates, not normalised: C_t = σ(f) C_{t−1} + σ(i) k vᵀ, h_t = C_tᵀ q / √D."""
    v = x["v"] * torch.sigmoid(x["i"])[..., None]
    return linear(x | {"log_decay": logsigmoid(x["f"]), "v": v}) * x["q"].shape[-1] ** -0.5


def delta_rule(x: Inputs) -> Tensor:
    """Gated DeltaNet, arXiv 2412.06464: S_t = γ S_{t−1} + β k (v − γ S_{t−1}ᵀ k)ᵀ, o_t = S_tᵀ q / √D.

    Computed by chunks: the tokens' updates u_t = β (v − γ S_{t−1}ᵀ k) solve (I + A) U = β (V − e^G K S),
    where A_tj = β_t exp(G_t − G_j) k_t·k_j for j < t and S is the state before the chunk.
    """
    scale, outputs = x["q"].shape[-1] ** -0.5, []
    S = torch.zeros_like(x["k"][:, 0, :, :, None] * x["v"][:, 0, :, None])  # [B, H, D, D]
    for piece in zip(*(x[n].split(CHUNK, 1) for n in ("q", "k", "v", "log_decay", "beta")), strict=True):
        q, k, v, g, beta = (t.transpose(1, 2) for t in piece)  # [B, H, C, D] and [B, H, C]
        G, beta = g.cumsum(-1)[..., None], beta[..., None]
        fade = (G - G.mT).tril().exp().tril()
        A = (beta * fade * (k @ k.mT)).tril(-1)
        rest = beta * (v - G.exp() * (k @ S))
        u = torch.linalg.solve_triangular(A, rest, upper=False, unitriangular=True)
        outputs.append(scale * (G.exp() * (q @ S) + (fade * (q @ k.mT)) @ u))
        S = G[:, :, -1:].exp() * S + ((G[:, :, -1:] - G).exp() * k).mT @ u
    return torch.cat(outputs, 2).transpose(1, 2)


def gated(x: Inputs) -> Tensor:
    return _gated(x["q"], x["k"], x["v"], x["g"])


def softmax(x: Inputs) -> Tensor:
    """Causal softmax attention; if q has fewer rows than k, they are the last ones."""
    q, k, v = (x[n].transpose(1, 2) for n in "qkv")
    rows, N = q.shape[2], k.shape[2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.ones(rows, N, device=q.device, dtype=torch.bool).tril(N - rows)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def _gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: float | None = None) -> Tensor:
    return gated_linear_attention(q, k, v, gate, scale=scale, backend="chunkwise")
