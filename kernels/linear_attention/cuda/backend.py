"""The CUDA backend on tensor cores, an `operator.Backend`: serves a Call with the launches of plan.py."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    Exchange,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
    state_shapes,
)
from lingpt.kernels.linear_attention.cuda.launch import (
    MAX_BATCH_HEADS,
    Launch,
    addresses_of,
    current_device,
    raw_stream,
)
from lingpt.kernels.linear_attention.cuda.plan import Plan, chunk_of, make_plan
from lingpt.kernels.linear_attention.cuda.toolchain import unusable_reason
from lingpt.kernels.linear_attention.cuda.variants import (
    BOUNDARY_INTERVAL,
    HEAD_DIMS,
    TAGS,
    kernel_head_dim,
    state_size,
)
from lingpt.kernels.numerics import LOG_ZERO

FALLBACK = ""
_COUNTS = {"initial": "n_initial", "final": "count_out"}  # of a state's tokens, in struct Params


def unsupported_reason(call: Call, head_dim: int | None = None) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can.

    head_dim: that of the kernels, if it is another.
    """
    B, _, H, D = call.shape
    if reason := device_unsupported_reason(call.dtype, head_dim or D, call.device):
        return reason
    if not call.causal:
        return "it is causal only"
    if any(x.stride(-1) != 1 for x in call.inputs):
        return "the last dimension of q, k and v must be contiguous"
    if B * H > MAX_BATCH_HEADS:
        return "batch size × heads is above 65,535"
    if call.cos is not None and not rotates(call):
        return f"it rotates a multiple of 16 dimensions, not {call.cos.shape[1]}"
    return None


def rotates(call: Call) -> bool:
    """Whether the kernels have the call's RoPE."""
    return call.cos is not None and call.cos.shape[1] % 16 == 0


