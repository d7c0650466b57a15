"""Disks that fail: full, read-only, broken, over quota, not ours."""

import errno
import random
from pathlib import Path

import pytest

from lingpt.tests.faults.harness import TRAIN, Fault
from lingpt.tests.faults.test_kills import assert_as_undisturbed, token_files

pytestmark = pytest.mark.slow

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
TIMES = (1, 5, 1000)  # calls that fail in a row: a hiccup, a while, for good


@pytest.mark.rounds(3, 60)
@pytest.mark.fault(
    "a writing call to the run's folder fails (full, quota, I/O error, read-only, permission, stale handle), "
    "once, for a while or for good",
    "the run continues, or ends with one line; no half of a file is left; the same command resumes it, "
    "bit by bit",
)
def test_the_disk_fails(harness, undisturbed, shimmed, figures, seed):
    rng = random.Random(seed)
    fault = Fault(rng.randint(1, undisturbed.calls), rng.choice(TIMES), rng.choice(ERRORS))
    outcome = harness.run(*TRAIN, fault=fault)
    figures["faults"] += 1
    assert "Traceback" not in outcome.output, (fault, outcome.output)
    assert outcome.code in (0, 2) and len(outcome.errors) == (outcome.code == 2), (fault, outcome.output)
    assert_as_undisturbed(harness, undisturbed, harness.run(*TRAIN))
    figures["runs"] += 1


@pytest.mark.rounds(1, 20)
@pytest.mark.fault("the same while the corpus is tokenised", "one line; the next start makes the cache")
def test_the_disk_fails_while_tokenising(new_harness, undisturbed, corpus, tmp_path, shimmed, figures, seed):
    harness = new_harness(tmp_path, **{"data.cache_dir": str(tmp_path / "cache"), "train.max_steps": 1})
    rng = random.Random(seed)
    fault = Fault(rng.randint(1, 25), rng.choice(TIMES), rng.choice(ERRORS), below="cache")
    outcome = harness.run(*TRAIN, fault=fault)
    figures["faults"] += 1
    assert "Traceback" not in outcome.output, (fault, outcome.output)
    assert outcome.code in (0, 2) and len(outcome.errors) == (outcome.code == 2), (fault, outcome.output)
    assert harness.run(*TRAIN).code == 0
    assert token_files(tmp_path / "cache").items() <= token_files(Path(corpus.cache_dir)).items()
    figures["runs"] += 1
