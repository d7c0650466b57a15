"""Tracking: W&B's offline record holds the losses, their group and their clock; logged out, no network."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from unittest import mock

import pytest

from lingpt.common.errors import UserError
from lingpt.common.run_folder import read_metrics
from lingpt.models import ModelArgs
from lingpt.train import loop, train
from lingpt.train.runs import trackers


def read_offline_record(path: Path) -> list:
    """The records of a `.wandb` file: LevelDB's log format (7-byte header, 32 KiB blocks) of protobufs."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records, parts, at = [], b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):  # full, last
            records.append(wandb_internal_pb2.Record.FromString(parts))  # type: ignore[attr-defined]
        at += 7 + length
    return records


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """Nobody is logged in, and the way out is closed."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.mark.slow
def test_the_offline_record_has_losses_group_and_step_metric(make_recipe, logged_out, monkeypatch, capfd):
    """Logged out: no prompt, no network, and a record of losses over training time, grouped by model."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("wandb asked something"))
    folder = train(make_recipe(wandb=True, wandb_group="study-tiny", max_steps=3))
    train(
        make_recipe(wandb=True, wandb_group="study-tiny", max_steps=5)
    )  # resumed: another file, the same run
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    records = [read_offline_record(path) for path in files]
    assert len(records) == 2
    runs = [next(r.run for r in part if r.HasField("run")) for part in records]
    assert len({run.run_id for run in runs}) == 1, "the resumed run has another id"
    names = runs[0].run_group, runs[0].display_name, runs[0].project
    assert names == ("study-tiny", "demo-ours", "lingpt")
    steps = {r.metric.name: r.metric.step_metric for r in records[0] if r.HasField("metric")}
    assert steps["train/loss"] == steps["val/loss"] == "train_time"
    globs = {r.metric.glob_name: r.metric.step_metric for r in records[0] if r.HasField("metric")}
    clocks = {"time": "train_time", "tokens": "tokens", "steps": "step"}
    axes = {f"loss over {name}/*": clock for name, clock in clocks.items()}
    assert axes.items() <= globs.items(), "the panels of figure 5"
    logged = [history(r) for r in records[1] if r.HasField("history")]  # the newest record has it all
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    written = [line for line in read_metrics(folder) if line["kind"] == "train"]
    for name in axes:
        assert [row[name[:-1] + "train"] for row in logged if name[:-1] + "train" in row] == losses
    assert logged[-1]["loss over time/val"] == logged[-1]["val/loss"]
    assert losses == pytest.approx([line["loss"] for line in written])
    assert all("train_time" in row for row in logged) and any("val/loss" in row for row in logged)
    assert [row["_step"] for row in logged] == [row["step"] for row in logged] == [1, 2, 3, 4, 5]


