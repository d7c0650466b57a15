"""mbarriers, and bulk copies between global and shared memory (TMA).

A bulk copy lands when no thread can go on without it: the latest moment that is legal.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import torch

from .access import Copies, Copy, units
from .faults import LaunchError, MemcheckError, UnknownInstruction
from .machine import DTYPES, MBARRIER, POLL, Component, Machine, Mask, Operation, builds
from .memory import SHARED_WINDOW
from .ptx import Address, Immediate, Instruction, Reg
from .race import MAX_MBARRIERS
from .scalar import BOOL, U32, U64


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What a kernel knows of a tensor that it copies boxes of. The innermost, contiguous dimension is first.

    Stands in for CUtensorMap, whose 128 bytes only the driver can write: `pack()` are 128 bytes that
    the emulator can read. Elements beyond the tensor are read as zeros and not written.
    """

    base: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    element_size: int = 2
    swizzle: int = 128  # bytes: 0, 32, 64 or 128

    _format = struct.Struct("<8sQ4B5Q4Q5H")

    def __post_init__(self) -> None:
        rank, inner = len(self.dims), self.box[0] * self.element_size
        checks = {
            "1 to 5 dimensions, a box of as many, a stride for all but one": 1 <= rank <= 5
            and len(self.box) == rank
            and len(self.strides) == rank - 1,
            "a base that is a multiple of 16": self.base % 16 == 0,
            "strides that are multiples of 16": all(s % 16 == 0 for s in self.strides),
            "a box of 1 to 256 a dimension": all(1 <= n <= 256 for n in self.box),
            "box rows of a multiple of 16 bytes": inner % 16 == 0,
            "box rows no wider than the swizzle": self.swizzle in (0, 32, 64, 128)
            and (self.swizzle == 0 or inner <= self.swizzle),
            "elements of 2, 4 or 8 bytes": self.element_size in (2, 4, 8),
            "no empty dimension": all(n > 0 for n in self.dims),
        }
        wrong = [text for text, good in checks.items() if not good]
        if wrong:
            raise LaunchError(f"a tensor map needs {wrong[0]}: {self}")

    @classmethod
    def of(cls, x: torch.Tensor, box: tuple[int, ...], swizzle: int = 128) -> TensorMap:
        """Of a tensor whose last dimension is contiguous; `box` as the map has it, innermost first."""
        size = x.element_size()
        strides = tuple(s * size for s in reversed(x.stride()[:-1]))
        return cls(x.data_ptr(), tuple(reversed(x.shape)), strides, box, size, swizzle)

    def pack(self) -> bytes:
        def five(x, n=5):
            return (*x, *[0] * (n - len(x)))

        head = b"TensMap.", self.base, len(self.dims), self.element_size, self.swizzle, 0
        packed = self._format.pack(*head, *five(self.dims), *five(self.strides, 4), *five(self.box))
        return packed.ljust(128, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> TensorMap:
        magic, base, rank, size, swizzle, _, *rest = cls._format.unpack(data[: cls._format.size])
        if magic != b"TensMap.":
            raise LaunchError("no tensor map where one is expected (TensorMap.pack makes one)")
        dims, strides, box = rest[:5], rest[5:9], rest[9:]
        return cls(base, tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), size, swizzle)

    def place(self, corner: list[int], shared: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the box's elements at `corner`: global address, whether in the tensor, shared address."""
        index = np.indices(self.box[::-1]).reshape(len(self.box), -1)[::-1]  # innermost first
        at = index + np.array(corner)[:, None]
        inside = ((at >= 0) & (at < np.array(self.dims)[:, None])).all(0)
        address = self.base + (at * np.array([self.element_size, *self.strides])[:, None]).sum(0)
        linear = shared + np.arange(index.shape[1]) * self.element_size
        bits = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[self.swizzle]
        return address, inside, linear ^ (linear >> 3 & bits)


# mbarriers


@dataclasses.dataclass
class Mbarrier:
    """`phase` counts the completed ones; `knows` and `fenced` are what those who arrived have passed on."""

    number: int
    expected: int
    pending: int
    knows: np.ndarray
    fenced: np.ndarray
    bytes: int = 0  # still to come
    phase: int = 0
    passed: tuple[np.ndarray, np.ndarray] | None = None  # at the last completion


class Mbarriers(Component):
    def reset(self) -> None:
        self.at: dict[int, Mbarrier] = {}
        self.count = 0

    def state(self) -> list[str]:
        missing = "of {0.expected} arrivals {0.pending} are to come, and {0.bytes} bytes"
        return [f"mbarrier {a:#x}, phase {b.phase}: " + missing.format(b) for a, b in self.at.items()]

    def init(self, address: int, count: int, warp: int, by: int) -> None:
        m, where = self.m, np.array([address])
        m.shared.check(where, 8, np.array([32 * warp]))
        m.race.write(units(where, 8), np.array([warp]), by)
        if self.count == MAX_MBARRIERS:
            raise UnknownInstruction(f"more than {MAX_MBARRIERS} mbarriers")
        self.at[address] = Mbarrier(self.count, count, count, *m.race.message())
        self.count += 1

    def find(self, address: int, warp: int, by: int, async_proxy: bool = False) -> Mbarrier:
        where, who = units(np.array([address]), 8), np.array([warp])
        if address not in self.at:
            raise MemcheckError(f"no mbarrier was initialised at shared address {address:#x}")
        self.m.race.check_known(where, who, by)
        if async_proxy:
            self.m.race.check_fenced(where, who, by)
        return self.at[address]

    def arrive(self, barrier: Mbarrier, count: int, message: tuple[np.ndarray, np.ndarray]) -> None:
        if count > barrier.pending:
            raise LaunchError(f"{count} arrivals at an mbarrier that expects {barrier.pending} more")
        np.maximum(barrier.knows, message[0], out=barrier.knows)
        np.maximum(barrier.fenced, message[1], out=barrier.fenced)
        barrier.pending -= count
        self.complete(barrier)

    def complete(self, barrier: Mbarrier) -> None:
        """The phase, if nothing is missing."""
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            barrier.passed = barrier.knows.copy(), barrier.fenced.copy()
            self.m.wake(MBARRIER)
        self.m.progress += 1

    def learn(self, barrier: Mbarrier, warp: int) -> None:
        """The warp has seen the last phase complete."""
        if barrier.passed:
            self.m.race.receive(warp, *barrier.passed)
            self.m.race.learn_phases(warp, barrier.number, barrier.phase)


def shared_addresses(m: Machine, operand: Address) -> Callable[[np.ndarray], np.ndarray]:
    """Of an operand that must be in shared memory, as a shared or a generic address."""
    addresses = m.addresses(operand)

    def found(lanes: np.ndarray) -> np.ndarray:
        address = addresses(lanes)
        return np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)

    return found


