"""Linear attention with a decay for each channel on the kernels of channel_decay.cu: plans and launches.

Forward: `prepare` where v is wide, `states` and `prefix` if sequences are cut into segments, then a scan.
Backward: the same in reverse for dv, then scans for dq and dk; the last writes the decays' gradient, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import (
    MAX_BATCH_HEADS,
    Fields,
    Kernel,
    current_device,
    raw_stream,
)
from lingpt.kernels.linear_attention.cuda.toolchain import (
    card,
    native_arch,
    supported_architectures,
    unusable_reason,
)
from lingpt.kernels.linear_attention.cuda.variants import SMALL_SHARED

SOURCE = "channel_decay.cu"
TAGS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
LEFT, RIGHT, STATES, PREPARE, PREFIX = range(5)  # the kernels of a build, in its tuples
CHUNK, SUBS = 32, 2  # tokens that a block takes at a time, and the blocks of 16 in them
# Tokens of a segment at most: the gradient of decays is summed up within one, and so is its rounding.
LONGEST_SEGMENT = 1024
WIDTH, MOST_KEYS, MOST_VALUES = 32, 256, 512  # Dk and Dv are multiples of the first
# (Dk, Dv) to compile ahead: of `gla`, by the width of the model, and those of heads as models have them.
HEAD_SHAPES = (
    *((32, 32), (32, 64), (64, 128), (96, 192), (128, 256), (256, 512)),
    *((64, 64), (128, 128), (256, 256)),
)

_TENSORS = ("a", "b", "c", "gate", "k")  # those with strides
# struct ChannelParams: pointers, different in each call; then what calls of one shape share.
POINTERS = Fields(
    dict.fromkeys(("a", "b", "c", "gate", "y", "y_rest", "k", "dq", "dq_rest", "dgate"), "P")
    | dict.fromkeys(("ends", "S", "states", "decays", "final", "initial", "prepared"), "P")
)
LAYOUT = Fields(
    {f"{name}_{dim}": "q" for name in _TENSORS for dim in ("batch", "token", "head")}
    | dict.fromkeys(("N", "H", "segments", "segment_len", "part", "first", "run_len", "channels"), "i")
    | {"scale": "f", "unused": "i"}
)
# What a scan's a, b and c are (channel_decay_params.cuh).
OPERANDS = {"FWD": "qkv", "DV": ("k", "q", "do"), "DQ": ("do", "v", "k"), "DK": ("v", "do", "q")}


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of channel_decay.cu."""

    arch: str
    tag: str  # of q, k and v
    gate_tag: str
    Dk: int
    Dv: int

    @functools.cached_property
    def groups(self) -> int:
        """The right form's GROUPS, which share a state's row: a lane has 64 numbers of it, or 96 or 128."""
        fitting = [n for n in range(1, 5) if self.Dv % (16 * n) == 0 and (n > 1 or self.Dv <= 192)]
        return next(n for most in (128, 256) for n in fitting if self.Dv <= most * n or n == 1)

    def registers(self, part: int) -> int:
        """Of a thread whose warp has so many numbers of a state's row: half as many, and the others."""
        return part // 2 + (72 if self.arch == "sm_80" else 64)

    @functools.cached_property
    def slices(self) -> tuple[int, int]:
        """Channels of c and y that a block has: v's in the left form, k's in the right one."""
        right = 2**15 // (self.groups * self.registers(self.Dv // self.groups))
        return _widest(self.Dv, 128), _widest(self.Dk, min(128, right))

    @functools.cached_property
    def prepared(self) -> bool:
        """Whether what all slices of v need of q, k and the decays is computed once, by `prepare`: of three
        or more, and of two where it would not fit beside them."""
        slices, needed = self.Dv // self.slices[0], self.left_shared(self.Dk, self.slices[0])
        return slices > 2 or (slices == 2 and needed > 1024 * most_shared(self.arch))

    @property
    def prepare_part(self) -> int:
        """Channels of q and k that `prepare` takes at a time."""
        return _widest(self.Dk, 128)

    @functools.cached_property
    def prepared_chunk(self) -> int:
        """Bytes of PreparedChunk."""
        return 4 * CHUNK * self.Dk + 4 * SUBS * self.Dk + 32 * CHUNK

    @property
    def roles(self) -> bool:
        """Whether each group of the right form's warps has a role: where their memory costs no block."""
        more, less = self.right_shared(True), self.right_shared(False)
        return self.groups > 1 and self.costs_no_block(RIGHT, more, less)

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        """Bytes of shared memory of each kernel's block."""
        right, part = self.right_shared(self.roles), self.prepare_part
        left, states = (n * stage for n, stage in zip(self.stages, self.stage, strict=True))
        if self.prepared:
            return left + self.exchange, right, states, self.left_shared(part, part), 0
        return self.left_shared(self.Dk, self.slices[0]), right, states, 0, 0

    def left_shared(self, keys: int, values: int) -> int:
        """Bytes of SharedLeft, with so many channels of a and b, and of c."""
        gate = 4 if self.gate_tag == "float" else 2
        tiles = _tile(keys, gate) + 8 * _tile(keys) + 2 * _tile(values)
        return tiles + SUBS * keys * 4 + SUBS * 16 * 48

    def right_shared(self, roles: bool) -> int:
        """Bytes of SharedRight."""
        right, groups, gate = self.slices[1], self.groups, 4 if self.gate_tag == "float" else 2
        stage, scores = 2 * _tile(self.Dv) + _tile(right) + _tile(right, gate), CHUNK * 80
        scan = stage + 3 * _tile(right) + _tile(right, gate) + scores
        scan += groups * CHUNK * (right + 4) * 4 + (4 * SUBS + groups) * right * 4
        return scan + roles * (stage + scores)

    @property
    def exchange(self) -> int:
        """Bytes of shared memory in which the warps of the prepared scan exchange what they have of y."""
        return CHUNK * self.slices[0] * 4

    @property
    def stage(self) -> tuple[int, int]:
        """Bytes of shared memory that a chunk takes in the prepared scan and in `states`."""
        left = self.slices[0]
        if self.prepared:
            states = _tile(self.Dk) + _tile(left) + SUBS * self.Dk * 4
            return states + _tile(self.Dk) + 48 * CHUNK, states
        gates = _tile(self.Dk, 4 if self.gate_tag == "float" else 2, gap=32)
        return 0, gates + _tile(self.Dk, gap=32) + _tile(left, gap=32)

    @property
    def stages(self) -> tuple[int, int]:
        """Chunks that the prepared scan and `states` have room for: three, or four where it costs no block.

        Without `prepare`, `states` has three where two such blocks fit, else two.
        """
        scan, states = self.stage
        if self.prepared:
            fourth = self.costs_no_block(LEFT, 4 * scan + self.exchange, 3 * scan + self.exchange)
            return 3 + fourth, 3 + self.costs_no_block(STATES, 4 * states, 3 * states)
        return 0, 2 + (2 * 3 * states // 1024 < most_shared(self.arch))

    @property
    def unsupported_reason(self) -> str | None:
        """Why its architecture cannot run it; None if it can."""
        needed, most = -(-max(self.shared) // 1024), most_shared(self.arch)
        if needed <= most:
            return None
        shape = f"Dk = {self.Dk} and Dv = {self.Dv}"
        return f"{shape} need {needed} KB of shared memory a block, {self.arch} has {most}"

    @functools.cached_property
    def threads(self) -> tuple[int, ...]:
        """Of each kernel's block."""
        left, right = self.slices
        return 2 * left, 2 * right * self.groups, 2 * self.Dk, 2 * self.prepare_part, 128

    def fitting(self, kernel: int, shared: int) -> int:
        """Blocks that a multiprocessor runs at once, if each has so many bytes of shared memory."""
        numbers = (self.Dk, self.Dv // self.groups, self.slices[0])[kernel]
        by_registers = 2**16 // (self.threads[kernel] * self.registers(numbers))
        by_memory = 1024 * (most_shared(self.arch) + 1) // (shared + 1024)
        return min(4, by_registers, by_memory)

    def costs_no_block(self, kernel: int, more: int, less: int) -> bool:
        """Whether as many blocks fit with more bytes of shared memory as with less."""
        return self.fitting(kernel, more) >= max(1, self.fitting(kernel, less))

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the left form, the right form and `states` that a multiprocessor runs at once."""
        return tuple(max(1, self.fitting(kernel, self.shared[kernel])) for kernel in (LEFT, RIGHT, STATES))

    @property
    def names(self) -> dict[str, str]:
        (left, right), (few, many, most), (chunks, stages) = self.slices, self.blocks, self.stages
        types, names = f"{self.tag}, {self.gate_tag}", {}
        for mode, reverse in (("FWD", "false"), ("DV", "true")):
            sizes = f"{self.Dk}, {left}, {reverse}"
            if self.prepared:
                options = f"{types}, {self.Dk}, {self.prepare_part}, {reverse}"
                names[f"prepare {mode}"] = f"channel_prepare<{options}>"
                names[f"states {mode}"] = f"channel_prepared_states<{self.tag}, {sizes}, {stages}, {most}>"
                names[mode] = f"channel_prepared<{self.tag}, {sizes}, {chunks}, {few}>"
            else:
                names[f"states {mode}"] = f"channel_states<{types}, {sizes}, {stages}, {most}>"
                names[mode] = f"channel_left<{types}, {sizes}, {few}>"
            names[f"prefix {mode}"] = f"channel_prefix<{self.Dk}, {self.Dv}, {reverse}>"
        roles = str(self.roles).lower()
        for mode, reverse in (("DQ", "false"), ("DK", "true")):
            options = f"{types}, {self.Dv}, {right}, {self.groups}, {reverse}, {roles}, {many}"
            names[mode] = f"channel_right<{options}>"
        return names

    @property
    def spec(self) -> KernelSpec:
        defines = {
            "CHANNEL_PARAMS_BYTES": POINTERS.size + LAYOUT.size,
            "PREPARED_CHUNK_BYTES": self.prepared_chunk,
        }
        sizes = ("LEFT_BYTES", "RIGHT_BYTES", "STATES_BYTES", "PREPARE_BYTES")
        defines |= dict(zip(sizes, self.shared, strict=False))
        title = f"{self.tag}, gates {self.gate_tag}, Dk = {self.Dk}, Dv = {self.Dv}"
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, (self.arch,), title)

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        return self.spec.load(self.arch, self.names)


build_for = functools.cache(Build)  # which keeps its kernels


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead: bf16 with gates in bf16, as `gla` trains."""
    builds = (
        Build(arch, "bf16", "bf16", Dk, Dv) for arch in supported_architectures() for Dk, Dv in HEAD_SHAPES
    )
    return [build.spec for build in builds if build.unsupported_reason is None]


def _tile(columns: int, size: int = 2, gap: int = 64) -> int:
    """Bytes of a Tile of channel_decay_params.cuh."""
    return -(-(CHUNK * (columns * size + 16) + CHUNK // 8 * gap) // 128) * 128


def _widest(channels: int, most: int) -> int:
    """The widest slice of at most so many channels: a multiple of 32 that divides them."""
    return max(width for width in range(32, most + 1, 32) if channels % width == 0)


def left_blocks(build: Build, q: Tensor) -> tuple[int, int]:
    """Blocks of the left scan of one segment, and how many the card runs at once."""
    B, _, H, _ = q.shape
    return B * H * (build.Dv // build.slices[0]), card(q.device)[1] * build.blocks[LEFT]


def segmentation(q: Tensor, Dv: int) -> tuple[int, int]:
    """(segments, tokens of each) that a sequence is cut into: enough to fill the card."""
    _, N, _, Dk = q.shape
    build = build_for(card(q.device)[0], TAGS[q.dtype], "float", int(Dk), int(Dv))
    blocks, slots = left_blocks(build, q)
    count = max(-(-N // LONGEST_SEGMENT), min(slots // blocks, N // (4 * CHUNK)), 1)
    length = -(-N // (count * CHUNK)) * CHUNK
    return -(-N // length), length


@functools.cache
def run_length(segments: int, blocks: int, slots: int) -> int:
    """Segments of a run, which a block of the left scan takes in turn, if there are so many blocks a segment.

    Of the lengths with which the scan is done first, the longest: `states` need not know the last run's sums.
    """

    def time(length: int) -> int:
        runs = -(-segments // length)
        return length * -(-runs * blocks // slots)

    return min(range(segments, 0, -1), key=time)


@functools.cache
def part_length(segments: int, blocks: int, slots: tuple[int, int]) -> int:
    """Segments of a part, prepared and scanned before the next: the workspace is for one part. Of the
    lengths with which all parts are done first, the shortest.

    slots: blocks of the scan, and of `states`, which takes half as long, that the card runs at once.
    """

    def time(part: int) -> float:
        length = run_length(part, blocks, slots[0])
        runs = -(-part // length)
        scan, summed = length * -(-runs * blocks // slots[0]), (runs - 1) * length
        return -(-segments // part) * (scan + -(-summed * blocks // slots[1]) / 2)

    return min(range(1, segments + 1), key=time)


def unsupported_reason(q: Tensor, Dk: int, Dv: int) -> str | None:
    """Why the kernels cannot serve a call with such q, but Dk and Dv; None if they can."""
    B, N, H, _ = q.shape
    if B * H > MAX_BATCH_HEADS:
        return "batch size × heads is above 65,535"
    if 0 in (B, N, H):
        return "it takes no empty tensors"
    # A number for torch.compile, too, even if D has changed since its first call.
    return _shape_unsupported_reason(q.dtype, operator.index(Dk), operator.index(Dv), q.device)


def _shape_unsupported_reason(dtype: torch.dtype, Dk: int, Dv: int, device: torch.device) -> str | None:
    return _no_kernels(dtype, Dk, Dv, device)


# How a compiler is found cannot be traced. (torch.compiler.assume_constant_result would load the compiler.)
_shape_unsupported_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _no_kernels(dtype: torch.dtype, Dk: int, Dv: int, device: torch.device) -> str | None:
    """Why no kernels run for these head dimensions, this dtype and card; None if they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {dtype}"
    if Dk % WIDTH or Dv % WIDTH or not (0 < Dk <= MOST_KEYS and 0 < Dv <= MOST_VALUES):
        return f"it takes Dk up to {MOST_KEYS} and Dv up to {MOST_VALUES}, not {Dk} and {Dv}"
    if reason := unusable_reason(device):
        return reason
    return Build(native_arch(device), TAGS[dtype], "float", Dk, Dv).unsupported_reason


def most_shared(arch: str) -> int:
    """KB of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)."""
    return 99 if arch in SMALL_SHARED else 163 if arch == "sm_80" else 227


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass over these tensors: its kernels, segments and memory."""

    build: Build
    tensors: dict[str, Tensor]
    scale: float
    segments: int
    segment_len: int
    part: int  # segments that the left scan's kernels take at a time
    run_len: int  # of these, that a block of it takes in turn
    stream: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: float, **more: Tensor) -> _Pass:
        gate = gate if gate.dtype in TAGS and gate.dtype != torch.float16 else gate.float()
        tensors = {name: _aligned(x) for name, x in dict(q=q, k=k, v=v, gate=gate, **more).items()}
        Dk, Dv = q.shape[-1], v.shape[-1]
        build = build_for(card(q.device)[0], TAGS[q.dtype], TAGS[gate.dtype], Dk, Dv)
        segments, length = segmentation(q, Dv)
        blocks, slots = left_blocks(build, q)
        of_states = card(q.device)[1] * build.blocks[STATES]
        part = part_length(segments, blocks, (slots, of_states)) if build.prepared else segments
        run_len = run_length(part, blocks, slots)
        return cls(build, tensors, scale, segments, length, part, run_len, raw_stream(q.device.index))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors["q"].device)

    def left(self, mode: str, initial: Tensor | None, **outputs: Tensor | None) -> Tensor:
        """Scans o or dv; the states between segments, [B, H, segments - 1, Dk, Dv]."""
        build, (B, _, H, Dk) = self.build, self.tensors["q"].shape
        states = self.empty(B, H, self.segments - 1, Dk, build.Dv)
        decays = self.empty(B, H, self.segments - 1, Dk)
        addresses = dict(outputs, states=states, decays=decays, initial=initial)
        slices, chunks = build.Dv // build.slices[0], self.segment_len // CHUNK
        if build.prepared:
            workspace = B * H * self.part * chunks * build.prepared_chunk
            addresses["prepared"] = self.empty(workspace, dtype=torch.uint8)
        for first in range(0, self.segments, self.part):
            segments = min(self.part, self.segments - first)
            runs = -(-segments // self.run_len)
            summed = (runs - 1) * self.run_len  # segments before the last run
            launch = functools.partial(self._launch, mode=mode, addresses=addresses, first=first)
            if build.prepared:
                launch(f"prepare {mode}", grid=(chunks, B * H, segments), form=PREPARE)
            if summed:
                launch(f"states {mode}", grid=(slices, B * H, summed), form=STATES)
            # Of one alone it is what `states` wrote.
            if summed > 1 or (summed and (first or initial is not None)):
                grid = -(-Dk * build.Dv // (4 * build.threads[PREFIX])), B * H, 1
                launch(f"prefix {mode}", grid=grid, form=PREFIX)
            launch(mode, grid=(slices, B * H, runs), form=LEFT)
        return states

    def right(self, mode: str, **addresses: Tensor | None) -> None:
        """Scans dq or dk."""
        B, _, H, Dk = self.tensors["q"].shape
        self._launch(mode, mode, (Dk // self.build.slices[1], B * H, self.segments), RIGHT, addresses)

    def _launch(
        self,
        kernel: str,
        mode: str,
        grid: tuple[int, int, int],
        form: int,  # LEFT, …
        addresses: Mapping[str, Tensor | None],
        first: int = 0,
    ) -> None:
        build, (_, N, H, Dk) = self.build, self.tensors["q"].shape
        operands = {
            name: self.tensors[x] for name, x in zip(_TENSORS, (*OPERANDS[mode], "gate", "k"), strict=True)
        }
        layout = _layout(
            tuple(x.stride()[:3] for x in operands.values()),
            *(N, H, self.segments, self.segment_len, self.part, first, self.run_len),
            *(Dk if mode in ("DQ", "DK") else build.Dv, self.scale),
        )
        pointers = {name: x.data_ptr() for name, x in {**operands, **addresses}.items() if x is not None}
        arguments = build.threads[form], build.shared[form], self.stream, POINTERS.pack(pointers) + layout
        build.kernels[kernel](grid, *arguments)


@functools.lru_cache(maxsize=1024)
def _layout(strides: tuple[tuple[int, ...], ...], *numbers: float) -> bytes:
    """A call for few tokens takes mostly host time, so this part of the parameters is packed once."""
    return LAYOUT.pack(dict(zip(LAYOUT.names, (*itertools.chain(*strides), *numbers), strict=False)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, initial: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, N, H, Dv], the final state [B, H, Dk, Dv], and for `backward` those between segments."""
    (B, N, H, Dk), Dv = q.shape, v.shape[-1]
    with current_device(q.device):
        run = _Pass.of(q, k, v, gate, scale)
        o, final = run.empty(B, N, H, Dv, dtype=q.dtype), run.empty(B, H, Dk, Dv)
        states = run.left("FWD", _state(initial), y=o, final=final)
    return o, final, states


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial: Tensor | None,
    final: Tensor,
    states: Tensor,
    scale: float,
    do: Tensor,
    dfinal: Tensor | None,
) -> list[Tensor]:
    """The gradients of q, k, v, gate and, if there is one, the initial state.

    `final`, `states`: what `forward` returned.
    """
    with current_device(q.device):
        run = _Pass.of(q, k, v, gate, scale, do=do)
        initial, dfinal = _state(initial), _state(None if dfinal is None else dfinal / scale)
        dv = run.empty(*v.shape, dtype=v.dtype)
        dinitial = None if initial is None else torch.empty_like(initial)
        dstates = run.left("DV", dfinal, y=dv, final=dinitial)
        # Allocated after `left`, these take the place of its workspace.
        dq, dk = (run.empty(*q.shape, dtype=q.dtype) for _ in range(2))
        dq_rest = torch.empty_like(dq)  # for the gates' gradient, a difference of large numbers
        dgate = run.empty(*gate.shape, dtype=run.tensors["gate"].dtype)
        run.right("DQ", states=states, initial=initial, y=dq, y_rest=dq_rest)
        others = dict(dq=dq, dq_rest=dq_rest, dgate=dgate, ends=states, S=final)
        run.right("DK", states=dstates, initial=dfinal, y=dk, **others)
        found = [dq, dk, dv, dgate.to(gate.dtype)]
        if dinitial is not None:
            found.append(dinitial * (scale * gate[:, 0].float().exp()).unsqueeze(-1))
    return found


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous and 16-byte aligned, as the kernels read them."""
    rows_fit = x.stride(-1) == 1 and math.gcd(*x.stride()[:-1]) * x.element_size() % 16 == 0
    fits = rows_fit and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _state(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()
