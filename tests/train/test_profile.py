"""Where the time goes: a trace that Perfetto reads, a table of the parts, and a line while a run trains."""

import gzip
import json
import re

import pytest

from lingpt.train import train
from lingpt.train.profile import summary


def event(name: str, ts: float, dur: float, cat: str = "user_annotation", **args) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


def row(text: str, name: str) -> list[float]:
    """The numbers in the table's row of that name."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return [float(number) for number in re.findall(r"[\d.]+", line.removeprefix(name))]


def test_a_run_is_profiled(make_recipe, capsys):
    """Every part is found in the steps after the first two, and what is left is the host's.

    Guards: of one process the wait for the device was called communication.
    """
    folder = train(make_recipe(profile=True, max_steps=5))
    out = capsys.readouterr().out
    text = (folder / "profile/summary.txt").read_text()
    assert text in out and "ui.perfetto.dev" in out
    with gzip.open(folder / "profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(e["name"] == "step" and e.get("cat") == "user_annotation" for e in events) == 2
    parts = ["data", "forward", "loss", "backward", "waiting for the device", "optimizer", "host, the rest"]
    assert "communication" not in text
    shares = {part: row(text, part)[1] for part in parts}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert shares["forward"] > 1 and shares["loss"] > 0 and shares["backward"] > 1
    # Also without a terminal: how fast, how much memory, how long still.
    assert re.search(
        r"step 3/5 · loss [\d.]+ · validation [\d.]+ · [\d.]+ k tokens/s · [\d.]+ GB · \d+ s left", out
    )


def test_a_kernel_belongs_to_the_part_that_launched_it():
    """Also where it runs later, or autograd's thread launched it; the loss is no part of the forward pass."""
    events = [
        event("step", 0, 1000),
        event("forward", 100, 200),
        event("loss", 200, 90),
        event("backward", 400, 300),
        event("launch", 150, 5, "cuda_runtime", correlation=1),
        event("launch", 250, 5, "cuda_runtime", correlation=2),
        event("launch", 500, 5, "cuda_driver", correlation=3),
        event("launch", 295, 5, "cuda_runtime", correlation=4),
        event("launch", 350, 5, "cuda_runtime", correlation=5),
        event("launch", 600, 5, "cuda_runtime", correlation=6),
        event("matmul", 300, 100, "kernel", correlation=1),
        event("softmax", 400, 50, "kernel", correlation=2),
        event("matmul", 800, 200, "kernel", correlation=3),
        event("norm", 500, 10, "kernel", correlation=4),
        event("copy", 600, 20, "gpu_memcpy", correlation=5),
        event("ncclReduceScatter", 850, 100, "kernel", correlation=6),
    ]
    text = summary(events)
    assert row(text, "forward") == [0.11, 11.0, 0.11, 11.0]
    assert row(text, "loss") == [0.09, 9.0, 0.05, 5.0]
    assert row(text, "backward") == [0.3, 30.0, 0.2, 20.0]
    assert row(text, "communication")[2:] == [0.1, 10.0] and "waiting" not in text
    assert row(text, "other kernels") == [0.02, 2.0]
    assert row(text, "device idle") == [0.62, 62.0]  # NCCL's ran beside another
    assert re.search(r"0\.30  matmul", text)


def test_what_is_between_the_steps_is_no_part_of_them():
    """Guards: a validation between the traced steps made `forward -157.6%` of them."""
    events = [
        event("step", 0, 1000),
        event("forward", 100, 200),
        event("loss", 200, 90),
        event("launch", 150, 5, "cuda_runtime", correlation=1),
        event("matmul", 1010, 100, "kernel", correlation=1),  # late, and still the step's
        event("loss", 1200, 9000),
        event("launch", 1300, 5, "cuda_runtime", correlation=2),
        event("softmax", 1400, 5000, "kernel", correlation=2),
        event("copy", 1500, 5000, "gpu_memcpy"),
        event("step", 11000, 1000),
    ]
    text = summary(events)
    assert row(text, "forward") == [0.06, 5.5, 0.05, 5.0] and row(text, "loss")[:2] == [0.04, 4.5]
    assert row(text, "other kernels") == [0.0, 0.0] and row(text, "device idle") == [0.95, 95.0]
    assert "softmax" not in text


def test_a_profile_that_cannot_be_written_does_not_end_the_run(make_recipe, capsys):
    """Guards: rank zero ended with it, and left the others waiting."""
    recipe = make_recipe(profile=True, max_steps=5)
    recipe.run_folder.mkdir(parents=True)
    (recipe.run_folder / "profile").write_text("in the way")
    train(recipe)
    out = capsys.readouterr().out
    assert "profile: cannot write to" in out and "training goes on" in out and "step 5/5" in out


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_is_too_short_says_so(make_recipe, capsys, steps):
    """Guards: nothing at all was said, or where an empty trace lies."""
    folder = train(make_recipe(profile=True, max_steps=steps))
    out = capsys.readouterr().out
    assert f"the first 2 steps of a start are left out, and this one had {steps}" in out
    assert "ui.perfetto.dev" not in out and not (folder / "profile").exists()


def test_without_a_step_it_says_so():
    assert "no step" in summary([event("forward", 0, 10)])
