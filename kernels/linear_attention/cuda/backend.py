"""The CUDA backend, a `backends.Backend`: serves a Call with the kernels that launch.py plans."""

from __future__ import annotations

import contextlib
import functools
import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention.call import Call, OptionGradients
from lingpt.kernels.linear_attention.cuda.launch import (
    BOUNDARY_INTERVAL,
    HEAD_DIMS,
    POINTERS,
    TAGS,
    LaunchPlan,
    chunk_tokens,
    make_plan,
    operands_of,
)
from lingpt.kernels.linear_attention.cuda.toolchain import check_usable, native_arch
from lingpt.kernels.linear_attention.numerics import LOG_ZERO
from lingpt.kernels.linear_attention.state import LinearAttentionState
from lingpt.kernels.torch_internals import raw_stream

MAX_BATCH_HEADS = 65535  # CUDA's limit on the grid's second dimension


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot serve this call, in words for a user; None if they can."""
    B, _, H, D = call.shape
    if reason := device_unsupported_reason(call.dtype, D, call.device):
        return reason
    if not call.causal:
        return "it is causal only"
    if any(x.stride(-1) != 1 for x in call.inputs):
        return "the last dimension of q, k and v must be contiguous"
    if B * H > MAX_BATCH_HEADS:
        return "batch size × heads is above 65,535"
    if call.cos is not None and call.cos.shape[1] % 16:
        return f"it rotates a multiple of 16 dimensions, not {call.cos.shape[1]}"
    return None


@functools.cache
def device_unsupported_reason(dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """Why no kernels run for this dtype, head_dim and card; None if they do."""
    if dtype not in TAGS:
        return f"it takes bf16 and fp16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {' or '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere card (compute capability 8.0) or a newer one"
    try:
        check_usable(native_arch(device))
    except UserError as error:
        return str(error)
    return None


def forward(call: Call) -> tuple[Tensor, Tensor, LinearAttentionState | None]:
    """o, stats and the final state."""
    q, k, v = (_aligned(x) for x in call.views)
    B, N, H, D = call.shape
    with _current_device(call.device):
        o = torch.empty(B, N, H, D, dtype=call.dtype, device=call.device)
        run = _Pass(call, (q, k, v, o))
        stats = _stats(run.plan, call.device)
        initial, final = _contiguous(call.initial_state), _new_state(call) if call.return_state else None
        g = stats.data_ptr()
        scratch = g + 4 * stats.numel()
        decays = run.decay_pointers(
            scratch + 4 * run.plan.scratch_size(run.plan.segmentation), final and final.n
        )
        pointers = run.pointers("FWD", g, initial=initial, final=final, scratch=scratch, decays=decays)
        for launch in (*run.plan.sum_decays, *run.plan.forward):
            launch(run.stream, pointers)
    if not call.normalize:
        stats[0].fill_(1.0)  # g: there is none, and no kernel writes it
    if final is not None and call.normalize and call.token_log_decay is None:
        final.n.copy_(_token_count(call))
    return o, stats, final


def backward(
    call: Call,
    o: Tensor,
    stats: Tensor,
    do: Tensor,
    final: LinearAttentionState | None,
    dstate: LinearAttentionState | None,
    out: tuple[Tensor, ...],
) -> OptionGradients:
    """Writes dq, dk and dv into `out`; returns the other gradients."""
    N, D = call.shape[1], call.shape[3]
    if call.token_log_decay is not None and N > BOUNDARY_INTERVAL and N % chunk_tokens(call.device, D):
        return _backward_in_two(call, o, stats, do, final, dstate, out)
    q, k, v = (_aligned(x) for x in call.views)
    written = tuple(
        x if _is_aligned(x) else torch.empty_like(x, memory_format=torch.contiguous_format) for x in out
    )
    dstate = _contiguous(dstate)
    with _current_device(call.device):
        tensors = (q, k, v, _aligned(o), _aligned(do), *written)
        found = _BackwardPass(call, tensors, stats, dstate)
        found.launch_dq()
        found.launch_dk_dv()
        decay_gradient = found.launch_decay_gradient()
    for x, y in zip(out, written, strict=True):
        if x is not y:
            x.copy_(y)
    if decay_gradient is not None and dstate is not None:
        assert final is not None
        _add_state(call, decay_gradient[:, BOUNDARY_INTERVAL * found.plan.boundaries :], final, dstate)
    (B, _, H, _), work, d_initial = call.shape, found.work, found.d_initial
    if d_initial is not None and call.normalize and call.token_log_decay is None:
        d_initial.n.copy_(_count_gradient(call, work["e"].view(B, H, N), dstate))
    a_gradient = None if call.a is None else work["da"].view(B, H, -1).sum((0, 2))
    b_gradient = None if call.b is None else call.shrink_b(work["db"].view(B, H, -1).sum((0, 2)))
    return OptionGradients(a_gradient, b_gradient, decay_gradient, d_initial)


def _backward_in_two(
    call: Call,
    o: Tensor,
    stats: Tensor,
    do: Tensor,
    final: LinearAttentionState | None,
    dstate: LinearAttentionState | None,
    out: tuple[Tensor, ...],
) -> OptionGradients:
    """`backward` of a call cut in two, so that the later part is whole chunks. The later part comes first,
    from the state at the cut; the early part then starts from that state's gradient.

    The decays' gradient has boundaries only in whole chunks (token_decay.cuh); without them, rounding
    accumulates over the whole sequence. The early part runs forward again, as no state is kept at the cut.
    """
    _, N, _, D = call.shape
    first = N % chunk_tokens(call.device, D)
    early, late = call.tokens(slice(first))._replace(return_state=True), call.tokens(slice(first, None))
    _, early_stats, state = forward(early)
    assert state is not None

    late_found = backward(
        late._replace(**state._asdict()),
        o[:, first:],
        stats[..., first:].contiguous(),
        do[:, first:],
        final,
        dstate,
        tuple(x[:, first:] for x in out),
    )
    early_found = backward(
        early,
        o[:, :first],
        early_stats,
        do[:, :first],
        state,
        late_found.initial_state,
        tuple(x[:, :first] for x in out),
    )
    assert early_found.token_log_decay is not None and late_found.token_log_decay is not None
    return OptionGradients(
        a=_sum(early_found.a, late_found.a),
        b=_sum(early_found.b, late_found.b),
        token_log_decay=torch.cat((early_found.token_log_decay, late_found.token_log_decay), 1),
        initial_state=early_found.initial_state,
    )


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return None if x is None or y is None else x + y


class DecayPointers(NamedTuple):
    """The addresses in struct Params that only per-token decays need; 0 for null."""

    decay_cumsum: int = 0
    to_end: int = 0
    counts: int = 0
    chunks: int = 0
    count_out: int = 0
    dG: int = 0
    boundaries: int = 0
    dG_columns: int = 0
    span_sums: int = 0
    d_log_decay: int = 0


class _Workspace:
    """Named buffers of fp32 numbers in one allocation; `sizes`: numbers of each."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        begins = accumulate(sizes.values(), initial=0)
        self._parts = {
            name: (begin, size) for (name, size), begin in zip(sizes.items(), begins, strict=False)
        }
        self._numbers = torch.empty(sum(sizes.values()), dtype=torch.float32, device=device)

    def address(self, name: str) -> int:
        return self._numbers.data_ptr() + 4 * self._parts[name][0]

    def __getitem__(self, name: str) -> Tensor:
        return self._numbers.narrow(0, *self._parts[name])


