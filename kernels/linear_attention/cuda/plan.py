"""Plans the passes of a call: which kernels are launched, on which grids, and the memory that they need.

Forward: `states` and `prefix` (if sequences are cut into segments), then one scan. Backward: `row_products`
for e, then one scan each for dq, dk and dv, after the states of their direction. On Hopper dq's scan computes
e, and dk and dv share a launch. With per-token decays, `sum_decays` comes first, for each direction, and
`decay_gradient` last. Without the normaliser there is no e, and tokens are not counted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lingpt.kernels.linear_attention.cuda.launch import LAYOUT, OPERANDS, Launch
from lingpt.kernels.linear_attention.cuda.toolchain import card
from lingpt.kernels.linear_attention.cuda.variants import (
    BOUNDARY_INTERVAL,
    DECAY_SPAN,
    DECAY_THREADS,
    THREADS,
    boundary_size,
    chunk_tokens,
    kernel_head_dim,
    state_size,
    variant_for,
)

TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")  # of a backward pass; forward has the first four
DECAY_HEADS = DECAY_THREADS // 32  # of a block of `sum_decays` and `decay_gradient`


def chunk_of(device: torch.device, head_dim: int) -> int:
    """Tokens per chunk, which a block processes at a time."""
    return chunk_tokens(card(device)[0], kernel_head_dim(head_dim))


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


class Direction(NamedTuple):
    """The launches of one direction, in this order."""

    own: list[Launch]  # each segment's own state, from zero, into the scratch; sums of per-token decays
    carry: list[Launch]  # these, in place, to the states before segments, from the initial one on
    scans: list[Launch]


class Plan:
    """The plan of a pass, from shapes, strides and options: its launches and its memory.

    `strides`: of TENSORS (forward: of the first four); `a`, `b`: a number, None for a tensor; `piece`: an
    empty segment follows the others, so that the state of all tokens is among those before segments;
    `divide`: o by the normaliser.
    `make_plan` caches plans: a short call takes mostly host time, and autograd's thread runs it with cold CPU
    caches.

    Launches: `forward`; or `rows` (for e), `forward` (dq; its states unless forward left them), `reverse` (dk
    and dv) and `decay_gradient`. Memory, sizes in fp32 numbers by the names of struct Params:
    `before` and `after`, of the scans in either direction, and `work`.
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
        piece: bool,
        divide: bool,
    ) -> None:
        self.B, self.N, self.H, columns = shape
        self.D = kernel_head_dim(columns)
        self._strides = dict(zip(TENSORS, strides, strict=False))
        self._piece = piece
        self.range = 2.0 ** (self.N.bit_length() // 2) if dtype == torch.float16 else 1.0
        self._numbers = dict(
            N=self.N, H=self.H, normalize=int(normalize_qk),
            divide=int(divide), columns=columns,
            a_value=a or 0.0, b_value=b or 0.0, range=self.range, inverse_range=1 / self.range,
        )  # fmt: skip
        arch, processors = card(device)
        self.variant = variant_for(arch, dtype, self.D, decay, rope, weights)
        self._kernels = self.variant.load(arch)
        self._slots = processors * self.variant.blocks  # blocks of a scan that the card runs at once
        segmentation = self._segmentation(scans=1)
        unsegmented = self._is_unsegmented(segmentation)
        if unsegmented:  # its one scan leaves a state a segment
            segmentation = segmentation._replace(sub_segments=1)
        self.before = self._scan_memory(segmentation)
        if "do" in self._strides:
            self._plan_backward(segmentation)
        elif unsegmented:
            sums, scans = self._sum_decays("FWD", segmentation), [self._unsegmented(segmentation)]
            self.forward = Direction(*sums, scans)
        else:
            scans = [self._scan("scan", ("FWD",), segmentation)]
            self.forward = Direction(*self._states("FWD", segmentation), scans)

    def _plan_backward(self, segmentation: Segmentation) -> None:
        scans = [modes for _, modes in self.variant.dk_dv]
        reverse = self._segmentation(scans=len(scans[0]))
        self.rows = self._row_products(segmentation)
        dq = [self._scan("scan", ("DQ",), segmentation)]
        dk_dv = [self._scan(kernel, modes, reverse) for kernel, modes in self.variant.dk_dv]
        self.forward = Direction(*self._states("FWD", segmentation), dq)
        self.reverse = Direction(*self._states("DK", reverse), dk_dv)
        self.decay_gradient = [
            self._per_span("decay_gradient", mode, segmentation)
            for mode in ("TOTALS", None)
            if ("decay_gradient", mode) in self._kernels
        ]
        self.after = self._scan_memory(reverse)
        rows, per_token = self.B * self.H * self.N, int(self.variant.per_token)
        per_segment = self.B * self.H * segmentation.segments
        self.work = dict(
            # first, as what is read there is aligned
            boundaries=self.B * self.H * self.boundaries * boundary_size(self.D),
            e=rows,
            db=per_segment,
            da=self.variant.da_parts * per_segment if self.variant.weights == "AFFINE" else 0,
            dG_rows=2 * rows * per_token,
            dG_columns=2 * rows * per_token,
            span_sums=2 * self.B * self.H * self._spans * per_token,
        )

    def _scan_memory(self, segmentation: Segmentation) -> dict[str, int]:
        """What a scan in one direction reads: a state for each sub-segment of each segment but the last, and
        the sums of per-token decays."""
        heads, per_token = self.B * self.H, int(self.variant.per_token)
        states = (segmentation.segments - 1) * segmentation.sub_segments
        chunks = -(-self.N // self.variant.chunk)
        sums = dict.fromkeys(("decay_cumsum", "to_end", "count"), heads * self.N * per_token)
        return {
            "scratch": heads * states * state_size(self.D),
            **sums,
            "chunks": 2 * heads * chunks * per_token,
        }

    @property
    def boundaries(self) -> int:
        """Boundaries of a sequence with per-token decays, every BOUNDARY_INTERVAL tokens; 0 unless it is a
        whole number of chunks."""
        exist = self.variant.per_token and self.N and self.N % self.variant.chunk == 0
        return (self.N - 1) // BOUNDARY_INTERVAL if exist else 0

    @property
    def _spans(self) -> int:
        return max(1, -(-self.N // DECAY_SPAN))

    def _segmentation(self, scans: int) -> Segmentation:
        """The segmentation with which `scans` concurrent scans fill the card."""
        heads, chunk = self.B * self.H, self.variant.chunk
        segments, segment_len = choose_segments(scans * heads, self.N, chunk, self._slots)
        segments += self._piece
        sub_segments = choose_sub_segments(heads * (segments - 1), segment_len // chunk, self._slots)
        return Segmentation(segments, segment_len, sub_segments)

    def _is_unsegmented(self, segmentation: Segmentation) -> bool:
        """Whether blocks of 64 columns fill the card with whole sequences, although blocks of whole heads do
        not."""
        blocks = self.B * self.H * (self.D // 64)
        exists = ("scan_unsegmented", "FWD") in self._kernels and segmentation.segments > 1
        return exists and not self._piece and 3 * blocks > 2 * self._slots >= 2 * blocks

    def _scan(self, kernel: str, modes: tuple[str, ...], segmentation: Segmentation) -> Launch:
        # Of a pair all blocks of the first mode come first: two multiprocessors share an instruction cache,
        # which holds the code of one scan only.
        grid = segmentation.segments, self.B * self.H, len(modes)
        return self._launch(kernel, modes, grid, segmentation)

    def _unsegmented(self, segmentation: Segmentation) -> Launch:
        """The forward scan of whole sequences, which also stores the states before the segments."""
        grid = self.D // 64, self.B * self.H, 1
        return self._launch("scan_unsegmented", ("FWD",), grid, segmentation, threads=4 * THREADS)

    def _states(self, mode: str, segmentation: Segmentation) -> tuple[list[Launch], list[Launch]]:
        """A direction's launches `own` and `carry`, which write the state before every segment but the first
        into the scratch."""
        own, carry = self._sum_decays(mode, segmentation)
        if segmentation.segments > 1:
            for_states, heads = segmentation.for_states(), self.B * self.H
            grid, values = (for_states.segments - 1, heads, 1), -(-state_size(self.D) // THREADS)
            own.append(self._launch("states", (mode,), grid, for_states))
            carry.append(self._launch("prefix", (mode,), (values, heads, 1), for_states, THREADS, shared=0))
        return own, carry

    def _sum_decays(self, mode: str, segmentation: Segmentation) -> tuple[list[Launch], list[Launch]]:
        """Those of them that sum the per-token decays."""
        own, carry, grid = [], [], (1, self.B * self.H, 1)
        if ("sum_decays", mode) in self._kernels:
            own.append(self._per_span("sum_decays", mode, segmentation))
        if ("sum_counts", mode) in self._kernels:
            carry.append(self._launch("sum_counts", (mode,), grid, segmentation, DECAY_THREADS, shared=0))
        return own, carry

    def _per_span(self, kernel: str, mode: str | None, segmentation: Segmentation) -> Launch:
        """A launch with one block for every DECAY_SPAN tokens of DECAY_HEADS heads."""
        grid = self._spans, self.B * -(-self.H // DECAY_HEADS), 1
        return self._launch(kernel, (mode,), grid, segmentation, threads=DECAY_THREADS, shared=0)

    def _row_products(self, segmentation: Segmentation) -> list[Launch]:
        """The launch for e, unless dq's scan computes it, or nothing needs it."""
        if ("row_products", None) not in self._kernels:
            return []
        grid = -(-self.N * self.H * (self.D // 8) // THREADS), self.B, 1
        return [self._launch("row_products", (None,), grid, segmentation, threads=THREADS, shared=0)]

    def _launch(
        self,
        kernel: str,
        modes: tuple[str | None, ...],
        grid: tuple[int, int, int],
        segmentation: Segmentation,
        threads: int | None = None,
        shared: int | None = None,
    ) -> Launch:
        """A launch with a struct Params for each mode; by default with a scan's threads and shared memory."""
        params = []
        for mode in modes:
            operands = OPERANDS.get(mode or kernel, {})
            strides = {
                f"{operand}_{dim}": stride
                for operand, name in operands.items()
                for dim, stride in zip(("batch", "token", "head"), self._strides[name], strict=False)
            }
            params.append((operands, LAYOUT.pack(strides | segmentation._asdict() | self._numbers)))
        threads = self.variant.threads if threads is None else threads
        shared = self.variant.shared if shared is None else shared
        return Launch(self._kernels[kernel, modes[0]], grid, threads, shared, tuple(params))


make_plan = functools.lru_cache(maxsize=1024)(Plan)
