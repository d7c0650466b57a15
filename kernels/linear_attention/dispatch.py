"""The one place where a backend is called: the CUDA kernel where it can run, else the chunkwise form.

The CUDA kernel is `lingpt.kernels.linear_attention.cuda`, imported when a CUDA tensor first arrives. Its interface:

    is_supported(dtype, head_dim, device) -> str | None                 None, or the reason why not
    forward(q, k, v, b, log_decay, cos, sin, initial_state, normalize_qk, return_state)
        -> o [B, N, H, D] in q's dtype, stats [3, B, H, N] fp32, LinearAttentionState or None
    backward(q, k, v, b, log_decay, cos, sin, o, stats, initial_state, do, dstate, normalize_qk, out)
        -> db [H] fp32, dinitial_state; each None where b is a number, where there is no initial state.
        dq, dk and dv are written into out = (dq, dk, dv).

q, k, v, out   [B, N, H, D], any strides but 1 for the last dimension: views of one packed qkv, it may be
b              a number, or fp32 [H]; with normalize_qk the coefficient in use is b·B_SHRINK (common.py)
log_decay      fp32 [H], or None
cos, sin       [N, R], any floating-point dtype and strides; None for no rotation
initial_state  LinearAttentionState of contiguous fp32 tensors, or None
return_state   whether the state after the last token is wanted
do, dstate     gradients of o and of the final state (None where it has none), contiguous
o, stats       what forward returned; stats are g = Σ w, 1/‖q‖ and 1/‖k‖ (no meaning in the norms without
               normalize_qk). So the backward pass of either backend can follow the forward pass of the other
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import chunkwise
from lingpt.kernels.linear_attention.common import LinearAttentionState


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: float | Tensor,
    log_decay: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    initial_state: LinearAttentionState | None,
    normalize_qk: bool,
    causal: bool,
    return_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor, LinearAttentionState | None]:
    """o, stats and, with `return_state`, the state after the last token."""
    inputs = (q, k, v, b, log_decay, cos, sin)
    if runs_on_cuda(q, k, v, cos, causal, backend):
        return cuda().forward(*inputs, _contiguous(initial_state), normalize_qk, return_state)
    return chunkwise.forward(*inputs, initial_state, normalize_qk, causal)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: float | Tensor,
    log_decay: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    o: Tensor,
    stats: Tensor,
    initial_state: LinearAttentionState | None,
    do: Tensor,
    dstate: LinearAttentionState | None,
    normalize_qk: bool,
    causal: bool,
    out: tuple[Tensor, Tensor, Tensor],
    backend: str,
) -> tuple[Tensor | None, LinearAttentionState | None]:
    """Writes dq, dk and dv into `out`; returns db and the gradient of the initial state."""
    inputs = (q, k, v, b, log_decay, cos, sin, o, stats)
    if runs_on_cuda(q, k, v, cos, causal, backend):
        gradients = do.contiguous(), _contiguous(dstate)
        return cuda().backward(*inputs, _contiguous(initial_state), *gradients, normalize_qk, out)
    return chunkwise.backward(*inputs, initial_state, do, dstate, normalize_qk, causal, out)


def _contiguous(state: LinearAttentionState | None) -> LinearAttentionState | None:
    return None if state is None else LinearAttentionState(*(x.contiguous() for x in state))


def runs_on_cuda(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, causal: bool, backend: str) -> bool:
    """Whether the CUDA kernel runs, for the backends "cuda", "chunkwise" and "auto".

    Decided inside the operators, where torch.compile does not look. Raises UserError where "cuda" cannot
    be had; "auto" says so once, except for dtypes that nobody expects on tensor cores.
    """
    if backend == "chunkwise" or (backend == "auto" and not q.is_cuda):
        return False
    B, _, H, D = q.shape
    reason = why_no_kernel(q.dtype, D, q.device)
    if reason is None and not causal:
        reason = "it is causal only"
    if reason is None and not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        reason = "the last dimension of q, k and v must be contiguous"
    if reason is None and B * H > 65535:
        reason = "batch size × heads is above 65,535"
    if reason is None and cos is not None and cos.shape[1] % 16:
        reason = f"it rotates a multiple of 16 dimensions, not {cos.shape[1]}"
    if reason is not None and backend == "cuda":
        raise UserError(f"backend='cuda' cannot run this: {reason}")
    if reason is not None and q.dtype in (torch.bfloat16, torch.float16):
        warn_once(reason)
    return reason is None and q.numel() > 0  # the chunkwise form knows what nothing gives


@functools.cache
def why_no_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    is_supported = getattr(cuda(), "is_supported", None)
    return "the CUDA kernel is not built" if is_supported is None else is_supported(dtype, head_dim, device)


@functools.cache
def cuda() -> ModuleType:
    return importlib.import_module("lingpt.kernels.linear_attention.cuda")


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(f"linear_attention runs on the slower chunkwise backend: {reason}", stacklevel=2)