class _Pass:
    """A pass of a call over these tensors (in the order of launch.TENSORS): its plan, stream and pointers."""

    def __init__(self, call: Call, tensors: tuple[Tensor, ...]) -> None:
        (a_tensor, a_value), (b_tensor, b_value) = map(_tensor_or_number, (call.constant, call.coefficient))
        cos, sin = (None if x is None else _aligned(x.float().contiguous()) for x in (call.cos, call.sin))
        self.plan = make_plan(
            call.device,
            call.dtype,
            tensors[0].shape,
            tuple([x.stride() for x in tensors]),
            _kind_of_decay(call),
            0 if cos is None else cos.shape[1],
            _kind_of_weights(call),
            a_value,
            b_value,
            call.normalize_qk,
        )
        self.stream = raw_stream(call.device)
        log_decay = call.head_log_decay
        if call.token_log_decay is not None:
            log_decay = call.token_log_decay.float().contiguous()
        options = b_tensor, a_tensor, log_decay, cos, sin
        # Kept alive until the launches, as some may be copies.
        self._kept = (*tensors, *options)
        self._option_pointers = [_pointer(x) for x in options]
        self._tensors = [x.data_ptr() for x in tensors] + [0]
        self._row = 4 * math.prod(tensors[0].shape[:3])  # bytes of one of the stats

    def pointers(
        self,
        mode: str,
        stats: int,
        *,
        e: int = 0,
        initial: LinearAttentionState | None = None,
        final: LinearAttentionState | None = None,
        scratch: int = 0,
        db: int = 0,
        da: int = 0,
        decays: DecayPointers | None = None,
    ) -> bytes:
        """The pointers of struct Params; `stats`, `e`, `scratch`, `db`, `da` and `decays` are addresses."""
        *initial_sums, n_initial = _state_pointers(initial)
        *final_sums, _ = _state_pointers(final)
        rows = stats, stats + self._row, stats + 2 * self._row, e
        states = *initial_sums, *final_sums, scratch, n_initial, db, da
        return POINTERS.pack(
            *operands_of[mode](self._tensors),
            *rows,
            *self._option_pointers,
            *states,
            *(decays or DecayPointers()),
        )

    def decay_pointers(
        self, sums: int, count_out: Tensor | None = None, dG: int = 0, boundaries: int = 0
    ) -> DecayPointers:
        """Pointers for `sum_decays` and the readers of its sums, which have `plan.decay_sums_size` numbers
        (token_decay.cuh)."""
        decay_cumsum, to_end, counts, chunks = (sums + i * self._row for i in range(4))
        return DecayPointers(decay_cumsum, to_end, counts, chunks, _pointer(count_out), dG, boundaries)


