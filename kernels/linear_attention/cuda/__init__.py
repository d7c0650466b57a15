"""Linear attention on tensor cores, compiled on the user's machine: the backend that backends.py chooses."""

from lingpt.kernels.linear_attention.cuda.backend import backward, forward, why_not, why_unsupported

__all__ = ["backward", "forward", "why_not", "why_unsupported"]
