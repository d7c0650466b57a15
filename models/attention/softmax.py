"""Softmax attention with rotary embeddings, as in Pythia: `softmax(q·k / √D) v` through PyTorch's SDPA.

LitGPT's `CausalSelfAttention` bit for bit in fp32 (tested), with one concatenation where it has four.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lingpt.common.errors import UserError
from lingpt.models.attention.base import QKVAttention


def apply_rope(x_BNHD: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor) -> torch.Tensor:
    """LitGPT's `apply_rope` on the leading R dimensions. It computes in the tables' dtype, kernels in x's."""
    half = cos_NR.shape[-1] // 2
    cos, sin = cos_NR[:, None, :half], sin_NR[:, None, :half]  # both halves of the tables are the same
    x1, x2, rest = x_BNHD.split((half, half, x_BNHD.shape[-1] - 2 * half), dim=-1)
    return torch.cat(((x1 * cos - x2 * sin).to(x1.dtype), (x2 * cos + x1 * sin).to(x1.dtype), rest), dim=-1)


@dataclass
class KVCache:
    """Keys and values `[B, H, max_seq_len, D]`; the first `length` positions are filled."""

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0

    def append(self, k_BHND: torch.Tensor, v_BHND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds N tokens and returns all keys and values so far, in the dtype of those given."""
        start, self.length = self.length, self.length + k_BHND.shape[2]
        if self.length > self.k.shape[2]:
            raise UserError(
                f"decoding {self.length} tokens with a cache of {self.k.shape[2]}: raise max_seq_len"
            )
        self.k[:, :, start : self.length] = k_BHND
        self.v[:, :, start : self.length] = v_BHND
        return self.k[:, :, : self.length].to(k_BHND.dtype), self.v[:, :, : self.length].to(v_BHND.dtype)


class SoftmaxAttention(QKVAttention):
    """LitGPT's parameters and keys; FlashAttention-2 where SDPA has it."""

    hf_exportable = True

    def forward(
        self, x_BNC: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, state: KVCache | None = None
    ) -> torch.Tensor:
        B, N, C = x_BNC.shape
        H, D = self.config.n_head, self.config.head_size
        qk, v = self.packed_qkv(x_BNC).view(B, N, 3 * H, D).split((2 * H, H), dim=2)
        q, k = apply_rope(qk, cos_NR, sin_NR).split(H, dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # views [B, H, N, D], SDPA's order
        mask = None
        if state is not None:
            k, v = state.append(k, v)
            if 1 < N < k.shape[2]:  # SDPA's own causal mask starts at the first key, not at the first new one
                mask = torch.ones(N, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - N)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=1.0 / math.sqrt(D), is_causal=N > 1 and mask is None
        )
        return self.proj(o.transpose(1, 2).reshape(B, N, C))

    def flops_per_token(self, seq_len: int) -> int:
        return 2 * seq_len * self.config.n_embd  # q·k and p·v, two FLOPs each, over half of the N × N square

    def saved_per_token(self) -> int:
        return 6 * self.config.n_embd  # qkv (v is a view of it), rotated q and k, o

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        shape = (batch_size, self.config.n_head, max_seq_len, self.config.head_size)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        return KVCache(k, v)
