"""Signals that ask a run to end: it saves its step and says how to go on, whenever they come."""

import contextlib
import json
import os
import pty
import random
import signal
import time
from pathlib import Path

import pytest

from lingpt.common.run_folder import newest_checkpoint, read_manifest, read_metrics
from lingpt.tests.faults.harness import TRAIN, TWO, Command
from lingpt.tests.faults.test_kills import assert_as_undisturbed
from lingpt.tests.forked import Outcome

pytestmark = pytest.mark.slow

LONG = ("--train.max_steps", "100000", "--train.save_interval", "100000", "--train.eval_interval", "50000")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PER_RUN = 10
SLOW_VALIDATION = """
import time
from lingpt.train import loop
exact = loop.validate
def validate(run, val, stop):
    def slow(blocks):
        with open(f"validating-{run.parallel.rank}", "a") as batches:
            batches.write(".")
        time.sleep(0.3)
        return val.gather(blocks)
    return exact(run, Slow(val, slow), stop)
class Slow:
    def __init__(self, blocks, gather): self.blocks, self.gather = blocks, gather
    def __len__(self): return len(self.blocks)
    def __getattr__(self, name): return getattr(self.blocks, name)
loop.validate = validate
"""


def assert_saved(command: Command, outcome: Outcome, number: int, figures: dict[str, float]) -> None:
    """It ended for the signal, with one line and with a checkpoint of its last step."""
    assert outcome.code == 128 + number, outcome.output
    assert len(outcome.errors) == 1 and "Traceback" not in outcome.output, outcome.output
    steps = [line["step"] for line in read_metrics(command.run) if line["kind"] == "train"]
    newest = newest_checkpoint(command.run)
    saved = (read_manifest(newest) or {})["step"] if newest else 0
    figures["faults"] += 1
    figures["most steps lost"] = max(figures["most steps lost"], max(steps, default=0) - saved)
    assert max(steps, default=0) - saved <= 1


@pytest.mark.rounds(1, 14)
@pytest.mark.fault(
    "a signal that asks to end (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2), at any moment from the start on",
    "the step is finished and saved, the exit code is 128 + signal; the same command resumes it, bit by bit",
)
def test_a_signal_at_any_time(harness, undisturbed, figures, seed):
    rng = random.Random(seed)
    for number in rng.choices(SIGNALS, k=PER_RUN if seed else 4):
        command = harness.start(*TRAIN)
        if rng.random() < 0.8:
            command.wait_for_a_step(rng)
        else:
            command.wait_for(command.takes_signals)
            time.sleep(rng.uniform(0, 0.6))
        command.send(number)
        outcome = command.end()
        if outcome.code != 0:  # it came too late
            assert_saved(command, outcome, number, figures)
    assert_as_undisturbed(harness, undisturbed, harness.run(*TRAIN))
    figures["runs"] += 1


@pytest.mark.rounds(0, 24)
@pytest.mark.fault(
    "the same, over two processes: to the main one, to the other, or to both (as a terminal does)",
    "both end at the same step; otherwise the same",
)
def test_a_signal_to_two_processes(harness, undisturbed_two, figures, seed):
    rng = random.Random(seed)
    for number in rng.choices(SIGNALS, k=5):
        command = harness.start(*TRAIN, *undisturbed_two.options)
        command.wait_for_a_step(rng)
        others = command.others()
        to = rng.choice(["main", "other", "group"])
        if to != "other":
            command.send(number)
        if to != "main":
            for pid in others:
                command.send(number, pid)
        outcome = command.end()
        if outcome.code != 0:
            assert_saved(command, outcome, number, figures)
    assert_as_undisturbed(harness, undisturbed_two, harness.run(*TRAIN, *undisturbed_two.options))
    figures["runs"] += 1


@pytest.mark.rounds(2, 10)
@pytest.mark.fault(
    "such a signal to the group, or to the main process, while two processes start",
    "all end, with one line; the exit code is 128 + signal",
)
def test_a_signal_while_two_processes_start(harness, figures, seed):
    """Guards: exit code 2, and SIGUSR2 that killed a process which had no handler yet."""
    rng = random.Random(seed)
    number = signal.SIGUSR2 if seed == 0 else rng.choice(SIGNALS)
    command = harness.start(*TRAIN, *TWO, fresh=True)
    command.wait_for(lambda: bool(command.others()))
    time.sleep(rng.uniform(0, 3))
    others = command.others()
    command.send_group(number) if seed % 2 == 0 else command.send(number)
    outcome = command.end()
    assert outcome.code == 128 + number and len(outcome.errors) == 1, outcome.output
    assert "Traceback" not in outcome.output and all(not Path(f"/proc/{pid}").exists() for pid in others)
    figures["faults"] += 1


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_has_its_exit_code(harness, figures, number):
    command = harness.start(*TRAIN, *LONG)
    command.wait_for(command.has_logged)
    command.send(number)
    assert_saved(command, command.end(), number, figures)


def test_the_line_says_how_to_go_on(harness, figures):
    command = harness.start(*TRAIN, *LONG)
    command.wait_for(command.has_logged)
    command.send(signal.SIGTERM)
    outcome = command.end()
    assert_saved(command, outcome, signal.SIGTERM, figures)
    (line,) = outcome.errors
    assert "stopped and saved at step" in line and "lingpt train --config tiny.yaml" in line
    saved = newest_checkpoint(command.run)
    assert saved is not None
    step = json.loads((saved / "manifest.json").read_text())["step"]
    outcome = harness.run(*TRAIN, "--train.max_steps", str(step + 2))
    assert outcome.code == 0 and f"step {step} of {step + 2}" in outcome.output, outcome.output


