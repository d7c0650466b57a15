"""mbarriers: arriving warps send their vector clocks, warps that wait for the phase receive them."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from .access import units
from .faults import LaunchError, MemcheckError, UnknownInstruction
from .machine import BOOL, MBARRIER, U32, Component, Machine, Mask, Operation, builds
from .ptx import Instruction


@dataclasses.dataclass
class Mbarrier:
    """`phase` counts completed phases; `message` merges the clocks that arrivals in the current one sent."""

    expected: int
    pending: int
    message: np.ndarray
    phase: int = 0
    completed: np.ndarray | None = None  # the message of the last completed phase


class Mbarriers(Component):
    """A block's mbarriers, by address."""

    def reset(self) -> None:
        self.at: dict[int, Mbarrier] = {}

    def state(self) -> list[str]:
        missing = "of {0.expected} arrivals {0.pending} are to come"
        return [f"mbarrier {a:#x}, phase {b.phase}: " + missing.format(b) for a, b in self.at.items()]

    def init(self, address: int, count: int, lane: int, by: int) -> None:
        m, where = self.m, np.array([address])
        m.shared.check(where, 8, np.array([lane]))
        m.race.write(units(where, 8), np.array([lane // 32]), by)
        self.at[address] = Mbarrier(count, count, m.race.message())

    def find(self, address: int, warp: int) -> Mbarrier:
        if address not in self.at:
            raise MemcheckError(f"no mbarrier was initialised at shared address {address:#x}")
        self.m.race.check_written(units(np.array([address]), 8), np.array([warp]))
        return self.at[address]

    def arrive(self, barrier: Mbarrier, message: np.ndarray, count: int) -> None:
        if count > barrier.pending:
            raise LaunchError(f"{count} arrivals at an mbarrier that expects {barrier.pending} more")
        np.maximum(barrier.message, message, out=barrier.message)
        barrier.pending -= count
        if barrier.pending == 0:
            barrier.phase += 1
            barrier.pending, barrier.completed = barrier.expected, barrier.message.copy()
            self.m.wake(MBARRIER)

    def arriving(self, lanes: np.ndarray, addresses: np.ndarray) -> list[tuple[int, Mbarrier, int]]:
        """(warp, mbarrier, the number of the warp's lanes that arrive there)."""
        pairs = collections.Counter(zip((lanes // 32).tolist(), addresses.tolist(), strict=True))
        return [(warp, self.find(address, warp), count) for (warp, address), count in pairs.items()]


@builds("mbarrier")
def _mbarrier(m: Machine, code: Instruction) -> Operation:
    forms = {"init": _init, "arrive": _arrive, "try_wait.parity": _wait}
    for form, build in forms.items():
        if code.opcode in (f"mbarrier.{form}.shared::cta.b64", f"mbarrier.{form}.shared.b64"):
            return build(m, code, m.component(Mbarriers))
    raise UnknownInstruction("this operation on an mbarrier")


def _init(m: Machine, code: Instruction, barriers: Mbarriers) -> Operation:
    addresses, counts = m.addresses(code.operands[0]), m.source(code.operands[1], U32)

    def init(mask: Mask) -> None:
        lanes = m.lanes(mask)
        for lane, address in zip(lanes.tolist(), addresses(lanes).tolist(), strict=True):
            barriers.init(address, int(counts[lane]), lane, code.index)

    return init


def _arrive(m: Machine, code: Instruction, barriers: Mbarriers) -> Operation:
    state, operand = code.operands
    if state is not None:
        raise UnknownInstruction("an mbarrier's state")
    addresses = m.addresses(operand)

    def arrive(mask: Mask) -> None:
        lanes = m.lanes(mask)
        for warp, barrier, count in barriers.arriving(lanes, addresses(lanes)):
            message = m.race.message()
            m.race.send(warp, message)
            barriers.arrive(barrier, message, count)

    return arrive


def _wait(m: Machine, code: Instruction, barriers: Mbarriers) -> Operation:
    """mbarrier.try_wait, which never fails here: threads wait until a phase completes, then test again."""
    predicate, operand, parity = code.operands
    p, addresses, wanted = m.register(predicate, BOOL), m.addresses(operand), m.source(parity, U32)

    def over(address: int, parity: int, warps: list[int]) -> bool:
        """Whether the phase of this parity has completed; if so, the warps receive its message."""
        for warp in warps:
            barrier = barriers.find(address, warp)
        done = barrier.phase & 1 != parity & 1
        if done and barrier.completed is not None:
            for warp in warps:
                m.race.receive(warp, barrier.completed)
        return done

    def wait(mask: Mask) -> None:
        lanes = m.lanes(mask)
        where, want, done = addresses(lanes), wanted[lanes], np.zeros(len(lanes), bool)
        for address, value in np.unique(np.stack([where, want.astype(np.int64)]), axis=1).T.tolist():
            same = (where == address) & (want == value)
            done[same] = over(address, value, np.unique(m.warp_of[lanes[same]]).tolist())
        p[lanes] = done
        if done.all():
            m.goto(mask, code.index + 1)
            return
        mask, late = m.diverge(mask), lanes[~done]
        m.pc[mask] = code.index + 1
        m.pc[late], m.status[late] = code.index, MBARRIER

    return wait
