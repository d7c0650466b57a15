"""A block of threads: registers, the binding of instructions to numpy, and the scheduler.

Every register is a row with one number per thread. An instruction becomes a function of the mask of threads
that execute it: True for all, or an array of bool. Threads at the smallest program counter run first,
together, so that those that diverged at an `if` converge after it; they run to the end of a basic block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import DeadlockError, EmulatorError, LaunchError, UnknownInstruction
from .memory import SHARED_START, GlobalMemory, SharedMemory
from .ptx import (
    Address,
    Immediate,
    Instruction,
    Inverted,
    Kernel,
    Name,
    Reg,
    immediate_bits,
)
from .race import Race

Mask = Any  # True, or bool [threads]
Operation = Callable[[Mask], None]

RUN, CONVERGE, BARRIER, MBARRIER, EXIT = range(5)
WAITS = {CONVERGE: "for their warps", BARRIER: "at a barrier", MBARRIER: "for an mbarrier"}
MOST_STEPS = 5_000_000  # basic blocks that a block of threads may execute

DTYPES = {f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)}
DTYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
DTYPES |= {"f16": np.dtype("u2"), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
BOOL, U32, U64, F32 = (DTYPES[kind] for kind in ("pred", "u32", "u64", "f32"))

BUILDERS: dict[str, Callable[[Machine, Instruction], Operation]] = {}
ENDS = ("bra", "ret", "bar", "mbarrier.try_wait")  # instructions that end a basic block
ALIGNED = {"mma", "ldmatrix", "stmatrix", "bar", "shfl", "vote"}  # executed by whole warps only


def builds(*names: str):
    """Registers the builder of the function for instructions whose opcode starts with one of `names`."""

    def register(builder):
        BUILDERS.update(dict.fromkeys(names, builder))
        return builder

    return register


class Component:
    """A part of a block that has its own state: copies in flight, mbarriers, …"""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.reset()

    def reset(self) -> None:
        """Called when a block begins."""

    def finish(self) -> None:
        """Called when the block has ended: raises an error if something was left unfinished."""

    def state(self) -> list[str]:
        """Lines for the report of a deadlock."""
        return []


@dataclasses.dataclass
class BasicBlock:
    """Straight-line code: from a label or the instruction after a branch to the next of these."""

    operations: list[Operation]
    first: int  # index of the first instruction
    after: int  # index after the last instruction
    end: Operation | None  # a branch or wait, which sets the program counter
    at_once: int  # threads that must execute it together: 1, 32 (a warp) or 128 (a warpgroup)


class Machine:
    """A kernel bound to blocks of `threads`, whole warps."""

    def __init__(self, kernel: Kernel, threads: int, shared: int) -> None:
        self.kernel, self.T, self.warps = kernel, threads, threads // 32
        self.all_lanes = np.arange(threads)
        self.warp_of, self.lane_of = self.all_lanes // 32, self.all_lanes % 32
        self.registers = {
            bits: np.empty((rows, threads), bool if bits == 1 else f"u{bits // 8}")
            for bits, rows in kernel.registers.items()
        }
        self.parameters = np.zeros(kernel.parameter_bytes, np.uint8)
        self.constants: dict[tuple, np.ndarray] = {}
        self.grid_registers: list[tuple[str, np.ndarray]] = []
        self.memory = GlobalMemory([])  # set by every launch
        self._place_variables(shared)
        self.shared = SharedMemory(self.shared_size)
        self.race = Race(self.warps, self.shared.end, self.describe)
        self.components: list[Component] = []
        # Each event completes copies in flight that report to an mbarrier.
        self.async_events: list[Callable[[], None]] = []
        self._bind()

    # Addresses and operands

    def _place_variables(self, dynamic_size: int) -> None:
        """Assigns addresses to shared variables (dynamic ones last), and to parameters (from 0)."""
        self.symbols = {name: offset for name, (offset, _) in self.kernel.parameters.items()}
        end = SHARED_START
        for variable in sorted(self.kernel.shared, key=lambda v: v.size == 0):
            end = -(-end // variable.align) * variable.align
            self.symbols[variable.name] = end
            end += variable.size
        self.shared_size = end - SHARED_START + dynamic_size

    def register(self, operand: Any, dtype: np.dtype) -> np.ndarray:
        """A live view of a register as `dtype`; of its low part if the register is wider."""
        if not isinstance(operand, Reg):
            raise UnknownInstruction(f"{operand} is not a register")
        row = self.registers[operand.bits][operand.row]
        if operand.bits == 1:
            return row
        return row.view(dtype)[:: row.itemsize // dtype.itemsize or 1]

    def source(self, operand: Any, dtype: np.dtype) -> np.ndarray:
        """The values [threads] of any readable operand: a live view, or a constant."""
        if isinstance(operand, Reg):
            return self.register(operand, dtype)
        key = operand, dtype.str
        if key not in self.constants:
            if isinstance(operand, Immediate):
                self.constants[key] = self._immediate(operand, dtype)
            elif isinstance(operand, Name):
                self.constants[key] = self._named(operand.text, dtype)
            else:
                raise UnknownInstruction(f"{operand} as an operand")
        return self.constants[key]

    def _immediate(self, operand: Immediate, dtype: np.dtype) -> np.ndarray:
        if dtype == BOOL:
            return np.full(self.T, bool(int(operand.text)))
        bits = immediate_bits(operand.text, dtype.itemsize)
        return np.full(self.T, bits, f"u{dtype.itemsize}").view(dtype)

    def _named(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name.startswith(("%ctaid.", "%nctaid.")):
            value = np.zeros(self.T, dtype)  # set for every block
            self.grid_registers.append((name, value))
            return value
        known: dict[str, Any] = {"%tid.x": self.all_lanes, "%ntid.x": self.T, "%laneid": self.lane_of}
        known |= self.symbols
        if name not in known:
            raise UnknownInstruction(f"{name} is unknown")
        return np.broadcast_to(known[name], self.T).astype(dtype)

    def addresses(self, operand: Address) -> Callable[[np.ndarray], np.ndarray]:
        """A function from lanes to their addresses, int64. 32-bit registers hold shared addresses."""
        narrow = isinstance(operand.base, Reg) and operand.base.bits == 32
        base = self.source(operand.base, U32 if narrow else DTYPES["s64"])
        return lambda lanes: base[lanes].astype(np.int64) + operand.offset

    def component(self, kind: type[Component]) -> Any:
        """The block's component of this class, created on first use."""
        found = next((x for x in self.components if isinstance(x, kind)), None)
        if found is None:
            found = kind(self)
            self.components.append(found)
        return found

    # Binding

    def _bind(self) -> None:
        code = self.kernel.code
        starts = {0, len(code), *self.kernel.labels.values()}
        for instruction in code:
            if instruction.opcode.startswith("mbarrier.try_wait"):  # waiting threads come back here
                starts.add(instruction.index)
            if ends(instruction):
                starts.add(instruction.index + 1)
        bounds = itertools.pairwise(sorted(starts))
        self.basic_blocks = {first: self._basic_block(code[first:after]) for first, after in bounds}

    def _basic_block(self, code: list[Instruction]) -> BasicBlock:
        straight, end = (code[:-1], self._bound(code[-1])) if ends(code[-1]) else (code, None)
        operations = [self._bound(instruction) for instruction in straight]
        words = {instruction.parts[0] for instruction in code}
        at_once = 128 if "wgmma" in words else 32 if words & ALIGNED else 1
        return BasicBlock(operations, code[0].index, code[-1].index + 1, end, at_once)

    def _bound(self, instruction: Instruction) -> Operation:
        try:
            operation = BUILDERS[instruction.parts[0]](self, instruction)
            if instruction.guard is None or instruction.parts[0] == "bra":
                return operation
            if ends(instruction):
                raise UnknownInstruction("with a predicate")
            return self._guarded(instruction, operation)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{self.kernel.name}: {instruction}: {error}") from None
        except (KeyError, ValueError, IndexError, AttributeError, TypeError, StopIteration) as error:
            raise UnknownInstruction(f"{self.kernel.name}: {instruction}: {error!r}") from error

    def guard(self, instruction: Instruction) -> Callable[[Mask], Mask]:
        """A function from the mask to the threads that pass the instruction's predicate."""
        guard = instruction.guard
        if guard is None:
            return lambda mask: mask
        inverted = isinstance(guard, Inverted)
        predicate = self.register(guard.register if inverted else guard, BOOL)

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

    # Properties of a mask, for operations

    def lanes(self, mask: Mask) -> np.ndarray:
        return self.all_lanes if mask is True else np.flatnonzero(mask)

    def whole_warps(self, mask: Mask) -> np.ndarray:
        """The warps in the mask. The scheduler runs whole warps; a predicate must not split them."""
        if mask is True:
            return np.arange(self.warps)
        counts = mask.reshape(-1, 32).sum(1)
        if ((counts != 0) & (counts != 32)).any():
            raise LaunchError("part of a warp executes an aligned instruction")
        return np.flatnonzero(counts)

    # Running

    def describe(self, index: int) -> str:
        return str(self.kernel.code[index])

    def run(self, ctaid: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """Runs one block."""
        for name, value in self.grid_registers:
            value[:] = (grid if name.startswith("%n") else ctaid)["xyz".index(name[-1])]
        self.shared.clear()
        for rows in self.registers.values():
            rows.view(np.uint8).fill(1 if rows.dtype == bool else 0xFF)  # NaN, and an invalid address
        self.race.clear()
        self.async_events.clear()
        self.pc, self.status = np.zeros(self.T, np.int64), np.full(self.T, RUN, np.int8)
        self.converged: int | None = 0  # all threads are at this instruction; None: see self.pc
        self.where = f"{self.kernel.name}, block {ctaid}"
        for component in self.components:
            component.reset()
        with np.errstate(all="ignore"):
            self._loop()
            for component in self.components:
                component.finish()

    def _loop(self) -> None:
        for _ in range(MOST_STEPS):
            if self.converged is not None:
                self._execute(self.basic_blocks[self.converged], True)
                continue
            running = self.status == RUN
            if not running.any():
                if (self.status == EXIT).all():
                    return
                self._unblock()
                continue
            at = int(self.pc[running].min())
            mask = running & (self.pc == at)
            block = self.basic_blocks[at]
            if mask.all():
                self.converged = at
                continue
            if block.at_once > 1:
                mask = self._converge(at, block.at_once)
            if mask.any():
                self._execute(block, mask)
        raise DeadlockError(f"{self.where}: no end after {MOST_STEPS} steps")

    def _converge(self, at: int, size: int) -> np.ndarray:
        """The threads at `at` whose whole warp (warpgroup) is there; the others wait."""
        here = (self.pc == at) & ((self.status == RUN) | (self.status == CONVERGE))
        end = self.T // size * size
        mask = np.zeros(self.T, bool)
        mask[:end] = np.repeat(here[:end].reshape(-1, size).all(1), size)
        self.status[here] = CONVERGE
        self.status[mask] = RUN
        return mask

    def _execute(self, block: BasicBlock, mask: Mask) -> None:
        index = block.first
        try:
            for operation in block.operations:
                operation(mask)
                index += 1
            if block.end is None:
                self.goto(mask, block.after)
            else:
                block.end(mask)
        except EmulatorError as error:
            raise type(error)(f"{self.where}: {self.describe(index)}: {error}") from None

    def _unblock(self) -> None:
        """Completes the oldest copy in flight, as no thread can run: the latest legal moment."""
        if not self.async_events:
            self._deadlock()
        self.async_events.pop(0)()

    def _deadlock(self) -> None:
        lines = []
        for status, what in WAITS.items():
            for at in np.unique(self.pc[self.status == status]):
                who = np.flatnonzero((self.status == status) & (self.pc == at))
                lines.append(f"{_threads(who)} wait {what} at {self.describe(int(at))}")
        lines += [line for component in self.components for line in component.state()]
        gone = np.flatnonzero(self.status == EXIT)
        if len(gone):
            lines.append(f"{_threads(gone)} have returned")
        raise DeadlockError(f"{self.where}: no thread can go on:\n  " + "\n  ".join(lines))

    # For the ends of basic blocks: moves threads

    def goto(self, mask: Mask, target: int) -> None:
        if mask is True:
            self.converged = target
        else:
            self.pc[mask] = target

    def diverge(self, mask: Mask) -> np.ndarray:
        """The mask as an array; from here on each thread has its own program counter."""
        if self.converged is None:
            return mask
        self.pc[:] = self.converged
        self.converged = None
        return np.ones(self.T, bool)

    def wake(self, status: int) -> None:
        self.status[self.status == status] = RUN


def ends(instruction: Instruction) -> bool:
    """Whether a basic block ends with this instruction."""
    return instruction.opcode.startswith(ENDS)


def _threads(who: np.ndarray) -> str:
    warps, counts = np.unique(who // 32, return_counts=True)
    whole = [str(w) for w, n in zip(warps, counts, strict=True) if n == 32]
    some = [f"{n} lanes of warp {w}" for w, n in zip(warps, counts, strict=True) if n != 32]
    return ", ".join(([f"warps {' '.join(whole)}"] if whole else []) + some)
