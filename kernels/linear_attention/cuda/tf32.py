"""Linear attention in fp32 with a decay that all channels share, on the kernels of tf32.cu: builds, launches.

A sum y_i = Σ_{j≤i} γ_{j+1} ⋯ γ_i (a_i·b_j) c_j is `states` and `prefix`, if the sequences are cut into
segments, then a scan. A `Plan` has launches with all that calls of one layout share; a call adds addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.cuda.channel_decay import most_shared
from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import Fields, Kernel, raw_stream
from lingpt.kernels.linear_attention.cuda.plan import choose_sub_segments
from lingpt.kernels.linear_attention.cuda.toolchain import card, supported_architectures
from lingpt.kernels.linear_attention.cuda.variants import SMALL_SHARED
from lingpt.kernels.numerics import LOG_ZERO, NORM_EPS

SOURCE = "tf32.cu"
HEAD_DIMS = (32, 64, 128, 256)  # to compile ahead
WIDEST = 288  # head_dim is a multiple of 8
SLICE = 64  # channels of c that a block has at most, or twice as many if it is `wide`
SHORTEST_SEGMENT = 64  # tokens
ROW_THREADS, ROW_LANES, PREFIX_THREADS = 256, 8, 128

# struct Tf32Params: pointers, different in each call; then what all calls of a plan share. The fields of the
# numbers per token that are read have values.
_NUMBERS = ("a_factor", "a_last", "b_factor", "b_last", "c_factor", "c_last", "log_decay")
_TENSORS = ("a", "b", "c", "y", "y_last", "a_norm", "b_norm", *_NUMBERS)
_STRIDES = ("batch", "token", "head")


def _strides(names: Iterable[str]) -> dict[str, str]:
    return {f"{name}_{dim}": "q" for name in names for dim in _STRIDES}


POINTERS = Fields(dict.fromkeys((*_TENSORS, "states", "decays", "initial", "final"), "P"))
LAYOUT = Fields(
    _strides(_TENSORS)
    | {f"{name}_value": "f" for name in _NUMBERS}
    | dict.fromkeys(("N", "H", "segment_len", "transposed", "decays_first", "divide", "rows_in_tf32"), "i")
    | {"sub_segments": "i"}
)
# The same of struct Tf32RowParams.
ROW_POINTERS = Fields(dict.fromkeys(("x", "y", "norm", "factor", "dot", "g", "inverse_g"), "P"))
ROW_LAYOUT = Fields(_strides("xy") | {"factor_value": "f"} | dict.fromkeys(("rows", "N", "H"), "I"))


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of tf32.cu."""

    arch: str
    D: int
    products: int  # in TF32 for one in fp32: 3, or 1 where its precision is enough

    @functools.cached_property
    def wide(self) -> bool:
        """Whether a block has twice as many channels of c and twice as many tokens: of heads wider than 128 a
        multiprocessor has room for one block only. Three products would need too many registers."""
        return self.D > 128 and self.products == 1 and most_shared(self.arch) > 200

    @functools.cached_property
    def slices(self) -> int:
        """Blocks that share a head's channels of c."""
        return -(-self.D // (SLICE * (1 + self.wide)))

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
        return 16 if (self.D > 128 and not self.wide) or self.arch in SMALL_SHARED else 32

    @functools.cached_property
    def shared(self) -> tuple[int, int]:
        """Bytes of shared memory of a block: a scan, `states`."""
        row, slice_row = self.D + 8 * (self.D % 16 == 0), 16 * self.warps + 8
        tokens = -(-(self.chunk * (8 + 12 * 4) + self.chunk // 16 * 8) // 16) * 16
        both = 2 * self.chunk * (row + slice_row) * 4 + self.D * 4
        scores, y = self.chunk // 16 * 16 * 20 * 4, (self.chunk if self.warps >= 8 else 1) * slice_row * 4
        scan = both + 2 * self.chunk * row * 4 + scores + y
        states = both + row * 4 + 16 * 20 * 4 + slice_row * 4
        return tuple(-(-x // 16) * 16 + 2 * tokens + 8 * len(_TENSORS) for x in (scan, states))  # type: ignore[return-value]

    @functools.cached_property
    def blocks(self) -> int:
        """Of a scan, that a multiprocessor runs at once."""
        by_registers = 2**16 // (self.threads * (self.D // 2 + 76))  # D // 2 of them hold the state
        by_memory = 1024 * (most_shared(self.arch) + 1) // (self.shared[0] + 1024)
        return max(1, min(6, by_registers, by_memory))

    @property
    def names(self) -> dict[str, str]:
        names = {x: f"tf32_{x}<{self.D}>" for x in ("prefix", "dots", "input_gradient")}
        for states, last, norms in itertools.product((False, True), repeat=3):
            flags = str((last, states, norms))[1:-1].lower()
            options = f"{self.D}, {self.warps}, {self.chunk}, {flags}, {self.blocks}"
            names[_sum_kernel(states, last, norms)] = f"tf32_scan<{options}>"
        return names

    @property
    def spec(self) -> KernelSpec:
        scan, states = self.shared
        defines = {
            "TF32_PARAMS_BYTES": POINTERS.size + LAYOUT.size,
            "TF32_ROW_PARAMS_BYTES": ROW_POINTERS.size + ROW_LAYOUT.size,
            "PRODUCTS": self.products,
            "SCAN_BYTES": scan,
            "STATES_BYTES": states,
            "LOG_ZERO": f"{LOG_ZERO[torch.float32]}f",
            "NORM_EPS": f"{NORM_EPS}f",
        }
        title = f"D = {self.D}, {self.products} TF32 product{'s' * (self.products > 1)}"
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, (self.arch,), title)

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        return self.spec.load(self.arch, self.names)


def _sum_kernel(states: bool, last: bool, norms: bool) -> str:
    return ("states" if states else "scan") + " last" * last + " norms" * norms


build_for = functools.cache(Build)  # which keeps its kernels


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead."""
    builds = itertools.product(supported_architectures(), HEAD_DIMS, (3, 1))
    return [build_for(*build).spec for build in builds]


def segmentation(N: int, blocks: int, slots: int, chunk: int) -> tuple[int, int]:
    """(segments, tokens of each but the last) that sequences of so many blocks are cut into: what a card with
    so many slots for blocks runs at once."""
    count = max(1, min(slots // blocks, N // SHORTEST_SEGMENT))
    length = -(-N // (count * chunk)) * chunk
    return -(-N // length), length


class Array(NamedTuple):
    """[B, N, H, …] in fp32: the strides of these, and so many bytes behind the address that calls have for
    `base`."""

    base: str
    strides: tuple[int, int, int]
    offset: int = 0


class PerToken(NamedTuple):
    """A number per token: `value` times x [B, N, H], or `value` if that is None."""

    x: Array | None = None
    value: float = 1.0


ONE, ZERO = PerToken(), PerToken(value=0.0)


class Operand(NamedTuple):
    """Rows of a sum: factor · x [B, N, H, D], and one more channel."""

    x: Array
    factor: PerToken = ONE
    last: PerToken = ZERO


class Arguments(NamedTuple):
    """A struct of parameters: the fields of its pointers with the arrays, and the bytes behind them."""

    fields: Fields
    arrays: tuple[tuple[str, str, int], ...]  # the pointer's name, base, offset
    layout: bytes

    @classmethod
    def of(
        cls, fields: Fields, layout: Fields, arrays: Mapping[str, Array | None], **values: float
    ) -> Arguments:
        given = {name: x for name, x in arrays.items() if x is not None}
        for name, x in given.items():
            if f"{name}_batch" in layout.names:
                values |= {f"{name}_{dim}": n for dim, n in zip(_STRIDES, x.strides, strict=True)}
        pointers = tuple((name, x.base, x.offset) for name, x in given.items())
        return cls(fields, pointers, layout.pack(values))

    def pack(self, addresses: Mapping[str, int]) -> bytes:
        pointers = {name: addresses[base] + offset for name, base, offset in self.arrays}
        return self.fields.pack(pointers) + self.layout


class Launch(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[Arguments, ...]


class Plan:
    """Launches on arrays of one shape [B, N, H, D], and their memory, the base "scratch"."""

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, int, int],
        products: int,
        rows_in_tf32: bool = False,  # whether all rows have numbers that TF32 holds
    ) -> None:
        arch, processors = card(device)
        self.device, self.shape, self.rows_in_tf32 = device, shape, rows_in_tf32
        self.build = build = build_for(arch, shape[3], products)
        B, N, H, _ = shape
        slots = processors * build.blocks
        blocks = build.slices * B * H
        self.segments, self.segment_len = segmentation(N, blocks, slots, build.chunk)
        self.sub_segments = choose_sub_segments(
            (self.segments - 1) * blocks, self.segment_len // build.chunk, slots
        )
        self.launches: list[Launch] = []
        self._size = 0  # bytes of scratch

    def run(self, addresses: Mapping[str, int]) -> Tensor:
        """Launches all; the scratch, which is to live as long as it is read."""
        scratch = torch.empty(self._size // 4, device=self.device)
        addresses, stream = {**addresses, "scratch": scratch.data_ptr()}, raw_stream(self.device.index)
        for kernel, grid, threads, shared, arguments in self.launches:
            kernel(grid, threads, shared, stream, *[x.pack(addresses) for x in arguments])
        return scratch

    def empty(self, numbers: int, strides: tuple[int, int, int] = (0, 0, 0)) -> Array:
        """So many numbers of the scratch."""
        found = Array("scratch", strides, self._size)
        self._size += -(-numbers // 4) * 16
        return found

    def empty_rows(self) -> Array:
        """[B, N, H, D]."""
        B, N, H, D = self.shape
        return self.empty(B * N * H * D, (N * H * D, H * D, D))

    def empty_numbers(self) -> Array:
        """[B, N, H], in memory [B, H, N]."""
        B, N, H, _ = self.shape
        return self.empty(B * H * N, (H * N, 1, N))

    def numbers_of(self, scratch: Tensor, x: Array) -> Tensor:
        """What is in scratch after `run`, as [B, H, N]."""
        B, N, H, _ = self.shape
        return scratch.as_strided((B, H, N), (H * N, N, 1), x.offset // 4)

    def rows_of(self, scratch: Tensor, x: Array) -> Tensor:
        """The same, [B, N, H, D]."""
        return scratch.as_strided(self.shape, (*x.strides, 1), x.offset // 4)

    def rows(self, kernel: str, *calls: Mapping[str, Array | None], factors: tuple[float, ...] = ()) -> None:
        """A kernel of tf32_rows.cuh, on arrays of rows x, y, and others in memory [B, H, N]. Some are for two
        calls; `factors`: a value of each."""
        B, N, H, _ = self.shape
        arguments = tuple(
            Arguments.of(ROW_POINTERS, ROW_LAYOUT, x, rows=B * N * H, N=N, H=H, factor_value=factor)
            for x, factor in zip(calls, factors or (1.0,) * len(calls), strict=True)
        )
        grid = (-(-B * N * H * ROW_LANES // ROW_THREADS), len(calls), 1)
        self.launch(kernel, grid, ROW_THREADS, 0, *arguments)

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, *arguments: Arguments
    ) -> None:
        self.launches.append(Launch(self.build.kernels[kernel], grid, threads, shared, arguments))


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums that a plan launches, with one decay; in reverse from the last token to the first, each of which
    decays what is after it."""

    plan: Plan
    log_decay: Array | None  # [B, N, H]
    reverse: bool = False

    def states(
        self, b: Operand, c: Operand, last: bool, initial: Array | None, *, norms: bool = False
    ) -> Array:
        """Σ b_j c_jᵀ after each sub-segment of all segments but the last, [cuts, B, H, D + 1, D + 1], from
        that before the first [B, H, D + 1, D + 1], None for zeros. last: whether c has the channel. norms:
        whether the rows of b are divided by their norms."""
        plan, build = self.plan, self.plan.build
        B, _, H, D = plan.shape
        cuts, size = (plan.segments - 1) * plan.sub_segments, (D + 1) ** 2
        states = plan.empty(cuts * B * H * size)
        if cuts:
            arrays = dict(states=states, decays=plan.empty(cuts * B * H), initial=initial)
            arguments = self._arguments(arrays, dict(b=b, c=c))
            grid = build.slices, B * H, cuts
            plan.launch(_sum_kernel(True, last, norms), grid, build.threads, build.shared[1], arguments)
            plan.launch("prefix", (-(-size // PREFIX_THREADS), B * H, 1), PREFIX_THREADS, 0, arguments)
        return states

    def scan(
        self,
        a: Operand,
        b: Operand,
        c: Operand,
        states: Array,
        y: Array,
        *,
        y_last: Array | None = None,
        norms: tuple[Array, Array] | None = None,
        initial: Array | None = None,
        final: Array | None = None,
        divide: bool = False,
        transposed: bool = False,
    ) -> None:
        """Writes y [B, N, H, D], and if they are not None y_last [B, N, H] and the final state
        [B, H, D + 1, D + 1].

        norms: where 1/‖a‖ and 1/‖b‖ [B, N, H] go, by which the rows are multiplied besides the given factors.
        divide: y by y_last. transposed: `states` and `initial` are those of Σ c_j b_jᵀ. The last channel of
        c, and what `final` has of it, is computed for y_last only.
        """
        plan, build, last = self.plan, self.plan.build, divide or y_last is not None
        arrays = dict(states=states, initial=initial, final=final, y=self._in_order(y))
        a_norm, b_norm = norms or (None, None)
        for name, x in dict(y_last=y_last, a_norm=a_norm, b_norm=b_norm).items():
            arrays[name] = x and self._in_order(x)
        arguments = self._arguments(arrays, dict(a=a, b=b, c=c), divide=divide, transposed=transposed)
        grid = build.slices, plan.shape[0] * plan.shape[2], plan.segments
        kernel = _sum_kernel(False, last, norms is not None)
        plan.launch(kernel, grid, build.threads, build.shared[0], arguments)

    def _arguments(
        self, arrays: dict[str, Array | None], operands: Mapping[str, Operand], **values: float
    ) -> Arguments:
        _, N, H, _ = self.plan.shape
        if self.log_decay is not None:  # in reverse what comes to a token is decayed by the one after it
            arrays = arrays | dict(log_decay=self._in_order(self.log_decay, after=self.reverse))
            values["log_decay_value"] = 1.0
        for name, operand in operands.items():
            arrays[name] = self._in_order(operand.x)
            for part, (x, value) in (("factor", operand.factor), ("last", operand.last)):
                values[f"{name}_{part}_value"] = value
                arrays[f"{name}_{part}"] = x and self._in_order(x)
        values |= dict(N=N, H=H, segment_len=self.plan.segment_len, sub_segments=self.plan.sub_segments)
        values |= dict(decays_first=not self.reverse, rows_in_tf32=self.plan.rows_in_tf32)
        return Arguments.of(POINTERS, LAYOUT, arrays, **values)

    def _in_order(self, x: Array, after: bool = False) -> Array:
        """x, from the last token to the first if in reverse; `after`: each has the number of the next one."""
        if not self.reverse:
            return x
        batch, token, head = x.strides
        offset = x.offset + 4 * token * (self.plan.shape[1] - 1 + after)
        return Array(x.base, (batch, -token, head), offset)


def fits(x: Tensor) -> bool:
    """Whether the kernels can read and write x: rows in fp32, contiguous and 16-byte aligned."""
    rows_fit = x.stride(-1) == 1 and math.gcd(*x.stride()[:-1]) % 4 == 0
    return x.dtype == torch.float32 and rows_fit and x.data_ptr() % 16 == 0


def fitting(x: Tensor) -> Tensor:
    """x in fp32, a copy if the kernels cannot read it as it is."""
    return x if fits(x) else x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
