"""The benchmark of the token cache runs and writes what it found; its times are for whoever runs it."""

import json
from pathlib import Path

from lingpt.bench.data import main


def test_what_is_measured_is_written(tmp_path: Path) -> None:
    """On a part of the embedded corpus; guards: a benchmark that nobody runs until it is needed."""
    found = main(["--megabytes", "0.3", "--repeats", "1", "--out", str(tmp_path / "bench.json")])
    assert json.loads((tmp_path / "bench.json").read_text())["ratio"] == found["ratio"]
    assert found["megabytes"] > 0 and found["processor_time_ratio"] > 0
