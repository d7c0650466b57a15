"""The benchmark of the token cache runs and writes what it found; its times are for whoever runs it."""

import json
from pathlib import Path

import pytest

from lingpt.cli.main import main


@pytest.mark.slow
def test_what_is_measured_is_printed_and_written(tmp_path: Path, capsys):
    """On a part of the embedded corpus. Both speeds come from a clock, and the ratio from both."""
    out = tmp_path / "bench.json"
    assert main(["bench", "data", "--megabytes", "0.3", "--repeats", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    speeds = result["cache_megabytes_per_second"], result["encode_batch_megabytes_per_second"]
    assert result["loader_tokens_per_second"] > 0
    assert min(speeds) > 0 and result["ratio"] == pytest.approx(speeds[0] / speeds[1])
    assert result["megabytes"] > 0 and len(result["seconds_wall_and_processor"]["cache"]) == 1


def test_few_bytes_are_two_documents_and_one_document_is_too_few(tmp_path, capsys):
    """Guards: a request for --data.val_source, which is no option of this command."""
    few = ["bench", "data", "--megabytes", "0.001", "--repeats", "1"]
    assert main(few) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 2
    for no_file in (str(tmp_path), "."):
        assert main([*few, "--out", no_file]) == 2
        assert f"cannot write to {no_file} (Is a directory)" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("hello")
    assert main(["bench", "data", "--source", str(tmp_path / "one.txt")]) == 2
    assert "give a larger --source" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("megabytes", "-1"), ("megabytes", "1e9"), ("repeats", "0")])
def test_numbers_have_a_range(option: str, value: str, capsys):
    assert main(["bench", "data", f"--{option}", value]) == 2
    assert capsys.readouterr().err.startswith(f"lingpt: {option} is {value}; it must be a ")
