"""Tensor cores: ldmatrix, stmatrix, mma.sync and wgmma. Products are exact, sums in fp32.

In a fragment, lane 4g + t holds row g and columns 2t, 2t + 1 of an 8×8 matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from .access import units
from .faults import LaunchError, UnknownInstruction
from .machine import BOOL, F32, U32, U64, Component, Machine, Mask, Operation, builds
from .ptx import Instruction
from .scalar import widen


def matrix_shape(code: Instruction) -> tuple[int, bool]:
    """(number of 8×8 matrices, whether they are transposed)."""
    form = re.fullmatch(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", code.opcode)
    if form is None:
        raise UnknownInstruction("matrices other than 8×8 of 16 bits")
    return int(form[1]), form[2] is not None


@builds("ldmatrix")
def _ldmatrix(m: Machine, code: Instruction) -> Operation:
    count, transposed = matrix_shape(code)
    registers = [m.register(x, U32).reshape(m.warps, 32) for x in code.operands[0]]
    addresses = m.addresses(code.operands[1])

    def ldmatrix(mask: Mask) -> None:
        warps = m.whole_warps(mask)
        rows, lanes = _matrix_rows(m, warps, count, addresses)
        m.race.read(units(rows, 16), m.warp_of[lanes], code.index)
        x = m.shared.load(rows, 2, 8).reshape(len(warps), count, 8, 8)
        x = np.ascontiguousarray(x.swapaxes(2, 3) if transposed else x).view(np.uint32)
        for i, d in enumerate(registers):
            d[warps] = x[:, i].reshape(len(warps), 32)

    return ldmatrix


@builds("stmatrix")
def _stmatrix(m: Machine, code: Instruction) -> Operation:
    count, transposed = matrix_shape(code)
    addresses = m.addresses(code.operands[0])
    registers = [m.register(x, U32).reshape(m.warps, 32) for x in code.operands[1]]

    def stmatrix(mask: Mask) -> None:
        warps = m.whole_warps(mask)
        rows, lanes = _matrix_rows(m, warps, count, addresses)
        x = np.stack([r[warps] for r in registers], axis=1).view(np.uint16).reshape(len(warps), count, 8, 8)
        m.race.write(units(rows, 16), m.warp_of[lanes], code.index)
        m.shared.store(rows, (x.swapaxes(2, 3) if transposed else x).reshape(-1, 8))

    return stmatrix


def _matrix_rows(m: Machine, warps: np.ndarray, count: int, addresses) -> tuple[np.ndarray, np.ndarray]:
    """Checked addresses of the rows of all matrices, and the lanes 8i … 8i+7 that provide them."""
    lanes = (32 * warps[:, None] + np.arange(8 * count)).reshape(-1)
    rows = addresses(lanes)
    m.shared.check(rows, 16, lanes)
    return rows, lanes


@builds("mma")
def _mma(m: Machine, code: Instruction) -> Operation:
    form = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.\2\.f32", code.opcode)
    if form is None or form.groups() not in (("16", "bf16"), ("16", "f16"), ("8", "tf32")):
        raise UnknownInstruction("of mma, m16n8k16 of bf16 or f16 and m16n8k8 of tf32, into f32, are known")
    kind = form[2]
    d = [m.register(x, F32).reshape(m.warps, 8, 4) for x in code.operands[0]]
    a, b = ([m.source(x, U32).reshape(m.warps, 8, 4) for x in code.operands[i]] for i in (1, 2))
    c = [m.source(x, F32).reshape(m.warps, 8, 4) for x in code.operands[3]]
    whole = np.empty((m.warps, 3, 8, 2, 4), np.uint32)  # blocks of eight rows: two of a, one of b

    def mma(mask: Mask) -> None:
        m.whole_warps(mask)
        whole[:, 0, :, 0], whole[:, 0, :, 1] = a[0], a[2]
        whole[:, 1, :, 0], whole[:, 1, :, 1] = a[1], a[3]
        whole[:, 2, :, 0], whole[:, 2, :, 1] = b[0], b[1]
        x = whole.reshape(m.warps, 24, 8)
        # Of fp32 numbers the tensor cores do not read the lowest 13 bits.
        x = (x & 0xFFFFE000).view(np.float32) if kind == "tf32" else widen(x.view(np.uint16), kind)
        product = x[:, :16] @ x[:, 16:].swapaxes(1, 2)
        where = True if mask is True else mask.reshape(m.warps, 8, 4)
        for i in range(4):
            rows = slice(8 * (i // 2), 8 * (i // 2) + 8)
            np.add(c[i], product[:, rows, i % 2 :: 2], out=d[i], where=where)

    return mma


# wgmma runs asynchronously; only wgmma.wait_group makes the accumulators available


@dataclasses.dataclass
class Product:
    """A warpgroup's d += a·b in flight. `a`, `b`: units of shared memory; or `a`: numbers from registers."""

    registers: tuple[int, ...]
    a: np.ndarray
    a_is_shared: bool
    b: np.ndarray
    accumulate: bool
    kind: str
    by: int

    @property
    def operands(self) -> list[np.ndarray]:
        """The operands in shared memory: [1, units] each."""
        return [x.reshape(1, -1) for x in ((self.a, self.b) if self.a_is_shared else (self.b,))]


