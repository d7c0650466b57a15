"""The kernels with a decay for each channel (linear_attention/cuda/channel_decay.py) as operators of PyTorch.

    lingpt::gated_linear_attention_cuda_fwd, lingpt::gated_linear_attention_cuda_bwd

gated_linear_attention.py and unified_linear_attention.py call `attend`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.checks import refuse_forward_mode
from lingpt.kernels.custom_op import LIBRARY, define, filled
from lingpt.kernels.linear_attention.cuda import channel_decay

CHUNK = 64  # tokens of a chunk of the PyTorch forms, by which FLOPs are counted for the kernels, too


def unsupported_reason(q: Tensor, Dv: int) -> str | None:
    """Why `attend` cannot run here with such q and v [B, N, H, Dv], in words for a user; None if it can."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}"
    return channel_decay.unsupported_reason(q, *(d + -d % channel_decay.WIDTH for d in (q.shape[-1], Dv)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, final state), once differentiable; arguments as in `gated_linear_attention`. Channels that the
    kernels do not have are zeros."""
    message = "a decay of each channel has no forward mode here; backend='reference' has"
    refuse_forward_mode(message, q, k, v, log_decay, initial_state)
    if scale == 0:  # they divide the final state's gradient by it
        q, scale = 0 * q, 1.0
    Dk, Dv = q.shape[-1], v.shape[-1]
    keys, values = (-d % channel_decay.WIDTH for d in (Dk, Dv))
    if keys or values:
        q, k, log_decay = (F.pad(x, (0, keys)) for x in (q, k, log_decay))
        v = F.pad(v, (0, values))
        if initial_state is not None:
            initial_state = F.pad(initial_state, (0, values, 0, keys))
    o, state, _ = _forward_op(q, k, v, log_decay, initial_state, scale)
    return (o[..., :Dv], state[..., :Dk, :Dv]) if keys or values else (o, state)


def gated_linear_attention_flops(B: int, N: int, H: int, Dk: int, Dv: int) -> int:
    """FLOPs of the forward pass: the matrix products of the chunkwise form, of causal ones the causal half.

    Per token and head 4·Dk·Dv across chunks (q·S, and k vᵀ into S), and 2·C·(Dk + Dv) / 2 within chunks of
    C = 64 tokens. The gates' element-wise work is not counted. The backward pass counts twice that.
    """
    return B * N * H * (4 * Dk * Dv + min(N, CHUNK) * (Dk + Dv))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state, and for the backward pass the states between segments."""
    return channel_decay.forward(q, k, v, log_decay, state, scale)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, scale: float,
    final: Tensor, between: Tensor, do: Tensor | None, dfinal: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, v, log_decay and the initial state."""
    do = torch.zeros_like(v) if do is None else do
    found = channel_decay.backward(q, k, v, log_decay, state, final, between, scale, do, dfinal)
    return filled((*found, None)[:5])


def _fake_forward(q, k, v, log_decay, state, scale):
    B, _, H, Dk = q.shape
    Dv, segments = v.shape[-1], channel_decay.segmentation(q, v.shape[-1])[0]
    states = (q.new_empty(B, H, *n, Dk, Dv, dtype=torch.float32) for n in ((), (segments - 1,)))
    return (v.new_empty(v.shape), *states)


def _fake_backward(q, k, v, log_decay, state, *_):
    return filled(None if x is None else x.new_empty(x.shape) for x in (q, k, v, log_decay, state))


def forward_flops(q: tuple, k: tuple, v: tuple, *_: Any, **__: Any) -> int:
    """`gated_linear_attention_flops` from the shapes of an operator's arguments."""
    B, N, H, Dk = q
    return gated_linear_attention_flops(B, N, H, Dk, v[-1])


def backward_flops(q: tuple, k: tuple, v: tuple, *_: Any, **__: Any) -> int:
    return 2 * forward_flops(q, k, v)


_ARGUMENTS = [*(f"Tensor {name}" for name in ("q", "k", "v", "log_decay")), "Tensor? state", "float scale"]
_SAVED = ["Tensor final", "Tensor between"]
_forward_op = define("gated_linear_attention_cuda_fwd", _ARGUMENTS, 3, _forward, _fake_forward, forward_flops)
_backward_op = define(
    "gated_linear_attention_cuda_bwd",
    [*_ARGUMENTS, *_SAVED, "Tensor? do", "Tensor? dfinal"],
    5,
    _backward,
    _fake_backward,
    backward_flops,
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *inputs, final, between = ctx.saved_tensors
    *gradients, dstate = _backward_op(*inputs, ctx.scale, final, between, do, dfinal)
    return *gradients, None if inputs[4] is None else dstate, None


torch.library.register_autograd(_forward_op.name(), _differentiate, setup_context=_save, lib=LIBRARY)
