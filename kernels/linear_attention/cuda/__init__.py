"""Linear attention on tensor cores, compiled on the user's machine: the backend that backends.py chooses."""

from lingpt.kernels.linear_attention.cuda.backend import (
    backward,
    device_unsupported_reason,
    forward,
    unsupported_reason,
)

__all__ = ["backward", "device_unsupported_reason", "forward", "unsupported_reason"]
