"""Chooses the backend of a call: the CUDA kernel if it can serve it, else the chunkwise form in plain
PyTorch.

The choice is made inside the operator, which torch.compile does not trace. The other two forms, reference and
recurrent, are differentiated by autograd and are called by interface.py.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Protocol

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import chunkwise
from lingpt.kernels.linear_attention.call import Call, OptionGradients
from lingpt.kernels.linear_attention.state import LinearAttentionState


class Backend(Protocol):
    """A module that computes both passes of a call.

    stats [3, B, H, N], fp32 (float64): the normaliser g = Σ w, 1/‖q‖ and 1/‖k‖ (g is meaningless without
    `normalize`, the norms are without `normalize_qk`). Backward needs only these, o and the final state, so
    one backend's backward pass can follow the forward pass of another.
    """

    def unsupported_reason(self, call: Call) -> str | None:
        """Why the backend cannot serve this call, in words for a user; None if it can."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor, LinearAttentionState | None]:
        """o [B, N, H, D] in the inputs' dtype, stats, and the final state if `call.return_state`."""

    def backward(
        self,
        call: Call,
        o: Tensor,
        stats: Tensor,
        do: Tensor,
        final: LinearAttentionState | None,
        dstate: LinearAttentionState | None,
        out: tuple[Tensor, ...],
    ) -> OptionGradients:
        """Writes dq, dk and dv into `out`, whose last dimension is contiguous; returns the other gradients.

        final: the final state, as forward returned it. do, dstate: the gradients of o and of that state (None
        if it has none).
        """


def choose(call: Call) -> Backend:
    """The backend for `call.backend` "cuda", "chunkwise" or "auto".

    Raises UserError if "cuda" cannot serve the call. "auto" falls back to chunkwise and warns once per
    reason, but not about fp32/fp64 inputs outside CUDA autocast, which the kernel never takes.
    """
    if call.backend == "chunkwise" or (call.backend == "auto" and call.device.type != "cuda"):
        return chunkwise
    reason = _cuda_unsupported_reason(call)
    if reason is not None and call.backend == "cuda":
        raise UserError(f"backend='cuda' cannot run this: {reason}")
    expected = call.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    if reason is not None and expected:
        warn_once(reason)
    empty = call.inputs[0].numel() == 0  # the chunkwise form handles empty inputs
    return chunkwise if reason is not None or empty else cuda()


def _cuda_unsupported_reason(call: Call) -> str | None:
    return (
        cuda().unsupported_reason(call)
        if call.device.type == "cuda"
        else f"the tensors are on {call.device.type}"
    )


@functools.cache
def cuda() -> Backend:
    """The CUDA backend, imported when a CUDA tensor first arrives."""
    return importlib.import_module("lingpt.kernels.linear_attention.cuda")


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(f"linear_attention runs on the slower chunkwise backend: {reason}", stacklevel=2)
