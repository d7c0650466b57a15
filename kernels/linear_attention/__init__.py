"""Linear attention with the kernel f(x) = 1 + b·x: the operator and its backends.

from lingpt import linear_attention
o = linear_attention(q, k, v)        # [B, N, H, D] each
"""

from lingpt.kernels.linear_attention.call import LinearAttentionState
from lingpt.kernels.linear_attention.interface import (
    linear_attention,
    linear_attention_qkv,
    linear_attention_qkv_with_state,
    linear_attention_with_state,
)
from lingpt.kernels.linear_attention.operator import linear_attention_flops

__all__ = [
    "LinearAttentionState",
    "linear_attention",
    "linear_attention_flops",
    "linear_attention_qkv",
    "linear_attention_qkv_with_state",
    "linear_attention_with_state",
]
