"""Loads and stores, atomics, fences and the copies of `cp.async`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import MemcheckError, UnknownInstruction
from .machine import DTYPES, Component, Machine, Mask, Operation, builds
from .memory import SHARED_WINDOW
from .ptx import Address, Instruction, Name, Reg


def units(address: np.ndarray, size: int) -> np.ndarray:
    """What the race detector watches of `size` bytes at every address: [n, ⌈size/2⌉]."""
    return (address >> 1)[:, None] + np.arange(max(size // 2, 1))


class Space:
    """Checked access to one space, or to whichever a generic address names."""

    def __init__(self, m: Machine, code: Instruction, operand: Address) -> None:
        self.m, self.by = m, code.index
        self.name = next((p.split("::")[0] for p in code.parts if p.split("::")[0] in SPACES), "generic")
        if self.name == "generic" and isinstance(operand.base, Name):
            raise UnknownInstruction("a variable as a generic address")
        if self.name == "local":
            raise UnknownInstruction("local memory (a stack)")

    def load(self, address: np.ndarray, size: int, count: int, lanes: np.ndarray) -> np.ndarray:
        """[lanes, count] raw elements of `size` bytes."""
        return getattr(self, f"_load_{self.name}")(address, size, count, lanes)

    def store(self, address: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        getattr(self, f"_store_{self.name}")(address, values, lanes)

    def _load_shared(self, address, size, count, lanes):
        m = self.m
        m.shared.check(address, size * count, lanes)
        m.race.read(units(address, size * count), m.warp_of[lanes], self.by)
        return m.shared.load(address, size, count)

    def _store_shared(self, address, values, lanes):
        m, size = self.m, values.dtype.itemsize * values.shape[1]
        m.shared.check(address, size, lanes)
        m.race.write(units(address, size), m.warp_of[lanes], self.by)
        m.shared.store(address, values)

    def _load_global(self, address, size, count, lanes):
        return self.m.memory.load(address, size, count, lanes)

    def _store_global(self, address, values, lanes):
        self.m.memory.store(address, values, lanes)

    _load_const = _load_global

    def _load_param(self, address, size, count, lanes):
        m = self.m
        start = address - m.parameters.ctypes.data - m.parameter_start
        bad = (start < 0) | (start + size * count > m.kernel.parameter_bytes) | (start % size != 0)
        if bad.any():
            thread = int(lanes[np.argmax(bad)])
            raise MemcheckError(f"thread {thread}: byte {int(start[np.argmax(bad)])} of the parameters")
        view = m.parameters[m.parameter_start : m.parameter_start + m.kernel.parameter_bytes // size * size]
        return view.view(f"u{size}")[(start // size)[:, None] + np.arange(count)]

    def _load_generic(self, address, size, count, lanes):
        result = np.empty((len(lanes), count), f"u{size}")
        for space, offset, here in self._spaces(address):
            load = getattr(self, f"_load_{space}")
            result[here] = load(address[here] - offset, size, count, lanes[here])
        return result

    def _store_generic(self, address, values, lanes):
        for space, offset, here in self._spaces(address):
            getattr(self, f"_store_{space}")(address[here] - offset, values[here], lanes[here])

    def _spaces(self, address):
        start = self.m.parameters.ctypes.data
        shared = address >= SHARED_WINDOW
        param = (address >= start) & (address < start + len(self.m.parameters))
        spaces = ("shared", SHARED_WINDOW, shared), ("param", 0, param), ("global", 0, ~(shared | param))
        return [x for x in spaces if x[2].any()]


SPACES = ("shared", "global", "param", "const", "local")


def _types(code: Instruction) -> tuple[np.dtype, int]:
    """Of the elements; how many."""
    count = next((int(p[1]) for p in code.parts if p in ("v2", "v4", "v8")), 1)
    return DTYPES[code.parts[-1]], count


@builds("ld", "ldu")
def _ld(m: Machine, code: Instruction) -> Operation:
    dtype, count = _types(code)
    size, (to, operand) = dtype.itemsize, code.operands[:2]
    space, addresses = Space(m, code, operand), m.addresses(operand)
    targets = [_destination(m, x, dtype) for x in (to if isinstance(to, tuple) else (to,))]

    def load(mask: Mask) -> None:
        lanes = m.lanes(mask)
        raw = space.load(addresses(lanes), size, count, lanes).view(dtype)
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


@builds("st")
def _st(m: Machine, code: Instruction) -> Operation:
    dtype, _ = _types(code)
    operand, values = code.operands[:2]
    space, addresses = Space(m, code, operand), m.addresses(operand)
    raw = np.dtype(f"u{dtype.itemsize}")
    sources = [m.source(x, raw) for x in (values if isinstance(values, tuple) else (values,))]

    def store(mask: Mask) -> None:
        lanes = m.lanes(mask)
        space.store(addresses(lanes), np.stack([x[lanes] for x in sources], axis=1), lanes)

    return store


@builds("atom", "red")
def _atom(m: Machine, code: Instruction) -> Operation:
    """Lane by lane. In shared memory atomics are not watched for races: they are for that."""
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda old, new: new}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    kind, dtype = next((p for p in code.parts if p in (*functions, "cas")), None), DTYPES[code.parts[-1]]
    if kind is None or "noftz" in code.parts:
        raise UnknownInstruction("this atomic")
    operands = code.operands if code.parts[0] == "atom" else (None, *code.operands)
    d = m.register(operands[0], dtype) if operands[0] is not None else None
    addresses = m.addresses(operands[1])
    values = [m.source(x, dtype) for x in operands[2:]]
    shared = any(p.split("::")[0] == "shared" for p in code.parts)

    def atom(mask: Mask) -> None:
        lanes = m.lanes(mask)
        for lane, address in zip(lanes, addresses(lanes), strict=True):
            old = _exchange(m, shared, int(address), lane, dtype, kind, functions, [v[lane] for v in values])
            if d is not None:
                d[lane] = old

    return atom


def _exchange(m, shared, address, lane, dtype, kind, functions, values) -> Any:
    where, who = np.array([address]), np.array([lane])
    if shared:
        m.shared.check(where, dtype.itemsize, who)
    else:
        m.memory.check(where.astype(np.uint64), dtype.itemsize, dtype.itemsize, who)
    view, base = (m.shared, 0) if shared else (m.memory, m.memory.base)
    words, at = view.views[dtype.itemsize].view(dtype), (address - base) // dtype.itemsize
    old = words[at].copy()
    if kind == "cas":
        words[at] = values[1] if old == values[0] else old
    else:
        words[at] = functions[kind](old, values[0])
    return old


@builds("fence")
def _fence(m: Machine, code: Instruction) -> Operation:
    """Only the fence between the proxies does anything: memory here is never reordered."""
    if "proxy" not in code.parts and "mbarrier_init" not in code.parts:
        return lambda mask: None
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
        self.m.race.start_write(units(address, size), self.m.warp_of[lanes], by, async_proxy=False)
        self.pending.append(Copy(lanes, address, data, self.committed[lanes], np.full(len(lanes), -1), by))

    def wait(self, mask: Mask, leave: int) -> None:
        """All groups of these threads but the last `leave`."""
        done = np.where(True if mask is True else mask, self.committed - leave, -1)
        self.land(lambda copy: copy.group < done[copy.lanes])

    def pass_on(self, lanes: np.ndarray) -> None:
        """All copies so far of these threads will be told of by an mbarrier."""
        for copy in self.pending:
            mine = np.isin(copy.lanes, lanes) & (copy.clock < 0)
            copy.clock[mine] = self.m.race.clock[self.m.warp_of[copy.lanes[mine]]]

    def land(self, chosen: Callable[[Copy], np.ndarray]) -> None:
        m, left = self.m, []
        for copy in self.pending:
            which = chosen(copy)
            now, later = copy.split(which)
            if len(now.lanes):
                m.shared.bytes[now.address[:, None] + np.arange(now.data.shape[1])] = now.data
                watched = units(now.address, now.data.shape[1])
                warps = m.warp_of[now.lanes]
                clock = np.where(now.clock < 0, m.race.clock[warps], now.clock)
                m.race.end_write(watched, warps, now.by, clock)
            if len(later.lanes):
                left.append(later)
        self.pending = left


@builds("cp")
def _cp(m: Machine, code: Instruction) -> Operation:
    from . import bulk

    if "bulk" in code.parts:
        return bulk.build_copy(m, code)
    if "mbarrier" in code.parts:
        return bulk.build_copy_arrival(m, code)
    copies = m.component(Copies)
    if "commit_group" in code.parts:

        def commit(mask: Mask) -> None:
            copies.committed[m.lanes(mask)] += 1

        return commit
    if "wait_group" in code.parts:
        leave = int(code.operands[0].text)
        return lambda mask: copies.wait(mask, leave)
    if "wait_all" in code.parts:
        return lambda mask: copies.wait(mask, -1)
    return _copy(m, code, copies)


def _copy(m: Machine, code: Instruction, copies: Copies) -> Operation:
    to, source = (m.addresses(x) for x in code.operands[:2])
    size = int(code.operands[2].text)
    if any("cache_hint" in p for p in code.parts) and len(code.operands) > 4:
        raise UnknownInstruction("cp.async with a size and a cache hint")
    hint_only = any("cache_hint" in p for p in code.parts)
    has_count = len(code.operands) > 3 and not hint_only
    count = m.source(code.operands[3], DTYPES["u32"]) if has_count else np.full(m.T, size)

    def copy(mask: Mask) -> None:
        lanes = m.lanes(mask)
        data, wanted = np.zeros((len(lanes), size), np.uint8), count[lanes]
        address = source(lanes)
        for n in np.unique(wanted).tolist():
            if n > size:
                raise MemcheckError(f"cp.async of {n} bytes where {size} have room")
            if n:
                here = wanted == n
                m.memory.check(address[here].astype(np.uint64), n, size, lanes[here])
                data[here, :n] = m.memory.views[1][(address[here] - m.memory.base)[:, None] + np.arange(n)]
        copies.start(lanes, to(lanes), data, code.index)

    return copy
