"""Control flow: branches, the end of a thread, and the barriers of a block."""

from __future__ import annotations

import numpy as np

from .faults import LaunchError, UnknownInstruction
from .machine import (
    BARRIER,
    EXIT,
    RUN,
    U32,
    Component,
    Machine,
    Mask,
    Operation,
    builds,
)
from .ptx import Immediate, Instruction


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
            mask = m.diverge(mask)
            m.pc[mask] = behind
            m.pc[taken] = target

    return branch


@builds("ret")
def _ret(m: Machine, code: Instruction) -> Operation:
    def leave(mask: Mask) -> None:
        m.status[m.diverge(mask)] = EXIT

    return leave


class Barriers(Component):
    """The threads that wait at each barrier, by its number."""

    def reset(self) -> None:
        self.waiting: dict[int, np.ndarray] = {}

    def arrive(self, number: int, threads: np.ndarray, counts: np.ndarray) -> None:
        m, here = self.m, self.waiting.setdefault(number, np.zeros(self.m.T, bool))
        if not 0 <= number < 16:
            raise LaunchError(f"there are barriers 0 … 15, not {number}")
        expected = np.unique(counts[threads])
        if len(expected) > 1 or expected[0] % 32:
            raise LaunchError(f"barrier {number}: counts {expected}")
        here |= threads
        arrived = int(here.sum())
        if arrived > expected[0]:
            raise LaunchError(f"barrier {number}: {arrived} threads arrive, {expected[0]} are expected")
        if arrived == expected[0]:
            m.race.barrier(np.unique(m.warp_of[here]))
            m.pc[here] += 1
            m.status[here] = RUN
            del self.waiting[number]


@builds("bar")
def _bar(m: Machine, code: Instruction) -> Operation:
    """bar.sync for the block or a number of threads; bar.warp.sync for whole warps."""
    if code.opcode == "bar.warp.sync":
        return _warp_barrier(m, code)
    if code.opcode != "bar.sync":
        raise UnknownInstruction("of barriers, bar.sync is known")
    number, count, *_ = (*code.operands, Immediate(str(m.T)))
    numbers, counts, barriers = m.source(number, U32), m.source(count, U32), m.component(Barriers)

    def barrier(mask: Mask) -> None:
        if mask is True and (counts == m.T).all() and (numbers == numbers[0]).all() and not barriers.waiting:
            m.race.barrier(np.arange(m.warps))
            m.goto(mask, code.index + 1)
            return
        mask = m.diverge(mask)
        m.pc[mask], m.status[mask] = code.index, BARRIER
        for which in np.unique(numbers[mask]):
            barriers.arrive(int(which), mask & (numbers == which), counts)

    return barrier


def _warp_barrier(m: Machine, code: Instruction) -> Operation:
    members = m.source(code.operands[0], U32)

    def barrier(mask: Mask) -> None:
        require_full(members, mask)
        m.whole_warps(mask)
        m.goto(mask, code.index + 1)

    return barrier


def require_full(members: np.ndarray, mask: Mask) -> None:
    """Checks that a `.sync` instruction names all lanes of its warp."""
    if (members[True if mask is True else mask] != 0xFFFFFFFF).any():
        raise UnknownInstruction("an instruction for part of a warp")
