"""Remembered hashes: a file is read once, and never taken for what it was before."""

import errno
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, file_hashes, prepare


@pytest.fixture
def settled(monkeypatch) -> None:
    """Files written just now count as old enough to be remembered."""
    monkeypatch.setattr("lingpt.data.file_hashes.SETTLED", -1.0)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files that were read to be hashed."""
    names, real = [], file_hashes._sha256
    monkeypatch.setattr(
        file_hashes, "_sha256", lambda path, stop: (names.append(str(path)), real(path, stop))[1]
    )
    return names


def test_a_corpus_is_hashed_once(settled, hashed, write_jsonl, texts, tokenizer_path, tmp_path: Path):
    """At the second start (and on the other ranks) no file is read, whatever the sequence length."""
    source, val = write_jsonl(texts(200)), write_jsonl(texts(20, seed=1), "val.jsonl")
    config = DataConfig(
        str(source), tokenizer_path, 32, val_source=str(val), cache_dir=str(tmp_path / "cache")
    )
    first = prepare(config, progress=False)
    assert sorted(hashed) == sorted([str(source), str(val)])
    hashed.clear()
    config.seq_len = 16
    assert prepare(config, progress=False).parts[0].cache.folder == first.parts[0].cache.folder
    assert hashed == []


def test_a_file_that_changed_is_hashed_again(settled, hashed, tmp_path: Path):
    """Another size; the same size; the same size and a modification time set back. Once each."""
    path, cache, before = tmp_path / "a.jsonl", tmp_path / "cache", (0, 0)
    for content in (b"one", b"other", b"again", b"third"):
        path.write_bytes(content)
        if content == b"third":
            os.utime(path, ns=before)
        before = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        for _ in range(2):
            assert file_hashes.file_hashes([path], cache) == [hashlib.sha256(content).hexdigest()]
        time.sleep(0.05)  # beyond the resolution of the file system's clock
    assert len(hashed) == 4


@pytest.mark.parametrize("seconds", [0, 10])
def test_a_file_written_just_now_is_not_remembered(tmp_path: Path, monkeypatch, seconds):
    """It could change once more in the same tick of the clock, in the same size; guards: however long it then
    took to read."""
    path, cache, now = tmp_path / "a.jsonl", tmp_path / "cache", [time.time()]
    path.write_bytes(b"one")

    def slow(*_) -> str:
        now[0] += seconds
        return "0" * 64

    monkeypatch.setattr(file_hashes, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(file_hashes, "_sha256", slow)
    file_hashes.file_hashes([path], cache)
    assert not cache.exists()


def test_a_file_dated_in_the_future_is_hashed_once(settled, hashed, tmp_path: Path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_bytes(b"one")
    os.utime(path, (4e9, 4e9))
    for _ in range(2):
        assert file_hashes.file_hashes([path], cache) == [hashlib.sha256(b"one").hexdigest()]
    assert len(hashed) == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"PATH": 3}', '{"PATH": [1]}', '{"PATH": [1, 2, 3, 4]}', b"\xff\xfe"]
)
def test_a_damaged_memory_is_none(settled, hashed, tmp_path: Path, content):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_bytes(b"one")
    cache.mkdir()
    raw = content if isinstance(content, bytes) else content.replace("PATH", str(path)).encode()
    (cache / file_hashes.NAME).write_bytes(raw)
    for _ in range(2):
        assert file_hashes.file_hashes([path], cache) == [hashlib.sha256(b"one").hexdigest()]
    assert len(hashed) == 1, "the memory is written again"


def test_a_cache_that_cannot_be_written_is_no_error_and_a_file_that_cannot_be_read_is(
    settled, tmp_path: Path
):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_bytes(b"one")
    cache.write_bytes(b"a file, where a folder is needed")
    assert file_hashes.file_hashes([path], cache) == [hashlib.sha256(b"one").hexdigest()]
    with pytest.raises(UserError, match=r"cannot read .*nowhere \(No such file"):
        file_hashes.file_hashes([tmp_path / "nowhere"], None)


def test_what_is_gone_is_forgotten(settled, tmp_path: Path):
    """The memory does not grow with every temporary file that was ever hashed."""
    paths, cache = [tmp_path / name for name in ("a", "b")], tmp_path / "cache"
    for path in paths:
        path.write_bytes(b"one")
        file_hashes.file_hashes([path], cache)
    paths[0].unlink()
    (tmp_path / "c").write_bytes(b"two")
    file_hashes.file_hashes([tmp_path / "c"], cache)
    text = (cache / file_hashes.NAME).read_text()
    assert str(paths[1]) in text and str(tmp_path / "c") in text and str(paths[0]) not in text


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_what_cannot_be_reached_is_no_error_and_is_remembered(settled, hashed, tmp_path, monkeypatch, number):
    """Guards: one path of another user or on a disk that was away, in the shared memory, that ended every
    later run."""
    paths, cache = [tmp_path / name for name in ("away", "here")], tmp_path / "cache"
    for path in paths:
        path.write_bytes(b"one")
    file_hashes.file_hashes(paths[:1], cache)
    real = Path.stat

    def stat(path: Path, **options):
        if path == paths[0]:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, **options)

    with monkeypatch.context() as away:
        away.setattr(Path, "stat", stat)
        assert file_hashes.file_hashes(paths[1:], cache) == [hashlib.sha256(b"one").hexdigest()]
    hashed.clear()
    file_hashes.file_hashes(paths, cache)
    assert hashed == [], "both are remembered"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_does_not_wait_for_gigabytes(tmp_path: Path):
    """Guards: a thread that is waited for until it has read its file to the end."""
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.truncate(8 << 30)  # takes no room on the disk, and seconds to hash
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        file_hashes.file_hashes([path], None)
    assert time.monotonic() - began < 2