class _BackwardPass:
    """The launches of a backward pass, in the order of its methods, and the memory they share."""

    def __init__(
        self, call: Call, tensors: tuple[Tensor, ...], stats: Tensor, dstate: LinearAttentionState | None
    ) -> None:
        self.call, self.dstate, self.run = call, dstate, _Pass(call, tensors)
        self.plan, self.stream, self.stats = self.run.plan, self.run.stream, stats.data_ptr()
        self.initial = _contiguous(call.initial_state)
        self.d_initial = None if self.initial is None else _new_state(call)
        B, N, H, _ = call.shape
        plan, rows = self.plan, B * H * N
        left = _left_behind(stats, plan)  # by the forward pass, unless it was another backend's
        states_size = plan.scratch_size(plan.segmentation)
        self.work = _Workspace(
            call.device,
            boundaries=plan.boundaries_size,  # first, as what is read there is aligned
            reverse_states=plan.scratch_size(plan.reverse_segmentation),
            e=rows,
            db=B * H * plan.segmentation.segments,
            da=plan.da_size,
            reverse_decays=plan.decay_sums_size,
            dG_rows=2 * rows if plan.sum_decays else 0,
            dG_columns=2 * rows if plan.sum_decays else 0,
            span_sums=plan.span_sums_size,
            states=0 if left else states_size + plan.decay_sums_size,
        )
        self.has_states, self.states = bool(left), left or self.work.address("states")
        self.decay_sums = self.states + 4 * states_size
        self.e, self.boundaries = self.work.address("e"), self.work.address("boundaries")

    def launch_dq(self) -> None:
        """e and dq, first to last token, from the states before the segments."""
        run, work = self.run, self.work
        for launch in self.plan.row_products:
            launch(self.stream, run.pointers("row_products", self.stats, e=self.e))
        decays = run.decay_pointers(self.decay_sums, dG=work.address("dG_rows"), boundaries=self.boundaries)
        before: dict[str, Any] = dict(initial=self.initial, scratch=self.states, decays=decays)
        if not self.has_states:
            pointers = run.pointers("FWD", self.stats, **before)
            for launch in (*self.plan.sum_decays, *self.plan.states):
                launch(self.stream, pointers)
        db, da = work.address("db"), work.address("da")
        self.plan.dq(self.stream, run.pointers("DQ", self.stats, e=self.e, db=db, da=da, **before))

    def launch_dk_dv(self) -> None:
        """dk, dv and the initial state's gradient, last to first token."""
        run, work, d_initial = self.run, self.work, self.d_initial
        decays = run.decay_pointers(
            work.address("reverse_decays"),
            d_initial and d_initial.n,
            work.address("dG_columns"),
            self.boundaries,
        )
        after: dict[str, Any] = dict(
            initial=self.dstate, final=d_initial, scratch=work.address("reverse_states"), decays=decays
        )
        dk, dv = (run.pointers(mode, self.stats, e=self.e, **after) for mode in ("DK", "DV"))
        for launch in (*self.plan.reverse_sum_decays, *self.plan.reverse_states):
            launch(self.stream, dk)
        if self.plan.build.sm90:
            self.plan.dk_dv(self.stream, dk, dv)
        else:
            self.plan.dk(self.stream, dk)
            self.plan.dv(self.stream, dv)

    def launch_decay_gradient(self) -> Tensor | None:
        """The gradient of token_log_decay [B, N, H], from what the scans for dq and dk stored; None without
        per-token decays."""
        if not self.plan.decay_gradient:
            return None
        B, N, H, _ = self.call.shape
        gradient = torch.empty(B, N, H, dtype=torch.float32, device=self.call.device)
        decays = DecayPointers(
            dG=self.work.address("dG_rows"),
            dG_columns=self.work.address("dG_columns"),
            boundaries=self.boundaries,
            span_sums=self.work.address("span_sums"),
            d_log_decay=gradient.data_ptr(),
        )
        for launch in self.plan.decay_gradient:
            launch(self.stream, self.run.pointers("sum_decays", self.stats, decays=decays))
        return gradient


