"""cp.async, whose bytes arrive only when their thread waits for them; prefetches, which do nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from .access import units
from .faults import MemcheckError, UnknownInstruction
from .machine import U32, Component, Machine, Mask, Operation, builds
from .mbarrier import Mbarriers
from .ptx import Instruction


@dataclasses.dataclass
class Copy:
    """The copies of one instruction, one entry per thread: destination, bytes, and the thread's commit group.

    `clock`: the clock of the thread's warp when it attached the copy to an mbarrier, or −1.
    """

    lanes: np.ndarray
    address: np.ndarray
    data: np.ndarray
    group: np.ndarray
    clock: np.ndarray
    by: int

    def of(self, chosen: np.ndarray) -> Copy:
        """The copies of the chosen threads."""
        lanes, address, data = self.lanes[chosen], self.address[chosen], self.data[chosen]
        return Copy(lanes, address, data, self.group[chosen], self.clock[chosen], self.by)


class Copies(Component):
    """A block's cp.async in flight. Copies that nothing waits for are not an error."""

    def reset(self) -> None:
        self.pending: list[Copy] = []
        self.committed = np.zeros(self.m.T, np.int64)  # number of commit groups per thread

    def start(self, lanes: np.ndarray, address: np.ndarray, data: np.ndarray, by: int) -> None:
        size = data.shape[1]
        self.m.shared.check(address, size, lanes)
        self.m.race.start_write(units(address, size), self.m.warp_of[lanes], by)
        self.pending.append(Copy(lanes, address, data, self.committed[lanes], np.full(len(lanes), -1), by))

    def wait(self, mask: Mask, leave: int) -> None:
        """Completes all commit groups of these threads except the last `leave`."""
        done = np.where(mask, self.committed - leave, -1)
        self.complete(lambda copy: copy.group < done[copy.lanes])

    def attach(self, lanes: np.ndarray) -> Callable[[], None]:
        """Attaches these threads' copies so far to an mbarrier; returns the function that completes them."""
        clock = self.m.race.clock[self.m.warp_of]
        for copy in self.pending:
            mine = np.isin(copy.lanes, lanes) & (copy.clock < 0)
            copy.clock[mine] = clock[copy.lanes[mine]]

        def attached(copy: Copy) -> np.ndarray:
            return np.isin(copy.lanes, lanes) & (copy.clock >= 0) & (copy.clock <= clock[copy.lanes])

        return lambda: self.complete(attached)

    def complete(self, chosen: Callable[[Copy], np.ndarray]) -> None:
        m, pending = self.m, []
        for copy in self.pending:
            done = chosen(copy)
            now, later = copy.of(done), copy.of(~done)
            if len(now.lanes):
                size, warps = now.data.shape[1], m.warp_of[now.lanes]
                m.shared.bytes[now.address[:, None] + np.arange(size)] = now.data
                clock = np.where(now.clock < 0, m.race.clock[warps], now.clock)
                m.race.end_write(units(now.address, size), warps, now.by, clock)
            if len(later.lanes):
                pending.append(later)
        self.pending = pending


@builds("cp")
def _cp(m: Machine, code: Instruction) -> Operation:
    copies = m.component(Copies)
    if code.opcode == "cp.async.commit_group":

        def commit(mask: Mask) -> None:
            copies.committed[m.lanes(mask)] += 1

        return commit
    if code.opcode == "cp.async.wait_group":
        leave = int(code.operands[0].text)
        return lambda mask: copies.wait(mask, leave)
    if code.opcode.startswith("cp.async.mbarrier.arrive.noinc."):
        return _arrive(m, code, copies)
    if re.fullmatch(r"cp\.async\.c[ag]\.shared\.global", code.opcode):
        return _copy(m, code, copies)
    raise UnknownInstruction("this form of cp")


@builds("prefetch")
def _prefetch(m: Machine, code: Instruction) -> Operation:
    """An address out of bounds is an error, although the hardware forgives it."""
    if code.opcode != "prefetch.global.L2":
        raise UnknownInstruction("this form of prefetch")
    source = m.addresses(code.operands[0])

    def prefetch(mask: Mask) -> None:
        lanes = m.lanes(mask)
        m.memory.check(source(lanes).astype(np.uint64), 1, 1, lanes)

    return prefetch


def _copy(m: Machine, code: Instruction, copies: Copies) -> Operation:
    """cp.async of `count` bytes, padded with zeros to `size`."""
    to, source, (width, count) = *map(m.addresses, code.operands[:2]), code.operands[2:]
    size, counts = int(width.text), m.source(count, U32)

    def copy(mask: Mask) -> None:
        lanes = m.lanes(mask)
        data, wanted, address = np.zeros((len(lanes), size), np.uint8), counts[lanes], source(lanes)
        for n in np.unique(wanted).tolist():
            if n > size:
                raise MemcheckError(f"cp.async of {n} bytes, into {size}")
            if n:
                here = wanted == n
                m.memory.check(address[here].astype(np.uint64), n, size, lanes[here])
                data[here, :n] = m.memory.views[1][(address[here] - m.memory.base)[:, None] + np.arange(n)]
        copies.start(lanes, to(lanes), data, code.index)

    return copy


def _arrive(m: Machine, code: Instruction, copies: Copies) -> Operation:
    """cp.async.mbarrier.arrive.noinc: arrives when the thread's cp.async so far are complete.

    It passes on what its warp had synchronised with when it executed this, not what it synchronised with
    later.
    """
    barriers, addresses = m.component(Mbarriers), m.addresses(code.operands[0])

    def arrive(mask: Mask) -> None:
        lanes = m.lanes(mask).copy()
        arriving, complete = barriers.arriving(lanes, addresses(lanes)), copies.attach(lanes)
        messages = [m.race.message() for _ in arriving]
        for (warp, _, _), message in zip(arriving, messages, strict=True):
            m.race.send(warp, message)

        def completed() -> None:
            complete()
            for (_, barrier, count), message in zip(arriving, messages, strict=True):
                barriers.arrive(barrier, message, count)

        m.async_events.append(completed)

    return arrive
