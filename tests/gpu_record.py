"""A pytest plugin: counts the tests marked `gpu` and writes them with the hash of the kernels' source (and
the expression of `-k`, if some were left out); `lingpt kernels release-check` compares it with the source.

    pytest -m gpu -p lingpt.tests.gpu_record --gpu-record docs/results/kernels/gpu-tests.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lingpt.common.files import write_json

if TYPE_CHECKING:
    import pytest


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