def history(record) -> dict:
    items = record.history.item
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.slow
def test_the_record_of_a_killed_run_has_its_losses(make_recipe, logged_out, start_script, tmp_path):
    """Killed with all that it started, as where a machine is taken away: only the last second is lost."""
    recipe = make_recipe(wandb=True, max_steps=10**6, eval_interval=10**6, save_interval=10**6)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    code = (
        "import json, sys; from lingpt.train import train; from lingpt.train.config import recipe_from_dict; "
        "train(recipe_from_dict(json.load(open(sys.argv[1]))))"
    )
    process = start_script(code, str(tmp_path / "recipe.json"))
    process.wait_for(lambda: len(read_metrics(recipe.run_folder)) > 20)
    sure = len(read_metrics(recipe.run_folder))
    time.sleep(3)
    process.send_group(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL, process.output()
    (record,) = recipe.run_folder.glob("wandb/offline-run-*/*.wandb")
    logged = [history(r) for r in read_offline_record(record) if r.HasField("history")]
    written = [line["loss"] for line in read_metrics(recipe.run_folder)]
    assert len(logged) >= sure
    assert [row["train/loss"] for row in logged] == pytest.approx(written[: len(logged)])


@pytest.mark.slow
def test_wandb_dying_does_not_end_the_run(make_recipe, logged_out, capsys, monkeypatch):
    """Its own process is killed at step 3; the run goes on, and says so once."""
    import psutil

    original = loop.Run.step

    def step(self, stop):
        if self.progress.step == 2:
            for child in psutil.Process().children(recursive=True):
                if "wandb-core" in child.name():
                    child.kill()
                    child.wait()
        return original(self, stop)

    monkeypatch.setattr(loop.Run, "step", step)
    folder = train(make_recipe(wandb=True))
    assert read_metrics(folder)[-1]["step"] == 6
    assert capsys.readouterr().out.count("wandb has failed and is left out") <= 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_metrics_wait_for_the_disk(tmp_path, monkeypatch, capsys, number):
    """In their order, each once, also where half a line got through; said once, and when it is over."""
    metrics, pwrite, full = trackers.Metrics(tmp_path, 0), os.pwrite, True

    def half(handle, data, offset):
        if full and offset > 60:
            raise OSError(number, os.strerror(number))
        return pwrite(handle, data[:20], offset)

    monkeypatch.setattr(os, "pwrite", half)
    for step in (1, 2, 3, 4, 5):
        metrics.write({"kind": "train", "step": step, "loss": 1.0})
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1 and os.strerror(number) in out
    with pytest.raises(UserError, match="cannot write to"):
        metrics.close()
    full = False
    metrics.write({"kind": "train", "step": 6, "loss": 1.0})
    metrics.close()
    assert "written again" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_metrics_wait_for_a_folder_that_is_gone(tmp_path):
    """Unmounted and mounted again; nothing is made in its place."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    metrics = trackers.Metrics(run, 0)
    metrics.write({"kind": "train", "step": 1})
    run.rename(away)
    metrics.write({"kind": "train", "step": 2})
    assert not run.exists()
    away.rename(run)
    metrics.write({"kind": "train", "step": 3})
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    (run / "metrics.jsonl").unlink()  # a copy without it: no hole in its place
    metrics.write({"kind": "train", "step": 4})
    assert [line["step"] for line in read_metrics(run)] == [4]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b/c"])
def test_a_damaged_run_id_is_made_again(tmp_path, content):
    (tmp_path / "run_id").write_bytes(content)
    known = trackers._run_id(tmp_path)
    assert len(known) == 8 and trackers._run_id(tmp_path) == known


def test_mode_is_offline_unless_logged_in(logged_out, monkeypatch, tmp_path):
    assert trackers.wandb_mode() == "offline"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert trackers.wandb_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert trackers.wandb_mode() == "offline", "a login elsewhere is none here"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert trackers.wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert trackers.wandb_mode() == "disabled"


@pytest.mark.slow
def test_the_longest_form_is_tracked(make_recipe, logged_out, capsys):
    """Guards: wandb refuses a tag of more than 64 characters, and such a run ended before its first step."""
    recipe = make_recipe(wandb=True, max_steps=1)
    recipe.model = ModelArgs("demo", "hybrid+softmax_every=4+conv_silu+constant=false")
    folder = train(recipe)
    assert "wandb" not in capsys.readouterr().out
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    (run,) = [record.run for record in read_offline_record(path) if record.HasField("run")]
    assert {"ours-gated+softmax", "ours-gated", "conv_silu", "softmax_every=4"} <= set(run.tags)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_wandb_failing_does_not_end_the_run(make_recipe, monkeypatch, capsys, kind):
    import wandb

    def fail(**_):
        raise kind("no service")

    monkeypatch.setattr(wandb, "init", fail)
    folder = train(make_recipe(wandb=True, max_steps=2))
    assert "wandb does not start (no service)" in capsys.readouterr().out
    assert read_metrics(folder)[-1]["step"] == 2


def test_a_resumed_record_lacks_lines_that_do_not_say_what_they_are(make_recipe, monkeypatch, capsys):
    """Guards: a line without its kind ended the run with a KeyError."""
    import wandb

    logged: list[int] = []
    run = mock.Mock(step=0, log=lambda values, step: logged.append(step))
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    recipe = make_recipe(wandb=True)
    recipe.run_folder.mkdir(parents=True)
    whole = {"kind": "train", "step": 1, "tokens": 256, "train_time": 1.0, "loss": 9.0}
    lines = [whole, {"step": 2}, {"kind": "train", "step": 3}, whole | {"step": 4}]
    (recipe.run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trackers.WandB(recipe)
    assert logged == [1, 4] and "wandb" not in capsys.readouterr().out


def test_a_wandb_that_cannot_be_imported_does_not_end_the_run(make_recipe, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = train(make_recipe(wandb=True, max_steps=2))
    assert "wandb does not start (import of wandb halted" in capsys.readouterr().out
    assert read_metrics(folder)[-1]["step"] == 2


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    metrics = trackers.Metrics(tmp_path, 0)
    metrics.write({"kind": "train", "step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    metrics.close()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["grad_norm"] is None


def test_a_damaged_line_costs_a_resumed_run_that_line_alone(tmp_path, capsys):
    """Guards: a resumed run that deletes all history after it."""
    lines = [json.dumps({"kind": "train", "step": step, "loss": 1.0}) for step in range(1, 9)]
    lines[3] = lines[3][:10]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    trackers.Metrics(tmp_path, 7).close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 5, 6, 7]
    assert "left out: 4" in capsys.readouterr().err


def test_what_a_start_without_a_checkpoint_logged_is_kept_aside(tmp_path, capsys):
    """Its checkpoints may be gone, with a disk that is not mounted."""
    before = json.dumps({"kind": "train", "step": 900, "loss": 1.0}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(before)
    trackers.Metrics(tmp_path, 0).close()
    assert "abandoned-metrics.jsonl" in capsys.readouterr().out and read_metrics(tmp_path) == []
    assert (tmp_path / "abandoned-metrics.jsonl").read_text() == before
    trackers.Metrics(tmp_path, 0).close()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_no_key_is_in_any_file_of_a_run(make_recipe, monkeypatch, tmp_path):
    """Neither of the environment, nor what a repository around the run has not committed."""
    secrets = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_" + "Sekret" * 6}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "password").write_text("none yet\n")
    for command in (["init", "-q"], ["add", "password"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "password").write_text(secrets.setdefault("diff", "correct horse battery staple"))
    folder = train(make_recipe(wandb=True, max_steps=1))
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert [name for name, secret in secrets.items() if secret.encode() in content] == [], path
