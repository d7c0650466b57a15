"""One process at a time trains in a run's folder; the others learn who does."""

import json
import multiprocessing
import os
import shutil
import socket
import threading
import time

import pytest

from lingpt.common.errors import UserError
from lingpt.train import loop, train
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
    for content in (b"\xff", b"3", b"{}"):
        (make_recipe().run_folder / ".lock").write_bytes(content)
        with pytest.raises(UserError, match="in use by another process"):
            train(make_recipe())


def test_a_holder_that_has_just_the_lock_has_a_moment_to_say_who_it_is(make_recipe, holder):
    path = make_recipe().run_folder / ".lock"
    said = path.read_bytes()
    path.write_bytes(b"")
    written = threading.Timer(0.15, path.write_bytes, [said])
    written.start()
    with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
        RunLock(path.parent).acquire()
    written.join()


def test_it_is_given_back_at_the_end_and_moves_with_a_run_that_starts_over(make_recipe):
    train(make_recipe(max_steps=3))
    folder = train(make_recipe(max_steps=3, resume="never"))
    for path in (folder, folder.with_name(f"{folder.name}.old-1")):
        (path / ".lock").write_text("of a longer holder" * 9)
        with RunLock(path) as lock:
            lock.acquire()
            assert json.loads((path / ".lock").read_text())["pid"] == os.getpid()


def test_a_start_that_is_refused_leaves_no_folder(make_recipe, tmp_path):
    """Nor its lock, where the lock had been taken."""
    empty = tmp_path / "step-00000003"
    empty.mkdir()
    for path, message in ((tmp_path / "nowhere", "no checkpoint"), (empty, "resume from another")):
        with pytest.raises(UserError, match=message):
            train(make_recipe(resume=str(path)))
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
    second.release()
    with RunLock(folder) as first:
        first.acquire()
        shutil.rmtree(folder)
        second.acquire()
    with second, pytest.raises(UserError, match="in use"):
        RunLock(folder).acquire()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(tmp_path) as lock:
        lock.acquire()
    assert "knows no locks" in capsys.readouterr().out


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "deleted"])
def test_a_run_whose_folder_is_another_s_ends_with_one_line(make_recipe, monkeypatch, moved):
    """Its name is used again while it trains. Guards: two runs mixed in a folder, the second's checkpoints
    pruned by the first."""
    recipe, step, other = make_recipe(max_steps=30, save_interval=1, keep_checkpoints=1), loop.Run.step, {}
    folder = recipe.run_folder

    def take_over(self, stop):
        if self.progress.step == 4:
            self.writer.wait()
            folder.rename(folder.with_name("aside")) if moved else shutil.rmtree(folder)
            folder.mkdir()
            for name in (".lock", "metrics.jsonl", "config.yaml"):
                (folder / name).write_text("another's")
            shutil.copytree(folder, other.setdefault("copy", folder.with_name("copy")))
        return step(self, stop)

    monkeypatch.setattr(loop.Run, "step", take_over)
    with pytest.raises(UserError, match="was deleted or moved while its run trained"):
        train(recipe)
    for name in os.listdir(other["copy"]):
        assert (folder / name).read_bytes() == (other["copy"] / name).read_bytes(), name
    assert sorted(os.listdir(folder)) == sorted(os.listdir(other["copy"]))


def test_a_run_whose_folder_is_deleted_ends_with_one_line(make_recipe, monkeypatch):
    step, recipe = loop.Run.step, make_recipe(max_steps=30, save_interval=100)

    def delete(self, stop):
        if self.progress.step == 4:
            shutil.rmtree(recipe.run_folder)
        return step(self, stop)

    monkeypatch.setattr(loop.Run, "step", delete)
    with pytest.raises(UserError, match="was deleted or moved while its run trained"):
        train(recipe)
    assert not recipe.run_folder.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """Guards: a run's folder from someone else, whose lock emptied the file that it led to."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    (run / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match="symbolic link"):
        RunLock(run).acquire()
    assert victim.read_text() == "mine"
