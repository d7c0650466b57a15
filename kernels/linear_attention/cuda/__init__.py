"""Linear attention on tensor cores: scan.cu, compiled on the user's machine; what dispatch.py calls."""

import torch

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention.cuda.launch import HEAD_DIMS, TAGS, backward, forward

__all__ = ["backward", "forward", "is_supported"]


def is_supported(dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """None where the kernel runs, else the reason why not, to be read by a user."""
    if dtype not in TAGS:
        return f"it takes bf16 and fp16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {' or '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere card (compute capability 8.0) or a newer one"
    try:
        from lingpt.kernels.linear_attention.cuda.compile import compiler_version

        compiler_version()
    except UserError as error:
        return str(error)
    return None
