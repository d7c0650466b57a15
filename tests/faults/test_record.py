"""docs/reliability.md shows the record of the soak, and the record is of tests that exist."""

import json
from pathlib import Path

from lingpt.tests.faults.record import table

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/results/reliability/faults.json").read_text())


def test_the_page_shows_the_record():
    assert table(RECORD) in (ROOT / "docs/reliability.md").read_text()


def test_every_row_can_be_run_again():
    for test in RECORD["tests"]:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