@builds("mbarrier")
def _mbarrier(m: Machine, code: Instruction) -> Operation:
    kind = code.parts[1]
    if kind in ("try_wait", "test_wait"):
        return _wait(m, code)
    if kind in ("init", "inval", "expect_tx", "complete_tx"):
        return _change(m, code, kind)
    if kind == "arrive" and "noComplete" not in code.parts:
        return _arrive(m, code)
    raise UnknownInstruction("this operation on an mbarrier")


def _change(m: Machine, code: Instruction, kind: str) -> Operation:
    barriers, addresses = m.component(Mbarriers), shared_addresses(m, code.operands[0])
    values = m.source(code.operands[1], U32) if len(code.operands) > 1 else np.zeros(m.T, np.uint32)

    def change(mask: Mask) -> None:
        lanes = m.lanes(mask)
        for lane, address in zip(lanes, addresses(lanes).tolist(), strict=True):
            warp, value = int(lane) // 32, int(values[lane])
            if kind == "init":
                barriers.init(address, value, warp, code.index)
                continue
            barrier = barriers.find(address, warp, code.index)
            if kind == "inval":
                del barriers.at[address]
            else:
                barrier.bytes += value if kind == "expect_tx" else -value
                barriers.complete(barrier)

    return change


def _arrive(m: Machine, code: Instruction) -> Operation:
    """arrive and arrive.expect_tx; the state it returns is the number of the phase."""
    has_state = not isinstance(code.operands[0], Address)
    state, operand, *rest = code.operands if has_state else (None, *code.operands)
    d = m.register(state, U64) if isinstance(state, Reg) else None
    expects = "expect_tx" in code.parts
    barriers, addresses = m.component(Mbarriers), shared_addresses(m, operand)
    values = m.source(rest[0] if rest else Immediate("0" if expects else "1"), U32)

    def arrive(mask: Mask) -> None:
        lanes = m.lanes(mask)
        for lane, address in zip(lanes, addresses(lanes).tolist(), strict=True):
            warp, value = int(lane) // 32, int(values[lane])
            barrier = barriers.find(address, warp, code.index)
            if d is not None:
                d[lane] = barrier.phase
            barrier.bytes += value if expects else 0
            message = m.race.message()
            m.race.send(warp, *message)
            barriers.arrive(barrier, 1 if expects else value, message)

    return arrive


