"""Linear attention with the kernel f(x) = 1 + b·x: the operator and its backends.

from lingpt import linear_attention
o = linear_attention(q, k, v)        # [B, N, H, D] each
"""

from lingpt.kernels.linear_attention.interface import linear_attention, linear_attention_qkv
from lingpt.kernels.linear_attention.registration import linear_attention_flops
from lingpt.kernels.linear_attention.state import LinearAttentionState

__all__ = [
    "LinearAttentionState",
    "linear_attention",
    "linear_attention_flops",
    "linear_attention_qkv",
]
