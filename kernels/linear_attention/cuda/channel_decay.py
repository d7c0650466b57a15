"""Linear attention with a decay for each channel on the kernels of channel_decay.cu: plans and launches.

Forward: `states` and `prefix`, if sequences are cut into segments, then a scan. Backward: the same in reverse
for the states, then scans for dq, dv and dk; the last writes the gradient of the decays, too.
"""

from __future__ import annotations

import dataclasses
import functools
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
CHUNK, SUBS = 32, 2  # tokens that a block takes at a time, and the blocks of 16 in them
# Tokens of a segment at most: the gradient of decays is summed up within one, and so is its rounding.
LONGEST_SEGMENT = 1024
WIDTH, MOST_KEYS, MOST_VALUES = 32, 256, 512  # Dk and Dv are multiples of the first
# (Dk, Dv) to compile ahead: of `gla`, by the width of the model, and those of heads as models have them.
HEAD_SHAPES = ((32, 32), (32, 64), (64, 128), (96, 192), (128, 256), (256, 512), (64, 64), (128, 128))

_TENSORS = ("a", "b", "c", "gate", "k")  # those with strides
PARAMS = Fields(
    dict.fromkeys(("a", "b", "c", "gate", "y", "y_rest", "k", "dq", "dq_rest", "dgate"), "P")
    | dict.fromkeys(("ends", "S", "before", "decays", "final", "initial"), "P")
    | {f"{name}_{dim}": "q" for name in _TENSORS for dim in ("batch", "token", "head")}
    | dict.fromkeys(("N", "H", "segments", "segment_len", "channels"), "i")
    | {"scale": "f"}
)
# What a scan's a, b and c are (channel_decay_params.cuh); the fields of each operand.
OPERANDS = {"FWD": "qkv", "DV": ("k", "q", "do"), "DQ": ("do", "v", "k"), "DK": ("v", "do", "q")}
FIELDS = {name: (name, f"{name}_batch", f"{name}_token", f"{name}_head") for name in _TENSORS}


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of channel_decay.cu."""

    arch: str
    tag: str  # of q, k and v
    gate_tag: str
    Dk: int
    Dv: int

    @property
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
    def shared(self) -> tuple[int, int, int]:
        """Bytes of shared memory of a block: the left form, the right form, `states`."""
        (left, right), groups = self.slices, self.groups
        gate = 4 if self.gate_tag == "float" else 2
        whole = _tile(self.Dk, gate) + 8 * _tile(self.Dk) + 2 * _tile(left)
        whole += SUBS * self.Dk * 4 + SUBS * 16 * 48
        scan = 2 * _tile(self.Dv) + 4 * _tile(right) + 2 * _tile(right, gate)
        scan += groups * CHUNK * (right + 4) * 4 + CHUNK * 80 + (4 * SUBS + groups) * right * 4
        return whole, scan, self.stages * self.stage

    @property
    def stage(self) -> int:
        """Bytes of shared memory that a chunk's gates, b and c take in `states`."""
        gates = _tile(self.Dk, 4 if self.gate_tag == "float" else 2, gap=32)
        return gates + _tile(self.Dk, gap=32) + _tile(self.slices[0], gap=32)

    @property
    def stages(self) -> int:
        """Chunks that a block of `states` has room for: three where two such blocks fit, else two."""
        return 3 if 2 * 3 * self.stage // 1024 < most_shared(self.arch) else 2

    @property
    def unsupported_reason(self) -> str | None:
        """Why its architecture cannot run it; None if it can."""
        needed, most = max(self.shared) // 1024, most_shared(self.arch)
        if needed < most:
            return None
        shape = f"Dk = {self.Dk} and Dv = {self.Dv}"
        return f"{shape} need {needed + 1} KB of shared memory a block, {self.arch} has {most}"

    @property
    def threads(self) -> tuple[int, int, int]:
        """Of a block of the left form, the right form, `states`."""
        left, right = self.slices
        return 2 * left, 2 * right * self.groups, 2 * self.Dk

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks of the left form, the right form and `states` that a multiprocessor runs at once."""

        def fitting(form: int, part: int) -> int:
            by_registers = 2**16 // (self.threads[form] * self.registers(part))
            by_memory = 1024 * (most_shared(self.arch) + 1) // (self.shared[form] + 1024)
            return max(1, min(4, by_registers, by_memory))

        return fitting(0, self.Dk), fitting(1, self.Dv // self.groups), fitting(2, self.slices[0])

    @property
    def names(self) -> dict[str, str]:
        (left, right), (few, many, most) = self.slices, self.blocks
        types, names = f"{self.tag}, {self.gate_tag}", {}
        for mode, reverse in (("FWD", "false"), ("DV", "true")):
            options = f"{types}, {self.Dk}, {left}, {reverse}"
            names[mode] = f"channel_left<{options}, {few}>"
            names[f"states {mode}"] = f"channel_states<{options}, {self.stages}, {most}>"
            names[f"prefix {mode}"] = f"channel_prefix<{self.Dk}, {self.Dv}, {reverse}>"
        for mode, reverse in (("DQ", "false"), ("DK", "true")):
            options = f"{types}, {self.Dv}, {right}, {self.groups}, {reverse}, {many}"
            names[mode] = f"channel_right<{options}>"
        return names

    @property
    def spec(self) -> KernelSpec:
        left, right, states = self.shared
        defines = {"CHANNEL_PARAMS_BYTES": PARAMS.size, "LEFT_BYTES": left}
        defines |= {"STATES_BYTES": states, "RIGHT_BYTES": right}
        title = f"{self.tag}, gates {self.gate_tag}, Dk = {self.Dk}, Dv = {self.Dv}"
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, (self.arch,), title)

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        return self.spec.load(self.arch, self.names)


build_for = functools.cache(Build)  # which keeps its kernels


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead: bf16 with gates in fp32, as `gla` trains."""
    builds = (
        Build(arch, "bf16", "float", Dk, Dv) for arch in supported_architectures() for Dk, Dv in HEAD_SHAPES
    )
    return [build.spec for build in builds if build.unsupported_reason is None]