class Warpgroups(Component):
    """The products of a block that nothing has waited for yet."""

    def reset(self) -> None:
        self.count = self.m.T // 128
        self.accumulators = self.m.registers[32].view(np.float32)
        self.open: list[list[Product]] = [[] for _ in range(self.count)]
        self.groups: list[list[list[Product]]] = [[] for _ in range(self.count)]
        # The values that registers will get.
        self.values: list[dict[tuple, np.ndarray]] = [{} for _ in range(self.count)]
        self.fenced = [False] * self.count

    def finish(self) -> None:
        if any(self.open) or any(self.groups):
            raise LaunchError("the kernel ends with wgmma that was not waited for")

    def members(self, mask: Mask) -> list[int]:
        warps = self.m.whole_warps(mask)
        groups, counts = np.unique(warps // 4, return_counts=True)
        if (counts != 4).any():
            raise LaunchError("part of a warpgroup executes wgmma")
        return groups.tolist()

    def start(self, group: int, product: Product) -> None:
        m = self.m
        if not self.fenced[group]:
            raise LaunchError("a wgmma without wgmma.fence in front of it, or behind the last wait")
        warps = np.arange(4 * group, 4 * group + 4)
        for operand in product.operands:
            m.race.start_product(operand, warps, product.by)
        rows, lanes = list(product.registers), slice(128 * group, 128 * group + 128)
        if product.registers not in self.values[group]:
            self.values[group][product.registers] = _from_fragment(self.accumulators[rows, lanes])
            self.accumulators[rows, lanes] = np.nan
        self.open[group].append(product)

    def commit(self, group: int) -> None:
        self.groups[group].append(self.open[group])
        self.open[group] = []

    def wait(self, group: int, leave: int) -> None:
        """Completes all commit groups but the last `leave`."""
        values, lanes = self.values[group], slice(128 * group, 128 * group + 128)
        while len(self.groups[group]) > leave:
            for product in self.groups[group].pop(0):
                values[product.registers] = self._compute(product, values[product.registers])
                for operand in product.operands:
                    self.m.race.end_product(operand, group, product.by)
        busy = {p.registers for products in (*self.groups[group], self.open[group]) for p in products}
        for registers in [r for r in values if r not in busy]:
            self.accumulators[list(registers), lanes] = _to_fragment(values.pop(registers))
        self.fenced[group] = self.fenced[group] and bool(busy)

    def _compute(self, product: Product, d: np.ndarray) -> np.ndarray:
        memory = self.m.shared.views[2]
        a = widen(memory[product.a], product.kind) if product.a_is_shared else product.a
        b = widen(memory[product.b], product.kind)
        return d + a @ b.T if product.accumulate else a @ b.T


def _to_fragment(d: np.ndarray) -> np.ndarray:
    """Accumulators [64, N] → [N/2 registers, 128 lanes]."""
    n = d.shape[1]
    return d.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, 128)


def _from_fragment(registers: np.ndarray) -> np.ndarray:
    n = 2 * len(registers)
    return registers.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)


