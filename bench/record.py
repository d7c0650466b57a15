"""The record of the GPU tests, which CI cannot run: written on a machine with a GPU, checked everywhere.

As a pytest plugin it counts the tests marked `gpu` and writes them with the hash of the kernels' source (and
the expression of `-k`, if some were left out):

    pytest -m gpu -p lingpt.bench.record --gpu-record docs/results/kernels/gpu-tests.json

`staleness` says why a record does not match this source (None: it does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lingpt.common.files import write_json
from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

if TYPE_CHECKING:
    import pytest

RUN_THEM = "run `make test-gpu` on a machine with a GPU"
WITHOUT_FLA = "not fla and not gla"  # the one selection accepted: it leaves out only tests of FLA's kernels


def staleness(path: Path, current: str | None = None) -> str | None:
    """Why the record at `path` does not match the source with hash `current` (by default the tree's); None if
    it does."""
    current = current or source_hash()
    try:
        record = json.loads(path.read_text())
        recorded, passed, failed = (record[key] for key in ("source_hash", "passed", "failed"))
        selected = record.get("selected", WITHOUT_FLA)
    except FileNotFoundError:
        return f"no GPU record at {path}: {RUN_THEM}"
    except (ValueError, KeyError, TypeError):
        return f"unreadable GPU record {path}: {RUN_THEM}"
    if recorded != current:
        return f"stale GPU record (kernels {recorded}, the tree has {current}): {RUN_THEM}"
    if failed or not passed:
        return f"the GPU record has {passed} tests passed and {failed} failed: fix them and {RUN_THEM}"
    if selected != WITHOUT_FLA:
        return f"the GPU record is of some tests alone (-k '{selected}'): {RUN_THEM}"
    return None


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record", metavar="PATH", help="write the outcomes of the tests marked gpu to this JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-record")
    if path and not hasattr(config, "workerinput"):  # with xdist, the workers report to the controller
        config.pluginmanager.register(Recorder(Path(path)), "gpu-record")


class Recorder:
    """Counts tests marked `gpu`: failed if any of setup, call and teardown failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" not in report.keywords and "multigpu" not in report.keywords:
            return
        if report.outcome != "passed" or report.when == "call":
            worse = self.outcomes.get(report.nodeid) == "failed"
            self.outcomes[report.nodeid] = "failed" if worse else report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from lingpt.bench.environment import environment

        counts = {word: list(self.outcomes.values()).count(word) for word in ("passed", "failed", "skipped")}
        if counts["passed"] + counts["failed"] == 0:
            return  # nothing ran: keep the record of a machine that has a GPU
        selected = {"selected": keyword} if (keyword := session.config.option.keyword) else {}
        write_json(self.path, environment() | counts | selected)