def _tile(columns: int, size: int = 2, gap: int = 64) -> int:
    """Bytes of a Tile of channel_decay_params.cuh."""
    return -(-(CHUNK * (columns * size + 16) + CHUNK // 8 * gap) // 128) * 128


def _widest(channels: int, most: int) -> int:
    """The widest slice of at most so many channels: a multiple of 32 that divides them."""
    return max(width for width in range(32, most + 1, 32) if channels % width == 0)


def segmentation(q: Tensor, Dv: int) -> tuple[int, int]:
    """(segments, tokens of each) that a sequence is cut into: enough to fill the card."""
    (B, N, H, Dk), (arch, processors) = q.shape, card(q.device)
    build = build_for(arch, TAGS[q.dtype], "float", int(Dk), int(Dv))
    blocks, slots = B * H * (Dv // build.slices[0]), processors * build.blocks[0]
    count = max(-(-N // LONGEST_SEGMENT), min(slots // blocks, N // (4 * CHUNK)), 1)
    length = -(-N // (count * CHUNK)) * CHUNK
    return -(-N // length), length


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
    stream: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: float, **more: Tensor) -> _Pass:
        gate = gate if gate.dtype in TAGS and gate.dtype != torch.float16 else gate.float()
        tensors = {name: _aligned(x) for name, x in dict(q=q, k=k, v=v, gate=gate, **more).items()}
        Dk, Dv = q.shape[-1], v.shape[-1]
        build = build_for(card(q.device)[0], TAGS[q.dtype], TAGS[gate.dtype], Dk, Dv)
        return cls(build, tensors, scale, *segmentation(q, Dv), raw_stream(q.device.index))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors["q"].device)

    def states(self, mode: str, initial: Tensor | None) -> Tensor:
        """The state before each segment in the direction of a mode, [B, H, segments, Dk, Dv]."""
        B, _, H, Dk = self.tensors["q"].shape
        build, states = self.build, self.empty(B, H, self.segments, Dk, self.build.Dv)
        if self.segments == 1:
            states[:, :, 0] = 0.0 if initial is None else initial
            return states
        decays = self.empty(B, H, self.segments, Dk)
        initial = None if initial is None else initial.float().contiguous()
        addresses = dict(before=states, decays=decays, initial=initial)
        grid = self.segments - 1, B * H, build.Dv // build.slices[0]
        self._launch(f"states {mode}", mode, grid, build.threads[2], build.shared[2], addresses)
        grid = -(-Dk * build.Dv // 128), B * H, 1
        self._launch(f"prefix {mode}", mode, grid, 128, 0, addresses)
        return states

    def scan(self, mode: str, states: Tensor, **addresses: Tensor | None) -> None:
        build, form, (B, _, H, Dk) = self.build, int(mode in ("DQ", "DK")), self.tensors["q"].shape
        blocks = (build.Dv, Dk)[form] // build.slices[form]
        grid, found = (self.segments, B * H, blocks), dict(addresses, before=states)
        self._launch(mode, mode, grid, build.threads[form], build.shared[form], found)

    def _launch(
        self,
        kernel: str,
        mode: str,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        addresses: Mapping[str, Tensor | None],
    ) -> None:
        _, N, H, Dk = self.tensors["q"].shape
        values: dict[str, float] = dict(
            N=N, H=H, segments=self.segments, segment_len=self.segment_len, scale=self.scale,
            channels=Dk if mode in ("DQ", "DK") else self.build.Dv,
        )  # fmt: skip
        for operand, name in zip(_TENSORS, (*OPERANDS[mode], "gate", "k"), strict=True):
            x = self.tensors[name]
            values.update(zip(FIELDS[operand], (x.data_ptr(), *x.stride()[:3]), strict=True))
        values |= {name: x.data_ptr() for name, x in addresses.items() if x is not None}
        self.build.kernels[kernel](grid, threads, shared, self.stream, PARAMS.pack(values))


def forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, initial: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, N, H, Dv], the final state [B, H, Dk, Dv], and for `backward` those before segments."""
    (B, N, H, Dk), Dv = q.shape, v.shape[-1]
    with current_device(q.device):
        run = _Pass.of(q, k, v, gate, scale)
        o, final = run.empty(B, N, H, Dv, dtype=q.dtype), run.empty(B, H, Dk, Dv)
        states = run.states("FWD", initial)
        run.scan("FWD", states, y=o, final=final)
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
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dgate = torch.empty(gate.shape, dtype=run.tensors["gate"].dtype, device=q.device)
        dfinal = None if dfinal is None else dfinal / scale
        dstates = run.states("DV", dfinal)
        dinitial = None if initial is None else torch.empty_like(initial)
        dq_rest = torch.empty_like(dq)  # for the gates' gradient, a difference of large numbers
        run.scan("DQ", states, y=dq, y_rest=dq_rest)
        run.scan("DV", dstates, y=dv, final=dinitial)
        run.scan("DK", dstates, y=dk, dq=dq, dq_rest=dq_rest, dgate=dgate, ends=states, S=final)
        found = [dq, dk, dv, dgate.to(gate.dtype)]
        if dinitial is not None:
            found.append(dinitial * (scale * gate[:, 0].float().exp()).unsqueeze(-1))
    return found


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous and 16-byte aligned, as the kernels read them."""
    rows_fit = x.stride(-1) == 1 and math.gcd(*x.stride()[:-1]) * x.element_size() % 16 == 0
    fits = rows_fit and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
