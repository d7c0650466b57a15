"""docs/reliability.md shows the record of the soak, and the record is of tests that exist."""

import json
from pathlib import Path

import pytest

from lingpt.tests.faults.record import staleness, table

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/results/reliability/faults.json").read_text())


def test_the_page_shows_the_record():
    assert table(RECORD) in (ROOT / "docs/reliability.md").read_text()


def test_every_row_can_be_run_again():
    for test in RECORD["tests"]:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_the_record_is_of_this_source():
    """Guards: promises whose record is older than a fault in the code; seen in every run, as a skip."""
    if reason := staleness(RECORD):
        pytest.skip(reason)
