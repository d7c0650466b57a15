"""The forms of linear attention, o_i = Σ_{j≤i} (q_i·k_j) v_j, in plain PyTorch: "Linear Transformers Are
Faster After All" (Buckman and Gelada 2024), sections 1 to 3.

They compute the same and differ in what they compute at a time: weights, N² of them; states, one after
another or all N; or both, by chunks. x: q, k and v, `[B, N, H, D]`; returns o. States are summed in fp32 at
least.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lingpt.bench.kernels.inputs import Inputs
from lingpt.kernels.numerics import state_dtype

BLOCK = 512  # queries whose weights exist at a time


def quadratic(x: Inputs) -> Tensor:
    """All weights at once."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return ((q @ k.mT).tril() @ v).transpose(1, 2)


def quadratic_in_blocks(x: Inputs) -> Tensor:
    """Some rows of the weights at a time, recomputed in the backward pass, as FlashAttention does."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).tril(k.shape[2] - q.shape[2]) @ v

    ends = [min(start + BLOCK, q.shape[2]) for start in range(0, q.shape[2], BLOCK)]
    blocks = zip(q.split(BLOCK, 2), ends, strict=True)
    o = [checkpoint(rows, q, k[:, :, :end], v[:, :, :end], use_reentrant=False) for q, end in blocks]
    return torch.cat(o, 2).transpose(1, 2)


def recurrent(x: Inputs) -> Tensor:
    """One state after another."""
    q, k, v = x["q"], x["k"], x["v"]
    # Not 0-dimensional: fp32 without dimensions plus bf16 is bf16.
    S, o = q.new_zeros(1, 1, 1, 1, dtype=state_dtype(q.dtype)), []
    for q_i, k_i, v_i in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        S = S + k_i.unsqueeze(-1) * v_i.unsqueeze(-2)
        o.append((q_i.to(S.dtype).unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(o, 1).to(q.dtype)


def all_states(x: Inputs) -> Tensor:
    """The states of all tokens, by a cumulative sum of N·D² numbers a head."""
    q, k, v = x["q"], x["k"], x["v"]
    # With `cumsum(dtype=…)` the gradient would be summed in the input's dtype on a GPU.
    S = (k.unsqueeze(-1) * v.unsqueeze(-2)).to(state_dtype(q.dtype)).cumsum(1)
    return (q.to(S.dtype).unsqueeze(-2) @ S).squeeze(-2).to(q.dtype)


def chunked(x: Inputs, chunk: int) -> Tensor:
    """The state before each chunk of tokens, and within it weights. `chunk` must divide N."""
    q, k, v = (x[name].transpose(1, 2).unflatten(2, (-1, chunk)) for name in "qkv")  # [B, H, chunks, C, D]
    own = (k.mT @ v).to(state_dtype(q.dtype))
    before = (own.cumsum(2) - own).to(q.dtype)
    return (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3).transpose(1, 2)