def _kind_of_decay(call: Call) -> str:
    """The kind of decay, one of launch.DECAYS."""
    if call.token_log_decay is not None:
        return "PER_TOKEN"
    return "NO_DECAY" if call.head_log_decay is None else "PER_HEAD"


def _kind_of_weights(call: Call) -> str:
    """The kind of weights, one of launch.WEIGHTS. PRODUCTS omits Σ v, which a state has even if a is 0."""
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
    state = LinearAttentionState.empty(B, H, D, device=call.device)
    if not call.normalize:
        state.z.zero_()
        state.n.zero_()
    return state


def _stats(plan: LaunchPlan, device: torch.device) -> Tensor:
    """stats [3, B, H, N], followed in the same memory by room for the states before the segments and for the
    results of `sum_decays`.

    The backward pass needs the same numbers: saving stats for it saves them too, and recomputing them would
    read k and v once more.
    """
    B, H, N = plan.B, plan.H, plan.N
    size = 3 * B * H * N + plan.scratch_size(plan.segmentation) + plan.decay_sums_size
    memory = torch.empty(size, dtype=torch.float32, device=device)
    return memory.as_strided((3, B, H, N), (B * H * N, H * N, N, 1))


def _left_behind(stats: Tensor, plan: LaunchPlan) -> int:
    """The address of what forward stored after the stats, if `_stats` allocated them; else 0."""
    end = stats.storage_offset() + stats.numel() + plan.scratch_size(plan.segmentation) + plan.decay_sums_size
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


def _current_device(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which the device is current."""
    is_current = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def _contiguous(state: LinearAttentionState | None) -> LinearAttentionState | None:
    return None if state is None else LinearAttentionState(*(x.contiguous() for x in state))


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not 16-byte aligned (a slice of odd width): the kernels read 16 bytes at
    a time."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and _strides_fit(x.stride())


@functools.lru_cache(maxsize=1024)
def _strides_fit(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and math.gcd(*strides[:-1]) % 8 == 0


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _state_pointers(state: LinearAttentionState | None) -> list[int]:
    return [0] * 4 if state is None else [x.data_ptr() for x in state]
