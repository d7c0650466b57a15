"""Guards children that train on, unknown to all, when the process that started them is killed."""

import signal
import sys
import time

import pytest

from lingpt.common.parent import STOP_SIGNALS, end_with_parent, signals_wait_in_children

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of it")

# A command that a study starts: it says that it is on, and, when it is told to end, that it has saved.
CHILD = """
import signal, sys, time
from lingpt.cli import main
def run(argv):
    print("on", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise
main._dispatch = run
sys.exit(main.main(["x"]))
"""
PARENT = """
import sys
from pathlib import Path
from lingpt.study import jobs
jobs.COMMAND = (sys.executable, "-c")
jobs.run_jobs([jobs.Job("x", [sys.argv[1]], Path("child.log"))], [jobs.Slot("CPU")])
"""


def test_signals_wait_until_a_child_is_ready():
    """Guards: a child that a signal ended as it was still importing, without a word."""
    blocked = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())  # noqa: E731
    before = blocked()
    assert not before.intersection(STOP_SIGNALS)
    with signals_wait_in_children():
        assert blocked() == before | set(STOP_SIGNALS)
        end_with_parent()
        assert blocked() == before
    with signals_wait_in_children():
        pass
    assert blocked() == before


@pytest.mark.slow
@linux
def test_a_job_saves_and_ends_when_its_study_is_killed(start_script, tmp_path):
    log = tmp_path / "child.log"
    parent = start_script(PARENT, CHILD)
    parent.wait_for(lambda: log.exists() and "on" in log.read_text())
    parent.send(signal.SIGKILL)
    until = time.monotonic() + 30
    while "saved" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert log.read_text().startswith("on\nsaved\n")


@pytest.mark.slow
@linux
def test_a_child_whose_parent_has_died_before_ends(start_script):
    """It was started, and its study killed, before it could ask the system to be told."""
    code = "import sys; from lingpt.cli.main import main; sys.exit(main(['--version']))"
    assert start_script(code).end().code == 0
    assert start_script(code, LINGPT_PARENT="0").end().code == 128 + signal.SIGTERM
