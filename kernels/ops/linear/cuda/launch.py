"""Launches scan.cu: which kernels a pass takes, on what grid, with which pointers. The maths is told there.

Forward: `states` and `prefix` (where a sequence is split into segments), then one scan.
Backward: `row_products` for e, then a scan each for dq, dk and dv, after the states of their direction. On
Hopper dq's scan finds e, and dk and dv share a launch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct

import torch
from torch import Tensor

from lingpt.kernels.linear.common import B_SHRINK, LinearAttentionState
from lingpt.kernels.linear.cuda.compile import Kernel, KernelSpec, native_arch

SOURCE = "scan.cu"
THREADS = 128
MODES = {"FWD": 0, "DQ": 1, "DK": 2, "DV": 3}
TAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)

# struct Params of scan.cu: six Rows, 17 pointers, six ints, three floats.
_BEFORE_CUT, _CUT = "@" + "Pqqi4x" * 6 + "P" * 17 + "2i", struct.Struct("@3i")  # segments, segment_len, parts
_CUT_AT = struct.calcsize(_BEFORE_CUT)
_PARAMS = struct.Struct(_BEFORE_CUT + "3ii3f4x")
_PARAMS_CODE = f"{_PARAMS.size}s"


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
    codes = {"scan_pair": 2 * _PARAMS_CODE, "row_products": _PARAMS_CODE + "Pq"}
    signatures = {name: codes.get(kernel, _PARAMS_CODE) for (kernel, _), name in names.items()}
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
    return max((n for n in range(1, chunks // 4 + 1) if chunks % n == 0 and n * segments <= slots), default=1)


class _Call:
    """What the kernels of one pass share: shapes, options, the build and the grid."""

    def __init__(self, q: Tensor, b, log_decay, cos, sin, normalize: bool) -> None:
        self.B, self.N, self.H, self.D = q.shape
        self.device = q.device
        rope = 0 if cos is None else cos.shape[1]
        self.build, self.kernels, self.slots = _prepare(
            q.device, q.dtype, self.D, log_decay is not None, rope
        )
        self.stream = torch.cuda.current_stream(q.device).cuda_stream
        shrink = B_SHRINK if normalize else 1.0
        b, b_value = ((b * shrink).float(), 0.0) if isinstance(b, Tensor) else (None, b * shrink)
        cos, sin = (_aligned(x.float().contiguous()) if rope else None for x in (cos, sin))
        self.options = b, log_decay, cos, sin  # kept here until the kernels are launched
        self.option_pointers = [_pointer(x) for x in self.options]
        range_ = 2.0 ** (self.N.bit_length() // 2) if q.dtype == torch.float16 else 1.0
        self.numbers = int(normalize), b_value, range_, 1 / range_
        self.cut(1)

    def cut(self, walks: int) -> None:
        """Cuts the sequences into the segments with which `walks` scans at once fill the card."""
        heads, chunk = self.B * self.H, self.build.chunk
        self.segments, self.segment_len = split(walks * heads, self.N, chunk, self.slots)
        self.parts = 1
        if self.segments > 1 and not (walks == 1 and self.goes_whole()):
            self.parts = parts_of(heads * (self.segments - 1), self.segment_len // chunk, self.slots)

    def scratch_size(self) -> int:
        """fp32 numbers: a state for every part of every segment but the last."""
        return self.B * self.H * (self.segments - 1) * self.parts * (self.D * self.D + 2 * self.D)

    def params(
        self, a, b, c, unit, y, o=None, *, stats, e=None, initial=None, final=None, scratch=None, db=None
    ) -> bytes:
        g, row_bytes = stats.data_ptr(), 4 * self.B * self.H * self.N
        *initial, n_initial = _state_pointers(initial)
        *final, _ = _state_pointers(final)
        return _PARAMS.pack(
            *(*_rows(a), *_rows(b), *_rows(c), *_rows(unit), *_rows(y), *_rows(o)),
            *(g, g + row_bytes, g + 2 * row_bytes),
            *(_pointer(e), *self.option_pointers),
            *(*initial, *final, _pointer(scratch), n_initial, _pointer(db)),
            *(self.N, self.H, self.segments, self.segment_len, self.parts),
            *self.numbers,
        )

    def scan(self, mode: str, params: bytes) -> None:
        grid = (self.segments, self.B * self.H, 1)
        block = (self.build.threads, 1, 1)
        self.kernels["scan", mode](grid, block, self.build.shared, self.stream, params)

    def goes_whole(self) -> bool:
        """Whether blocks of 64 columns fill the card without a cut, where blocks of whole heads would not."""
        blocks = self.B * self.H * (self.D // 64)
        return (
            ("scan_whole", None) in self.kernels
            and self.segments > 1
            and 3 * blocks > 2 * self.slots >= 2 * blocks
        )

    def scan_whole(self, params: bytes) -> None:
        """The forward scan of uncut sequences. It leaves the states before the segments, too."""
        grid = (self.D // 64, self.B * self.H, 1)
        block = (4 * THREADS, 1, 1)
        self.kernels["scan_whole", None](grid, block, self.build.shared, self.stream, params)

    def scan_pair(self, dk: bytes, dv: bytes) -> None:
        """The scans of dk and dv: on Hopper side by side, as both read k, q and do."""
        if not self.build.hopper:
            self.scan("DK", dk)
            self.scan("DV", dv)
            return
        # All of dk first: two multiprocessors share a cache of instructions, which holds only one's code.
        grid = (self.segments, self.B * self.H, 2)
        block = (self.build.threads, 1, 1)
        self.kernels["scan_pair", None](grid, block, self.build.shared, self.stream, dk, dv)

    def states(self, mode: str, params: bytes) -> None:
        """The state before every segment but the first, into the scratch."""
        if self.segments == 1:
            return
        parts = (self.segments - 1) * self.parts
        cut = _CUT.pack(parts + 1, self.segment_len // self.parts, 1)  # every part is a segment here
        params = params[:_CUT_AT] + cut + params[_CUT_AT + _CUT.size :]
        grid = (parts, self.B * self.H, 1)
        block = (self.build.threads, 1, 1)
        self.kernels["states", mode](grid, block, self.build.shared, self.stream, params)
        grid = (-(-(self.D * self.D + 2 * self.D) // THREADS), self.B * self.H, 1)
        self.kernels["prefix", mode](grid, (THREADS, 1, 1), 0, self.stream, params)

    def row_products(self, params: bytes, e: Tensor) -> None:
        rows = self.B * self.N * self.H
        if rows == 0:
            return
        grid = (-(-rows * (self.D // 8) // THREADS), 1, 1)
        kernel = self.kernels["row_products", None]
        kernel(grid, (THREADS, 1, 1), 0, self.stream, params, e.data_ptr(), rows)


def forward(q, k, v, b, log_decay, cos, sin, initial_state, normalize_qk, return_state):
    """→ o [B, N, H, D]; stats [3, B, H, N] fp32: the normaliser, 1/‖q‖, 1/‖k‖; the final state or None."""
    q, k, v = map(_aligned, (q, k, v))
    B, N, H, D = q.shape
    o = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    final = _empty_state(B, H, D, q.device) if return_state else None
    with torch.cuda.device(q.device):
        call = _Call(q, b, log_decay, cos, sin, normalize_qk)
        stats, scratch = _stats_and_scratch(call)
        params = call.params(
            q, k, v, None, o, stats=stats, initial=initial_state, final=final, scratch=scratch
        )
        if call.goes_whole():
            call.scan_whole(params)
        else:
            call.states("FWD", params)
            call.scan("FWD", params)
    if return_state:
        final.n.copy_(_count(initial_state, log_decay, B, N, H, q.device))
    return o, stats, final


def backward(q, k, v, b, log_decay, cos, sin, o, stats, initial_state, do, dstate, normalize_qk, out):
    """Writes dq, dk and dv into `out`; → (db [H] or None, gradient of the initial state or None)."""
    q, k, v, o, do = map(_aligned, (q, k, v, o, do))
    dq, dk, dv = out
    B, N, H, D = q.shape
    e = torch.empty(B, H, N, device=q.device)
    d_initial = _empty_state(B, H, D, q.device) if initial_state is not None else None
    with torch.cuda.device(q.device):
        call = _Call(q, b, log_decay, cos, sin, normalize_qk)
        db = torch.empty(B, H, call.segments, device=q.device)
        shared = dict(stats=stats, e=e)
        if not call.build.hopper:  # there dq's scan finds e, reading do only once
            call.row_products(call.params(do, None, None, None, o, **shared), e)
        states = _scratch_behind(stats, call)  # the forward pass left them, unless it was another backend's
        if states is None:
            states = torch.empty(call.scratch_size(), device=q.device)
            call.states(
                "FWD", call.params(None, k, v, None, None, **shared, initial=initial_state, scratch=states)
            )
        params = call.params(do, v, k, q, dq, o, **shared, initial=initial_state, db=db, scratch=states)
        call.scan("DQ", params)
        if call.build.hopper:
            call.cut(2)
        shared |= dict(
            scratch=torch.empty(call.scratch_size(), device=q.device), initial=dstate, final=d_initial
        )
        params = call.params(v, do, q, k, dk, **shared)
        call.states("DK", params)
        call.scan_pair(params, call.params(k, q, do, None, dv, **shared))
    if d_initial is not None:
        decay = torch.zeros(H, device=q.device) if log_decay is None else log_decay.float()
        weights = torch.exp(decay[:, None] * torch.arange(1, N + 1, device=q.device))
        dn = -(e * weights).sum(-1)
        d_initial.n.copy_(dn if dstate is None else dn + dstate.n * torch.exp(decay * N))
    if not isinstance(b, Tensor):
        return None, d_initial
    return db.sum((0, 2)) * (B_SHRINK if normalize_qk else 1.0), d_initial


def _stats_and_scratch(call: _Call) -> tuple[Tensor, Tensor]:
    """stats [3, B, H, N], and behind them in the same memory the states before the segments.

    The backward pass starts from the same states: what saves stats for it saves them too, and computing them
    again would read k and v once more.
    """
    sizes = 3 * call.B * call.H * call.N, call.scratch_size()
    stats, scratch = torch.empty(sum(sizes), device=call.device).split_with_sizes(sizes)
    return stats.view(3, call.B, call.H, call.N), scratch


def _scratch_behind(stats: Tensor, call: _Call) -> Tensor | None:
    """What `_stats_and_scratch` put there, if these stats are its."""
    size, start = call.scratch_size(), stats.storage_offset() + stats.numel()
    if not stats.is_contiguous() or stats.untyped_storage().nbytes() != 4 * (start + size):
        return None
    return stats.as_strided((size,), (1,), start)


def _count(initial_state, log_decay, B, N, H, device) -> Tensor:
    """The (decayed) number of tokens seen, [B, H]."""
    n = torch.zeros(B, H, device=device) if initial_state is None else initial_state.n
    if log_decay is None:
        return n + N
    x = log_decay.double()
    geometric = torch.where(x == 0, N, torch.expm1(x * N) / torch.expm1(x))
    return n * torch.exp(x * N).float() + geometric.float()


def _empty_state(B: int, H: int, D: int, device) -> LinearAttentionState:
    shapes = ((B, H, D, D), (B, H, D), (B, H, D), (B, H))
    return LinearAttentionState(*(torch.empty(shape, device=device) for shape in shapes))


def _aligned(x: Tensor) -> Tensor:
    """The kernels read 16 bytes at a time: rows that start elsewhere (a slice of odd width) are copied."""
    *strides, last = x.stride()
    odd = x.data_ptr() % 16 or last != 1 or math.gcd(*strides) % 8
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor | None) -> tuple[int, int, int, int]:
    """struct Rows: data, and strides of batch, head and token."""
    if x is None:
        return 0, 0, 0, 0
    batch, token, head, _ = x.stride()
    return x.data_ptr(), batch, head, token


def _state_pointers(state: LinearAttentionState | None) -> list[int]:
    return [0] * 4 if state is None else [x.data_ptr() for x in state]
