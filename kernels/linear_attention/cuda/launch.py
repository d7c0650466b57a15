"""Plans the launches of linear_attention.cu: the kernels of a pass, their grids and their Params.

Forward: `states` and `prefix` (if sequences are cut into segments), then one scan. Backward: `row_products`
for e, then one scan each for dq, dk and dv, after the states of their direction. On Hopper dq's scan computes
e, and dk and dv share a launch. With per-token decays, `sum_decays` comes first, for each direction, and
`decay_gradient` last. Without the normaliser there is no e, and tokens are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from operator import add, itemgetter
from typing import NamedTuple

import torch

from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.kernel import Kernel
from lingpt.kernels.linear_attention.cuda.toolchain import native_arch, supported_architectures
from lingpt.kernels.linear_attention.numerics import LOG_ZERO, NORM_EPS

SOURCE = "linear_attention.cu"
TAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
MODES = ("FWD", "DQ", "DK", "DV")  # of a scan: modes.cuh has the table
DECAYS = ("NO_DECAY", "PER_HEAD", "PER_TOKEN")  # a constant γ of each head, or a decay of each token's own
WEIGHTS = ("NORMALISED", "AFFINE", "PRODUCTS")  # (1 + b x)/g, a + b x, b x: params.cuh
CHUNK = 64  # tokens that a block takes at a time; 32 where shared memory is small and head_dim 128
THREADS = 128  # of a block of the sm_80 scan, of `prefix` and `row_products`; of an sm_90a warpgroup
DECAY_THREADS = 256  # of a block of `sum_decays`, `sum_counts` and `decay_gradient`
DECAY_HEADS = DECAY_THREADS // 32  # of a block of the first and the last
DECAY_SPAN = 256  # tokens of such a block
# Tokens between boundaries, at which the gradient of decays is computed without a sum (token_decay.cuh).
BOUNDARY_INTERVAL = 512

# Shared memory, bytes (CUDA C++ Programming Guide, table of compute capabilities).
SMALL_SHARED = ("sm_86", "sm_89", "sm_120", "sm_121")  # 99 KB a block; the others have 163 or 227
SM90_SHARED = 228 * 1024  # of a multiprocessor; a block costs it 1 KB more than it asks for
RESERVED_SHARED = 1024

# The tensors of a pass (forward has the first four), and those that are a mode's operands a, b, c, qk, y and
# o (params.cuh).
TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
OPERANDS = {
    "FWD": ("q", "k", "v", None, "o", None),
    "DQ": ("do", "v", "k", "q", "dq", "o"),
    "DK": ("v", "do", "q", "k", "dk", None),
    "DV": ("k", "q", "do", None, "dv", None),
    "row_products": ("do", None, None, None, "o", None),
    "sum_decays": (None,) * 6,
}
operands_of = {
    mode: itemgetter(*(TENSORS.index(name) if name else -1 for name in names))
    for mode, names in OPERANDS.items()
}

# struct Params of params.cuh: 35 pointers, different in each call; then the layout, which all calls of a plan
# share: strides, six ints, four floats. The compiler checks the sizes (KernelBuild.defines).
POINTERS, LAYOUT = struct.Struct("@35P"), struct.Struct("@18q6i4f")
PARAMS_CODE = f"{POINTERS.size + LAYOUT.size}s"


def state_size(head_dim: int) -> int:
    """Size of a state in the scratch, in fp32 numbers: S and two vectors."""
    return head_dim * head_dim + 2 * head_dim


def boundary_size(head_dim: int) -> int:
    """Size of a boundary, in fp32 numbers: a state in 16 bits, two vectors, and 16 more."""
    return head_dim * head_dim // 2 + 2 * head_dim + 16


@dataclasses.dataclass(frozen=True)
class KernelBuild:
    """One build of the kernels: all template arguments, and what follows from them."""

    tag: str
    head_dim: int
    chunk: int  # tokens
    blocks: int  # a multiprocessor, at least: bounds the registers
    decay: str  # one of DECAYS
    rope: int  # dimensions of q and k that are rotated
    sm90: bool  # the scan of scan_sm90.cuh
    weights: str = "NORMALISED"  # one of WEIGHTS

    @functools.cached_property
    def threads(self) -> int:
        """Threads of a scan's block: on sm_90a a warpgroup for every 64 columns, and two more."""
        return (self.head_dim // 64 + 2) * THREADS if self.sm90 else THREADS

    @functools.cached_property
    def shared(self) -> int:
        """Dynamic shared memory of a scan in bytes: SharedSm80::BYTES; on sm_90a all a block can have."""
        C, D = self.chunk, self.head_dim
        if self.sm90:
            return SM90_SHARED // self.blocks - RESERVED_SHARED
        tiles, scores, per_token = 2 * 6 * C * D, C * 128, C * (24 + 20 + 10 + 20)
        decays = 42 * C + 8 if self.decay == "PER_TOKEN" else 0
        return tiles + scores + per_token + 14 * D + 56 + decays

    @property
    def names(self) -> dict[tuple[str, str | None], str]:
        """(kernel, mode) → name of its C++ template instance; some kernels have no mode."""
        D, C, decay, weights = self.head_dim, self.chunk, self.decay, self.weights
        options = f"{decay}, {self.rope}, {weights}"
        flags = f"{options}, {self.blocks}"
        names: dict[tuple[str, str | None], str] = {
            (kernel, mode): f"{kernel}<{self.tag}, {D}, {C}, {mode}, {flags}>"
            for kernel, modes in (("scan", MODES[: 2 if self.sm90 else 4]), ("states", ("FWD", "DK")))
            for mode in modes
        }
        if self.sm90:
            names["scan_pair", None] = f"scan_pair<{self.tag}, {D}, {flags}>"
            if D == 128:
                names["scan_unsegmented", None] = f"scan_unsegmented<{self.tag}, {D}, {options}>"
        elif self.has_counts:
            names["row_products", None] = f"row_products<{self.tag}, {D}>"
        for mode, reverse in (("FWD", "false"), ("DK", "true")):
            names["prefix", mode] = f"prefix<{D}, {C}, {reverse}, {decay}, {weights}>"
            if decay == "PER_TOKEN":
                names["sum_decays", mode] = f"sum_decays<{C}, {reverse}, {str(self.has_counts).lower()}>"
            if decay == "PER_TOKEN" and self.has_counts:
                names["sum_counts", mode] = f"sum_counts<{C}, {reverse}>"
        if decay == "PER_TOKEN":
            parts = 2 if self.sm90 and weights != "PRODUCTS" else 1  # of a token's, by two roles
            warps = 4 * (D // 64 + parts - 1) if self.sm90 else 4  # of outputs, and of token stats
            names["decay_gradient", "TOTALS"] = f"decay_gradient<{D}, {C}, true, {parts}, {warps}>"
            names["decay_gradient", None] = f"decay_gradient<{D}, {C}, false, {parts}, {warps}>"
        return names

    @property
    def has_counts(self) -> bool:
        """Whether tokens are counted, as the normaliser needs them."""
        return self.weights == "NORMALISED"

    @property
    def defines(self) -> dict[str, object]:
        """Constants that the source shares with Python: defined here, or checked by a static_assert there."""
        return {
            **({"SCAN_SM90": 1} if self.sm90 else {}),
            "POINTERS_BYTES": POINTERS.size,
            "LAYOUT_BYTES": LAYOUT.size,
            "SHARED_BYTES": self.shared,
            "SCAN_THREADS": self.threads,
            "LAUNCH_THREADS": THREADS,
            "LAUNCH_STATE_SIZE": state_size(self.head_dim),
            "LAUNCH_BOUNDARY_SIZE": boundary_size(self.head_dim),
            "LAUNCH_DECAY_THREADS": DECAY_THREADS,
            "LAUNCH_DECAY_SPAN": DECAY_SPAN,
            "LAUNCH_BOUNDARY_INTERVAL": BOUNDARY_INTERVAL,
            "NORM_EPS": f"{NORM_EPS}f",
            "LOG_ZERO": f"{LOG_ZERO[torch.float32]}f",
        }

    def spec(self, *architectures: str) -> KernelSpec:
        return KernelSpec(SOURCE, tuple(self.names.values()), self.defines, architectures=architectures)


def kernel_build(
    arch: str, dtype: torch.dtype, head_dim: int, decay: str, rope: int, weights: str = "NORMALISED"
) -> KernelBuild:
    """The build for a card: with chunks of 64 tokens if shared memory holds two stages of three such tiles.

    `decay`: one of DECAYS. `rope`: a multiple of 16 up to head_dim, or 0. Hopper's warpgroups rotate within
    64 columns at most. `weights`: one of WEIGHTS.
    """
    sm90 = arch == "sm_90a" and rope <= 64
    blocks = 1 if arch in SMALL_SHARED else 2 if head_dim == 128 else 3
    if sm90:
        blocks -= 1
    return KernelBuild(TAGS[dtype], head_dim, _chunk(arch, head_dim), blocks, decay, rope, sm90, weights)


def _chunk(arch: str, head_dim: int) -> int:
    return 32 if arch in SMALL_SHARED and head_dim == 128 else CHUNK


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead: bf16, for models (RoPE on a quarter of the dimensions)
    and for separate q, k, v."""
    builds: dict[KernelBuild, list[str]] = {}
    for arch in supported_architectures():
        for head_dim in HEAD_DIMS:
            for decay, rope, weights in _compiled_ahead(head_dim):
                build = kernel_build(arch, torch.bfloat16, head_dim, decay, rope, weights)
                builds.setdefault(build, []).append(arch)
    return [build.spec(*architectures) for build, architectures in builds.items()]


def _compiled_ahead(head_dim: int) -> list[tuple[str, int, str]]:
    """(decay, rope, weights) of the builds that are compiled ahead."""
    model = head_dim // 4
    return [
        ("NO_DECAY", 0, "NORMALISED"),
        *((decay, model, "NORMALISED") for decay in DECAYS),
        ("PER_TOKEN", model, "AFFINE"),
        ("PER_TOKEN", 0, "PRODUCTS"),
    ]


@functools.cache
def load_kernels(build: KernelBuild, arch: str) -> dict[tuple[str, str | None], Kernel]:
    """The build's kernels, compiled and loaded: (kernel, mode) → Kernel, with the keys of `build.names`."""
    names = build.names
    signatures = {
        name: PARAMS_CODE * (2 if kernel == "scan_pair" else 1) for (kernel, _), name in names.items()
    }
    kernels = build.spec(arch).compile(arch).load(signatures)
    return {key: kernels[name] for key, name in names.items()}


@functools.cache
def _card(device: torch.device) -> tuple[str, int]:
    """The card's architecture and number of multiprocessors."""
    return native_arch(device), torch.cuda.get_device_properties(device).multi_processor_count


def chunk_tokens(device: torch.device, head_dim: int) -> int:
    """Tokens per chunk, which a block processes at a time."""
    return _chunk(_card(device)[0], head_dim)


@functools.lru_cache(maxsize=1024)
def choose_segments(batch_heads: int, seq_len: int, chunk: int, slots: int) -> tuple[int, int]:
    """(segments, tokens per segment): how to cut sequences so that all `slots` blocks of a card have work.

    The cost of a choice is the number of tokens that the busiest slot scans, times 1.35 if states come first.
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
def choose_sub_segments(segments: int, chunks: int, slots: int) -> int:
    """The number of sub-segments that `states` cuts each segment into, to fill `slots`; `segments`: the
    number of segments over all heads, `chunks`: chunks per segment."""
    fitting = (n for n in range(1, chunks // 4 + 1) if chunks % n == 0 and n * segments <= slots)
    return max(fitting, default=1) if segments else 1


class Segmentation(NamedTuple):
    """How sequences are cut: into `segments` of `segment_len` tokens; a block of `states` scans one of the
    `sub_segments` of a segment."""

    segments: int
    segment_len: int
    sub_segments: int

    def for_states(self) -> Segmentation:
        """The segmentation for `states`: each sub-segment is a segment, and the last segment is not cut."""
        return Segmentation(
            (self.segments - 1) * self.sub_segments + 1, self.segment_len // self.sub_segments, 1
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and the part after the pointers of each struct Params (two for `scan_pair`)."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    layouts: tuple[bytes, ...]

    def __call__(self, stream: int, *pointers: bytes) -> None:
        self.kernel(self.grid, self.block, self.shared, stream, *map(add, pointers, self.layouts))


class LaunchPlan:
    """The plan of a pass, from shapes, strides and options: its launches and the size of its scratch.

    `strides`: of TENSORS (forward: of the first four); `a`, `b`: a number, None for a tensor. `make_plan`
    caches plans: a short call takes mostly host time, and autograd's thread runs it with cold CPU caches.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        strides: tuple[tuple[int, int, int, int], ...],
        decay: str,
        rope: int,
        weights: str,
        a: float | None,
        b: float | None,
        normalize_qk: bool,
    ) -> None:
        self.B, self.N, self.H, self.D = shape
        self._strides = dict(zip(TENSORS, strides, strict=False))
        range_ = 2.0 ** (self.N.bit_length() // 2) if dtype == torch.float16 else 1.0
        self._numbers = int(normalize_qk), a or 0.0, b or 0.0, range_, 1 / range_
        arch, processors = _card(device)
        self.build = kernel_build(arch, dtype, self.D, decay, rope, weights)
        self._kernels = load_kernels(self.build, arch)
        self._slots = processors * self.build.blocks  # blocks of a scan that the card runs at once
        self.segmentation = self._segmentation(scans=1)
        unsegmented = self._is_unsegmented()
        if unsegmented:  # its one scan leaves a state a segment
            self.segmentation = self.segmentation._replace(sub_segments=1)
        self.states = self._states("FWD", self.segmentation)
        self._per_token_decay = decay == "PER_TOKEN"
        self.sum_decays = self._sum_decays("FWD")
        if "do" in self._strides:
            self._plan_backward()
        elif unsegmented:
            self.forward = [self._unsegmented()]
        else:
            self.forward = [*self.states, self._scan("FWD", self.segmentation)]

    def _plan_backward(self) -> None:
        """Plans dq, then dk and dv in reverse, segmented for two concurrent scans if they share a launch."""
        self.reverse_segmentation = self._segmentation(scans=2) if self.build.sm90 else self.segmentation
        self.dq = self._scan("DQ", self.segmentation)
        self.reverse_states = self._states("DK", self.reverse_segmentation)
        self.reverse_sum_decays, self.decay_gradient = self._sum_decays("DK"), self._decay_gradient()
        self.row_products = self._row_products()
        if self.build.sm90:  # dk and dv at once, as both read k, q and do
            self.dk_dv = self._pair()
        else:
            self.dk, self.dv = (self._scan(mode, self.segmentation) for mode in ("DK", "DV"))

    def scratch_size(self, segmentation: Segmentation) -> int:
        """Size in fp32 numbers: a state for every sub-segment of every segment but the last."""
        states = (segmentation.segments - 1) * segmentation.sub_segments
        return self.B * self.H * states * state_size(self.D)

    @property
    def decay_sums_size(self) -> int:
        """Size in fp32 numbers: Γ and two more per token and head, and two per chunk and head."""
        chunks = -(-self.N // self.build.chunk)
        return self.B * self.H * (3 * self.N + 2 * chunks) if self._per_token_decay else 0

    @property
    def span_sums_size(self) -> int:
        """Size in fp32 numbers: two per span and head, for `decay_gradient`."""
        return 2 * self.B * self.H * self._spans if self._per_token_decay else 0

    @property
    def boundaries(self) -> int:
        """Boundaries of a sequence with per-token decays, every BOUNDARY_INTERVAL tokens; 0 unless it is a
        whole number of chunks."""
        exist = self._per_token_decay and self.N and self.N % self.build.chunk == 0
        return (self.N - 1) // BOUNDARY_INTERVAL if exist else 0

    @property
    def boundaries_size(self) -> int:
        """Size of all boundaries in fp32 numbers."""
        return self.B * self.H * self.boundaries * boundary_size(self.D)

    @property
    def da_size(self) -> int:
        """Size in fp32 numbers of the gradient of a: one per segment, on Hopper eight parts of it."""
        parts = 8 if self.build.sm90 else 1
        return parts * self.B * self.H * self.segmentation.segments if self.build.weights == "AFFINE" else 0

    @property
    def _spans(self) -> int:
        return max(1, -(-self.N // DECAY_SPAN))

    def _segmentation(self, scans: int) -> Segmentation:
        """The segmentation with which `scans` concurrent scans fill the card."""
        heads, chunk = self.B * self.H, self.build.chunk
        segments, segment_len = choose_segments(scans * heads, self.N, chunk, self._slots)
        sub_segments = choose_sub_segments(heads * (segments - 1), segment_len // chunk, self._slots)
        return Segmentation(segments, segment_len, sub_segments)

    def _is_unsegmented(self) -> bool:
        """Whether blocks of 64 columns fill the card with whole sequences, although blocks of whole heads do
        not."""
        blocks = self.B * self.H * (self.D // 64)
        exists = ("scan_unsegmented", None) in self._kernels and self.segmentation.segments > 1
        return exists and 3 * blocks > 2 * self._slots >= 2 * blocks

    def _scan(self, mode: str, segmentation: Segmentation) -> Launch:
        return self._launch("scan", mode, segmentation.segments, self._layout(mode, segmentation))

    def _unsegmented(self) -> Launch:
        """The forward scan of whole sequences, which also stores the states before the segments."""
        layout = self._layout("FWD", self.segmentation)
        return self._launch("scan_unsegmented", None, self.D // 64, layout, threads=4 * THREADS)

    def _pair(self) -> Launch:
        # All of dk first: two multiprocessors share an instruction cache, which holds the code of one scan
        # only.
        layouts = (self._layout(mode, self.reverse_segmentation) for mode in ("DK", "DV"))
        return self._launch("scan_pair", None, self.reverse_segmentation.segments, *layouts, depth=2)

    def _states(self, mode: str, segmentation: Segmentation) -> list[Launch]:
        """Launches that write the state before every segment but the first into the scratch."""
        if segmentation.segments == 1:
            return []
        for_states, prefix_blocks = segmentation.for_states(), -(-state_size(self.D) // THREADS)
        layout = self._layout(mode, for_states)
        return [
            self._launch("states", mode, for_states.segments - 1, layout),
            self._launch("prefix", mode, prefix_blocks, layout, threads=THREADS, shared=0),
        ]

    def _sum_decays(self, mode: str) -> list[Launch]:
        """Launches that sum the per-token decays, in the direction of a mode."""
        if not self._per_token_decay:
            return []
        layout = self._layout("sum_decays", self.segmentation)
        launches = [self._per_span("sum_decays", mode, layout)]
        if ("sum_counts", mode) in self._kernels:
            launches.append(self._launch("sum_counts", mode, 1, layout, threads=DECAY_THREADS, shared=0))
        return launches

    def _decay_gradient(self) -> list[Launch]:
        if not self._per_token_decay:
            return []
        layout = self._layout("sum_decays", self.segmentation)
        return [self._per_span("decay_gradient", mode, layout) for mode in ("TOTALS", None)]

    def _per_span(self, kernel: str, mode: str | None, layout: bytes) -> Launch:
        """A launch with one block for every DECAY_SPAN tokens of DECAY_HEADS heads."""
        grid = self._spans, self.B * -(-self.H // DECAY_HEADS), 1
        return Launch(self._kernels[kernel, mode], grid, (DECAY_THREADS, 1, 1), 0, (layout,))

    def _row_products(self) -> list[Launch]:
        """The launch for e, which only the normaliser needs; none on Hopper, where dq's scan computes it."""
        if ("row_products", None) not in self._kernels:
            return []
        layout = self._layout("row_products", self.segmentation)
        grid = -(-self.N * self.H * (self.D // 8) // THREADS), self.B, 1
        return [Launch(self._kernels["row_products", None], grid, (THREADS, 1, 1), 0, (layout,))]

    def _launch(
        self,
        kernel: str,
        mode: str | None,
        width: int,
        *layouts: bytes,
        depth: int = 1,
        threads: int | None = None,
        shared: int | None = None,
    ) -> Launch:
        """A launch on `width` × B·H × `depth` blocks, by default with a scan's threads and shared memory."""
        grid, block = (width, self.B * self.H, depth), (threads or self.build.threads, 1, 1)
        shared = self.build.shared if shared is None else shared
        return Launch(self._kernels[kernel, mode], grid, block, shared, layouts)

    def _layout(self, mode: str, segmentation: Segmentation) -> bytes:
        """The part of struct Params after its pointers."""
        strides = (self._strides.get(name or "", (0, 0, 0, 0)) for name in OPERANDS[mode])
        flat = [stride for batch, token, head, _ in strides for stride in (batch, head, token)]
        return LAYOUT.pack(*flat, self.N, self.H, *segmentation, *self._numbers)


make_plan = functools.lru_cache(maxsize=1024)(LaunchPlan)