@functools.cache
def device_unsupported_reason(dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """Why no kernels run for this dtype, head_dim and card; None if they do."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype not in TAGS:
        return f"it takes bf16 and fp16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {' or '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    return unusable_reason(device)


def forward(call: Call, exchange: Exchange | None = None, *, divide: bool = True) -> Outputs:
    """As in `operator.Backend`, but for states, which have the channels of the kernels' heads.

    divide: o by the normaliser.

    The stats are followed in the same memory by what the scan has read (`Plan.before`): the backward pass
    needs the same numbers. Saving stats for it saves them too; recomputing them would read k and v once more.
    """
    B, N, H, D = call.shape
    with current_device(call.device):
        o = torch.empty(B, N, H, D, dtype=call.dtype, device=call.device)
        run = _Pass(call, dict(zip("qkv", map(aligned, call.views), strict=True), o=o), exchange, divide)
        rows, sizes = B * H * N, run.plan.before
        memory = torch.empty(3 * rows + sum(sizes.values()), dtype=torch.float32, device=call.device)
        stats = memory.as_strided((3, B, H, N), (rows, H * N, N, 1))
        addresses = run.stats(stats) | addresses_of(memory.data_ptr() + 12 * rows, sizes)
        own, carry, scans = run.plan.forward
        run.launch(own, addresses)
        if exchange is not None:
            state = _own_state(run, call, addresses, memory[3 * rows :], sizes)
            call = call._replace(**exchange(state)._asdict())
        initial, final = _contiguous(call.initial_state), _new_state(call) if call.return_state else None
        addresses |= _state_addresses("initial", initial) | _state_addresses("final", final)
        run.launch([*carry, *scans], addresses)
    if not call.normalize:
        stats[0].fill_(1.0)  # g: there is none, and no kernel writes it
    if final is not None and call.normalize and call.token_log_decay is None:
        final.n.copy_(_token_count(call))
    return Outputs(o, stats, final)


def backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None = None,
) -> InputGradients:
    """As in `operator.Backend`, with states as in `forward`."""
    N, D = call.shape[1], call.shape[3]
    if call.token_log_decay is not None and N > BOUNDARY_INTERVAL and N % chunk_of(call.device, D):
        if exchange is not None:
            own = _backward_in_two(call, saved, gradients, out).initial_state
            assert own is not None
            gradients = gradients._replace(state=exchange(own))
        return _backward_in_two(call, saved, gradients, out)
    written = tuple(
        x if is_aligned(x) else torch.empty_like(x, memory_format=torch.contiguous_format) for x in out
    )
    with current_device(call.device):
        found = _launch_backward(call, saved, gradients, written, exchange)
    for x, y in zip(out, written, strict=True):
        if x is not y:
            x.copy_(y)
    return found


def _backward_in_two(
    call: Call, saved: Outputs, gradients: OutputGradients, out: tuple[Tensor, ...]
) -> InputGradients:
    """`backward` of a call cut in two, so that the later part is whole chunks. The later part comes first,
    from the state at the cut; the early part then starts from that state's gradient.

    The decays' gradient has boundaries only in whole chunks (token_decay.cuh); without them, rounding
    accumulates over the whole sequence. The early part runs forward again, as no state is kept at the cut.
    """
    (o, stats, final), (do, dstate) = saved, gradients
    first = call.shape[1] % chunk_of(call.device, call.shape[3])
    early, late = call.tokens(slice(first))._replace(return_state=True), call.tokens(slice(first, None))
    again = forward(early)
    assert again.state is not None
    late_found = backward(
        late._replace(**again.state._asdict()),
        Outputs(o[:, first:], stats[..., first:].contiguous(), final),
        OutputGradients(do[:, first:], dstate),
        tuple(x[:, first:] for x in out),
    )
    early_found = backward(
        early,
        Outputs(o[:, :first], stats[..., :first].contiguous(), again.state),
        OutputGradients(do[:, :first], late_found.initial_state),
        tuple(x[:, :first] for x in out),
    )
    assert early_found.token_log_decay is not None and late_found.token_log_decay is not None
    return InputGradients(
        a=_sum(early_found.a, late_found.a),
        b=_sum(early_found.b, late_found.b),
        token_log_decay=torch.cat((early_found.token_log_decay, late_found.token_log_decay), 1),
        initial_state=early_found.initial_state,
    )


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return None if x is None or y is None else x + y


class _Pass:
    """A pass of a call over these tensors: its plan, stream and addresses."""

    def __init__(
        self, call: Call, tensors: dict[str, Tensor], exchange: Exchange | None, divide: bool = True
    ) -> None:
        (a_tensor, a_value), (b_tensor, b_value) = map(_tensor_or_number, (call.constant, call.coefficient))
        cos, sin = (None if x is None else aligned(x.float().contiguous()) for x in (call.cos, call.sin))
        self.plan: Plan = make_plan(
            call.device,
            call.dtype,
            call.shape,
            tuple([x.stride() for x in tensors.values()]),
            _kind_of_decay(call),
            0 if cos is None else cos.shape[1],
            _kind_of_weights(call),
            a_value,
            b_value,
            call.normalize_qk,
            exchange is not None,
            divide,
        )
        self.stream = raw_stream(call.device.index)
        log_decay = call.head_log_decay
        if call.token_log_decay is not None:
            log_decay = call.token_log_decay.float().contiguous()
        options = dict(coefficient=b_tensor, constant=a_tensor, log_decay=log_decay, cos=cos, sin=sin)
        # Kept alive until the launches, as some may be copies.
        self._kept = (*tensors.values(), *options.values())
        self.tensors = {name: x.data_ptr() for name, x in tensors.items()}
        self._options = {name: x.data_ptr() for name, x in options.items() if x is not None}

    def stats(self, stats: Tensor) -> dict[str, int]:
        """The addresses of the stats [3, B, H, N], and those of the options, which all launches get."""
        first, row = stats.data_ptr(), 4 * stats.stride(0)
        return self._options | dict(g=first, rq=first + row, rk=first + 2 * row)

    def launch(self, launches: list[Launch], addresses: dict[str, int]) -> None:
        for launch in launches:
            launch(self.stream, self.tensors, addresses)


def _launch_backward(
    call: Call,
    saved: Outputs,
    gradients: OutputGradients,
    out: tuple[Tensor, ...],
    exchange: Exchange | None,
) -> InputGradients:
    """The launches of a backward pass, in three stages, and the memory that they share."""
    (o, stats, final), do, dstate = saved, gradients.o, _contiguous(gradients.state)
    tensors = dict(zip("qkv", map(aligned, call.views), strict=True), o=aligned(o), do=aligned(do))
    run = _Pass(call, tensors | dict(zip(("dq", "dk", "dv"), out, strict=True)), exchange)
    plan, (B, N, H, _) = run.plan, call.shape
    initial = _contiguous(call.initial_state)
    d_initial = None if initial is None else _new_state(call)

    left = _left_behind(stats, plan)
    sections = plan.work, plan.after, {} if left else plan.before
    n_work, n_after, n_before = (sum(sizes.values()) for sizes in sections)
    memory = torch.empty(n_work + n_after + n_before, dtype=torch.float32, device=call.device)
    start = memory.data_ptr()
    work = addresses_of(start, plan.work)
    common = run.stats(stats) | dict(e=work["e"], boundaries=work["boundaries"])

    def per_head(name: str) -> Tensor:
        return memory.narrow(0, (work[name] - start) // 4, plan.work[name]).view(B, H, -1)

    # dq, first to last token, from the states before the segments.
    addresses = common | addresses_of(left or start + 4 * (n_work + n_after), plan.before)
    addresses |= _state_addresses("initial", initial)
    addresses |= dict(db=work["db"], da=work["da"], dG=work["dG_rows"])
    own, carry, scans = plan.forward
    run.launch([*plan.rows, *([] if left else own + carry), *scans], addresses)

    # dk, dv and the initial state's gradient, last to first token.
    addresses = common | addresses_of(start + 4 * n_work, plan.after) | dict(dG=work["dG_columns"])
    own, carry, scans = plan.reverse
    run.launch(own, addresses)
    if exchange is not None:
        after = memory[n_work : n_work + n_after]
        dstate = _contiguous(exchange(_own_state(run, call, addresses, after, plan.after, per_head("e"))))
    addresses |= _state_addresses("initial", dstate) | _state_addresses("final", d_initial)
    run.launch([*carry, *scans], addresses)

    # The gradient of token_log_decay, from what the scans for dq and dk stored.
    decay_gradient = None
    if plan.decay_gradient:
        decay_gradient = torch.empty(B, N, H, dtype=torch.float32, device=call.device)
        addresses = common | dict(
            dG=work["dG_rows"],
            dG_columns=work["dG_columns"],
            span_sums=work["span_sums"],
            d_log_decay=decay_gradient.data_ptr(),
        )
        run.launch(plan.decay_gradient, addresses)
        if dstate is not None:
            assert final is not None
            _add_state(call, decay_gradient[:, BOUNDARY_INTERVAL * plan.boundaries :], final, dstate)

    if d_initial is not None and call.normalize and call.token_log_decay is None:
        d_initial.n.copy_(_count_gradient(call, per_head("e"), dstate))
    return InputGradients(
        a=None if call.a is None else per_head("da").sum((0, 2)),
        b=None if call.b is None else call.shrink_b(per_head("db").sum((0, 2))),
        token_log_decay=decay_gradient,
        initial_state=d_initial,
    )


def _kind_of_decay(call: Call) -> str:
    """The kind of decay, one of variants.DECAYS."""
    if call.token_log_decay is not None:
        return "PER_TOKEN"
    return "NO_DECAY" if call.head_log_decay is None else "PER_HEAD"


def _kind_of_weights(call: Call) -> str:
    """The kind of weights, one of variants.WEIGHTS. PRODUCTS omits Σ v, which a state has even if a is 0."""
    if call.normalize:
        return "NORMALISED"
    has_state = call.return_state or call.S is not None
    return "PRODUCTS" if call.a is None and call.a_value == 0 and not has_state else "AFFINE"


def _tensor_or_number(x: float | Tensor) -> tuple[Tensor | None, float | None]:
    return (x.float(), None) if isinstance(x, Tensor) else (None, x)


def _add_state(
    call: Call, gradient: Tensor, final: LinearAttentionState, dstate: LinearAttentionState
) -> None:
    """Adds the final state's part to `gradient`, dL/dg [B, tokens, H] of the tokens after the last
    boundary: ⟨dS, S⟩, which is part of dL/dG_N and so of the sum of each of them."""
    B, _, H, _ = call.shape
    products = [(x * dx).reshape(B, H, -1).sum(-1) for x, dx in zip(final, dstate, strict=True)]
    added = torch.stack(products).sum(0)
    assert call.token_log_decay is not None
    decays = call.token_log_decay[:, -gradient.shape[1] :]
    gradient.add_(added.unsqueeze(1)).masked_fill_(decays <= LOG_ZERO[torch.float32], 0.0)


def _new_state(call: Call) -> LinearAttentionState:
    """An uninitialised state; z and n are zeros without the normaliser, as the kernels do not write them."""
    B, _, H, D = call.shape
    shapes = state_shapes(B, H, kernel_head_dim(D))
    state = LinearAttentionState(
        *(torch.empty(shape, dtype=torch.float32, device=call.device) for shape in shapes)
    )
    if not call.normalize:
        state.z.zero_()
        state.n.zero_()
    return state


def _own_state(
    run: _Pass,
    call: Call,
    addresses: dict[str, int],
    memory: Tensor,
    sizes: dict[str, int],
    e: Tensor | None = None,
) -> LinearAttentionState:
    """The state of the call's tokens alone, after a direction's launches `own`; given e, in reverse: the
    gradient of the state before them by their outputs.

    memory: what these have left, of the given sizes. It is copied, as the carry is in place and is yet to
    come, from the true initial state.
    """
    (B, _, H, _), copy, state, range_ = call.shape, memory.clone(), _new_state(call), run.plan.range
    addresses = addresses | addresses_of(copy.data_ptr(), sizes) | dict(count_out=state.n.data_ptr())
    run.launch((run.plan.forward if e is None else run.plan.reverse).carry, addresses)
    D = run.plan.D
    own = copy[: sizes["scratch"]].view(B, H, -1, state_size(D))[:, :, -1]
    # Scaled as in `prefix`, and in reverse the first token's decay is still to come (`SegmentStates`).
    scales = [range_, range_, 1.0] if e is None else [1 / range_] * 3
    if not call.normalize:
        scales = [range_, 0.0, 1.0]
    decay = own.new_ones(B, H, 1)
    if e is not None and call.token_log_decay is not None:
        decay = call.token_log_decay[:, 0, :, None].float().clamp(min=LOG_ZERO[torch.float32]).exp()
    for part, x, scale in zip(state, own.split((D * D, D, D), 2), scales, strict=False):
        if scale:  # without the normaliser the scratch has no z
            part.view(x.shape).copy_(x * (scale * decay))
    if call.normalize and call.token_log_decay is None:
        state.n.copy_(_token_count(call) if e is None else _count_gradient(call, e, None))
    return state


def _left_behind(stats: Tensor, plan: Plan) -> int:
    """The address of what `forward` stored after the stats; 0 if it was another backend's."""
    end = stats.storage_offset() + stats.numel() + sum(plan.before.values())
    ours = stats.is_contiguous() and stats.untyped_storage().nbytes() == 4 * end
    return stats.data_ptr() + 4 * stats.numel() if ours else 0


def _token_count(call: Call) -> Tensor:
    """The (decayed) number of tokens in the final state, [B, H]."""
    B, N, H, _ = call.shape
    n = torch.zeros(B, H, dtype=torch.float32, device=call.device) if call.n is None else call.n
    if call.head_log_decay is None:
        return n + N
    x = call.head_log_decay.double()
    geometric = torch.where(x == 0, N, torch.expm1(x * N) / torch.expm1(x))
    return n * torch.exp(x * N).float() + geometric.float()


def _count_gradient(call: Call, e: Tensor, dstate: LinearAttentionState | None) -> Tensor:
    """The gradient of the initial number of tokens, [B, H]: −Σ e γ^(i+1), plus the final number's part."""
    _, H, N = e.shape
    decay = e.new_zeros(H) if call.head_log_decay is None else call.head_log_decay.float()
    dn = -(e * torch.exp(decay[:, None] * torch.arange(1, N + 1, device=e.device))).sum(-1)
    return dn if dstate is None else dn + dstate.n * torch.exp(decay * N)


def _contiguous(state: LinearAttentionState | None) -> LinearAttentionState | None:
    return None if state is None else LinearAttentionState(*(x.contiguous() for x in state))


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not 16-byte aligned (a slice of odd width): the kernels read 16 bytes at
    a time."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and _strides_fit(x.stride())


@functools.lru_cache(maxsize=1024)
def _strides_fit(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and math.gcd(*strides[:-1]) % 8 == 0


def _state_addresses(name: str, state: LinearAttentionState | None) -> dict[str, int]:
    """The fields of struct Params for the initial or the final state."""
    if state is None:
        return {}
    S, z, c, n = (x.data_ptr() for x in state)
    return {f"{name}_S": S, f"{name}_k": z, f"{name}_v": c, _COUNTS[name]: n}