@pytest.mark.parametrize("options", [(), TWO], ids=["one", "two"])
@pytest.mark.fault(
    "SIGTERM to the main process in a long validation",
    "it is left at the next batch, and comes first when the run is resumed",
)
def test_a_signal_in_a_long_validation(harness, figures, options):
    argv = (*TRAIN, *options, "--train.eval_tokens", "3200")
    command = harness.start(*argv, hook=SLOW_VALIDATION)
    batches = harness.folder / "validating-0"
    command.wait_for(batches.exists)
    command.send(signal.SIGTERM)
    done = batches.stat().st_size
    outcome = command.end()
    assert_saved(command, outcome, signal.SIGTERM, figures)
    assert "stopped and saved at step 3 of 12" in outcome.output
    assert batches.stat().st_size <= done + 2
    assert harness.run(*argv).code == 0
    validated = [line["step"] for line in read_metrics(command.run) if line["kind"] == "val"]
    assert validated == [3, 6, 9, 12]
    figures["runs"] += 1


def test_ctrl_c_to_two_processes_in_a_validation(harness, figures):
    """A terminal sends it to every process."""
    command = harness.start(*TRAIN, *TWO, hook=SLOW_VALIDATION)
    command.wait_for((harness.folder / "validating-0").exists)
    command.send_group(signal.SIGINT)
    assert_saved(command, command.end(), signal.SIGINT, figures)


def test_a_stop_sticks_when_it_comes_in_the_middle_of_a_call(harness):
    """On a GPU a step spends its time in one call; Python's handlers run after it, next to the agreement."""
    hook = """
import os, signal
from pathlib import Path
from lingpt.train.distributed.parallel import Parallel
exact = Parallel.all_reduce_sum_async
def all_reduce_sum_async(self, *values):
    found = exact(self, *values)  # what was requested so far is in there: the signal comes too late for it
    if not Path("sent").exists() and Path("go").exists():
        Path("sent").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return found
Parallel.all_reduce_sum_async = all_reduce_sum_async
"""
    command = harness.start(*TRAIN, *LONG, hook=hook)
    command.wait_for(command.has_logged)
    (harness.folder / "go").touch()
    outcome = command.end()
    assert outcome.code == 143 and "stopped and saved at step" in outcome.output, outcome.output


def test_further_signals_do_not_kill_the_save(harness):
    """A launcher passes on what the terminal sent already; a scheduler asks again and again."""
    hook = """
import os, signal, time
from lingpt.train import loop
exact = loop.Run.save
def save(self):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    exact(self)
    os.kill(os.getpid(), signal.SIGHUP)
loop.Run.save = save
"""
    command = harness.start(*TRAIN, *LONG, hook=hook)
    command.wait_for(command.has_logged)
    command.send(signal.SIGINT)
    outcome = command.end()
    assert outcome.code == 130 and "stopped and saved at step" in outcome.output, outcome.output
    assert newest_checkpoint(command.run) is not None


def test_a_terminal_that_goes_away(harness):
    """Lost ssh: SIGHUP, and every write to the terminal fails from then on."""
    ours, theirs = pty.openpty()
    hook = f"""
import fcntl, os, sys, termios
terminal = os.open({os.ttyname(theirs)!r}, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
# The streams were opened on a file, which can seek.
sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
"""
    command = harness.start(*TRAIN, *LONG, hook=hook)
    os.set_blocking(ours, False)

    def drained() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        return command.has_logged()

    command.wait_for(drained)
    os.close(theirs)
    os.close(ours)
    assert command.end().code == 128 + signal.SIGHUP
    saved = newest_checkpoint(command.run)
    assert saved is not None and json.loads((saved / "manifest.json").read_text())["step"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault(
    "a signal while the corpus is tokenised", "within two seconds, and nothing is left half-written"
)
def test_a_signal_while_tokenising(new_harness, tmp_path, figures, number):
    source = tmp_path / "long.jsonl"
    source.write_text(
        "\n".join(json.dumps({"text": f"number {i} is followed by {i * i} " * 200}) for i in range(5000))
    )
    data = {"data.source": str(source), "data.val_source": None, "data.cache_dir": str(tmp_path / "cache")}
    command = new_harness(tmp_path, **data).start(*TRAIN)
    tokens = tmp_path / "cache/tokens"
    command.wait_for(lambda: any(p.stat().st_size for p in tokens.glob(".*.partial/train.arrow")))
    command.send(number)
    began = time.monotonic()
    outcome = command.end()
    figures["faults"] += 1
    figures["most seconds to end"] = max(figures["most seconds to end"], round(time.monotonic() - began, 1))
    assert outcome.code == 128 + number and "nothing was left half-written" in outcome.output, outcome.output
    assert time.monotonic() - began < 30, "two seconds, but for a machine that is busy"
    assert "Traceback" not in outcome.output
    assert [p.name for p in tokens.glob("*") if p.suffix != ".lock"] == []
    assert not command.run.parent.exists()
