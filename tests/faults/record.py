"""The record of the faults that were injected: what docs/reliability.md shows.

As a pytest plugin it sums up the figures of the tests marked `fault` and writes them (`make soak`); the rows
of tests that did not run stay:

    pytest tests/faults -p lingpt.tests.faults.record --fault-record docs/results/reliability/faults.json

`table` makes the page's table of it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lingpt.common.files import write_json

if TYPE_CHECKING:
    import pytest


def table(record: dict[str, Any]) -> str:
    """Markdown: fault, promise, the test that injects it, and what came of it."""
    lines = ["| fault | promise | test | faults | failed | |", "|---|---|---|---|---|---|"]
    for test, row in record["tests"].items():
        shown = [row["fault"], row["promise"], f"`{test}`", row["faults"], row["failed"]]
        more = [f"{key}: {value:g}" for key, value in row.items() if key not in _COLUMNS]
        lines.append(f"| {' | '.join(map(str, [*shown, ', '.join(more)]))} |")
    return "\n".join(lines)


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
