"""Processes that are killed, at any moment that matters: the same command goes on, as if nothing had been."""

import random
import signal
import time
from pathlib import Path

import pytest

from lingpt.common.files import PARTIAL, file_sha256
from lingpt.tests.faults.conftest import Undisturbed
from lingpt.tests.faults.harness import TRAIN, Fault, Harness, last_state, losses
from lingpt.tests.forked import Outcome

pytestmark = pytest.mark.slow

KILLS = 10  # of one run


def assert_as_undisturbed(harness: Harness, expected: Undisturbed, outcome: Outcome) -> None:
    """The run has ended well, with every loss and every bit of the one that nothing happened to."""
    run = harness.folder / "runs/run"
    assert outcome.code == 0, outcome.output
    assert losses(run) == expected.losses
    assert last_state(run) == expected.state
    assert not list(run.rglob(f"*{PARTIAL}")), "what a killed process left is cleared away"


def finish(harness: Harness, expected: Undisturbed, outcome: Outcome, figures: dict[str, float]) -> None:
    """Checks the run that has ended, and moves it away, for the next one to have its name."""
    assert_as_undisturbed(harness, expected, outcome)
    figures["runs"] += 1
    (harness.folder / "runs").rename(harness.folder / f"runs-{figures['runs']}")


def count(harness: Harness, expected: Undisturbed, outcome: Outcome, figures: dict[str, float]) -> None:
    """Checks that it was killed in silence; or, where it came to its end before, that it ended well."""
    assert "Traceback" not in outcome.output and not outcome.errors, outcome.output
    if outcome.code == 0:
        finish(harness, expected, outcome, figures)
    else:
        assert outcome.code == -signal.SIGKILL, outcome.output
        figures["faults"] += 1


@pytest.mark.rounds(1, 16)
@pytest.mark.fault(
    "`kill -9` in the middle of a call that writes to the run's folder",
    "nothing is lost but the steps since the newest checkpoint; the same command resumes it, bit by bit",
)
def test_killed_at_a_writing_call(harness, undisturbed, shimmed, figures, seed):
    rng = random.Random(seed)
    for _ in range(KILLS if seed else 4):
        outcome = harness.run(*TRAIN, fault=Fault(rng.randint(1, undisturbed.calls * 2 // 3)))
        count(harness, undisturbed, outcome, figures)
    finish(harness, undisturbed, harness.run(*TRAIN), figures)


@pytest.mark.rounds(0, 9)
@pytest.mark.fault("`kill -9` at any other time", "the same")
def test_killed_at_any_time(harness, undisturbed, figures, seed):
    rng = random.Random(seed)
    for _ in range(KILLS):
        command = harness.start(*TRAIN)
        time.sleep(rng.uniform(0, 2.5))
        command.send(signal.SIGKILL)
        outcome = command.end()
        count(harness, undisturbed, outcome, figures)
    finish(harness, undisturbed, harness.run(*TRAIN), figures)


@pytest.mark.rounds(1, 10)
@pytest.mark.fault(
    "`kill -9` of one process of two",
    "the other ends within a minute, with one line; the same command resumes it, bit by bit",
)
def test_one_of_two_processes_is_killed(harness, undisturbed_two, figures, seed):
    """Guards: a main process that took the other one with it in silence."""
    rng = random.Random(seed)
    for main in (True, False):
        command = harness.start(*TRAIN, *undisturbed_two.options)
        command.wait_for_a_step(rng)
        if not (others := command.others()):
            break
        whom = command.pid if main else others[0]
        command.send(signal.SIGKILL, whom)
        killed = time.monotonic()
        outcome = command.end()
        seconds = time.monotonic() - killed
        assert seconds < 60 and all(not Path(f"/proc/{pid}").exists() for pid in others)
        if outcome.code == 0:
            break
        assert outcome.code == (-signal.SIGKILL if whom == command.pid else 2), outcome.output
        assert len(outcome.errors) == 1 and "Traceback" not in outcome.output, outcome.output
        named = "the main process" if whom == command.pid else "process 1 of 2"
        assert named in outcome.errors[0] and "the same command resumes it" in outcome.errors[0]
        figures["faults"] += 1
        figures["most seconds to end"] = max(figures["most seconds to end"], round(seconds, 1))
    assert_as_undisturbed(harness, undisturbed_two, harness.run(*TRAIN, *undisturbed_two.options))
    figures["runs"] += 1


@pytest.mark.rounds(1, 10)
@pytest.mark.fault(
    "`kill -9` while the corpus is tokenised",
    "half of a cache is never taken for a whole; the next start makes it",
)
def test_killed_while_tokenising(new_harness, undisturbed, corpus, tmp_path, shimmed, figures, seed):
    harness = new_harness(tmp_path, **{"data.cache_dir": str(tmp_path / "cache"), "train.max_steps": 1})
    rng = random.Random(seed)
    for _ in range(2):
        outcome = harness.run(*TRAIN, fault=Fault(rng.randint(1, 25), below="cache"))
        assert outcome.code == -signal.SIGKILL and not outcome.errors, outcome.output
        figures["faults"] += 1
    outcome = harness.run(*TRAIN)
    assert outcome.code == 0, outcome.output
    assert token_files(tmp_path / "cache").items() <= token_files(Path(corpus.cache_dir)).items()
    assert not list((tmp_path / "cache/tokens").rglob(f"*{PARTIAL}"))
    figures["runs"] += 1


def token_files(cache: Path) -> dict[str, str]:
    files = cache.glob("tokens/*/*.arrow")
    return {str(file.relative_to(cache)): file_sha256(file) for file in files}
