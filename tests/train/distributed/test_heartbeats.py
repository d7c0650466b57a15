"""A process that keeps the others waiting is named."""

import re
import socket
import time

import pytest
import torch.distributed as dist

from lingpt.train.distributed.heartbeats import Heartbeats


def beats(*collectives: int, before: tuple[int, ...] = (), stopped: int | None = None) -> list[str | None]:
    """What each of several processes finds once it has waited at so many `collectives` for the time-out.

    before: where they have been as long, first. stopped: one that sends no more heartbeats.
    """
    store = dist.HashStore()
    processes = [Heartbeats(store, rank, len(collectives), seconds=30) for rank in range(len(collectives))]
    found: list[str | None] = [None] * len(collectives)
    for counts in (before or collectives, collectives):
        for _ in range(12):
            for rank, count in enumerate(counts):
                if found[rank] is None and (counts is not collectives or rank != stopped):
                    found[rank] = processes[rank].beat(count)
    return found


def test_the_process_that_keeps_the_others_waiting_is_named():
    """By one of them, whichever comes first, and with the function that it is in."""
    found = beats(8, 8, 7)
    here = rf"process 2 of 3 \(on {socket.gethostname()}, in lingpt\.\S+\)"
    assert re.match(f"{here} has kept the others waiting for 0.5 min .--train.timeout_minutes", found[0])
    assert found[1:] == ["", ""]


def test_rank_zero_is_named_by_another():
    """Guards: where rank zero was frozen nobody said anything, and torchrun named another as the cause."""
    assert beats(7, 8, 8)[1].startswith("process 0 of 3 (on ")
    assert beats(8, 8, before=(7, 7), stopped=0)[1].startswith("process 0 of 2 (on ")


def test_a_process_that_is_stopped_where_the_others_wait_is_named():
    """It has come to as many collectives as they have, and is silent."""
    found = beats(8, 8, 8, before=(7, 7, 7), stopped=1)
    assert found[0].startswith("process 1 of 3 (on ") and found[1:] == [None, ""]


@pytest.mark.parametrize("before", [(8, 8), (7, 7)])
def test_where_all_are_at_work_nothing_ends(before):
    """Guards: a step, or a first compile, that takes longer than the time-out."""
    assert beats(8, 8, before=before) == [None, None]


def test_who_comes_last_to_a_long_step_s_end_is_not_late():
    """Guards: its own wait was the step's, and it took itself for the one that keeps the others waiting."""
    store = dist.HashStore()
    first, last = (Heartbeats(store, rank, 2, seconds=30) for rank in range(2))
    for _ in range(20):
        assert first.beat(7) is None and last.beat(7) is None
    for _ in range(5):
        assert first.beat(8) is None and last.beat(7) is None
    assert first.beat(8) is None and last.beat(8) is None
    for count in range(9, 30):  # and who is behind, while both go on
        assert first.beat(count) is None and last.beat(count - 1) is None


def test_who_was_stopped_with_all_the_others_has_not_waited(monkeypatch):
    """Ctrl-Z, and `fg` an hour later: time is counted in heartbeats."""
    store = dist.HashStore()
    processes = [Heartbeats(store, rank, 2, seconds=30) for rank in range(2)]
    for at in (0, 3600):
        monkeypatch.setattr(time, "monotonic", lambda at=at: at)
        assert [one.beat(8 - rank) for rank, one in enumerate(processes)] == [None, None]


def test_a_process_that_has_not_begun_to_count_is_late():
    """Guards: its key is not in the store, and to wait for the key was the end of all, without a word."""
    heartbeats = Heartbeats(dist.HashStore(), 0, 2, seconds=30)
    (line,) = filter(None, (heartbeats.beat(1) for _ in range(12)))
    assert "process 1 of 2 (not heard of since the start) has kept the others waiting" in line
