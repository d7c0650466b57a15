"""Two processes of a deterministic run, on a GPU; and what is said of runs that differ."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from lingpt.tests.faults.on_gpu import deterministic_jobs, first_difference, in_turn, table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["ours", "softmax"])
def test_two_deterministic_processes_have_the_same_bits(tmp_path, attention):
    """Whatever kernel is the faster one to each: nothing that is chosen by timing changes a bit."""
    _, *deterministic = deterministic_jobs(attention, "pythia-14m", batch=64)
    one, two = in_turn(deterministic, tmp_path)
    assert first_difference(one, two) is None


def test_what_differs_first_is_named():
    run = {"names": ["a", "b"], "losses": [3.0, 2.0], "gradients": [[1, 2]], "weights": [5, 6]}
    assert first_difference(run, deepcopy(run)) is None
    assert first_difference(run, {**run, "losses": [3.0, 2.5]}) == "step 2: loss 2.0 and 2.5"
    assert first_difference(run, {**run, "gradients": [[1, 3]]}) == "step 1: 1 of 2 gradients, from b on"
    assert first_difference(run, {**run, "weights": [4, 6]}) == "the weights at the end: a"


def test_the_page_shows_what_was_measured():
    record = DOCS / "results/reliability/gpu.json"
    page = (DOCS / "reliability.md").read_text()
    assert not record.exists() or table(json.loads(record.read_text())) in page
