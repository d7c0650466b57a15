"""The CUDA backend of linear attention: tensor-core kernels, compiled on the user's machine."""

from lingpt.kernels.linear_attention.cuda.backend import (
    backward,
    device_unsupported_reason,
    forward,
    unsupported_reason,
)

__all__ = ["backward", "device_unsupported_reason", "forward", "unsupported_reason"]