@functools.lru_cache(maxsize=4096)
def operand_units(descriptor: int, outer: int, transposed: bool) -> np.ndarray:
    """The addresses of an operand's elements in shared memory, in units of two bytes: [outer, 16].

    PTX ISA, "Matrix descriptor": start, leading and stride byte offsets, base offset, swizzle mode. Eight
    rows of 128 bytes are an atom; the swizzle XORs bits 4 … 6 of an address with bits 7 … 9.
        K contiguous: a row of an atom is an outer index; the next atom is one stride further.
        transposed: a row is a k, its columns 64 outer indices; the next atom along k is one stride further,
        that of the next 64 outer indices one leading offset.
    """
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 62 != 1 or descriptor >> 49 & 7:
        raise UnknownInstruction(f"descriptor {descriptor:#x}: no 128-byte swizzle at base offset 0")
    i, k = np.arange(outer)[:, None], np.arange(16)
    if transposed:
        address = start + i // 64 * leading + i % 64 * 2 + k // 8 * stride + k % 8 * 128
    else:
        address = start + i // 8 * stride + i % 8 * 128 + k * 2
    found = (address ^ (address >> 3 & 0x70)) >> 1
    found.setflags(write=False)
    return found


@builds("wgmma")
def _wgmma(m: Machine, code: Instruction) -> Operation:
    groups = m.component(Warpgroups)
    if "mma_async" in code.parts:
        return _mma_async(m, code, groups)

    def fence(group: int) -> None:
        groups.fenced[group] = True

    def wait(group: int) -> None:
        groups.wait(group, int(code.operands[0].text))

    step = {"fence": fence, "commit_group": groups.commit, "wait_group": wait}[code.parts[1]]

    def each(mask: Mask) -> None:
        for group in groups.members(mask):
            step(group)

    return each


def _mma_async(m: Machine, code: Instruction, groups: Warpgroups) -> Operation:
    form = re.search(r"\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2$", code.opcode)
    if form is None:
        raise UnknownInstruction("of wgmma, bf16 or f16 into f32 is known")
    n, kind = int(form[1]), form[2]
    d, a, b, scale_d, *flags = code.operands
    scale_a, scale_b, *transposed = (int(x.text) for x in flags)
    registers = tuple(x.row for x in d)
    if len(registers) != n // 2 or (scale_a, scale_b) != (1, 1):
        raise UnknownInstruction(f"{len(registers)} accumulators for n = {n}, or a scale but 1")
    accumulate = m.source(scale_d, BOOL)
    if isinstance(a, tuple):
        (trans_b,) = transposed
        a_registers = [m.register(x, U32) for x in a]
    else:
        trans_a, trans_b = transposed
        a_descriptor = m.source(a, U64)
    b_descriptor = m.source(b, U64)

    def mma_async(mask: Mask) -> None:
        for group in groups.members(mask):
            lanes = slice(128 * group, 128 * group + 128)
            if isinstance(a, tuple):
                left = _left([r[lanes] for r in a_registers], kind)
            else:
                left = _shared_operand(m, a_descriptor[lanes], group, 64, trans_a)
            right = _shared_operand(m, b_descriptor[lanes], group, n, trans_b)
            add = bool(_agreed(accumulate[lanes], "scale-d"))
            groups.start(
                group, Product(registers, left, not isinstance(a, tuple), right, add, kind, code.index)
            )

    return mma_async


def _agreed(values: np.ndarray, what: str) -> bool | int:
    """The value, which must be equal in all threads of a warpgroup."""
    if (values != values[0]).any():
        raise LaunchError(f"the threads of a warpgroup disagree on {what}")
    return values[0].item()


def _shared_operand(m: Machine, descriptors: np.ndarray, group: int, outer: int, trans: int) -> np.ndarray:
    found = operand_units(_agreed(descriptors, "a descriptor"), outer, bool(trans))
    ends = np.array([found.min(), found.max()]) * 2
    m.shared.check(ends, 2, np.array([128 * group] * 2))
    return found


def _left(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """The left operand [64, 16], from four registers of 128 lanes: rows g and g + 8 of a warp's 16, columns
    2t and 2t + 8."""
    x = np.stack(registers).reshape(2, 2, 4, 8, 4)  # column half, row half, warp, g, t
    x = np.ascontiguousarray(x.transpose(2, 1, 3, 0, 4)).reshape(64, 8)
    return widen(x.view(np.uint16), kind)
