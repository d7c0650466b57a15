"""The CUDA backends of linear attention: kernels compiled on the user's machine."""

from lingpt.kernels.linear_attention.cuda import adapted_backend, backend, fp32_backend, wide_backend
from lingpt.kernels.linear_attention.cuda.backend import device_unsupported_reason

BACKENDS = (backend, adapted_backend, wide_backend, fp32_backend)  # the first that can serve a call is taken

__all__ = ["BACKENDS", "device_unsupported_reason"]