def _wait(m: Machine, code: Instruction) -> Operation:
    """A failed try_wait stays until a phase completes; a failed test_wait goes on when nobody else can."""
    stays, parity = code.parts[1] == "try_wait", "parity" in code.parts
    p = m.register(code.operands[0], BOOL)
    barriers, addresses = m.component(Mbarriers), shared_addresses(m, code.operands[1])
    wanted, passing = m.source(code.operands[2], U32 if parity else U64), m.guard(code)

    def over(address: int, want: int, warps: np.ndarray) -> bool:
        for warp in warps:
            found = barriers.find(address, int(warp), code.index)
        done = found.phase & 1 != want & 1 if parity else found.phase != want
        if done:
            for warp in warps:
                barriers.learn(found, int(warp))
        return done

    def wait(mask: Mask) -> None:
        taken = passing(mask)
        lanes = m.lanes(taken)
        where, want, done = addresses(lanes), wanted[lanes], np.zeros(len(lanes), bool)
        for address, value in np.unique(np.stack([where, want.astype(np.int64)]), axis=1).T:
            same = (where == address) & (want == value)
            done[same] = over(int(address), int(value), np.unique(m.warp_of[lanes[same]]))
        p[lanes] = done
        if done.all():
            m.goto(mask, code.index + 1)
            return
        mask, late = m.part(mask), lanes[~done]
        m.pc[mask] = code.index + 1
        m.status[late] = MBARRIER if stays else POLL
        if stays:
            m.pc[late] = code.index

    return wait


