"""LinGPT's operators: linear attention with the kernel 1 + b·x, and gated linear attention for comparison.

from lingpt.kernels import linear_attention
o = linear_attention(q, k, v)        # [B, N, H, D] each
"""

from lingpt.kernels.errors import KernelError
from lingpt.kernels.gated import gated_linear_attention, gated_linear_attention_flops
from lingpt.kernels.linear.common import LinearAttentionState
from lingpt.kernels.linear.library import linear_attention_flops
from lingpt.kernels.linear.op import linear_attention, linear_attention_qkv

__all__ = [
    "KernelError",
    "LinearAttentionState",
    "gated_linear_attention",
    "gated_linear_attention_flops",
    "linear_attention",
    "linear_attention_flops",
    "linear_attention_qkv",
]
