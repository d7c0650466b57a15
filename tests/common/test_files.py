"""Files: whole or not at all, whenever the writer fails."""

import errno
import hashlib
import os
import stat
import time
from types import SimpleNamespace

import pytest

from lingpt.common import files
from lingpt.common.errors import UserError
from lingpt.common.files import (
    STALE,
    new_folder,
    read_json,
    read_yaml,
    remove_partial,
    replacing,
    write_errors,
    write_json,
    write_text,
)


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "new" / "file.json"
    write_json(path, {"é": path})
    assert read_json(path) == {"é": str(path)} and path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("killed")
    assert read_json(path) == {"é": str(path)}
    assert os.listdir(path.parent) == ["file.json"], "something is left"


def test_a_file_name_that_is_not_utf8_comes_back_from_json(tmp_path):
    """Guards: a score that was lost, as the record names the file that the text was read from."""
    name = os.fsdecode(b"caf\xe9 \\ \xc3\xa9.jsonl")
    write_json(tmp_path / "file.json", {name: tmp_path / name})
    assert read_json(tmp_path / "file.json") == {name: str(tmp_path / name)}
    assert "é.jsonl" in (tmp_path / "file.json").read_text()


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("half")
        raise RuntimeError("killed")
    assert os.listdir(tmp_path) == []
    with new_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("all")
        assert os.listdir(tmp_path) == [folder.name] != ["folder"]
    assert (tmp_path / "folder/a").read_text() == "all" and os.listdir(tmp_path) == ["folder"]


def test_content_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    """Guards: an empty file after a power failure; and a new one that it takes away."""
    path, synced = tmp_path / "new", []
    monkeypatch.setattr(files, "sync", lambda at: synced.append((at.suffix or at.name, path.exists())))
    write_text(path, "all")
    path.unlink()
    with new_folder(path) as folder:
        (folder / "a").write_text("all")
    partial, renamed = (files.PARTIAL, False), (tmp_path.name, True)
    assert synced == [partial, renamed, ("a", False), partial, renamed]


def test_a_folder_that_goes_while_it_is_filled_is_not_made_again(tmp_path):
    """An unmounted disk: its files would fill the one below."""
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "disk/folder") as folder:
        (tmp_path / "disk").rename(tmp_path / "unmounted")
        write_json(folder / "file.json", {})
    assert os.listdir(tmp_path) == ["unmounted"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    for name in (".step-1.partial", ".step-2.a8.partial", ".other.partial", "step-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-3.partial").touch()
    remove_partial(tmp_path, "step-")
    assert sorted(os.listdir(tmp_path)) == [".other.partial", "step-1"]


def test_a_failing_disk_is_one_line(tmp_path):
    line = r"cannot write to .*file \(No space left on device\).*: buy a disk"
    with pytest.raises(UserError, match=line), write_errors(tmp_path / "file", "buy a disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("read", "text"),
    [(read_json, "{"), (read_json, "[" * 100_000), (read_yaml, "a: [1\n"), (read_yaml, "[" * 9_999)],
    ids=lambda part: str(part)[:9],
)
def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path, read, text):
    with pytest.raises(UserError, match=r"cannot read .*nowhere \(No such file"):
        read(tmp_path / "nowhere")
    write_text(tmp_path / "broken", text)
    with pytest.raises(UserError, match=r"broken is .*not (JSON|YAML)") as error:
        read(tmp_path / "broken")
    assert "\n" not in str(error.value)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"binary is"):
        read(tmp_path / "binary")


@pytest.mark.parametrize("text", ['!!int ""', "!!bool maybe", "!!timestamp now"])
def test_a_value_that_is_not_of_its_tag_is_no_yaml(tmp_path, text):
    """Guards: an IndexError, KeyError or AttributeError of PyYAML's."""
    write_text(tmp_path / "tagged", f"x: {text}")
    with pytest.raises(UserError, match="tagged is not YAML"):
        read_yaml(tmp_path / "tagged")


@pytest.mark.parametrize("name", ["x.json", "x[1].json", "x**.json"])
def test_what_a_killed_writer_left_goes_later(tmp_path, name):
    """Not at once: another process may be writing the same file. Guards: a name read as a pattern."""
    old, new = tmp_path / f".{name}.a1b2c3.partial", tmp_path / f".{name}.d4e5f6.partial"
    for left, age in ((old, 2 * STALE), (new, 0)):
        left.touch()
        os.utime(left, (time.time() - age,) * 2)
    other = tmp_path / f".{name}5.a1b2c3.partial"
    other.touch()
    os.utime(other, (0, 0))
    write_json(tmp_path / name, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, other.name, name])


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_keep_the_umask(tmp_path, umask):
    """Guards: files of a group that its members cannot write; private files that all can read."""
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a", "x")
        with new_folder(tmp_path / "b"):
            pass
        with replacing(tmp_path / "c") as temporary:  # as safetensors does
            temporary.unlink()
            temporary.touch(0o600)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"]
    assert modes == [0o666 & ~umask, 0o777 & ~umask, 0o666 & ~umask]


def test_what_another_user_left_stays(tmp_path, monkeypatch):
    """Guards: `Operation not permitted` of a write into a folder that users share."""

    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files, "remove_partial", refuse)
    write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


def test_an_empty_name_of_the_cache_is_none(monkeypatch):
    """Guards: `LINGPT_CACHE=` and gigabytes in the working folder."""
    monkeypatch.setenv("HOME", "/home/someone")
    for name, folder in (("", "/home/someone/.cache/lingpt"), ("~/mine", "/home/someone/mine")):
        monkeypatch.setenv("LINGPT_CACHE", name)
        assert str(files.cache_dir()) == folder
    monkeypatch.setenv("LINGPT_CACHE", "~no-such-user/x")
    with pytest.raises(UserError, match=r"no home folder ~no-such-user: .* LINGPT_CACHE"):
        files.cache_dir()


def test_who_else_can_write(monkeypatch):
    """Guards: another user's kernels or tokens, taken for ours; and ours, refused."""
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    for owner, mode, of_folder, expected in (
        (5, 0o600, 7, False), (0, 0o600, 7, False), (7, 0o600, 7, False), (8, 0o600, 7, True),
        (5, 0o664, 5, False), (5, 0o646, 5, True), (5, 0o1777, 5, False),
    ):  # fmt: skip
        folder = SimpleNamespace(stat=lambda uid=of_folder: SimpleNamespace(st_uid=uid))
        found = SimpleNamespace(st_uid=owner, st_mode=mode)
        path = SimpleNamespace(stat=lambda found=found: found, parent=folder)
        assert files.others_can_write(path) == expected


def test_what_is_set_aside_is_kept(tmp_path):
    for text in "abc":
        write_text(tmp_path / "x", text)
        files.set_aside(tmp_path / "x", "old")
    assert [(tmp_path / f"old-x{end}").read_text() for end in ("", ".2", ".3")] == ["a", "b", "c"]


def test_what_is_read_is_the_readers_own(tmp_path):
    """Guards: a recipe that was read before, with the changes of who had it."""
    write_text(tmp_path / "a.yaml", "a: [1]")
    read_yaml(tmp_path / "a.yaml")["a"].append(2)
    assert read_yaml(tmp_path / "a.yaml") == {"a": [1]}
    assert files.file_sha256(tmp_path / "a.yaml") == hashlib.sha256(b"a: [1]").hexdigest()