def build_copy_arrival(m: Machine, code: Instruction) -> Operation:
    """cp.async.mbarrier.arrive{.noinc}: arrives when the thread's cp.async so far have landed.

    It passes on what its warp knew when it executed this, not what it has learned since.
    """
    barriers, copies = m.component(Mbarriers), m.component(Copies)
    addresses, counted = shared_addresses(m, code.operands[0]), "noinc" in code.parts

    def arrive(mask: Mask) -> None:
        lanes = m.lanes(mask).copy()
        pairs = zip(lanes.tolist(), addresses(lanes).tolist(), strict=True)
        found = [barriers.find(address, lane // 32, code.index) for lane, address in pairs]
        for barrier in found:
            barrier.pending += 0 if counted else 1
        copies.pass_on(lanes)
        clock = m.race.clock.copy()
        messages = {}
        for warp in np.unique(m.warp_of[lanes]):
            messages[warp] = m.race.message()
            m.race.send(int(warp), *messages[warp])

        def passed_on(copy: Copy) -> np.ndarray:
            return (
                np.isin(copy.lanes, lanes) & (copy.clock >= 0) & (copy.clock <= clock[m.warp_of[copy.lanes]])
            )

        def land() -> None:
            copies.land(passed_on)
            for lane, barrier in zip(lanes, found, strict=True):
                barriers.arrive(barrier, 1, messages[lane // 32])

        m.async_events.append(land)

    return arrive


# Bulk copies


def build_copy(m: Machine, code: Instruction) -> Operation:
    parts = [p.split("::")[0] for p in code.parts]
    if "prefetch" in parts:
        return lambda mask: None
    if "commit_group" in parts or "wait_group" in parts:
        return _group(m, code)
    if "reduce" in parts or "multicast" in parts or "im2col" in parts:
        raise UnknownInstruction("this bulk copy")
    to_shared = parts.index("shared") < parts.index("global")
    return _bulk_load(m, code) if to_shared else _bulk_store(m, code)


def _box(m: Machine, code: Instruction, tensor: Address, shared: Address, size) -> Callable:
    """A function of a lane: (global addresses, which to copy, shared addresses, bytes an element)."""
    from_map, to = m.addresses(tensor), shared_addresses(m, shared)
    coordinates = [m.source(x, DTYPES["s32"]) for x in tensor.coordinates]
    sizes = None if size is None else m.source(size, U32)

    def box(lane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        who = np.array([lane])
        address, place = int(from_map(who)[0]), int(to(who)[0])
        if coordinates:
            tensor_map = _read_map(m, address)
            if len(tensor_map.dims) != len(coordinates):
                raise LaunchError(f"{len(coordinates)} coordinates for {tensor_map}")
            align, element = 128, tensor_map.element_size
            global_, inside, shared_ = tensor_map.place([int(x[lane]) for x in coordinates], place)
        else:
            align, element, count = 16, 2, int(sizes[lane])
            if count % 16 or address % 16:
                raise MemcheckError(f"a bulk copy of {count} bytes at {address:#x}: no multiple of 16")
            steps = np.arange(0, count, 2)
            global_, inside, shared_ = address + steps, np.ones(len(steps), bool), place + steps
        m.shared.check(np.array([place]), 1, who, align)
        m.shared.check(shared_, element, np.full(len(shared_), lane))
        m.memory.check(global_[inside].astype(np.uint64), element, element, np.full(int(inside.sum()), lane))
        return global_, inside, shared_, element

    return box


def _read_map(m: Machine, address: int) -> TensorMap:
    start = address - m.parameters.ctypes.data
    if address % 64:
        raise MemcheckError(f"a tensor map at {address:#x}: not a multiple of 64")
    if 0 <= start <= len(m.parameters) - 128:
        return TensorMap.unpack(m.parameters[start : start + 128].tobytes())
    where = np.array([address], np.uint64)
    return TensorMap.unpack(m.memory.load(where, 8, 16, np.zeros(1, np.int64)).tobytes())


def _bulk_load(m: Machine, code: Instruction) -> Operation:
    barriers = m.component(Mbarriers)
    tensor = "tensor" in code.parts
    if not any(p.startswith("mbarrier") for p in code.parts):
        raise UnknownInstruction("a bulk copy to shared memory completes on an mbarrier")
    to, source, *rest = code.operands
    size = None if tensor else rest.pop(0)
    box, mbarrier = _box(m, code, source, to, size), shared_addresses(m, rest[0])

    def load(mask: Mask) -> None:
        for lane in m.lanes(mask):
            warp, address = int(lane) // 32, int(mbarrier(np.array([lane]))[0])
            barrier = barriers.find(address, warp, code.index, async_proxy=True)
            start(box(lane), barrier, np.array([warp]))

    def start(copy: tuple, barrier: Mbarrier, warp: np.ndarray) -> None:
        source, inside, place, element = copy
        watched = np.unique(units(place, element))[None]
        m.race.start_write(watched, warp, code.index, async_proxy=True)

        def land() -> None:
            data = np.zeros(len(place), f"u{element}")
            data[inside] = m.memory.views[element][(source[inside] - m.memory.base) // element]
            m.shared.views[element][place // element] = data
            m.race.land(watched, barrier.number, barrier.phase, code.index)
            barrier.bytes -= len(place) * element
            barriers.complete(barrier)

        m.async_events.append(land)

    return load


@dataclasses.dataclass
class Store:
    """A bulk copy to global memory, of a thread's group. `data`: once it is read."""

    lane: int
    group: int
    address: np.ndarray  # global, of every element
    place: np.ndarray  # shared
    element: int  # bytes
    watched: np.ndarray
    by: int
    data: np.ndarray | None = None


class Stores(Component):
    """Shared memory is read when a thread waits for that, global memory written when it waits for all."""

    def reset(self) -> None:
        self.pending: list[Store] = []
        self.committed = np.zeros(self.m.T, np.int64)  # groups of every thread

    def finish(self) -> None:
        if any(store.data is None for store in self.pending):
            raise LaunchError("the kernel ends before its bulk copies have read shared memory")
        for store in self.pending:
            self._write(store)

    def wait(self, lanes: np.ndarray, leave: int, only_read: bool) -> None:
        left = []
        for store in self.pending:
            done = store.lane in lanes and store.group < self.committed[store.lane] - leave
            if done and store.data is None:
                store.data = self.m.shared.views[store.element][store.place // store.element]
                self.m.race.end_read(store.watched, store.lane // 32, store.by)
            if done and not only_read:
                self._write(store)
            else:
                left.append(store)
        self.pending = left

    def _write(self, store: Store) -> None:
        memory = self.m.memory
        memory.views[store.element][(store.address - memory.base) // store.element] = store.data


def _bulk_store(m: Machine, code: Instruction) -> Operation:
    stores = m.component(Stores)
    to, source = code.operands[:2]
    size = None if "tensor" in code.parts else code.operands[2]
    box = _box(m, code, to, source, size)

    def store(mask: Mask) -> None:
        for lane in m.lanes(mask):
            address, inside, place, element = box(lane)
            watched = np.unique(units(place, element))[None]
            m.race.check_read(watched, np.array([lane // 32]), code.index)
            m.race.start_read(watched, code.index)
            group = int(stores.committed[lane])
            stores.pending.append(
                Store(int(lane), group, address[inside], place[inside], element, watched, code.index)
            )

    return store


def _group(m: Machine, code: Instruction) -> Operation:
    stores = m.component(Stores)
    if "commit_group" in code.parts:

        def commit(mask: Mask) -> None:
            stores.committed[m.lanes(mask)] += 1

        return commit
    leave, only_read = int(code.operands[0].text), "read" in code.parts
    return lambda mask: stores.wait(m.lanes(mask), leave, only_read)
