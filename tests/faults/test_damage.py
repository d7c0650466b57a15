"""Files that are not as they were written, and two processes at the same folder."""

import random
import shutil
from pathlib import Path

import pytest

from lingpt.tests.faults.harness import TRAIN, last_state
from lingpt.tests.faults.test_kills import assert_as_undisturbed

pytestmark = pytest.mark.slow

STOPPED = """
import os, signal
from lingpt.train import loop
exact = loop.Run.step
def step(self, stop):
    if self.progress.step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    return exact(self, stop)
loop.Run.step = step
"""


@pytest.fixture(scope="session")
def interrupted(new_harness) -> Path:
    """The folder of a run that is to go on from step 8 of 12, and has an older checkpoint too."""
    harness = new_harness()
    assert harness.start(*TRAIN, hook=STOPPED).end().code == 143
    return harness.folder


def damage(rng: random.Random, file: Path) -> str:
    """Flips a bit, or cuts the file short, or empties it; says which."""
    content, kind = bytearray(file.read_bytes()), rng.choice(["flipped", "flipped", "cut", "emptied"])
    if kind == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) if kind == "cut" else 0 :]
    file.write_bytes(content)
    return f"{file.name} {kind}"


@pytest.mark.rounds(3, 60)
@pytest.mark.fault(
    "a flipped bit, a cut or an empty file anywhere in a run's folder",
    "the run resumes from what is whole, bit by bit, or refuses with one line that names the file",
)
def test_a_damaged_file(new_harness, interrupted, undisturbed, tmp_path, figures, seed):
    rng = random.Random(seed)
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    harness = new_harness(tmp_path)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.stat().st_size)
    what = damage(rng, rng.choice(files))
    figures["faults"] += 1
    outcome = harness.run(*TRAIN)
    assert "Traceback" not in outcome.output, (what, outcome.output)
    if outcome.code == 0:
        assert last_state(tmp_path / "runs/run") == undisturbed.state, (what, outcome.output)
        figures["runs"] += 1
    else:
        assert outcome.code == 2 and len(outcome.errors) == 1 and "runs/run" in outcome.errors[0], (
            what,
            outcome.output,
        )
        figures["refused"] += 1


@pytest.mark.rounds(1, 10)
@pytest.mark.fault("a second process in the same folder", "one trains; the other says who, in one line")
def test_two_starts_at_once(harness, undisturbed, figures, seed):
    commands = [harness.start(*TRAIN) for _ in range(2)]
    outcomes = [command.end() for command in commands]
    figures["faults"] += 1
    refused = [outcome for outcome in outcomes if outcome.code]
    assert len(refused) <= 1, "one of them trains"
    for outcome in refused:
        assert outcome.code == 2 and len(outcome.errors) == 1 and "in use by process" in outcome.errors[0]
    assert_as_undisturbed(harness, undisturbed, harness.run(*TRAIN))
    figures["runs"] += 1
