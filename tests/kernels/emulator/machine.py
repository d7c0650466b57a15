"""A block of threads: registers, the binding of instructions to numpy, and the scheduler.

Every register is a row of one number a thread. An instruction becomes a function of the mask of threads that
execute it: True for all, or an array of bool. Threads at the smallest program counter run first, together,
which brings together again what an `if` took apart; a run goes to the end of a straight piece of code.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import DeadlockError, EmulatorError, LaunchError, UnknownInstruction
from .memory import SHARED_START, GlobalMemory, SharedMemory
from .ptx import Address, Immediate, Instruction, Inverted, Kernel, Name, Reg, immediate_bits
from .race import Race

Mask = Any  # True, or bool [threads]
Operation = Callable[[Mask], None]

RUN, WARP, BARRIER, MBARRIER, POLL, EXIT = range(6)
WAITS = {WARP: "for their warps", BARRIER: "at a barrier", MBARRIER: "for an mbarrier", POLL: "polling"}
LANES = np.arange(32)
MOST_STEPS = 5_000_000  # pieces of code that a block may execute

DTYPES = {f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)}
DTYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
DTYPES |= {"bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}

BUILDERS: dict[str, Callable[[Machine, Instruction], Operation]] = {}
ENDS = {"bra", "ret", "exit", "trap", "bar", "barrier"}  # of a straight piece of code
ALIGNED = ("mma", "ldmatrix", "stmatrix", "bar", "barrier")  # the whole warp, whatever the registers say
MASKED = ("shfl", "vote", "redux", "elect", "match")  # the lanes that a register names


def builds(*names: str):
    """Registers how an instruction, by the first word of its opcode, becomes a function."""

    def register(builder):
        BUILDERS.update(dict.fromkeys(names, builder))
        return builder

    return register


class Component:
    """Something of a block that has state of its own: copies in flight, mbarriers, …"""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.reset()

    def reset(self) -> None:
        """A block begins."""

    def finish(self) -> None:
        """It has ended: raises an error if something must not be left unfinished."""

    def state(self) -> list[str]:
        """Lines for the report of a deadlock."""
        return []


@dataclasses.dataclass
class Piece:
    """Straight code: from a label or behind a branch to the next of them."""

    operations: list[Operation]
    first: int  # index of the first instruction
    after: int  # and of the one behind the last
    end: Callable[[Mask], None] | None  # a branch or wait, which sets the program counter
    together: int  # threads that must come at once: 1, 32 (a warp) or 128 (a warpgroup)
    masked: bool  # none of its instructions needs more of a warp than its register says


class Machine:
    """A kernel bound to a block's shape."""

    def __init__(self, kernel: Kernel, block: tuple[int, int, int], shared: int, racecheck: bool) -> None:
        self.kernel, self.block, self.dynamic_shared = kernel, block, shared
        count = int(np.prod(block))
        self.T = -(-count // 32) * 32
        self.absent = np.arange(self.T) >= count
        self.warps = self.T // 32
        self.warp_of = np.arange(self.T) // 32
        self.lane_of = np.arange(self.T) % 32
        self.all_lanes = np.arange(self.T)
        self.registers = {
            bits: np.empty((rows, self.T), bool if bits == 1 else f"u{bits // 8}")
            for bits, rows in kernel.registers.items()
        }
        self.parameters = np.zeros(kernel.parameter_bytes + 128, np.uint8)  # some room to align
        self.parameter_start = -self.parameters.ctypes.data % 128
        self.constants: dict[tuple, np.ndarray] = {}
        self.grid_registers: dict[str, np.ndarray] = {}
        self.memory: GlobalMemory | None = None
        self._place_variables()
        self.shared = SharedMemory(self.shared_size)
        self.race = Race(self.warps, self.shared.end, self.describe, racecheck)
        self.components: list[Component] = []
        self.async_events: list[Callable[[], None]] = []  # copies in flight that nobody but a wait makes land
        self._bind()

    # Addresses and operands

    def _place_variables(self) -> None:
        self.symbols: dict[str, int] = {}
        self.global_data: list[np.ndarray] = []
        end, dynamic = SHARED_START, []
        for variable in self.kernel.variables:
            if variable.space != "shared":
                data = np.frombuffer(bytearray(variable.data.ljust(16, b"\0")), np.uint8)
                self.global_data.append(data)
                self.symbols[variable.name] = data.ctypes.data
            elif variable.size == 0:
                dynamic.append(variable)
            else:
                end = -(-end // variable.align) * variable.align
                self.symbols[variable.name] = end
                end += variable.size
        if self.dynamic_shared or dynamic:
            align = max((v.align for v in dynamic), default=16)
            end = -(-end // align) * align
            self.symbols.update((v.name, end) for v in dynamic)
        self.shared_size = end - SHARED_START + self.dynamic_shared

    def register(self, operand: Any, dtype: np.dtype) -> np.ndarray:
        """A live view of a register as `dtype`; of its low part where the register is wider."""
        if not isinstance(operand, Reg):
            raise UnknownInstruction(f"{operand} is no register")
        row = self.registers[operand.bits][operand.row]
        if operand.bits == 1:
            return row
        return row.view(dtype)[:: row.itemsize // dtype.itemsize or 1]

    def source(self, operand: Any, dtype: np.dtype) -> np.ndarray:
        """[threads] of whatever can be read: a live view, or a constant."""
        if isinstance(operand, Reg):
            return self.register(operand, dtype)
        if isinstance(operand, Inverted):
            raise UnknownInstruction("an inverted predicate as an operand")
        key = (operand, dtype.str)
        if key not in self.constants:
            if isinstance(operand, Immediate):
                if dtype == np.dtype(bool):
                    bits = bool(int(operand.text))
                    self.constants[key] = np.full(self.T, bits)
                else:
                    bits = immediate_bits(operand.text, dtype.itemsize)
                    self.constants[key] = np.full(self.T, bits, f"u{dtype.itemsize}").view(dtype)
            else:
                self.constants[key] = self._named(operand, dtype)
        return self.constants[key]

    def _named(self, operand: Name, dtype: np.dtype) -> np.ndarray:
        name = operand.text
        if name in self.symbols:
            return np.full(self.T, self.symbols[name]).astype(dtype)
        if name in self.kernel.parameters:
            return np.full(self.T, self.parameter_address(name)).astype(dtype)
        x, y, _ = self.block
        tid = {"x": self.all_lanes % x, "y": self.all_lanes // x % y, "z": self.all_lanes // (x * y)}
        special = {f"%tid.{d}": tid[d] for d in "xyz"}
        special |= {f"%ntid.{d}": np.full(self.T, n) for d, n in zip("xyz", self.block, strict=True)}
        special |= {"%laneid": self.lane_of, "%warpid": self.warp_of, "WARP_SZ": np.full(self.T, 32)}
        special |= {"%nwarpid": np.full(self.T, self.warps)}
        special |= {f"%lanemask_{n}": self._lane_mask(n) for n in ("eq", "lt", "le", "gt", "ge")}
        special |= {"%dynamic_smem_size": np.full(self.T, self.dynamic_shared)}
        special |= {"%total_smem_size": np.full(self.T, self.shared_size), "%smid": np.zeros(self.T)}
        # A cluster is one block.
        special |= {f"%cluster_{n}": np.zeros(self.T) for n in ("ctarank", *(f"ctaid.{d}" for d in "xyz"))}
        special |= {f"%cluster_{n}": np.ones(self.T) for n in ("nctarank", *(f"nctaid.{d}" for d in "xyz"))}
        if name in special:
            return special[name].astype(dtype)
        if name.startswith(("%ctaid.", "%nctaid.", "%clusterid.", "%nclusterid.")):
            value = np.zeros(self.T, dtype)  # filled in for every block
            self.grid_registers[f"{name} {dtype.str}"] = value
            return value
        if name in ("%clock", "%clock64", "%globaltimer"):
            return np.zeros(self.T, dtype)
        raise UnknownInstruction(f"{name} is unknown")

    def _lane_mask(self, name: str) -> np.ndarray:
        bit = np.uint64(1) << self.lane_of.astype(np.uint64)
        lower = bit - np.uint64(1)
        upper = np.uint64(0xFFFFFFFF) ^ lower
        return {"eq": bit, "lt": lower, "le": bit | lower, "gt": upper ^ bit, "ge": upper}[name]

    def parameter_address(self, name: str) -> int:
        return self.parameters.ctypes.data + self.parameter_start + self.kernel.parameters[name][0]

    def address(self, operand: Address) -> tuple[np.ndarray, int]:
        """Base (a live view of int64) and offset. 32-bit registers hold shared addresses."""
        base = operand.base
        if isinstance(base, Reg) and base.bits == 32:
            return self.register(base, np.dtype("u4")), operand.offset
        return self.source(base, np.dtype("i8")), operand.offset

    def lanes(self, mask: Mask) -> np.ndarray:
        return self.all_lanes if mask is True else np.flatnonzero(mask)

    def addresses(self, operand: Address) -> Callable[[np.ndarray], np.ndarray]:
        """A function of lanes: their addresses, int64."""
        base, offset = self.address(operand)
        return lambda lanes: base[lanes].astype(np.int64) + offset

    def component(self, kind: type[Component]) -> Any:
        """The one of this class."""
        found = next((x for x in self.components if isinstance(x, kind)), None)
        if found is None:
            found = kind(self)
            self.components.append(found)
        return found

    # Binding

    def _bind(self) -> None:
        code = self.kernel.code
        starts = {0, *self.kernel.labels.values()}
        for instruction in code:
            if waits(instruction):
                starts.add(instruction.index)
            if instruction.parts[0] in ENDS or waits(instruction):
                starts.add(instruction.index + 1)
        self.pieces: dict[int, Piece] = {}
        bounds = sorted(starts | {len(code)})
        for first, after in itertools.pairwise(bounds):
            self.pieces[first] = self._piece(code[first:after])

    def _piece(self, code: list[Instruction]) -> Piece:
        last = code[-1]
        has_end = last.parts[0] in ENDS or waits(last)
        straight = code[:-1] if has_end else code
        operations = [self.bound(instruction) for instruction in straight]
        end = self.bound(last) if has_end else None
        words = {instruction.parts[0] for instruction in code}
        masked = any(x.opcode.startswith("bar.warp") for x in code) or bool(words & set(MASKED))
        aligned = any(x.parts[0] in ALIGNED and not x.opcode.startswith("bar.warp") for x in code)
        together = 128 if "wgmma" in words else 32 if aligned or masked else 1
        return Piece(operations, code[0].index, last.index + 1, end, together, masked and not aligned)

    def bound(self, instruction: Instruction) -> Operation:
        builder = BUILDERS.get(instruction.parts[0])
        if builder is None:
            raise UnknownInstruction(f"{self.kernel.name}: {instruction}: not implemented")
        try:
            operation = builder(self, instruction)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{self.kernel.name}: {instruction}: {error}") from None
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            raise UnknownInstruction(f"{self.kernel.name}: {instruction}: {error!r}") from error
        if instruction.guard is None or instruction.parts[0] in ENDS:
            return operation
        return self._guarded(instruction, operation)

    def guard(self, instruction: Instruction) -> Callable[[Mask], Mask]:
        """Which of the threads pass the instruction's predicate."""
        guard = instruction.guard
        if guard is None:
            return lambda mask: mask
        inverted = isinstance(guard, Inverted)
        predicate = self.register(guard.register if inverted else guard, DTYPES["pred"])

        def passing(mask: Mask) -> Mask:
            taken = ~predicate if inverted else predicate
            if mask is True:
                return True if taken.all() else taken.copy()
            return taken & mask

        return passing

    def _guarded(self, instruction: Instruction, operation: Operation) -> Operation:
        passing = self.guard(instruction)

        def guarded(mask: Mask) -> None:
            taken = passing(mask)
            if taken is True or taken.any():
                operation(taken)

        return guarded

    # Running

    def describe(self, index: int) -> str:
        return str(self.kernel.code[index])

    def run(self, ctaid: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """One block."""
        for key, value in self.grid_registers.items():
            name, axis = key.split()[0].rsplit(".", 1)
            count = name in ("%nctaid", "%nclusterid")
            value[:] = (grid if count else ctaid)["xyz".index(axis)]
        self.shared.clear()
        for rows in self.registers.values():
            rows.view(np.uint8).fill(1 if rows.dtype == bool else 0xFF)  # NaN, and no address
        self.race.clear()
        self.async_events.clear()
        self.pc = np.zeros(self.T, np.int64)
        self.status = np.where(self.absent, EXIT, RUN).astype(np.int8)
        self.progress = self.polled = 0
        self.barriers: dict[int, np.ndarray] = {}
        for component in self.components:
            component.reset()
        self.where = f"{self.kernel.name}, block {ctaid}"
        with np.errstate(all="ignore"):
            self._loop()
            for component in self.components:
                component.finish()

    def _loop(self) -> None:
        # `together`: all threads run as one, from this instruction; None if they are apart.
        self.together: int | None = None if self.absent.any() else 0
        for _ in range(MOST_STEPS):
            if self.together is not None:
                self._execute(self.pieces[self.together], True)
                continue
            running = self.status == RUN
            if not running.any():
                if (self.status == EXIT).all():
                    return
                self._unblock()
                continue
            at = int(self.pc[running].min())
            mask = running & (self.pc == at)
            piece = self.pieces[at]
            if mask.all():
                self.together = at
                continue
            if piece.together > 1:
                mask = self._complete(at, piece.together)
            if mask.any():
                self._execute(piece, mask)
        raise DeadlockError(f"{self.where}: no end after {MOST_STEPS} steps")

    def _complete(self, at: int, size: int) -> np.ndarray:
        """The threads at `at` whose warps (warpgroups) are there as a whole; the others wait."""
        here = (self.pc == at) & ((self.status == RUN) | (self.status == WARP))
        end = self.T // size * size
        whole = (here | (self.absent if size == 32 else False))[:end].reshape(-1, size).all(1)
        mask = here & False
        mask[:end] = here[:end] & np.repeat(whole, size)
        self.status[here] = WARP
        self.status[mask] = RUN
        return mask

    def _execute(self, piece: Piece, mask: Mask) -> None:
        operation = None
        try:
            for operation in piece.operations:
                operation(mask)
            operation = piece.end
            if operation is None:
                self.goto(mask, piece.after)
            else:
                operation(mask)
        except EmulatorError as error:
            if operation is piece.end:
                index = piece.after - 1
            else:
                index = piece.first + piece.operations.index(operation)
            raise type(error)(f"{self.where}: {self.describe(index)}: {error}") from None

    def _unblock(self) -> None:
        """Nobody runs: something in flight lands (at the latest moment), or those who poll look again."""
        if self.async_events:
            self.async_events.pop(0)()
            self.wake(POLL)
        elif (self.status == POLL).any() and self.progress != self.polled:
            self.polled = self.progress
            self.wake(POLL)
        elif not self._run_masked():
            self._deadlock()

    def _run_masked(self) -> bool:
        """Part of a warp waits for the rest where its instructions name only the lanes that are there."""
        for at in np.unique(self.pc[self.status == WARP]):
            piece = self.pieces[int(at)]
            if piece.masked:
                mask = (self.status == WARP) & (self.pc == at)
                self.status[mask] = RUN
                self._execute(piece, mask)
                return True
        return False

    def _deadlock(self) -> None:
        lines = []
        for status, what in WAITS.items():
            for at in np.unique(self.pc[self.status == status]):
                who = np.flatnonzero((self.status == status) & (self.pc == at))
                lines.append(f"{_threads(who)} wait {what} at {self.describe(int(at))}")
        lines += [line for component in self.components for line in component.state()]
        gone = np.flatnonzero((self.status == EXIT) & ~self.absent)
        if len(gone):
            lines.append(f"{_threads(gone)} have returned")
        raise DeadlockError(f"{self.where}: nobody can go on:\n  " + "\n  ".join(lines))

    def goto(self, mask: Mask, target: int) -> None:
        if mask is True:
            self.together = target
        else:
            self.pc[mask] = target

    def part(self, mask: Mask) -> np.ndarray:
        """The mask as an array; from here on threads have program counters of their own."""
        if mask is True:
            self.pc[:], self.together = self.together, None
            return np.ones(self.T, bool)
        return mask

    def wake(self, status: int) -> None:
        self.status[self.status == status] = RUN

    def require_lanes(self, mask: Mask, members: np.ndarray) -> None:
        """That the lanes which a `.sync` instruction names are there. members: [threads], bits."""
        if mask is True:
            return
        present = (mask.reshape(-1, 32) * (1 << LANES)).sum(1)
        missing = members.astype(np.int64) & ~present[self.warp_of]
        if (missing[mask] != 0).any():
            thread = int(np.flatnonzero(mask & (missing != 0))[0])
            raise DeadlockError(f"thread {thread} waits for lanes {int(missing[thread]):#x} of its warp")


def waits(instruction: Instruction) -> bool:
    """Whether a thread may have to stay at the instruction and try again."""
    return instruction.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))


def _threads(who: np.ndarray) -> str:
    warps, counts = np.unique(who // 32, return_counts=True)
    whole = [str(w) for w, n in zip(warps, counts, strict=True) if n == 32]
    some = [f"{n} lanes of warp {w}" for w, n in zip(warps, counts, strict=True) if n != 32]
    return ", ".join(([f"warps {' '.join(whole)}"] if whole else []) + some)


# Control flow


@builds("bra")
def _bra(m: Machine, code: Instruction) -> Operation:
    target, behind, passing = code.operands[0], code.index + 1, m.guard(code)

    def branch(mask: Mask) -> None:
        taken = passing(mask)
        if taken is mask or taken is True:
            m.goto(mask, target)
        elif not taken.any():
            m.goto(mask, behind)
        else:
            mask = m.part(mask)
            m.pc[mask] = behind
            m.pc[taken] = target

    return branch


@builds("ret", "exit")
def _ret(m: Machine, code: Instruction) -> Operation:
    passing = m.guard(code)

    def leave(mask: Mask) -> None:
        taken, mask = passing(mask), m.part(mask)
        m.pc[mask] = code.index + 1
        m.status[mask if taken is True else taken] = EXIT

    return leave


@builds("trap")
def _trap(m: Machine, code: Instruction) -> Operation:
    passing = m.guard(code)

    def trap(mask: Mask) -> None:
        taken = passing(mask)
        if taken is True or taken.any():
            raise EmulatorError(f"threads {m.lanes(taken)[:8]} trap")
        m.goto(mask, code.index + 1)

    return trap


@builds("bar", "barrier")
def _bar(m: Machine, code: Instruction) -> Operation:
    """bar{.warp}.sync, bar.arrive, barrier{.cta}.sync and so on."""
    if "warp" in code.parts:
        members = m.source(code.operands[0], DTYPES["u32"])

        def meet_warp(mask: Mask) -> None:
            m.require_lanes(mask, members)
            m.goto(mask, code.index + 1)

        return meet_warp
    if "cluster" in code.parts:
        return _cluster_barrier(m, code)
    if not {"sync", "arrive"} & set(code.parts):
        raise UnknownInstruction("of barriers, sync and arrive are known")
    number = m.source(code.operands[0], DTYPES["u32"])
    count = m.source(code.operands[1], DTYPES["u32"]) if len(code.operands) > 1 else np.full(m.T, m.T)
    passing, stays = m.guard(code), "sync" in code.parts

    def barrier(mask: Mask) -> None:
        taken = passing(mask)
        if mask is True and taken is True and stays and count[0] == m.T and not m.barriers:
            m.race.meet(np.arange(m.warps))
            m.together = code.index + 1
            return
        mask = m.part(mask)
        taken = mask if taken is True else taken
        m.pc[mask] = code.index + 1
        if stays:
            m.pc[taken], m.status[taken] = code.index, BARRIER
        for which in np.unique(number[taken]):
            _arrive_at_barrier(m, int(which), taken & (number == which), count, stays)

    return barrier


def _arrive_at_barrier(m: Machine, which: int, threads: np.ndarray, count: np.ndarray, stays: bool) -> None:
    """Bits of `m.barriers[which]`: 1 arrived, 2 waits."""
    state = m.barriers.setdefault(which, np.zeros(m.T, np.int8))
    if not 0 <= which < 16:
        raise LaunchError(f"there are barriers 0 … 15, not {which}")
    expected = np.unique(count[threads])
    if len(expected) > 1 or expected[0] % 32 or (state[threads]).any():
        raise LaunchError(f"barrier {which}: counts {expected}, or a warp that arrives twice")
    state[threads] |= 3 if stays else 1
    arrived = int((state > 0).sum()) + int(m.absent.sum() if expected[0] == m.T else 0)
    if arrived > expected[0]:
        raise LaunchError(f"barrier {which}: {arrived} threads arrive, {expected[0]} are expected")
    if arrived == expected[0]:
        members, waiting = np.unique(m.warp_of[state > 0]), np.flatnonzero(state == 3)
        _exchange(m, members, np.unique(m.warp_of[waiting]))
        m.pc[waiting] += 1
        m.status[waiting] = RUN
        del m.barriers[which]
    m.progress += 1


def _exchange(m: Machine, members: np.ndarray, waiting: np.ndarray) -> None:
    """All who arrived send, those who wait receive."""
    knows, fenced = m.race.message()
    for warp in members:
        m.race.send(warp, knows, fenced)
    for warp in waiting:
        m.race.receive(warp, knows, fenced)


def _cluster_barrier(m: Machine, code: Instruction) -> Operation:
    """barrier.cluster.arrive and .wait of a cluster of one block: a barrier of the block at the wait."""
    if "arrive" in code.parts:
        return lambda mask: m.goto(mask, code.index + 1)
    whole = dataclasses.replace(code, opcode="bar.sync", operands=(Immediate("15"),))
    return _bar(m, whole)
