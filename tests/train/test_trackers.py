"""Tracking: W&B's offline record holds the losses, their group and their clock; logged out, no network."""

import json
import struct
import zlib
from pathlib import Path

import pytest

from lingpt.common.run_folder import read_metrics
from lingpt.train import trackers, train


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
            records.append(wandb_internal_pb2.Record.FromString(parts))
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


def test_the_offline_record_has_losses_group_and_step_metric(make_recipe, logged_out, monkeypatch, capfd):
    """Logged out: no prompt, no network, and a record of losses over training time, grouped by model."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("wandb asked something"))
    folder = train(make_recipe(wandb=True, max_steps=3))
    train(make_recipe(wandb=True, max_steps=5))  # resumed: another file, the same run
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    records = [read_offline_record(path) for path in files]
    assert len(records) == 2
    runs = [next(r.run for r in part if r.HasField("run")) for part in records]
    assert len({run.run_id for run in runs}) == 1, "the resumed run has another id"
    assert runs[0].run_group == "demo" and runs[0].display_name == "demo-ours" and runs[0].project == "lingpt"
    steps = {r.metric.name: r.metric.step_metric for r in records[0] if r.HasField("metric")}
    assert steps["train/loss"] == steps["val/loss"] == "train_time"
    logged = [history(r) for part in records for r in part if r.HasField("history")]
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    written = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert losses == pytest.approx([line["loss"] for line in written])
    assert all("train_time" in row for row in logged) and any("val/loss" in row for row in logged)


def history(record) -> dict:
    items = record.history.item
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


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


def test_wandb_failing_does_not_end_the_run(make_recipe, monkeypatch, capsys):
    import wandb

    def fail(**_):
        raise wandb.errors.CommError("no service")

    monkeypatch.setattr(wandb, "init", fail)
    folder = train(make_recipe(wandb=True, max_steps=2))
    assert "wandb does not start (no service)" in capsys.readouterr().out
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
