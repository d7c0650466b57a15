"""One process at a time trains in a run's folder; the others learn who does."""

import multiprocessing
import os
import socket
import time

import pytest

from lingpt.common.errors import UserError
from lingpt.train import train
from lingpt.train.runs.run_lock import RunLock


@pytest.fixture
def holder(make_recipe):
    """Another process that holds the lock of the recipe's run."""
    context = multiprocessing.get_context("fork")  # the lock alone: nothing else of a run is needed
    held = context.Event()

    def hold() -> None:
        lock = RunLock(make_recipe().run_folder)
        lock.acquire()
        held.set()
        time.sleep(600)

    process = context.Process(target=hold)
    process.start()
    assert held.wait(60)
    yield process
    process.kill()
    process.join()


def test_the_second_process_learns_who_trains_and_touches_nothing(make_recipe, holder):
    folder = make_recipe().run_folder
    before = sorted(os.listdir(folder))
    for resume in ("auto", "never"):
        who = rf"in use by process {holder.pid} on {socket.gethostname()} since .*another --train.name"
        with pytest.raises(UserError, match=who):
            train(make_recipe(resume=resume))
    assert sorted(os.listdir(folder)) == before and os.listdir(folder.parent) == [folder.name]


def test_the_dead_hold_nothing(make_recipe, holder):
    holder.kill()
    holder.join()
    assert (train(make_recipe()) / "checkpoints/step-00000006").is_dir()


def test_a_lock_that_says_nothing_still_holds(make_recipe, holder):
    (make_recipe().run_folder / ".lock").write_bytes(b"\xff")
    with pytest.raises(UserError, match="in use by another process"):
        train(make_recipe())


def test_it_is_given_back_at_the_end_and_moves_with_a_run_that_starts_over(make_recipe):
    train(make_recipe(max_steps=3))
    folder = train(make_recipe(max_steps=3, resume="never"))
    for path in (folder, folder.with_name(f"{folder.name}.old-1")):
        with RunLock(path) as lock:
            lock.acquire()


def test_a_start_that_is_refused_leaves_no_folder(make_recipe, tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        train(make_recipe(resume=str(tmp_path / "nowhere")))
    assert not make_recipe().run_folder.exists()


def test_a_start_that_fails_removes_no_lock_of_another(tmp_path):
    folder = tmp_path / "run"
    second = RunLock(folder)

    class Failing(RunLock):
        def release(self) -> None:  # the moment at which another process gets the lock
            was_held = self._held is not None
            super().release()
            if was_held:
                second.acquire()

    with Failing(folder) as first:
        first.acquire()
    with second, pytest.raises(UserError, match="in use"):
        RunLock(folder).acquire()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(tmp_path) as lock:
        lock.acquire()
    assert "knows no locks" in capsys.readouterr().out
