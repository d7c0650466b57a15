"""Linear attention in fp32 with a decay that all channels share, on the kernels of tf32.cu: builds, launches.

A sum y_i = Σ_{j≤i} γ_{j+1} ⋯ γ_i (a_i·b_j) c_j is `states` and `prefix`, if the sequences are cut into
segments, then a scan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.call import LinearAttentionState
from lingpt.kernels.linear_attention.cuda.channel_decay import most_shared
from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import Fields, Kernel, raw_stream
from lingpt.kernels.linear_attention.cuda.toolchain import card, supported_architectures
from lingpt.kernels.linear_attention.cuda.variants import SMALL_SHARED
from lingpt.kernels.numerics import LOG_ZERO, NORM_EPS

SOURCE = "tf32.cu"
HEAD_DIMS = (32, 64, 128, 256)  # to compile ahead
WIDTH, WIDEST = 8, 256  # head_dim is a multiple of the first
SLICE = 64  # channels of c that a block has at most
SHORTEST_SEGMENT = 64  # tokens
ROW_THREADS, ROW_LANES, PREFIX_THREADS = 256, 8, 128

_STRIDED = ("x", "batch", "token", "head")
_PER_TOKEN = (*_STRIDED, "value")


def _struct(name: str, fields: tuple[str, ...] = _STRIDED) -> dict[str, str]:
    return {f"{name}_{field}": {"x": "P", "value": "f"}.get(field, "q") for field in fields}


def _operand(name: str) -> dict[str, str]:
    return _struct(name) | _struct(f"{name}_factor", _PER_TOKEN) | _struct(f"{name}_last", _PER_TOKEN)


PARAMS = Fields(
    _operand("a") | _operand("b") | _operand("c")
    | _struct("log_decay", _PER_TOKEN) | _struct("y") | _struct("y_last")
    | dict.fromkeys(("states", "decays", "final"), "P")
    | dict.fromkeys(("N", "H", "segment_len", "transposed", "decays_first", "divide"), "i")
)  # fmt: skip
_STRUCTS = {
    name: tuple(f"{name}_{field}" for field in _STRIDED)
    for name in (
        *"abcxy",
        *(f"{x}_{part}" for x in "abc" for part in ("factor", "last")),
        *("log_decay", "y_last", "out"),
    )
}
ROW_PARAMS = Fields(
    _struct("x") | _struct("y") | _struct("out")
    | dict.fromkeys(("norm", "factor", "dot", "g", "inverse_g"), "P")
    | dict.fromkeys(("rows", "N", "H", "unused"), "I")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of tf32.cu."""

    arch: str
    D: int

    @functools.cached_property
    def slices(self) -> int:
        """Blocks that share a head's channels of c."""
        return -(-self.D // SLICE)

    @functools.cached_property
    def warps(self) -> int:
        """Of a block: one for 16 channels; there is one more."""
        return -(-self.D // (16 * self.slices))

    @functools.cached_property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def chunk(self) -> int:
        """Tokens that a block has in shared memory at a time."""
        return 16 if self.D > 128 or self.arch in SMALL_SHARED else 32

    @functools.cached_property
    def shared(self) -> tuple[int, int]:
        """Bytes of shared memory of a block: a scan, `states`."""
        row, slice_row = self.D + 8 * (self.D % 16 == 0), 16 * self.warps + 8
        tokens = -(-(self.chunk * (8 + 12 * 4) + self.chunk // 16 * 8) // 16) * 16
        both = 2 * self.chunk * (row + slice_row) * 4
        scores = self.chunk // 16 * 16 * 20 * 4
        scan = both + 2 * self.chunk * row * 4 + scores + self.D * 4
        states = both + row * 4 + 16 * 20 * 4 + self.D * 4
        return tuple(-(-x // 16) * 16 + 2 * tokens + 32 for x in (scan, states))  # type: ignore[return-value]

    @functools.cached_property
    def blocks(self) -> int:
        """Of a scan, that a multiprocessor runs at once."""
        by_registers = 2**16 // (self.threads * (self.D // 2 + 80))
        by_memory = 1024 * (most_shared(self.arch) + 1) // (self.shared[0] + 1024)
        return max(1, min(6, by_registers, by_memory))

    @property
    def names(self) -> dict[str, str]:
        names = {x: f"tf32_{x}<{self.D}>" for x in ("prefix", "norms", "dots", "input_gradient")}
        for kernel in ("scan", "states"):
            for last in (False, True):
                flags = f"{str(last).lower()}, {str(kernel == 'states').lower()}"
                options = f"{self.D}, {self.warps}, {self.chunk}, {flags}, {self.blocks}"
                names[kernel + " last" * last] = f"tf32_scan<{options}>"
        return names

    @property
    def spec(self) -> KernelSpec:
        scan, states = self.shared
        defines = {
            "TF32_PARAMS_BYTES": PARAMS.size,
            "TF32_ROW_PARAMS_BYTES": ROW_PARAMS.size,
            "SCAN_BYTES": scan,
            "STATES_BYTES": states,
            "LOG_ZERO": f"{LOG_ZERO[torch.float32]}f",
            "NORM_EPS": f"{NORM_EPS}f",
        }
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, (self.arch,), f"D = {self.D}")

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Compiled and loaded, by the keys of `names`."""
        kernels = self.spec.compile(self.arch).load(self.names.values())
        return {key: kernels[name] for key, name in self.names.items()}


build_for = functools.cache(Build)  # which keeps its kernels


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead."""
    return [build_for(arch, D).spec for arch in supported_architectures() for D in HEAD_DIMS]


def takes(D: int) -> bool:
    """Whether the kernels have this head_dim."""
    return D % WIDTH == 0 and D <= WIDEST


def segmentation(N: int, blocks: int, slots: int, chunk: int) -> tuple[int, int]:
    """(segments, tokens of each but the last) that sequences of so many blocks are cut into: what a card with
    so many slots for blocks runs at once."""
    count = max(1, min(slots // blocks, N // SHORTEST_SEGMENT))
    length = -(-N // (count * chunk)) * chunk
    return -(-N // length), length


class PerToken(NamedTuple):
    """A number per token: `value` times x [B, N, H], or `value` if that is None."""

    x: Tensor | None = None
    value: float = 1.0


ONE, ZERO = PerToken(), PerToken(value=0.0)


class Operand(NamedTuple):
    """Rows of a sum: factor · x [B, N, H, D] in fp32, and one more channel."""

    x: Tensor
    factor: PerToken = ONE
    last: PerToken = ZERO


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over tensors of one shape [B, N, H, D], with one decay; in reverse from the last token to the
    first, each of which decays what is after it."""

    shape: tuple[int, int, int, int]
    device: torch.device
    log_decay: Tensor | None  # [B, N, H]
    reverse: bool = False

    @functools.cached_property
    def build(self) -> Build:
        return build_for(card(self.device)[0], self.shape[3])

    @functools.cached_property
    def segments(self) -> tuple[int, int]:
        (B, N, H, _), build = self.shape, self.build
        slots = card(self.device)[1] * build.blocks
        return segmentation(N, build.slices * B * H, slots, build.chunk)

    def reversed(self) -> Sums:
        return dataclasses.replace(self, reverse=not self.reverse)

    def states(self, initial: LinearAttentionState | None, b: Operand, c: Operand, last: bool) -> Tensor:
        """Σ b_j c_jᵀ before each segment, [segments, B, H, D + 1, D + 1]. last: whether c has the channel."""
        (B, _, H, D), (segments, _) = self.shape, self.segments
        states, decays = self.empty(segments, B, H, D + 1, D + 1), self.empty(segments, B, H)
        first = states[0].zero_()
        if initial is not None:
            first[..., :D, :D], first[..., D, :D] = initial.S, initial.c
            first[..., :D, D], first[..., D, D] = initial.z, initial.n
        if segments > 1:
            values = self._values(b=b, c=c) | dict(states=states.data_ptr(), decays=decays.data_ptr())
            self._launch("states" + " last" * last, segments - 1, values)
            grid = (-(-((D + 1) ** 2) // PREFIX_THREADS), B * H, 1)
            self.build.kernels["prefix"](grid, PREFIX_THREADS, 0, self._stream, PARAMS.pack(values))
        return states

    def scan(
        self,
        a: Operand,
        b: Operand,
        c: Operand,
        states: Tensor,
        y: Tensor,
        *,
        y_last: Tensor | None = None,
        final: Tensor | None = None,
        divide: bool = False,
        transposed: bool = False,
    ) -> None:
        """Writes y [B, N, H, D], and if they are not None y_last [B, N, H] and the final state
        [B, H, D + 1, D + 1].

        divide: y by y_last. transposed: `states` are those of Σ c_j b_jᵀ. The last channel of c, and what
        `final` has of it, is computed for y_last only.
        """
        last = divide or y_last is not None
        values = self._values(a=a, b=b, c=c) | self._strided("y", y)
        if y_last is not None:
            values |= self._strided("y_last", y_last)
        values |= dict(states=states.data_ptr(), divide=divide, transposed=transposed)
        values["final"] = 0 if final is None else final.data_ptr()
        self._launch("scan" + " last" * last, self.segments[0], values)

    def rows(self, kernel: str, tensors: dict[str, Tensor], per_token: dict[str, Tensor | None]) -> None:
        """A kernel of tf32_rows.cuh, on tensors [B, N, H, D] and contiguous ones [B, H, N]."""
        B, N, H, _ = self.shape
        values: dict[str, float] = dict(rows=B * N * H, N=N, H=H)
        for name, x in tensors.items():
            values |= zip(_STRUCTS[name], (x.data_ptr(), *x.stride()[:3]), strict=True)
        values |= {name: x.data_ptr() for name, x in per_token.items() if x is not None}
        grid = (-(-B * N * H * ROW_LANES // ROW_THREADS), 1, 1)
        self.build.kernels[kernel](grid, ROW_THREADS, 0, self._stream, ROW_PARAMS.pack(values))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device)

    def empty_state(self) -> Tensor:
        B, _, H, D = self.shape
        return self.empty(B, H, D + 1, D + 1)

    @property
    def _stream(self) -> int:
        return raw_stream(self.device.index)

    def _launch(self, kernel: str, segments: int, values: dict[str, float]) -> None:
        (B, _, H, _), build = self.shape, self.build
        grid, shared = (build.slices, B * H, segments), build.shared[kernel.startswith("states")]
        build.kernels[kernel](grid, build.threads, shared, self._stream, PARAMS.pack(values))

    def _values(self, **operands: Operand) -> dict[str, float]:
        _, N, H, _ = self.shape
        values: dict[str, float] = dict(N=N, H=H, segment_len=self.segments[1], decays_first=not self.reverse)
        if self.log_decay is not None:  # in reverse what comes to a token is decayed by the one after it
            values |= self._strided("log_decay", self.log_decay, after=self.reverse)
            values["log_decay_value"] = 1.0
        for name, x in operands.items():
            values |= self._strided(name, x.x)
            for part, (per_token, value) in (("factor", x.factor), ("last", x.last)):
                values[f"{name}_{part}_value"] = value
                if per_token is not None:
                    values |= self._strided(f"{name}_{part}", per_token)
        return values

    def _strided(self, name: str, x: Tensor, after: bool = False) -> dict[str, float]:
        """The address and the strides of x [B, N, H, …], of its tokens in reverse if so; `after`: each of
        them has the number of the token after it."""
        batch, token, head, *_ = x.stride()
        address = x.data_ptr()
        if self.reverse:
            address += x.element_size() * token * (x.shape[1] - 1 + after)
            token = -token
        return dict(zip(_STRUCTS[name], (address, batch, token, head), strict=True))


def fits(x: Tensor) -> bool:
    """Whether the kernels can read and write x: rows in fp32, contiguous and 16-byte aligned."""
    rows_fit = x.stride(-1) == 1 and math.gcd(*x.stride()[:-1]) % 4 == 0
    return x.dtype == torch.float32 and rows_fit and x.data_ptr() % 16 == 0


def fitting(x: Tensor) -> Tensor:
    """x in fp32, a copy if the kernels cannot read it as it is."""
    return x if fits(x) else x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
