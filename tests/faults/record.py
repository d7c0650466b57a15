"""The record of the faults that were injected: what docs/reliability.md shows.

As a pytest plugin it sums up the figures of the tests marked `fault` and writes them (`make soak`); the rows
of tests that did not run stay:

    pytest tests/faults -p lingpt.tests.faults.record --fault-record docs/results/reliability/faults.json

`table` makes the page's table of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lingpt.common.files import write_json
from lingpt.kernels.linear_attention.cuda.source_hash import strip_python

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
COVERED = ("cli", "common", "data", "train")  # the folders whose source the faults are injected into


def table(record: dict[str, Any]) -> str:
    """Markdown: fault, promise, the test that injects it, and what came of it."""
    lines = ["| fault | promise | test | faults | failed | |", "|---|---|---|---|---|---|"]
    for test, row in record["tests"].items():
        shown = [row["fault"], row["promise"], f"`{test}`", row["faults"], row["failed"]]
        more = [f"{key}: {value:g}" for key, value in row.items() if key not in _COLUMNS]
        lines.append(f"| {' | '.join(map(str, [*shown, ', '.join(more)]))} |")
    return "\n".join(lines)


def source_hash() -> str:
    """The hash of the source that the faults cover; docstrings and comments do not count."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in COVERED for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0{strip_python(path.read_text())}\0".encode())
    return digest.hexdigest()[:16]


def staleness(record: dict[str, Any]) -> str | None:
    """Which rows of the record are of another source than this one; None if none is."""
    source = source_hash()
    stale = [test for test, row in record["tests"].items() if row["run"].get("source") != source]
    named = ", ".join(test.split("::")[1] for test in stale[:3])
    return f"{len(stale)} rows of the fault record are of another source ({named}, …)" if stale else None


_COLUMNS = ("fault", "promise", "faults", "failed", "run")


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-record", metavar="PATH", help="write what came of the injected faults to this JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--fault-record")
    if path and not hasattr(config, "workerinput"):  # with xdist, the workers report to the controller
        config.pluginmanager.register(Recorder(Path(path)), "fault-record")


class Recorder:
    """Sums up the figures of each test function over its seeds; `most …` are maxima."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if "fault" not in properties:
            return
        fault, promise = properties["fault"]
        row = self.tests.setdefault(
            report.nodeid.split("[")[0], {"fault": fault, "promise": promise, "faults": 0, "failed": 0}
        )
        row["failed"] += report.failed
        if report.when == "teardown":
            for key, value in properties["figures"].items():
                row[key] = max(row.get(key, 0), value) if key.startswith("most ") else row.get(key, 0) + value

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        about = {
            "date": date.today().isoformat(),
            "source": source_hash(),
            "first_seed": int(os.environ.get("LINGPT_SOAK_SEED", 0)),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        rows = json.loads(self.path.read_text())["tests"] if self.path.exists() else {}
        rows |= {test: row | {"run": about} for test, row in self.tests.items()}
        write_json(self.path, {"tests": dict(sorted(rows.items()))})


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
