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
    find_model_folder,
    newest_checkpoint,
    read_config,
    read_environment,
    read_manifest,
    read_metrics,
    read_model,
    require_newest_checkpoint,
    valid_checkpoints,
    warn_skipped_checkpoints,
    without_seed,
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
    folders = [write_checkpoint(tmp_path, step) for step in (300, 2_000_000_000, 99_999_999, 100_000_000, 5)]
    (tmp_path / "checkpoints/abandoned-step-00000400").mkdir()
    (tmp_path / "checkpoints/.step-00000500.partial").mkdir()
    steps = [checkpoint_step(folder) for folder in valid_checkpoints(tmp_path)]
    assert steps == [5, 300, 99_999_999, 100_000_000, 2_000_000_000]
    assert newest_checkpoint(tmp_path) == folders[1] and read_manifest(folders[1])["step"] == 2_000_000_000
    for name in ("x", "step-5", "step-000000005", "step-00000005.bak"):
        assert checkpoint_step(tmp_path / name) is None


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_named(tmp_path, capsys):
    """Guards: "it has no config.json" of a run that has yet to save."""
    with pytest.raises(UserError, match="is not a run folder"):
        require_newest_checkpoint(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has no whole checkpoint yet"):
        find_model_folder(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no whole checkpoint yet"):
        find_model_folder(tmp_path)
    folders = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    weights = [folder / "model.safetensors" for folder in folders]
    weights[2].write_bytes(b"1")
    assert find_model_folder(tmp_path, verify=False) == folders[1] and capsys.readouterr().err == ""
    assert find_model_folder(tmp_path) == folders[1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folders[2]} is not whole (model.safetensors has 1 bytes")
    weights[1].write_bytes(b"abcdefgh")
    assert find_model_folder(tmp_path, verify=False) == folders[1]
    with pytest.raises(UserError, match=r"step-00000002 is damaged \(model.safetensors does not match"):
        find_model_folder(tmp_path)
    for file in weights:
        file.write_bytes(b"123456789")
    with pytest.raises(UserError, match=r"no checkpoint of .* can be read \(step-00000003 is not whole"):
        find_model_folder(tmp_path)
    folders[1].rename(tmp_path / "pruned")  # by its run, meanwhile
    warn_skipped_checkpoints(folders[1])
    assert f"{folders[2]} is not whole" in capsys.readouterr().err
    (tmp_path / "export").mkdir()
    assert find_model_folder(tmp_path / "export") == tmp_path / "export"  # no checkpoint, and no manifest


def test_a_model_folder_may_hold_what_a_run_also_has(tmp_path):
    """Guards: "has no whole checkpoint yet" of an exported model with a copy of its run's losses."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").touch()
    assert find_model_folder(tmp_path) == tmp_path
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="has no whole checkpoint yet"):
        find_model_folder(tmp_path)


def test_a_manifest_is_of_its_own_values_and_step(tmp_path, monkeypatch):
    """It may be written again; what has read a file already says its checksum."""
    folder = write_checkpoint(tmp_path, 5)
    write_manifest(folder, {"step": 5, "tokens": 7}, {"model.safetensors": "0" * 64})
    values = json.loads((folder / "manifest.json").read_text())
    assert values["sha256"] == {"model.safetensors": "0" * 64} and read_manifest(folder) == values
    assert damage(folder) == "is damaged (model.safetensors does not match its checksum)"
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(values.items()))))
    assert read_manifest(folder) == values
    (folder / "manifest.json").write_text(json.dumps(values | {"tokens": 8}))
    assert read_manifest(folder) is None
    write_manifest(folder, {"step": 5})
    assert damage(folder) is None and read_manifest(folder.rename(checkpoint_folder(tmp_path, 6))) is None

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run_folder, "file_sha256", fail)
    found = damage(folder.with_name("step-00000006").rename(folder))
    assert found == "is not readable (model.safetensors: Input/output error)"


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
    assert [without_seed(name) for name in ("a-seed0", "a-seed12", "a-seed")] == ["a", "a", "a-seed"]


def test_metrics_end_where_a_crash_cut_them_and_a_config_has_keys(tmp_path, capsys):
    assert read_metrics(tmp_path) == []
    lines = [
        '{"kind": "train", "step": 1}',
        '{"step": 3}',
        '{"kind": "val", "step": 2}',
        "",
        '{"kind": "val"}',
    ]
    for last, steps in (('{"kind": "tr', [1, 2]), ("[" * 100_000, [1, 2]), (lines[0], [1, 2, 1])):
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, last]))
        assert [line["step"] for line in read_metrics(tmp_path)] == steps
        assert capsys.readouterr().err.endswith("damaged, and these lines of it are left out: 2, 5\n")
    for text in ("- 1\n", "model:\n  name: demo\ndata:\n"):  # the second is cut short
        (tmp_path / "config.yaml").write_text(text)
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


def test_what_a_run_says_of_itself(tmp_path):
    """Guards: a traceback of a record by hand, or by an older version; the first layer taken for all."""
    for text in (None, "{", "[]", '{"data": 3}'):
        if text:
            (tmp_path / "environment.json").write_text(text)
        assert read_environment(tmp_path, "data") == {}
    for attention, expected in (("gla", "gla"), (["gla", "ours"], ("gla", "ours")), ([1], None), (3, None)):
        (tmp_path / "config.yaml").write_text(json.dumps({"model": {"name": "demo", "attention": attention}}))
        if expected:
            assert read_model(tmp_path) == ("demo", expected)
        else:
            with pytest.raises(UserError, match="does not say which model the run trained"):
                read_model(tmp_path)
