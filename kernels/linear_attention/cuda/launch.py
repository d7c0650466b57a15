"""Launches scan.cu: which kernels a pass takes, on what grid, with which pointers. The maths is told there.

Forward: `states` and `prefix` (where a sequence is split into segments), then one scan.
Backward: `row_products` for e, then a scan each for dq, dk and dv, after the states of their direction. On
Hopper dq's scan finds e, and dk and dv share a launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import struct
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.common import B_SHRINK, LinearAttentionState
from lingpt.kernels.linear_attention.cuda.compile import Kernel, KernelSpec, native_arch

SOURCE = "scan.cu"
THREADS = 128
MODES = {"FWD": 0, "DQ": 1, "DK": 2, "DV": 3}
TAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)

# The tensors of a pass (forward has the first four), and which of them are a, b, c, unit, y and o of scan.cu.
TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
ROLES = {
    "FWD": ("q", "k", "v", None, "o", None),
    "DQ": ("do", "v", "k", "q", "dq", "o"),
    "DK": ("v", "do", "q", "k", "dk", None),
    "DV": ("k", "q", "do", None, "dv", None),
    "row_products": ("do", None, None, None, "o", None),
}
_in_role = {
    mode: itemgetter(*(TENSORS.index(name) if name else -1 for name in names))
    for mode, names in ROLES.items()
}

# struct Params of scan.cu: 23 pointers, which every call has its own; strides, six ints, three floats.
_POINTERS, _REST = struct.Struct("@23P"), struct.Struct("@18q6i3f4x")
_PARAMS_CODE = f"{_POINTERS.size + _REST.size}s"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One build of the kernels: everything that is a template argument, and what follows from it."""

    tag: str
    head_dim: int
    chunk: int  # tokens
    blocks: int  # a multiprocessor, at least: bounds the registers
    decay: bool
    rope: int  # dimensions of q and k that are rotated
    hopper: bool  # the walk of hopper.cuh

    @functools.cached_property
    def threads(self) -> int:
        """Of a block of a scan: on Hopper a warpgroup for every 64 columns, and two more."""
        return 2 * self.head_dim + 256 if self.hopper else THREADS

    @functools.cached_property
    def shared(self) -> int:
        """Dynamic shared memory of a scan, bytes: Shared::BYTES; on Hopper all that `blocks` can have."""
        C, D = self.chunk, self.head_dim
        if self.hopper:
            return 232448 if D == 128 else 115712
        tiles, weights, rows = 2 * 6 * C * D, C * 128, C * (24 + 20 + 10 + 20)
        return tiles + weights + rows + 14 * D + 56

    @property
    def names(self) -> dict[tuple[str, str | None], str]:
        """(kernel, mode) → its instance in C++; some have no mode."""
        D, decay = self.head_dim, str(self.decay).lower()
        flags = ", ".join(str(x).lower() for x in (self.decay, self.rope, self.blocks))
        scans = ("FWD", "DQ") if self.hopper else MODES
        names = {
            (kernel, mode): f"{kernel}<{self.tag}, {D}, {self.chunk}, {MODES[mode]}, {flags}>"
            for kernel, modes in (("scan", scans), ("states", ("FWD", "DK")))
            for mode in modes
        }
        if self.hopper:
            names["scan_pair", None] = f"scan_pair<{self.tag}, {D}, {decay}, {self.rope}, {self.blocks}>"
            if D == 128:
                names["scan_whole", None] = f"scan_whole<{self.tag}, {D}, {decay}, {self.rope}>"
        else:
            names["row_products", None] = f"row_products<{self.tag}, {D}>"
        names["prefix", "FWD"] = f"prefix<{D}, false, {decay}>"
        names["prefix", "DK"] = f"prefix<{D}, true, {decay}>"
        return names

    def spec(self, *architectures: str) -> KernelSpec:
        defines = {"HOPPER_BUILD": 1} if self.hopper else {}
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, architectures=architectures)


