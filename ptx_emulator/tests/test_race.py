"""Accesses to shared memory that nothing orders: in a kernel, and in the vector clocks themselves."""

import numpy as np
import pytest
import torch

from lingpt.ptx_emulator import ProxyError, RaceError
from lingpt.ptx_emulator.race import Race


@pytest.mark.nvrtc
def test_a_missing_barrier_is_a_race(launch) -> None:
    """Guards: a read behind a write, and a write behind a read, both between warps, without a barrier."""
    a, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    for name, verb in (("reverse", r"reads .* a write of warp"), ("overwrite", r"writes .* a read of warp")):
        launch(name, a, out, 1)
        assert torch.equal(out, a.flip(0))
        with pytest.raises(RaceError, match=rf"(?s)probes.cu:\d+.*{verb} \d.*probes.cu:\d+"):
            launch(name, a, out, 0)


# The clocks: two warps of one warpgroup, and the units 4 … 7 of shared memory

UNITS = np.arange(4, 8)[None]
WARPS = np.arange(4)


@pytest.fixture
def race() -> Race:
    return Race(warps=4, size=64, describe=lambda index: f"instruction {index}")


def warp(number: int) -> np.ndarray:
    return np.array([number])


@pytest.mark.parametrize("second", ["read", "write"])
@pytest.mark.parametrize("order", ["nothing", "a barrier", "a message", "a message before the write"])
def test_what_orders_a_write_and_what_follows(race: Race, second: str, order: str) -> None:
    """Guards: a barrier or an mbarrier orders what came before it, and only that."""
    message = race.message()
    if order == "a message before the write":
        race.send(0, message)
    race.write(UNITS, warp(0), by=1)
    if order == "a barrier":
        race.barrier(np.array([0, 1]))
    if order == "a message":
        race.send(0, message)
    race.receive(1, message)
    if order in ("a barrier", "a message"):
        getattr(race, second)(UNITS, warp(1), by=2)
        return
    with pytest.raises(
        RaceError, match=rf"warp 1 {second}s .* 0x8; there is a write of warp 0.* instruction 1"
    ):
        getattr(race, second)(UNITS, warp(1), by=2)


def test_a_write_waits_for_every_reader(race: Race) -> None:
    """Guards: two readers, of which only one has been waited for; the units next to them are free."""
    for reader in (1, 2):
        race.read(UNITS, warp(reader), by=reader)
    race.barrier(np.array([0, 1]))
    race.write(UNITS + 4, warp(0), by=3)
    with pytest.raises(RaceError, match="a read of warp 2"):
        race.write(UNITS, warp(0), by=3)
    race.barrier(np.array([0, 2]))
    race.write(UNITS, warp(0), by=3)


def test_two_warps_write_one_place_in_one_instruction(race: Race) -> None:
    """Guards: the instruction's own threads are checked against each other."""
    with pytest.raises(RaceError, match=r"warp 0 writes .* a write of warp 1"):
        race.write(np.concatenate([UNITS, UNITS]), np.array([0, 1]), by=1)


def test_a_copy_in_flight_is_nobodys(race: Race) -> None:
    """Guards: not even the warp that copies may read before the copy is complete; then it is a write."""
    race.start_write(UNITS, warp(0), by=1)
    with pytest.raises(RaceError, match="still in flight"):
        race.read(UNITS, warp(0), by=2)
    race.end_write(UNITS, warp(0), 1, race.clock[warp(0)])
    race.read(UNITS, warp(0), by=2)
    with pytest.raises(RaceError, match="a write of warp 0"):
        race.read(UNITS, warp(1), by=2)


@pytest.mark.parametrize("fence", ["nowhere", "before the write", "by the writer", "by a reader"])
def test_the_async_proxy_needs_a_fence_behind_the_write(race: Race, fence: str) -> None:
    """Guards: anywhere on the way from the write to the product, and not before the write."""
    if fence == "before the write":
        race.fence(WARPS)
    race.write(UNITS, warp(0), by=1)
    if fence == "by the writer":
        race.fence(warp(0))
    race.barrier(WARPS)
    if fence == "by a reader":
        race.fence(warp(3))
        race.barrier(WARPS)
    if fence in ("by the writer", "by a reader"):
        race.start_product(UNITS, WARPS, by=2)
        return
    with pytest.raises(ProxyError, match=r"no fence\.proxy\.async behind what warp 0 wrote: instruction 1"):
        race.start_product(UNITS, WARPS, by=2)


def test_operands_of_a_product_are_free_once_it_was_waited_for(race: Race) -> None:
    """Guards: two products read the same operand; the first one's end does not free it."""
    for by in (1, 2):
        race.start_product(UNITS, WARPS, by)
    race.end_product(UNITS, group=0, by=1)
    with pytest.raises(RaceError, match="a read of something still in flight: instruction 2"):
        race.write(UNITS, warp(0), by=3)
    race.end_product(UNITS, group=0, by=2)
    race.write(UNITS, warp(0), by=3)
