"""The CUDA backend of heads of 129 to 256 in bf16, an `operator.Backend`: two calls on tensor cores.

With q̂ and k̂ cut into halves s = 0, 1 a weight is a sum of two, and so is what follows from it:

    1 + b q̂ᵢ·k̂ⱼ = ½ Σ_s (1 + 2b q̂ᵢₛ·k̂ⱼₛ),       gᵢ = ½ Σ_s gᵢₛ,       oᵢ = Σ_s Σ_j (1 + 2b q̂ᵢₛ·k̂ⱼₛ) vⱼ / 2gᵢ

A call has one half of q̂ and k̂ and both of v, as [H, 2] heads of half the width, and gives the sums over j,
not divided, and gᵢₛ. With 2g and the divided o in the backward pass, the gradients of both add up. Without
the normaliser the weights are Σ_s (a/2 + b q̂ᵢₛ·k̂ⱼₛ).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    Exchange,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
)
from lingpt.kernels.linear_attention.cuda import adapted_backend, backend, padding, wide_rows
from lingpt.kernels.linear_attention.cuda.launch import MAX_BATCH_HEADS, current_device
from lingpt.kernels.linear_attention.cuda.variants import HEAD_DIMS

FALLBACK = ""


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    B, _, H, D = call.shape
    if HEAD_DIMS[-1] >= D:
        return adapted_backend.unsupported_reason(call)
    if D > wide_rows.WIDEST:
        return f"tensor cores take a head_dim up to {wide_rows.WIDEST}, not {D}"
    if call.dtype == torch.float16:
        return f"tensor cores take fp16 up to a head_dim of {HEAD_DIMS[-1]}, not {D}"
    if 2 * B * H > MAX_BATCH_HEADS:
        return "batch size × heads is above 32,767"
    return backend.unsupported_reason(call._replace(cos=None, sin=None), HEAD_DIMS[-1])


def forward(call: Call, exchange: Exchange | None = None) -> Outputs:
    """As in `operator.Backend`; runs twice for an exchange."""
    if exchange is not None:
        own = forward(call._replace(return_state=True)).state
        assert own is not None
        call = call._replace(**exchange(own)._asdict())
    with current_device(call.device):
        return padding.forward(_forward, call, _widths(call))


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
    with current_device(call.device):
        return padding.backward(_backward, call, saved, gradients, out, _widths(call))


def _widths(call: Call) -> padding.Widths:
    width = -(-call.shape[3] // 16) * 16
    return padding.Widths(width, width)


def _forward(call: Call) -> Outputs:
    B, N, H, _ = call.shape
    stats = torch.ones(3, B, H, N, device=call.device)
    calls = _calls(call, _unit_rows(call, stats))
    found = [adapted_backend.forward(x, divide=False) for x in calls]
    o = torch.empty(call.shape, dtype=call.dtype, device=call.device)
    sums = dict(y0=found[0].o, y1=found[1].o)
    if call.normalize:
        sums |= dict(g0=found[0].stats, g1=found[1].stats, g=stats)
    wide_rows.launch("outputs", call.shape, out=o, **sums)
    states = [x.state for x in found if x.state is not None]
    return Outputs(o, stats, _joined(states, sums=False) if states else None)


def _backward(
    call: Call, saved: Outputs, gradients: OutputGradients, out: tuple[Tensor, ...]
) -> InputGradients:
    (o, stats, state), (do, dstate) = saved, gradients
    halves = _unit_rows(call, torch.empty_like(stats))
    of_calls = _twice(torch.ones_like(stats), 2)  # the halves' norms are 1
    if call.normalize:
        of_calls[0] = 2 * _twice(stats[0], 1)
    states, dstates = _split(state), _split(dstate, gradient=True)
    dq, dk, dv = (torch.empty_like(halves[0]) for _ in range(3))
    found = [
        adapted_backend.backward(
            x,
            Outputs(_heads(o), of_calls, states[s]),
            OutputGradients(_heads(do), dstates[s]),
            (dq[s], dk[s], dv[s]),
        )
        for s, x in enumerate(_calls(call, halves))
    ]
    for x, half, y, r in zip(out, halves, (dq, dk), stats[1:], strict=False):
        written = x if backend.is_aligned(x) else torch.empty_like(o)
        wide_rows.launch(
            "input_gradient", call.shape,
            half0=half[0], half1=half[1], y0=y[0], y1=y[1], out=written,
            r=r.contiguous() if call.normalize_qk else None, **_angles(call),
        )  # fmt: skip
        if written is not x:
            x.copy_(written)
    torch.add(*dv.view(2, *call.shape), out=out[2])
    return _whole(call, found)


def _unit_rows(call: Call, stats: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of q̂ and of k̂, [2, B, N, 2 H, D/2], each half for both of v's; inverse norms go into stats."""
    (B, N, H, D), found = call.shape, []
    for x, r in zip(call.views[:2], stats[1:], strict=True):
        half = torch.empty(2, B, N, 2 * H, D // 2, dtype=x.dtype, device=x.device)
        wide_rows.launch(
            "unit_rows", call.shape,
            x=backend.aligned(x), half0=half[0], half1=half[1],
            r=r if call.normalize_qk else None, **_angles(call),
        )  # fmt: skip
        found.append(half)
    return found[0], found[1]


def _angles(call: Call) -> dict[str, Tensor]:
    if call.cos is None or call.sin is None:
        return {}
    return dict(cos=call.cos.float().contiguous(), sin=call.sin.float().contiguous())


def _calls(call: Call, halves: tuple[Tensor, Tensor]) -> list[Call]:
    """The call of each half of q̂ and k̂."""
    a, b = call.constant, call.coefficient
    if call.normalize:
        b = 2 * b
    else:
        a = a / 2
    options: dict[str, Any] = dict(qkv=None, cos=None, sin=None, v=_heads(call.views[2]), normalize_qk=False)
    for name, x in dict(a=a, b=b).items():
        options |= {name: _twice(x)} if isinstance(x, Tensor) else {f"{name}_value": x}
    for name in ("head_log_decay", "token_log_decay"):
        if (decay := getattr(call, name)) is not None:
            options[name] = _twice(decay)
    states = _split(call.initial_state)
    return [
        call._replace(q=q, k=k, **options, **(state._asdict() if state else {}))
        for q, k, state in zip(*halves, states, strict=True)
    ]


def _twice(x: Tensor, dim: int = -1) -> Tensor:
    return x.repeat_interleave(2, dim)


def _heads(x: Tensor) -> Tensor:
    """[B, N, H, D] as [B, N, 2 H, D/2]."""
    B, N, H, D = x.shape
    return x.reshape(B, N, 2 * H, D // 2)


def _whole(call: Call, found: list[InputGradients]) -> InputGradients:
    """The call's gradients, besides those of q, k and v."""

    def total(name: str) -> Tensor | None:
        parts = [x for y in found if (x := getattr(y, name)) is not None]
        return torch.stack(parts).unflatten(-1, (-1, 2)).sum((0, -1)) if parts else None

    a, b, decay = (total(name) for name in ("a", "b", "token_log_decay"))
    states = [x.initial_state for x in found if x.initial_state is not None]
    return InputGradients(
        a=None if a is None else a / 2,
        b=None if b is None else call.shrink_b(2 * b if call.normalize else b),
        token_log_decay=decay,
        initial_state=_joined(states, sums=True) if states else None,
    )


def _split(
    state: LinearAttentionState | None, *, gradient: bool = False
) -> tuple[LinearAttentionState | None, ...]:
    """The states of both calls. Parts that several heads share are copied to each; gradients of such parts
    go to the first head alone, as those of all heads are added."""
    if state is None:
        return None, None
    S, z, c, n = state
    B, H, D = z.shape
    S = S.unflatten(3, (2, -1)).unflatten(2, (2, -1)).permute(2, 0, 1, 4, 3, 5)
    S = S.reshape(2, B, 2 * H, D // 2, D // 2)
    z = _twice(z.unflatten(2, (2, -1)).movedim(2, 0), 2)
    c, n = c.reshape(B, 2 * H, -1).repeat(2, 1, 1, 1), _twice(n).repeat(2, 1, 1)
    if gradient:
        for x in (z, n):
            x[:, :, 1::2] = 0
        for x in (c, n):
            x[1] = 0
    return tuple(map(LinearAttentionState, S, z, c, n))


def _joined(states: list[LinearAttentionState], *, sums: bool) -> LinearAttentionState:
    """The whole state, given those of both calls; or (sums) its gradient, given theirs."""
    S, z, c, n = (torch.stack(x).unflatten(2, (-1, 2)) for x in zip(*states, strict=True))  # [2, B, H, 2, …]
    S = S.permute(1, 2, 0, 4, 3, 5).flatten(4).flatten(2, 3)
    z, c, n = (z.sum(3), c.sum(0), n.sum((0, 3))) if sums else (z[:, :, :, 0], c[0], n[0, ..., 0])
    return LinearAttentionState(S, z.movedim(0, 2).flatten(2), c.flatten(2), n)
