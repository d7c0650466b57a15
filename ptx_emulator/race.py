"""Race detection in shared memory by happens-before: races, data in flight, and the fence between proxies.

A warp is one thread of execution (accesses of its own lanes count as ordered). Warps have vector clocks,
which barriers merge and mbarriers pass from arriving to waiting warps. Shared memory is watched in units of
two bytes. A stamp is `clock << 24 | instruction`; an access happened before if its stamp is at most the
warp's bound for its actor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .faults import ProxyError, RaceError

TICK = 1 << 24  # one clock tick in a stamp; the bits below are the instruction's index
IN_FLIGHT = 1 << 60


class Race:
    """The race detector for one block's shared memory."""

    def __init__(self, warps: int, size: int, describe: Callable[[int], str]) -> None:
        self.warps, self.describe = warps, describe
        units = -(-size // 2)
        # Actors: the warps; everything in flight (one actor); the products of each warpgroup.
        self.groups = warps + 1
        self.actors = self.groups + -(-warps // 4)
        self.writer = np.zeros(units, np.int16)
        self.written = np.zeros(units, np.int64)  # stamp of the last write
        self.reads = np.zeros((self.actors, units), np.int64)  # stamp of the last read by each actor
        self.flights = np.zeros(units, np.int16)  # number of reads in flight
        # Per warp and actor, the last stamp that happened before, and the last that the async proxy sees.
        self.bounds = np.zeros((2, warps, self.actors), np.int64)
        self.knows, self.fenced = self.bounds
        self.clock = np.zeros(warps, np.int64)
        self.clear()

    def clear(self) -> None:
        for state in (self.writer, self.written, self.reads, self.flights, self.fenced, self.clock):
            state.fill(0)
        self.knows.fill(TICK - 1)
        self.products = 0
        self.tick(np.arange(self.warps))

    # Synchronisation

    def tick(self, warps: np.ndarray | int) -> None:
        """Advances these warps' clocks: their later accesses are not ordered by what they send up to now."""
        self.clock[warps] += TICK
        self.knows[warps, warps] = self.clock[warps] + TICK - 1

    def message(self) -> np.ndarray:
        """The message of an mbarrier before the first arrival: empty bounds."""
        return np.zeros((2, self.actors), np.int64)

    def send(self, warp: int, message: np.ndarray) -> None:
        """An arrival: merges the warp's bounds into the mbarrier's message."""
        np.maximum(message, self.bounds[:, warp], out=message)
        self.tick(warp)

    def receive(self, warp: int, message: np.ndarray) -> None:
        np.maximum(self.bounds[:, warp], message, out=self.bounds[:, warp])

    def barrier(self, warps: np.ndarray) -> None:
        """A barrier of these warps: merges their bounds."""
        self.bounds[:, warps] = self.bounds[:, warps].max(1, keepdims=True)
        self.tick(warps)

    def fence(self, warps: np.ndarray) -> None:
        """fence.proxy.async: makes all writes that happened before it in these warps visible to the async
        proxy.

        The fence may be anywhere on the causality path from the write to the product (PTX ISA,
        "Proxy-preserved base causality order").
        """
        self.fenced[warps] = np.maximum(self.fenced[warps], self.knows[warps])
        self.tick(warps)

    # Accesses. `units`: [n, k] indices of two-byte units; `warps`: [n], the warps; `by`: the instruction

    def read(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        self.check_written(units, warps)
        self.reads[warps[:, None], units] = self.clock[warps][:, None] | by

    def write(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        self._check_write(units, warps)
        self.end_write(units, warps, by, self.clock[warps])
        clash = self.writer[units] != warps[:, None]  # another warp, in the same instruction
        if clash.any():
            self._report_write(clash, units, warps, "writes")

    def start_write(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        """Starts a cp.async: no warp may access these bytes until `end_write`."""
        self._check_write(units, warps)
        self.writer[units] = self.warps
        self.written[units] = IN_FLIGHT | by

    def end_write(self, units: np.ndarray, warps: np.ndarray, by: int, clock: np.ndarray) -> None:
        """Ends a cp.async, which from now on is an ordinary write of its warp, at the warp's time `clock`."""
        self.writer[units] = warps[:, None]
        self.written[units] = clock[:, None] | by

    def start_product(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        """Starts a read by the async proxy for these warps: no warp may write there until `end_product`."""
        everyone = np.repeat(units, len(warps), 0)
        self.check_written(everyone, warps)
        self._check_fenced(everyone, warps)
        self.flights[units] += 1
        self.reads[self.warps, units] = IN_FLIGHT | by

    def end_product(self, units: np.ndarray, group: int, by: int) -> None:
        """Ends a product for which a warpgroup has waited: for all four of its warps it happened before."""
        self.flights[units] -= 1
        self.reads[self.warps, units] *= self.flights[units] > 0
        self.products += TICK
        self.reads[self.groups + group, units] = self.products | by
        self.knows[4 * group : 4 * group + 4, self.groups + group] = self.products + TICK - 1

    def check_written(self, units: np.ndarray, warps: np.ndarray, verb: str = "reads") -> None:
        """Checks that the last writes happened before. Without `read`, for reads that are not recorded: of an
        mbarrier."""
        bad = self.written[units] > self.knows[warps[:, None], self.writer[units]]
        if bad.any():
            self._report_write(bad, units, warps, verb)

    def _check_write(self, units: np.ndarray, warps: np.ndarray) -> None:
        self.check_written(units, warps, "writes")
        bad = self.reads[:, units] > self.knows[warps].T[:, :, None]
        if bad.any():
            reader, i, k = np.argwhere(bad)[0]
            stamp = self.reads[reader, units[i, k]]
            self._report(units[i, k], warps[i], "writes", stamp, "read", int(reader))

    def _check_fenced(self, units: np.ndarray, warps: np.ndarray) -> None:
        bad = self.written[units] > self.fenced[warps[:, None], self.writer[units]]
        if bad.any():
            i, k = np.argwhere(bad)[0]
            unit = units[i, k]
            raise ProxyError(
                f"the async proxy gets to shared address {int(unit) * 2:#x}, for warp {int(warps[i])}, "
                f"with no fence.proxy.async behind what warp {int(self.writer[unit])} wrote: "
                f"{self.describe(int(self.written[unit]) % TICK)}"
            )

    def _report_write(self, bad: np.ndarray, units: np.ndarray, warps: np.ndarray, verb: str) -> None:
        i, k = np.argwhere(bad)[0]
        unit = units[i, k]
        self._report(unit, warps[i], verb, self.written[unit], "write", int(self.writer[unit]))

    def _report(self, unit: int, warp: int, verb: str, stamp: int, other: str, who: int) -> None:
        if stamp >= IN_FLIGHT:
            name = "of something still in flight"
        else:
            what = f"warp {who}" if who < self.warps else f"warpgroup {who - self.groups}'s product"
            name = f"of {what}, which nothing orders"
        raise RaceError(
            f"warp {int(warp)} {verb} shared address {int(unit) * 2:#x}; there is a {other} {name}: "
            f"{self.describe(int(stamp) % TICK)}"
        )
