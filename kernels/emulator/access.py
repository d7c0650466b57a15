"""Loads and stores, the fence between the proxies, and the copies of `cp.async`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from lingpt.kernels.emulator.faults import MemcheckError, UnknownInstruction
from lingpt.kernels.emulator.machine import DTYPES, U32, Component, Machine, Mask, Operation, builds
from lingpt.kernels.emulator.ptx import Instruction, Reg


def units(address: np.ndarray, size: int) -> np.ndarray:
    """What the race detector watches of `size` bytes at every address: [n, ⌈size/2⌉]."""
    return (address >> 1)[:, None] + np.arange(max(size // 2, 1))


# Loads and stores. A generic address is one of global memory: shared memory has none without a cvta.


def _form(code: Instruction) -> tuple[str, np.dtype, int]:
    """The space; the type of the elements; how many."""
    spaces = [p.split("::")[0] for p in code.parts if p.split("::")[0] in SPACES]
    count = next((int(p[1]) for p in code.parts if p in ("v2", "v4")), 1)
    return spaces[0] if spaces else "global", DTYPES[code.parts[-1]], count


SPACES = ("shared", "global", "param", "const", "local")


def _load_shared(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    m.shared.check(address, size * count, lanes)
    m.race.read(units(address, size * count), m.warp_of[lanes], by)
    return m.shared.load(address, size, count)


def _load_global(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    return m.memory.load(address, size, count, lanes)


def _load_param(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    bad = (address < 0) | (address + size * count > len(m.parameters)) | (address % size != 0)
    if bad.any():
        i = int(np.argmax(bad))
        raise MemcheckError(f"thread {int(lanes[i])}: byte {int(address[i])} of the parameters")
    whole = m.parameters[: len(m.parameters) // size * size].view(f"u{size}")
    return whole[(address // size)[:, None] + np.arange(count)]


@builds("ld")
def _ld(m: Machine, code: Instruction) -> Operation:
    space, dtype, count = _form(code)
    read = {"shared": _load_shared, "global": _load_global, "param": _load_param}[space]
    to, operand = code.operands
    addresses = m.addresses(operand)
    targets = [_destination(m, x, dtype) for x in (to if isinstance(to, tuple) else (to,))]

    def load(mask: Mask) -> None:
        lanes = m.lanes(mask)
        raw = read(m, addresses(lanes), dtype.itemsize, count, lanes, code.index).view(dtype)
        for i, d in enumerate(targets):
            if mask is True:
                d[...] = raw[:, i]
            else:
                d[lanes] = raw[:, i]

    return load


def _destination(m: Machine, register: Reg, dtype: np.dtype) -> np.ndarray:
    """A register may be wider than what is loaded, which is then extended."""
    if dtype.kind == "f":
        return m.register(register, dtype)
    return m.register(register, np.dtype(f"{dtype.kind}{max(register.bits // 8, dtype.itemsize)}"))


def _store_shared(m: Machine, address, values, lanes, by: int) -> None:
    size = values.dtype.itemsize * values.shape[1]
    m.shared.check(address, size, lanes)
    m.race.write(units(address, size), m.warp_of[lanes], by)
    m.shared.store(address, values)


def _store_global(m: Machine, address, values, lanes, by: int) -> None:
    m.memory.store(address, values, lanes)


@builds("st")
def _st(m: Machine, code: Instruction) -> Operation:
    space, dtype, _ = _form(code)
    write = {"shared": _store_shared, "global": _store_global}[space]
    operand, values = code.operands
    addresses, raw = m.addresses(operand), np.dtype(f"u{dtype.itemsize}")
    sources = [m.source(x, raw) for x in (values if isinstance(values, tuple) else (values,))]

    def store(mask: Mask) -> None:
        lanes = m.lanes(mask)
        write(m, addresses(lanes), np.stack([x[lanes] for x in sources], axis=1), lanes, code.index)

    return store


@builds("fence")
def _fence(m: Machine, code: Instruction) -> Operation:
    if not code.opcode.startswith("fence.proxy.async"):
        raise UnknownInstruction("of fences, fence.proxy.async is known")
    return lambda mask: m.race.fence(np.unique(m.warp_of[m.lanes(mask)]))


# cp.async: what is copied lands when the thread waits for it, and not before


@dataclasses.dataclass
class Copy:
    """Of one instruction: the threads, where to, what, and in which of each thread's groups.

    `clock`: of the thread's warp when it passed the copy on to an mbarrier, or −1.
    """

    lanes: np.ndarray
    address: np.ndarray
    data: np.ndarray
    group: np.ndarray
    clock: np.ndarray
    by: int

    def split(self, chosen: np.ndarray) -> tuple[Copy, Copy]:
        arrays = self.lanes, self.address, self.data, self.group, self.clock
        return tuple(Copy(*(x[part] for x in arrays), self.by) for part in (chosen, ~chosen))


class Copies(Component):
    """The cp.async of a block that have not landed. Those that nobody waits for do no harm."""

    def reset(self) -> None:
        self.pending: list[Copy] = []
        self.committed = np.zeros(self.m.T, np.int64)  # groups of every thread

    def start(self, lanes: np.ndarray, address: np.ndarray, data: np.ndarray, by: int) -> None:
        size = data.shape[1]
        self.m.shared.check(address, size, lanes)
        self.m.race.start_write(units(address, size), self.m.warp_of[lanes], by)
        self.pending.append(Copy(lanes, address, data, self.committed[lanes], np.full(len(lanes), -1), by))

    def wait(self, mask: Mask, leave: int) -> None:
        """All groups of these threads but the last `leave`."""
        done = np.where(mask, self.committed - leave, -1)
        self.land(lambda copy: copy.group < done[copy.lanes])

    def pass_on(self, lanes: np.ndarray) -> Callable[[], None]:
        """An mbarrier will tell of all copies of these threads so far. Returns what makes them land."""
        clock = self.m.race.clock[self.m.warp_of]
        for copy in self.pending:
            mine = np.isin(copy.lanes, lanes) & (copy.clock < 0)
            copy.clock[mine] = clock[copy.lanes[mine]]

        def passed_on(copy: Copy) -> np.ndarray:
            return np.isin(copy.lanes, lanes) & (copy.clock >= 0) & (copy.clock <= clock[copy.lanes])

        return lambda: self.land(passed_on)

    def land(self, chosen: Callable[[Copy], np.ndarray]) -> None:
        m, left = self.m, []
        for copy in self.pending:
            now, later = copy.split(chosen(copy))
            if len(now.lanes):
                size, warps = now.data.shape[1], m.warp_of[now.lanes]
                m.shared.bytes[now.address[:, None] + np.arange(size)] = now.data
                clock = np.where(now.clock < 0, m.race.clock[warps], now.clock)
                m.race.end_write(units(now.address, size), warps, now.by, clock)
            if len(later.lanes):
                left.append(later)
        self.pending = left


@builds("cp")
def _cp(m: Machine, code: Instruction) -> Operation:
    from . import mbarrier

    copies = m.component(Copies)
    if code.opcode == "cp.async.commit_group":

        def commit(mask: Mask) -> None:
            copies.committed[m.lanes(mask)] += 1

        return commit
    if code.opcode == "cp.async.wait_group":
        leave = int(code.operands[0].text)
        return lambda mask: copies.wait(mask, leave)
    if code.opcode.startswith("cp.async.mbarrier.arrive.noinc."):
        return mbarrier.build_copy_arrival(m, code)
    if re.fullmatch(r"cp\.async\.c[ag]\.shared\.global", code.opcode):
        return _copy(m, code, copies)
    raise UnknownInstruction("this form of cp")


def _copy(m: Machine, code: Instruction, copies: Copies) -> Operation:
    """Of `count` bytes, zeros behind them up to `size`."""
    target, source, (size, count) = *map(m.addresses, code.operands[:2]), code.operands[2:]
    size, counts = int(size.text), m.source(count, U32)

    def copy(mask: Mask) -> None:
        lanes = m.lanes(mask)
        data, wanted, address = np.zeros((len(lanes), size), np.uint8), counts[lanes], source(lanes)
        for n in np.unique(wanted).tolist():
            if n > size:
                raise MemcheckError(f"cp.async of {n} bytes where {size} have room")
            if n:
                here = wanted == n
                m.memory.check(address[here].astype(np.uint64), n, size, lanes[here])
                data[here, :n] = m.memory.views[1][(address[here] - m.memory.base)[:, None] + np.arange(n)]
        copies.start(lanes, target(lanes), data, code.index)

    return copy
