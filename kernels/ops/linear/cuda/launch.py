"""Launches scan.cu: which kernels a pass takes, on what grid, with which pointers. The maths is told there.

Forward: `states` and `prefix` (where a sequence is split into segments), then one scan.
Backward: `row_products` for e, then a scan each for dq, dk and dv, after the states of their direction.
"""

from __future__ import annotations

import dataclasses
import functools
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

# struct Params of scan.cu: five Rows, 17 pointers, five ints, three floats.
_PARAMS = struct.Struct("@" + "Pqqi4x" * 5 + "P" * 17 + "5i3f")
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
    hopper: bool  # with warpgroup products

    @property
    def threads(self) -> int:
        """Of a block of a scan: on Hopper a warpgroup for every 64 columns."""
        return 2 * self.head_dim if self.hopper else THREADS

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a scan, bytes (Shared<D, C, HOPPER>::BYTES)."""
        C, D = self.chunk, self.head_dim
        stages = 1 if self.hopper and D == 128 else 2
        operand = C * 128 + (D * D * 2 if self.hopper else 0)
        rows = C * (24 + 20 + 10 + 20)
        return stages * 6 * C * D + operand + rows + 14 * D + 56

    def name(self, kernel: str, mode: str) -> str:
        flags = ", ".join(str(x).lower() for x in (self.decay, self.rope, self.hopper, self.blocks))
        return f"{kernel}<{self.tag}, {self.head_dim}, {self.chunk}, {MODES[mode]}, {flags}>"

    @property
    def names(self) -> tuple[str, ...]:
        decay = str(self.decay).lower()
        return (
            *(self.name("scan", mode) for mode in MODES),
            *(self.name("states", mode) for mode in ("FWD", "DK")),
            *(f"prefix<{self.head_dim}, {reverse}, {decay}>" for reverse in ("false", "true")),
            f"row_products<{self.tag}, {self.head_dim}>",
        )

    def spec(self, *architectures: str) -> KernelSpec:
        defines = {"HOPPER_BUILD": 1} if self.hopper else {}
        return KernelSpec(SOURCE, self.names, defines, architectures=architectures)


def variant(arch: str, dtype: torch.dtype, head_dim: int, decay: bool, rope: int) -> Variant:
    """The build for a card: chunks of 64 tokens where shared memory holds two stages of three tiles of them.

    `rope`: a multiple of 16 up to head_dim, or 0. Hopper's warpgroups rotate within 64 columns at most.
    """
    hopper = arch == "sm_90a" and rope <= 64
    small = arch in ("sm_86", "sm_89", "sm_120")  # 99 KB a block
    chunk = 32 if small and head_dim == 128 else 64
    blocks = 1 if small else 2 if head_dim == 128 else 3
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
def _kernels(build: Variant, arch: str) -> dict[str, Kernel]:
    signatures = {name: _PARAMS_CODE for name in build.names}
    signatures[build.names[-1]] = _PARAMS_CODE + "Pq"
    return build.spec(arch).compile(arch).load(signatures)


@functools.cache
def _card(device: torch.device) -> tuple[str, int]:
    return native_arch(device), torch.cuda.get_device_properties(device).multi_processor_count


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


class _Call:
    """What the kernels of one pass share: shapes, options, the build and the grid."""

    def __init__(self, q: Tensor, b, log_decay, cos, sin, normalize: bool) -> None:
        self.B, self.N, self.H, self.D = q.shape
        self.device = q.device
        self.arch, processors = _card(q.device)
        rope = 0 if cos is None else cos.shape[1]
        self.build = variant(self.arch, q.dtype, self.D, log_decay is not None, rope)
        self.kernels = _kernels(self.build, self.arch)
        self.stream = torch.cuda.current_stream(q.device).cuda_stream
        slots = processors * self.build.blocks
        self.segments, self.segment_len = split(self.B * self.H, self.N, self.build.chunk, slots)
        shrink = B_SHRINK if normalize else 1.0
        self.b = (b * shrink).float() if isinstance(b, Tensor) else None
        self.b_value = 0.0 if isinstance(b, Tensor) else b * shrink
        self.log_decay = log_decay
        self.cos, self.sin = (_aligned(x.float().contiguous()) if rope else None for x in (cos, sin))
        self.normalize = normalize
        self.range = 2.0 ** (self.N.bit_length() // 2) if q.dtype == torch.float16 else 1.0

    def scratch_size(self) -> int:
        """fp32 numbers: a state for every segment but the first."""
        return self.B * self.H * (self.segments - 1) * (self.D * self.D + 2 * self.D)

    def params(
        self, a, b, c, unit, y, *, stats, e=None, initial=None, final=None, scratch=None, db=None
    ) -> bytes:
        rows = [x for tensor in (a, b, c, unit, y) for x in _rows(tensor)]
        g, row_bytes = stats.data_ptr(), 4 * self.B * self.H * self.N
        states = [_pointer(x) for state in (initial, final) for x in (state or (None,) * 4)[:3]]
        return _PARAMS.pack(
            *rows,
            *(g, g + row_bytes, g + 2 * row_bytes),
            *map(_pointer, (e, self.b, self.log_decay, self.cos, self.sin)),
            *states,
            *map(_pointer, (scratch, initial[3] if initial else None, db)),
            *(self.N, self.H, self.segments, self.segment_len),
            *(int(self.normalize), self.b_value, self.range, 1 / self.range),
        )

    def scan(self, mode: str, params: bytes) -> None:
        kernel = self.kernels[self.build.name("scan", mode)]
        kernel(
            (self.segments, self.B * self.H, 1),
            (self.build.threads, 1, 1),
            self.build.shared,
            self.stream,
            params,
        )

    def states(self, mode: str, params: bytes) -> None:
        """The state before every segment but the first, into the scratch."""
        if self.segments == 1:
            return
        kernel = self.kernels[self.build.name("states", mode)]
        grid = (self.segments - 1, self.B * self.H, 1)
        kernel(grid, (self.build.threads, 1, 1), self.build.shared, self.stream, params)
        reverse = mode == "DK"
        kernel = self.kernels[f"prefix<{self.D}, {str(reverse).lower()}, {str(self.build.decay).lower()}>"]
        grid = (-(-(self.D * self.D + 2 * self.D) // THREADS), self.B * self.H, 1)
        kernel(grid, (THREADS, 1, 1), 0, self.stream, params)

    def row_products(self, params: bytes, e: Tensor) -> None:
        rows = self.B * self.N * self.H
        if rows == 0:
            return
        grid = (-(-rows * (self.D // 8) // THREADS), 1, 1)
        self.kernels[self.build.names[-1]](grid, (THREADS, 1, 1), 0, self.stream, params, e.data_ptr(), rows)


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
        call.row_products(call.params(do, None, None, None, o, **shared), e)
        states = _scratch_behind(stats, call)  # the forward pass left them, unless it was another backend's
        if states is None:
            states = torch.empty(call.scratch_size(), device=q.device)
            call.states(
                "FWD", call.params(None, k, v, None, None, **shared, initial=initial_state, scratch=states)
            )
        call.scan("DQ", call.params(do, v, k, q, dq, **shared, initial=initial_state, db=db, scratch=states))
        shared["scratch"] = torch.empty(call.scratch_size(), device=q.device)
        params = call.params(v, do, q, k, dk, **shared, initial=dstate, final=d_initial)
        call.states("DK", params)
        call.scan("DK", params)
        call.scan("DV", call.params(k, q, do, None, dv, **shared, initial=dstate, final=d_initial))
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
    shape = (3, call.B, call.H, call.N)
    memory = torch.empty(3 * call.B * call.H * call.N + call.scratch_size(), device=call.device)
    stats, scratch = memory.split([memory.numel() - call.scratch_size(), call.scratch_size()])
    return stats.view(shape), scratch


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
    odd = x.data_ptr() % 16 or x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1])
    return x.contiguous().clone() if odd else x


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(2), x.stride(1))
