"""The CUDA backend in fp32, an `operator.Backend`: on tf32.cu, or for a head_dim that it does not have on
recurrence.cu.

On the rows of chunkwise.py a call is S'ᵢ = γᵢ S'ᵢ₋₁ + k'ᵢ v'ᵢᵀ, uᵢ = S'ᵢᵀ q'ᵢ. The three sums of the backward
pass are the same recurrence with the rows in other places: dq' from the first token to the last, dk' and dv'
from the last to the first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.call import Call, Exchange, InputGradients, OutputGradients, Outputs
from lingpt.kernels.linear_attention.chunkwise import Rows, pack, per_token, unpack
from lingpt.kernels.linear_attention.cuda import recurrence, tf32, tf32_passes
from lingpt.kernels.linear_attention.cuda.launch import current_device
from lingpt.kernels.numerics import LOG_ZERO, decay_gradient, to_tokens, true_fp32

FALLBACK = "in fp32, several times slower (docs/kernel.md)"


def unsupported_reason(call: Call) -> str | None:
    """Why the kernel cannot serve this call, in words for a user; None if it can."""
    D = call.shape[3]
    if not call.causal:
        return "it is causal only"
    if D >= recurrence.MOST_CHANNELS:  # the normaliser is one more
        return f"it takes a head_dim below {recurrence.MOST_CHANNELS}, not {D}"
    return recurrence.unsupported_reason(call.views[0], D)


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`; runs twice for an exchange."""
    if exchange is not None:
        own = forward(call._replace(return_state=True)).state
        assert own is not None
        call = call._replace(**exchange(own)._asdict())
    if tf32.takes(call.shape[3]):
        with current_device(call.device):
            return tf32_passes.forward(call)
    with torch.no_grad(), true_fp32(call.device):
        rows = Rows.of(call, call.shape[1])
        U, final = _sums(call, rows.Q, rows.K, rows.V, pack(call.initial_state, call))
        return rows.outputs(call, to_tokens(U, call.shape[1]), final)


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`; runs twice for an exchange."""
    if exchange is not None:
        own = backward(call, saved, gradients, out).initial_state
        assert own is not None
        gradients = gradients._replace(state=exchange(own))
    if tf32.takes(call.shape[3]):
        with current_device(call.device):
            return tf32_passes.backward(call, saved, gradients, out)
    (o, stats, final), (do, dstate) = saved, gradients
    with torch.no_grad(), true_fp32(call.device):
        rows = Rows.of(call, call.shape[1], stats)
        (Q, K, V, *_), do = rows, do.float()
        initial, dfinal = pack(call.initial_state, call), pack(dstate, call)
        if call.normalize and o.dtype != do.dtype:  # as in the chunkwise form
            U, _ = _sums(call, Q, K, V, initial)
            o = to_tokens(U, call.shape[1])[..., :-1] / per_token(stats)[0]
        G = rows.output_gradient(call, do, o)
        dQ, _ = _sums(call, G, V, K, initial.mT)
        dK, _ = _sums(call, V, G, Q, dfinal.mT, reverse=True)
        dV, dinitial = _sums(call, K, Q, G, dfinal, reverse=True)
        d_token_log_decay = None
        if call.token_log_decay is not None:
            dG = torch.linalg.vecdot(Q, dQ) - torch.linalg.vecdot(K, dK)
            at_end = (pack(final, call) * dfinal).sum((-2, -1))
            d_token_log_decay = decay_gradient(dG.squeeze(2).mT, at_end, call.token_log_decay)
            is_zero = call.token_log_decay <= LOG_ZERO[torch.float32]
            d_token_log_decay = d_token_log_decay.masked_fill(is_zero, 0.0).contiguous()
        da, db = rows.input_gradients(call, dQ, dK, dV, out)
        return InputGradients(da, db, d_token_log_decay, None if call.S is None else unpack(dinitial))


def _sums(
    call: Call, q: Tensor, k: Tensor, v: Tensor, state: Tensor, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Σ_{j≤i} γ_{j+1} ⋯ γ_i (q_i·k_j) v_j, and the state after the last token; in reverse the sum is over
    i ≤ j, and the state, before the first token, is decayed by it. Rows and sums: [B, H, 1, N, ·]."""
    B, N, H, _ = call.shape
    if call.token_log_decay is not None:
        decay = call.token_log_decay.unsqueeze(-1)
    elif call.head_log_decay is not None:
        decay = call.head_log_decay.view(1, 1, H, 1).expand(B, N, H, 1)
    else:
        decay = state.new_zeros(()).expand(B, N, H, 1)
    first = decay[:, 0, :, :, None]
    if reverse:  # what comes to a token from the one after it is decayed by that one's γ
        decay = F.pad(decay[:, 1:], (0, 0, 0, 0, 0, 1))
    q, k, v = (to_tokens(x, N) for x in (q, k, v))
    none = decay.new_zeros(()).expand(B, N, H, 1)
    y, final = recurrence.forward(q, k, v, decay, none, state, reverse=reverse)
    return y.transpose(1, 2).unsqueeze(2), first.exp() * final if reverse else final