def variant(arch: str, dtype: torch.dtype, head_dim: int, decay: bool, rope: int) -> Variant:
    """The build for a card: chunks of 64 tokens where shared memory holds two stages of three tiles of them.

    `rope`: a multiple of 16 up to head_dim, or 0. Hopper's warpgroups rotate within 64 columns at most.
    """
    small = arch in ("sm_86", "sm_89", "sm_120")  # 99 KB a block
    chunk = 32 if small and head_dim == 128 else 64
    hopper = arch == "sm_90a" and rope <= 64
    blocks = 1 if small else 2 if head_dim == 128 else 3
    if hopper:
        blocks -= 1
    return Variant(TAGS[dtype], head_dim, chunk, blocks, decay, rope, hopper)


def specs() -> list[KernelSpec]:
    """What `lingpt kernels` compiles ahead: bf16, for models (RoPE on a quarter) and for separate q, k, v."""
    found = []
    for archs in (("sm_80",), ("sm_86", "sm_89"), ("sm_90a",)):
        for head_dim in HEAD_DIMS:
            for decay, rope in ((False, 0), (False, head_dim // 4), (True, head_dim // 4)):
                found.append(variant(archs[0], torch.bfloat16, head_dim, decay, rope).spec(*archs))
    return found


@functools.cache
def _kernels(build: Variant, arch: str) -> dict[tuple[str, str | None], Kernel]:
    """By kernel and mode, as `build.names`."""
    names = build.names
    signatures = {
        name: _PARAMS_CODE * (2 if kernel == "scan_pair" else 1) for (kernel, _), name in names.items()
    }
    kernels = build.spec(arch).compile(arch).load(signatures)
    return {key: kernels[name] for key, name in names.items()}


@functools.cache
def _card(device: torch.device) -> tuple[str, int]:
    return native_arch(device), torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _prepare(
    device: torch.device, dtype: torch.dtype, head_dim: int, decay: bool, rope: int
) -> tuple[Variant, dict[tuple[str, str | None], Kernel], int]:
    """The build, its kernels, and how many of its blocks the card runs at once."""
    arch, processors = _card(device)
    build = variant(arch, dtype, head_dim, decay, rope)
    return build, _kernels(build, arch), processors * build.blocks


@functools.lru_cache(maxsize=1024)
def split(batch_heads: int, seq_len: int, chunk: int, slots: int) -> tuple[int, int]:
    """(segments, tokens a segment): how to cut sequences so that all `slots` blocks of a card have work.

    The cost of a choice is the tokens that the busiest slot walks, a third more if states come first.
    """
    best, best_cost = (1, max(seq_len, 1)), float("inf")
    for segments in range(1, max(1, seq_len // (4 * chunk)) + 1):
        length = -(-seq_len // (segments * chunk)) * chunk
        count = -(-seq_len // length)
        cost = -(-batch_heads * count // slots) * length * (1.0 if count == 1 else 1.35)
        if cost < best_cost:
            best, best_cost = (count, length), cost
        if batch_heads * segments >= 2 * slots:
            break
    return best


@functools.lru_cache(maxsize=1024)
def parts_of(segments: int, chunks: int, slots: int) -> int:
    """Into how many parts `states` cuts so many segments of so many chunks each, to fill a card's `slots`."""
    fitting = (n for n in range(1, chunks // 4 + 1) if chunks % n == 0 and n * segments <= slots)
    return max(fitting, default=1) if segments else 1


class Cut(NamedTuple):
    """Sequences as `segments` of `segment_len` tokens; `states` walks `parts` of a segment at once."""

    segments: int
    segment_len: int
    parts: int

    def of_states(self) -> Cut:
        """What `states` walks: every part but the last segment's, each a segment to it."""
        return Cut((self.segments - 1) * self.parts + 1, self.segment_len // self.parts, 1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and `rest`: its struct Params (the pair's: two) behind their pointers."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    rest: tuple[bytes, ...]

    def __call__(self, stream: int, *pointers: bytes) -> None:
        self.kernel(self.grid, self.block, self.shared, stream, *map(add, pointers, self.rest))


class Plan:
    """What shapes, strides and options decide of a pass: its launches, and how large its scratch is.

    `strides`: of TENSORS, forward of the first four; `b`: a number, None for a tensor. Looked up in a call,
    not made: a short one's larger share is the host's, and autograd's thread runs it on cold caches.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        strides: tuple[tuple[int, int, int, int], ...],
        decay: bool,
        rope: int,
        b: float | None,
        normalize: bool,
    ) -> None:
        self.B, self.N, self.H, self.D = shape
        self.strides = dict(zip(TENSORS, strides, strict=False))
        range_ = 2.0 ** (self.N.bit_length() // 2) if dtype == torch.float16 else 1.0
        self.numbers = int(normalize), b or 0.0, range_, 1 / range_
        self.build, self.kernels, self.slots = _prepare(device, dtype, self.D, decay, rope)
        self.cut = self._cut(1)
        self.goes_whole = self._goes_whole()
        if self.goes_whole:  # its one walk leaves a state a segment
            self.cut = self.cut._replace(parts=1)
        self.pair_cut = self._cut(2) if self.build.hopper else self.cut  # of the scans of dk and dv
        self.states = self._states("FWD", self.cut)
        if "do" in self.strides:
            self._plan_backward()
        else:
            self.forward = [self._whole()] if self.goes_whole else [*self.states, self._scan("FWD", self.cut)]

    def _plan_backward(self) -> None:
        self.dq, self.pair_states = self._scan("DQ", self.cut), self._states("DK", self.pair_cut)
        if self.build.hopper:  # dk and dv side by side, as both read k, q and do; dq's scan finds e
            self.pair = self._pair()
        else:
            self.row_products = self._row_products()
            self.dk, self.dv = self._scan("DK", self.cut), self._scan("DV", self.cut)

    def scratch_size(self, cut: Cut) -> int:
        """fp32 numbers: a state for every part of every segment but the last."""
        return self.B * self.H * (cut.segments - 1) * cut.parts * (self.D * self.D + 2 * self.D)

    def _cut(self, walks: int) -> Cut:
        """The segments with which `walks` scans at once fill the card."""
        heads, chunk = self.B * self.H, self.build.chunk
        segments, segment_len = split(walks * heads, self.N, chunk, self.slots)
        return Cut(segments, segment_len, parts_of(heads * (segments - 1), segment_len // chunk, self.slots))

    def _goes_whole(self) -> bool:
        """Whether blocks of 64 columns fill the card without a cut, where blocks of whole heads would not."""
        blocks = self.B * self.H * (self.D // 64)
        there = ("scan_whole", None) in self.kernels and self.cut.segments > 1
        return there and 3 * blocks > 2 * self.slots >= 2 * blocks

    def _scan(self, mode: str, cut: Cut) -> Launch:
        return self._launch("scan", mode, cut.segments, self._rest(mode, cut))

    def _whole(self) -> Launch:
        """The forward scan of uncut sequences. It leaves the states before the segments, too."""
        rest = self._rest("FWD", self.cut)
        return self._launch("scan_whole", None, self.D // 64, rest, threads=4 * THREADS)

    def _pair(self) -> Launch:
        # All of dk first: two multiprocessors share a cache of instructions, which holds only one's code.
        rests = self._rest("DK", self.pair_cut), self._rest("DV", self.pair_cut)
        return self._launch("scan_pair", None, self.pair_cut.segments, *rests, deep=2)

    def _states(self, mode: str, cut: Cut) -> list[Launch]:
        """The state before every segment but the first, into the scratch."""
        if cut.segments == 1:
            return []
        walked, numbers = cut.of_states(), self.D * self.D + 2 * self.D
        rest = self._rest(mode, walked)
        return [
            self._launch("states", mode, walked.segments - 1, rest),
            self._launch("prefix", mode, -(-numbers // THREADS), rest, threads=THREADS, shared=0),
        ]

    def _row_products(self) -> Launch:
        kernel, rest = self.kernels["row_products", None], self._rest("row_products", self.cut)
        grid = -(-self.N * self.H * (self.D // 8) // THREADS), self.B, 1
        return Launch(kernel, grid, (THREADS, 1, 1), 0, (rest,))

    def _launch(
        self, kernel: str, mode: str | None, wide: int, *rest: bytes, deep=1, threads=None, shared=None
    ) -> Launch:
        """On `wide` × B·H × `deep` blocks; a scan's threads and shared memory, if nothing else is said."""
        grid, block = (wide, self.B * self.H, deep), (threads or self.build.threads, 1, 1)
        shared = self.build.shared if shared is None else shared
        return Launch(self.kernels[kernel, mode], grid, block, shared, rest)

    def _rest(self, mode: str, cut: Cut) -> bytes:
        """struct Params behind its pointers."""
        strides = [self.strides.get(name, (0, 0, 0, 0)) for name in ROLES[mode]]
        rows = [x for batch, token, head, _ in strides for x in (batch, head, token)]
        return _REST.pack(*rows, self.N, self.H, *cut, *self.numbers)


_plan = functools.lru_cache(maxsize=1024)(Plan)


class _Call:
    """A pass over these tensors (in the order of TENSORS): its plan, its stream, its pointers."""

    def __init__(self, tensors: tuple[Tensor, ...], b, log_decay, cos, sin, normalize: bool) -> None:
        q, shrink = tensors[0], B_SHRINK if normalize else 1.0
        b, number = ((b * shrink).float(), None) if isinstance(b, Tensor) else (None, b * shrink)
        rope = 0 if cos is None else cos.shape[1]
        cos, sin = (_aligned(x.float().contiguous()) for x in (cos, sin)) if rope else (None, None)
        strides = tuple([x.stride() for x in tensors])
        decay = log_decay is not None
        self.plan = _plan(q.device, q.dtype, q.shape, strides, decay, rope, number, normalize)
        self.stream = _stream(q.device)
        self.options = b, log_decay, cos, sin  # kept here until the kernels are launched
        self._options = [_pointer(x) for x in self.options]
        self._tensors = [x.data_ptr() for x in tensors] + [0]
        self._row = 4 * q.shape[0] * q.shape[1] * q.shape[2]

    def pointers(self, mode: str, stats: int, *, e=0, initial=None, final=None, scratch=0, db=0) -> bytes:
        """Of struct Params; addresses, and states."""
        *initial, n_initial = _state_pointers(initial)
        *final, _ = _state_pointers(final)
        stats = stats, stats + self._row, stats + 2 * self._row, e
        return _POINTERS.pack(
            *_in_role[mode](self._tensors), *stats, *self._options, *initial, *final, scratch, n_initial, db
        )


def forward(q, k, v, b, log_decay, cos, sin, initial_state, normalize_qk, return_state):
    """→ o [B, N, H, D]; stats [3, B, H, N] fp32: the normaliser, 1/‖q‖, 1/‖k‖; the final state or None."""
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    B, N, H, D = q.shape
    with _on(q.device):
        o = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
        call = _Call((q, k, v, o), b, log_decay, cos, sin, normalize_qk)
        stats = _stats(call.plan, q.device)
        final = _empty_state(B, H, D, q.device) if return_state else None
        g = stats.data_ptr()
        ends = dict(initial=initial_state, final=final, scratch=g + 4 * stats.numel())
        pointers = call.pointers("FWD", g, **ends)
        for launch in call.plan.forward:
            launch(call.stream, pointers)
    if return_state:
        final.n.copy_(_count(initial_state, log_decay, B, N, H, q.device))
    return o, stats, final


def backward(q, k, v, b, log_decay, cos, sin, o, stats, initial_state, do, dstate, normalize_qk, out):
    """Writes dq, dk and dv into `out`; → (db [H] or None, gradient of the initial state or None)."""
    tensors = _aligned(q), _aligned(k), _aligned(v), _aligned(o), _aligned(do), *out
    B, N, H, D = q.shape
    with _on(q.device):
        call = _Call(tensors, b, log_decay, cos, sin, normalize_qk)
        plan, stream, g = call.plan, call.stream, stats.data_ptr()
        states = _states_behind(stats, plan)  # the forward pass left them, unless it was another backend's
        sizes = plan.scratch_size(plan.pair_cut), B * H * N, B * H * plan.cut.segments
        sizes = *sizes, 0 if states else plan.scratch_size(plan.cut)
        work = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
        scratch, e, db, own_states, _ = (work.data_ptr() + 4 * at for at in accumulate(sizes, initial=0))
        d_initial = None if initial_state is None else _empty_state(B, H, D, q.device)
        if not plan.build.hopper:
            plan.row_products(stream, call.pointers("row_products", g, e=e))
        if not states:
            states = own_states
            pointers = call.pointers("FWD", g, initial=initial_state, scratch=states)
            for launch in plan.states:
                launch(stream, pointers)
        plan.dq(stream, call.pointers("DQ", g, e=e, initial=initial_state, scratch=states, db=db))
        ends = dict(e=e, initial=dstate, final=d_initial, scratch=scratch)
        dk, dv = call.pointers("DK", g, **ends), call.pointers("DV", g, **ends)
        for launch in plan.pair_states:
            launch(stream, dk)
        if plan.build.hopper:
            plan.pair(stream, dk, dv)
        else:
            plan.dk(stream, dk)
            plan.dv(stream, dv)
    if d_initial is None and not isinstance(b, Tensor):
        return None, None
    _, rows_e, sums_db, _ = work.split_with_sizes(sizes)
    if d_initial is not None:
        _finish_initial(d_initial, rows_e.view(B, H, N), log_decay, dstate)
    if not isinstance(b, Tensor):
        return None, d_initial
    return sums_db.view(B, H, -1).sum((0, 2)) * (B_SHRINK if normalize_qk else 1.0), d_initial


def _finish_initial(d_initial: LinearAttentionState, e: Tensor, log_decay: Tensor | None, dstate) -> None:
    """The gradient of the initial count of tokens, [B, H]: −Σ e γ^(i+1), and what the final count's adds."""
    _, H, N = e.shape
    decay = e.new_zeros(H) if log_decay is None else log_decay.float()
    dn = -(e * torch.exp(decay[:, None] * torch.arange(1, N + 1, device=e.device))).sum(-1)
    d_initial.n.copy_(dn if dstate is None else dn + dstate.n * torch.exp(decay * N))


def _stats(plan: Plan, device: torch.device) -> Tensor:
    """stats [3, B, H, N], and behind them in the same memory room for the states before the segments.

    The backward pass starts from the same states: what saves stats for it saves them too, and computing them
    again would read k and v once more.
    """
    B, H, N = plan.B, plan.H, plan.N
    memory = torch.empty(3 * B * H * N + plan.scratch_size(plan.cut), dtype=torch.float32, device=device)
    return memory.as_strided((3, B, H, N), (B * H * N, H * N, N, 1))


def _states_behind(stats: Tensor, plan: Plan) -> int:
    """The address of the states that forward left there, if these stats are `_stats`'; else 0."""
    end = stats.storage_offset() + stats.numel() + plan.scratch_size(plan.cut)
    ours = stats.is_contiguous() and stats.untyped_storage().nbytes() == 4 * end
    return stats.data_ptr() + 4 * stats.numel() if ours else 0


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device current, if it isn't."""
    is_current = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    """The handle of PyTorch's stream, as Inductor finds it: a Stream object costs ten times as much."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _count(initial_state, log_decay, B, N, H, device) -> Tensor:
    """The (decayed) number of tokens seen, [B, H]."""
    n = torch.zeros(B, H, dtype=torch.float32, device=device) if initial_state is None else initial_state.n
    if log_decay is None:
        return n + N
    x = log_decay.double()
    geometric = torch.where(x == 0, N, torch.expm1(x * N) / torch.expm1(x))
    return n * torch.exp(x * N).float() + geometric.float()


def _empty_state(B: int, H: int, D: int, device) -> LinearAttentionState:
    shapes = ((B, H, D, D), (B, H, D), (B, H, D), (B, H))
    return LinearAttentionState(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def _aligned(x: Tensor) -> Tensor:
    """The kernels read 16 bytes at a time: rows that start elsewhere (a slice of odd width) are copied."""
    fits = x.data_ptr() % 16 == 0 and _strides_fit(x.stride())
    return x if fits else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _strides_fit(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and math.gcd(*strides[:-1]) % 8 == 0


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _state_pointers(state: LinearAttentionState | None) -> list[int]:
    return [0] * 4 if state is None else [x.data_ptr() for x in state]
