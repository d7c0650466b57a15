"""Where the time goes: a trace that Perfetto reads, a table of the parts, and a line while a run trains."""

import gzip
import json
import re

import pytest

from lingpt.train import train


@pytest.mark.slow
def test_a_run_is_profiled(make_recipe, capsys):
    """Every part is found in the steps after the first two.

    Guards: of one process the wait for the device was called communication.
    """
    folder = train(make_recipe(profile=True, max_steps=4))
    out = capsys.readouterr().out
    text = (folder / "profile/summary.txt").read_text()
    assert "CPU total" in out and "ui.perfetto.dev" in out
    with gzip.open(folder / "profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(e["name"] == "step" and e.get("cat") == "user_annotation" for e in events) == 2
    for part in ("step", "data", "forward", "loss", "backward", "waiting for the device", "optimizer"):
        assert re.search(rf"^ *{part}  ", text, re.MULTILINE), part
    assert "communication" not in text
    # Also without a terminal: how fast, how much memory, how long still.
    assert re.search(
        r"step 3/4 · loss [\d.]+ · validation [\d.]+ · [\d.]+ k? ?tokens/s · [\d.]+ GB · \d+ s left", out
    )


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
