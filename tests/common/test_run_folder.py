"""A run's folder: what counts as a checkpoint, and in which order."""

import errno
import json
import os

import pytest

from lingpt.common import run_folder
from lingpt.common.errors import UserError
from lingpt.common.run_folder import (
    all_checkpoint_folders,
    attention_label,
    check_links,
    checkpoint_folder,
    checkpoint_step,
    damage,
    newest_checkpoint,
    read_config,
    read_manifest,
    read_metrics,
    valid_checkpoints,
    write_manifest,
)


def write_checkpoint(run, step):
    folder = checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345678")
    write_manifest(folder, {"step": step})
    return folder


def test_whole_checkpoints_are_found_in_the_order_of_their_steps(tmp_path):
    """Steps of more digits than the names have come last; other folders are not looked at."""
    assert valid_checkpoints(tmp_path) == [] and newest_checkpoint(tmp_path) is None
    folders = [write_checkpoint(tmp_path, step) for step in (300, 2_000_000_000, 5)]
    (tmp_path / "checkpoints/abandoned-step-00000400").mkdir()
    (tmp_path / "checkpoints/.step-00000500.partial").mkdir()
    assert [checkpoint_step(folder) for folder in valid_checkpoints(tmp_path)] == [5, 300, 2_000_000_000]
    assert newest_checkpoint(tmp_path) == folders[1] and read_manifest(folders[1])["step"] == 2_000_000_000
    assert checkpoint_step(tmp_path) is None


def test_a_checkpoint_with_another_manifest_is_broken(tmp_path):
    folder = write_checkpoint(tmp_path, 5)
    for text in ("", "[]", "{}", '{"files": 3}', '{"files": {"model.safetensors": 7}}', "[" * 100_000):
        (folder / "manifest.json").write_text(text)
        assert read_manifest(folder) is None and damage(folder).startswith("is not whole")
        assert valid_checkpoints(tmp_path) == [] and all_checkpoint_folders(tmp_path) == [folder]


@pytest.mark.parametrize("name", ["/dev/zero", "../../victim", "link", "fifo", "folder", "a\0b", "x" * 300])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    """Guards: a manifest that made a reader hash a device without end, or a file elsewhere."""
    (tmp_path / "victim").write_text("12345678")
    folder = write_checkpoint(tmp_path, 5)
    (folder / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    manifest = read_manifest(folder)
    values = {key: value for key, value in manifest.items() if key != "checksum"}
    values["files"] = {**manifest["files"], name: 8}
    values["sha256"] = {**manifest["sha256"], name: "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(values | {"checksum": run_folder._checksum(values)}))
    assert read_manifest(folder) is None and damage(folder).startswith("is not whole")


@pytest.mark.parametrize(("name", "read"), [("metrics.jsonl", read_metrics), ("config.yaml", read_config)])
@pytest.mark.parametrize(("make", "reason"), [(os.mkfifo, "it is no regular file"), (os.mkdir, "Is a dir")])
def test_what_is_no_regular_file_is_one_line(tmp_path, name, read, make, reason):
    """Guards: `lingpt curves` waiting for ever at a FIFO."""
    make(tmp_path / name)
    with pytest.raises(UserError, match=rf"cannot read .*{name} \({reason}"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name", [".lock", "wandb", "checkpoints", "checkpoints/step-00000003", "metrics.jsonl"]
)
def test_no_link_is_followed_out_of_a_run(tmp_path, name):
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "checkpoints").mkdir(parents=True)
    (run / "inside").symlink_to(run / "checkpoints")
    check_links(run)
    if name == "checkpoints":
        (run / name).rmdir()
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=rf"{name} is a symbolic link that leads out"):
        check_links(run)


def test_labels():
    assert attention_label("ours") == "ours"
    assert attention_label(["ours", "softmax", "ours"]) == "ours+softmax"


def test_metrics_end_where_a_crash_cut_them_and_a_config_has_keys(tmp_path, capsys):
    assert read_metrics(tmp_path) == []
    lines = '{"kind": "train", "step": 1}\n{"step": 3}\n{"kind": "val", "step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(lines + '{"kind": "tr')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert capsys.readouterr().err.endswith("damaged, and these lines of it are left out: 2\n")
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match=r"config.yaml does not hold a run's recipe"):
        read_config(tmp_path)


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path, monkeypatch):
    """Guards: a run that starts over, and cuts its metrics, since its disk does not answer."""
    write_checkpoint(tmp_path, 5)

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(type(tmp_path), "iterdir", fail)
    with pytest.raises(UserError, match=r"cannot read .*checkpoints \(Input/output error"):
        valid_checkpoints(tmp_path)
