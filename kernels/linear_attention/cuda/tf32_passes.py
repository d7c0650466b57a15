"""The passes of linear attention on the sums of tf32.py; fp32_backend.py says which calls they serve.

The rows of chunkwise.py are never stored: the kernels read q, k, v and do, with a factor per token, and the
additional column as a number per token. The three sums of the backward pass share two passes for states,
Σ k'v'ᵀ from the first token on and Σ q'h'ᵀ from the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
)
from lingpt.kernels.linear_attention.chunkwise import pack, unpack
from lingpt.kernels.linear_attention.cuda.tf32 import ONE, ZERO, Operand, PerToken, Sums, fits, fitting
from lingpt.kernels.numerics import LOG_ZERO, decay_gradient, per_head, rotate, rotate_backward


class _Inputs(NamedTuple):
    """q' = [b q̂, a], k' = [k̂, 1] and v' = [v, 1], without the normaliser v' = v."""

    q: Operand
    k: Operand
    v: Operand
    stats: Tensor  # as in Outputs; g is not yet known if they were made here

    @classmethod
    def of(cls, call: Call, sums: Sums, stats: Tensor | None = None) -> _Inputs:
        """`stats`: those of the forward pass."""
        B, N, H, _ = call.shape
        q, k, v = call.views
        if call.cos is not None and call.sin is not None:
            q, k = (rotate(x.float(), call.cos, call.sin) for x in (q, k))
        q, k, v = fitting(q), fitting(k), fitting(v)
        if stats is None:
            filled = call.normalize and call.normalize_qk
            stats = sums.empty(3, B, H, N) if filled else q.new_ones(3, B, H, N)
            for x, norm in ((q, stats[1]), (k, stats[2])) if call.normalize_qk else ():
                sums.rows("norms", {"x": x}, {"dot": norm})
        q_r, k_r = stats[1:].transpose(2, 3)
        a, b = (per_head(x, 3, 2, torch.float32) for x in (call.constant, call.coefficient))
        q_factor = PerToken(q_r * b) if isinstance(b, Tensor) else PerToken(q_r, b)
        a_last = PerToken(a.expand(B, N, H)) if isinstance(a, Tensor) else PerToken(value=a)
        v_last = ONE if call.normalize else ZERO
        operands = Operand(q, q_factor, a_last), Operand(k, PerToken(k_r), ONE), Operand(v, ONE, v_last)
        return cls(*operands, stats)


def forward(call: Call) -> Outputs:
    """As in `operator.Backend`."""
    with torch.no_grad():
        sums = _sums(call)
        rows = _Inputs.of(call, sums)
        final = sums.empty_state() if call.return_state else None
        states = sums.states(call.initial_state, rows.k, rows.v, call.normalize)
        o = _outputs(call, sums, rows, states, final)
        return Outputs(o.to(call.dtype), rows.stats, None if final is None else _unpack(call, final))


def backward(
    call: Call, saved: Outputs, gradients: OutputGradients, out: tuple[Tensor, ...]
) -> InputGradients:
    """As in `operator.Backend`."""
    (o, stats, final), (do, dstate), (dq, dk, dv) = saved, gradients, out
    with torch.no_grad():
        sums, (B, N, H, _) = _sums(call), call.shape
        rows = _Inputs.of(call, sums, stats)
        (q, k, v, _), do = rows, fitting(do)
        states = sums.states(call.initial_state, k, v, call.normalize)
        if call.normalize and o.dtype != do.dtype:  # as in the chunkwise form
            o = _outputs(call, sums, rows._replace(stats=stats.clone()), states, None)
        h = _output_gradient(call, sums, do, o, stats[0])

        decays, starts = call.token_log_decay is not None, call.S is not None
        dQ, dK, dV = (dv if x is dv and fits(dv) else sums.empty(*call.shape) for x in out)
        q_last = sums.empty(B, N, H) if decays or call.a is not None else None
        k_last = sums.empty(B, N, H) if decays else None
        v_last = sums.empty(B, N, H) if starts and call.normalize else None  # for the state alone
        to_start = sums.empty_state() if starts else None
        sums.scan(h, v, k, states, dQ, y_last=q_last, transposed=True)
        after = sums.reversed()
        states = after.states(dstate, q, h, call.normalize)
        after.scan(v, h, q, states, dK, y_last=k_last, transposed=True)
        after.scan(k, q, h, states, dV, y_last=v_last, final=to_start)

        a, b = (per_head(x, 3, 1, torch.float32) for x in (call.constant, call.coefficient))  # for [B, H, N]
        along_q = _input_gradient(call, sums, q.x, dQ, stats[1], stats[1] * b, dq)
        along_k = _input_gradient(call, sums, k.x, dK, stats[2], stats[2], dk)
        if dV is not dv:
            dv.copy_(dV)
        d_token_log_decay = None
        if q_last is not None and k_last is not None:
            dG = along_q * b + a * q_last.mT - along_k - k_last.mT
            d_token_log_decay = _decay_gradient(call, dG.mT, final, dstate)
        da = None if call.a is None or q_last is None else q_last.sum((0, 1))
        db = None if call.b is None else call.shrink_b(along_q.sum((0, 2)))
        if to_start is None:
            return InputGradients(da, db, d_token_log_decay)
        if sums.log_decay is not None:
            to_start *= sums.log_decay[:, 0].clamp(min=LOG_ZERO[torch.float32]).exp()[..., None, None]
        return InputGradients(da, db, d_token_log_decay, _unpack(call, to_start))


def _sums(call: Call) -> Sums:
    decay = call.token_log_decay
    if decay is None and call.head_log_decay is not None:
        decay = call.head_log_decay.expand(call.shape[:3])
    return Sums(call.shape, call.device, decay)


def _unpack(call: Call, state: Tensor) -> LinearAttentionState:
    return unpack(state if call.normalize else state[..., :-1])


def _outputs(call: Call, sums: Sums, rows: _Inputs, states: Tensor, final: Tensor | None) -> Tensor:
    """o in fp32; writes g into rows.stats."""
    o, g = sums.empty(*call.shape), rows.stats[0].mT if call.normalize else None
    q, k, v, _ = rows
    sums.scan(q, k, v, states, o, y_last=g, final=final, divide=call.normalize)
    return o


def _output_gradient(call: Call, sums: Sums, do: Tensor, o: Tensor, g: Tensor) -> Operand:
    """The rows h' = [do/g, −(do·o)/g], without the normaliser do."""
    if not call.normalize:
        return Operand(do)
    inverse, last = torch.empty_like(g), torch.empty_like(g)
    sums.rows("dots", {"x": do, "y": fitting(o)}, {"g": g, "inverse_g": inverse, "dot": last})
    return Operand(do, PerToken(inverse.mT), PerToken(last.mT))


