"""A lock on a file: one holder at a time; who comes second is refused, or waits."""

import errno
import os
from threading import Event, Thread

import pytest

from lingpt.common.locks import file_lock


def test_a_held_lock_is_refused_or_waited_for(tmp_path):
    path, waits, done = tmp_path / ".lock", Event(), Event()

    def wait() -> None:
        with file_lock(path, before_waiting=waits.set):
            done.set()

    with file_lock(path) as lock:
        assert lock.unsupported is None and os.fstat(lock.file).st_ino == path.stat().st_ino
        with pytest.raises(BlockingIOError), file_lock(path):
            pass
        waiter = Thread(target=wait, daemon=True)
        waiter.start()
        assert waits.wait(60) and not done.wait(0.2)
    waiter.join(60)
    assert done.is_set()
    with file_lock(path) as lock:
        assert lock.unsupported is None


def test_an_error_releases_it(tmp_path):
    with pytest.raises(RuntimeError), file_lock(tmp_path / ".lock"):
        raise RuntimeError
    with file_lock(tmp_path / ".lock") as lock:
        assert lock.unsupported is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_said_and_stops_nobody(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for before_waiting in (None, pytest.fail):
        with file_lock(tmp_path / ".lock", before_waiting) as lock:
            assert lock.unsupported == os.strerror(number)
