"""A lock on a file: one holder at a time; who comes second is refused, or waits."""

import errno
import os
import stat
from pathlib import Path
from threading import Event, Thread

import pytest

from lingpt.common.locks import file_lock


def test_a_held_lock_is_refused_or_waited_for(tmp_path):
    path, waits, done = tmp_path / "new" / "run" / ".lock", Event(), Event()

    def wait() -> None:
        with file_lock(path, before_waiting=waits.set):
            done.set()

    with file_lock(path) as lock:
        assert lock.unsupported is None and os.fstat(lock.file).st_ino == path.stat().st_ino
        with pytest.raises(BlockingIOError), file_lock(path, blocking=False):
            pass
        waiter = Thread(target=wait, daemon=True)
        waiter.start()
        assert waits.wait(60) and not done.wait(0.2)
    waiter.join(60)
    assert done.is_set()
    with file_lock(path) as lock:
        assert lock.unsupported is None


def test_who_waited_for_a_file_that_is_gone_locks_the_one_that_others_see(tmp_path):
    path, waits, locked, checked = tmp_path / ".lock", Event(), Event(), Event()

    def wait() -> None:
        with file_lock(path, before_waiting=waits.set):
            locked.set()
            checked.wait(60)

    waiter = Thread(target=wait, daemon=True)
    with file_lock(path):
        waiter.start()
        assert waits.wait(60)
        path.unlink()
    assert locked.wait(60)
    with pytest.raises(BlockingIOError), file_lock(path, blocking=False):
        pass
    checked.set()
    waiter.join(60)


def test_a_folder_that_is_removed_in_between_is_made_again(tmp_path, monkeypatch):
    """Guards: `cannot write` of who starts a run as another process, whose start has failed, removes the
    folder. A folder that cannot be made is an error."""
    path, mkdir, removed = tmp_path / "run" / ".lock", Path.mkdir, []

    def mkdir_and_lose(folder: Path, *args, **options) -> None:
        mkdir(folder, *args, **options)
        if not removed:
            removed.append(folder.rmdir())

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    with file_lock(path):
        assert path.exists() and removed
    with pytest.raises(FileExistsError), file_lock(path / ".lock"):
        pass


def test_an_error_releases_it(tmp_path):
    with pytest.raises(RuntimeError), file_lock(tmp_path / ".lock"):
        raise RuntimeError
    with file_lock(tmp_path / ".lock") as lock:
        assert lock.unsupported is None


def test_a_link_is_not_followed(tmp_path):
    """Guards: a file that is not ours, created or written to by who can put a link in its folder."""
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)), file_lock(tmp_path / ".lock"):
        pass
    assert not (tmp_path / "other").exists()


def test_the_file_keeps_the_umask(tmp_path):
    """Guards: a lock in a group's cache that its members cannot open."""
    before = os.umask(0o002)
    try:
        with file_lock(tmp_path / ".lock") as lock:
            assert stat.S_IMODE(os.fstat(lock.file).st_mode) == 0o664
    finally:
        os.umask(before)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_said_and_stops_nobody(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for blocking in (True, False):
        with file_lock(tmp_path / ".lock", blocking, pytest.fail) as lock:
            assert lock.unsupported == os.strerror(number)
