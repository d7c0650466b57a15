"""Happens-before on shared memory: races, what is in flight, and the fence between the two proxies.

A warp is one thread of execution (its own lanes are taken to be in order). Warps have vector clocks, which
barriers merge and mbarriers carry from those who arrive to those who wait. Copies that complete on an
mbarrier write in that barrier's name: whoever has waited for the phase knows of them. Shared memory is
watched in units of two bytes. A stamp is `clock << 24 | instruction`; a stamp that is not above the reader's
bound for the writer happened before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .faults import ProxyError, RaceError

TICK = 1 << 24  # a stamp's clock; below it the index of the instruction
IN_FLIGHT = 1 << 60
MAX_MBARRIERS = 128


class Race:
    """The watch over one block's shared memory. With `on` false it watches nothing."""

    def __init__(self, warps: int, size: int, describe: Callable[[int], str], on: bool) -> None:
        self.on, self.warps, self.describe = on, warps, describe
        units = -(-size // 2) if on else 0
        # Actors: the warps, whatever is in flight, the warpgroups' products, the mbarriers.
        self.groups = warps + 1
        self.mbarriers = self.groups + -(-warps // 4)
        actors = self.mbarriers + MAX_MBARRIERS
        self.writer = np.zeros(units, np.int16)
        self.written = np.zeros(units, np.int64)  # stamp
        self.reads = np.zeros((self.mbarriers, units), np.int64)  # the last by each actor, a stamp
        self.flights = np.zeros(units, np.int16)  # reads in flight
        self.knows = np.zeros((warps, actors), np.int64)  # the last stamp of each that happened before
        self.fenced = np.zeros((warps, actors), np.int64)  # the same for what is visible to the async proxy
        self.clock = np.zeros(warps, np.int64)
        self.clear()

    def clear(self) -> None:
        for state in (self.writer, self.written, self.reads, self.flights):
            state.fill(0)
        self.knows.fill(TICK - 1)
        self.fenced.fill(0)
        self.fenced[:, self.warps :] = IN_FLIGHT - 1  # these are of the async proxy
        self.clock.fill(0)
        self.products = 0
        self.tick(np.arange(self.warps))

    # What orders

    def tick(self, warps: np.ndarray) -> None:
        """What these warps do from now on is not known to whoever learns from what they did so far."""
        self.clock[warps] += TICK
        self.knows[warps, warps] = self.clock[warps] + TICK - 1

    def meet(self, warps: np.ndarray) -> None:
        """A barrier among these warps."""
        for known in (self.knows, self.fenced):
            known[warps] = known[warps].max(0)
        self.tick(warps)

    def send(self, warp: int, knows: np.ndarray, fenced: np.ndarray) -> None:
        """An arrival: what the warp knows is added to what a barrier passes on."""
        np.maximum(knows, self.knows[warp], out=knows)
        np.maximum(fenced, self.fenced[warp], out=fenced)
        self.tick(np.array([warp]))

    def receive(self, warp: int, knows: np.ndarray, fenced: np.ndarray) -> None:
        np.maximum(self.knows[warp], knows, out=self.knows[warp])
        np.maximum(self.fenced[warp], fenced, out=self.fenced[warp])

    def fence(self, warps: np.ndarray) -> None:
        """fence.proxy.async: what these warps know of is visible to the async proxy behind it.

        It is enough that the fence is somewhere on the way from the write to the product or copy (PTX ISA,
        "Proxy-preserved base causality order").
        """
        self.fenced[warps] = np.maximum(self.fenced[warps], self.knows[warps])
        self.tick(warps)

    def message(self) -> tuple[np.ndarray, np.ndarray]:
        """What a barrier passes on before anybody has arrived: nothing."""
        return np.zeros(self.knows.shape[1], np.int64), np.zeros(self.knows.shape[1], np.int64)

    # What is ordered. `units`: [n, k] indices of two bytes; `warps`: [n] who; `by`: the instruction

    def read(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        if self.on:
            self._check_written(units, warps, by, "reads")
            self.reads[warps[:, None], units] = self.clock[warps][:, None] | by

    def write(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        if self.on:
            self._check_write(units, warps, by)
            self.writer[units] = warps[:, None]
            self.written[units] = self.clock[warps][:, None] | by
            clash = self.writer[units] != warps[:, None]
            if clash.any():
                i, k = np.argwhere(clash)[0]
                self._report(units[i, k], warps[i], by, "writes", self.written[units[i, k]], "write")

    def check_known(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        """A read that leaves no trace: of an mbarrier, whose own operations are atomic."""
        if self.on:
            self._check_written(units, warps, by, "reads")

    def check_read(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        """By the async proxy, in the name of these warps."""
        if self.on:
            self._check_written(units, warps, by, "reads")
            self.check_fenced(units, warps, by)

    def start_read(self, units: np.ndarray, by: int) -> None:
        """Nobody may write these bytes until `end_read`."""
        if self.on:
            self.flights[units] += 1
            self.reads[self.warps, units] = IN_FLIGHT | by

    def end_read(self, units: np.ndarray, warp: int, by: int) -> None:
        """A bulk copy has read what it copies; the warp has waited for it."""
        if self.on:
            self._leave(units)
            self.reads[warp, units] = self.clock[warp] | by

    def end_products(self, units: np.ndarray, group: int, by: int) -> None:
        """A warpgroup has waited for a product, which ends as one: each of the warps may speak for it."""
        if self.on:
            self._leave(units)
            self.products += TICK
            self.reads[self.groups + group, units] = self.products | by
            self.knows[4 * group : 4 * group + 4, self.groups + group] = self.products + TICK - 1

    def _leave(self, units: np.ndarray) -> None:
        self.flights[units] -= 1
        self.reads[self.warps, units] *= self.flights[units] > 0

    def start_write(self, units: np.ndarray, warps: np.ndarray, by: int, async_proxy: bool) -> None:
        """Nobody may touch these bytes until `end_write` or `land`."""
        if not self.on:
            return
        self._check_write(units, warps, by)
        if async_proxy:
            self.check_fenced(units, warps, by)
        self.writer[units] = self.warps
        self.written[units] = IN_FLIGHT | by

    def end_write(self, units: np.ndarray, warps: np.ndarray, by: int, clock: np.ndarray) -> None:
        """A cp.async has landed: from here on an ordinary write of its warp, at this time of the warp's."""
        if self.on:
            self.writer[units] = warps[:, None]
            self.written[units] = clock[:, None] | by

    def land(self, units: np.ndarray, mbarrier: int, phase: int, by: int) -> None:
        """A bulk copy has landed: known to those who wait for this phase of the mbarrier."""
        if self.on:
            self.writer[units] = self.actor(mbarrier)
            self.written[units] = (phase + 1) * TICK | by

    def learn_phases(self, warp: int, mbarrier: int, phases: int) -> None:
        """The warp has seen `phases` phases of the mbarrier complete."""
        self.knows[warp, self.actor(mbarrier)] = (phases + 1) * TICK - 1

    def actor(self, mbarrier: int) -> int:
        return self.mbarriers + mbarrier

    def check_fenced(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        if not self.on:
            return
        bad = self.written[units] > self.fenced[warps[:, None], self.writer[units]]
        if bad.any():
            i, k = np.argwhere(bad)[0]
            unit = units[i, k]
            raise ProxyError(
                f"the async proxy gets to shared address {int(unit) * 2:#x}, for warp {int(warps[i])}, "
                f"with no fence.proxy.async behind what warp {int(self.writer[unit])} wrote: "
                f"{self.describe(int(self.written[unit]) % TICK)}"
            )

    def _check_written(self, units: np.ndarray, warps: np.ndarray, by: int, verb: str) -> None:
        bad = self.written[units] > self.knows[warps[:, None], self.writer[units]]
        if bad.any():
            i, k = np.argwhere(bad)[0]
            self._report(units[i, k], warps[i], by, verb, self.written[units[i, k]], "write")

    def _check_write(self, units: np.ndarray, warps: np.ndarray, by: int) -> None:
        self._check_written(units, warps, by, "writes")
        bounds = self.knows[warps, : self.mbarriers].T[:, :, None]
        bad = self.reads[:, units] > bounds
        if bad.any():
            reader, i, k = np.argwhere(bad)[0]
            self._report(
                units[i, k], warps[i], by, "writes", self.reads[reader, units[i, k]], "read", int(reader)
            )

    def _report(self, unit, warp, by, verb, stamp, other, who=None) -> None:
        who = int(self.writer[unit]) if who is None else who
        if stamp >= IN_FLIGHT:
            name = "of something still in flight"
        elif who >= self.mbarriers:
            name = "of a copy whose mbarrier it has not waited for"
        else:
            what = f"warp {who}" if who < self.warps else f"warpgroup {who - self.groups}'s product"
            name = f"of {what}, which nothing orders"
        raise RaceError(
            f"warp {int(warp)} {verb} shared address {int(unit) * 2:#x}; there is a {other} {name}: "
            f"{self.describe(int(stamp) % TICK)}"
        )