def _decay_gradient(
    call: Call, dG: Tensor, final: LinearAttentionState | None, dstate: LinearAttentionState | None
) -> Tensor | None:
    """The gradient of token_log_decay, from dG = q'·dq' − k'·dk' [B, N, H]."""
    if call.token_log_decay is None:
        return None
    at_end = (pack(final, call) * pack(dstate, call)).sum((-2, -1))
    gradient = decay_gradient(dG, at_end, call.token_log_decay)
    return gradient.masked_fill(call.token_log_decay <= LOG_ZERO[torch.float32], 0.0).contiguous()


def _input_gradient(
    call: Call, sums: Sums, x: Tensor, d: Tensor, norm: Tensor, factor: Tensor, out: Tensor
) -> Tensor:
    """Writes the gradient of x before rotation, given d, that of `factor`/`norm` x̂ with x̂ = `norm` x; returns
    x̂·d [B, H, N]. norm, factor: [B, H, N]."""
    along, rotates = torch.empty_like(norm), call.cos is not None and call.sin is not None
    to = out if not rotates and fits(out) else torch.empty_like(d)
    tensors = {"x": x, "y": d, "out": to}
    per_token = {"norm": norm if call.normalize_qk else None, "factor": factor, "dot": along}
    sums.rows("input_gradient", tensors, per_token)
    if to is not out:
        out.copy_(rotate_backward(to, call.cos, call.sin) if rotates else to)  # type: ignore[arg-type]
    return along
