"""A recipe that trains in a second, the harness, and what the recipe gives where nothing happens to it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lingpt.data import DataConfig
from lingpt.tests.faults.harness import PIECES, STEPS, TRAIN, TWO, Harness, last_state, losses, merged
from lingpt.tests.forked import shim


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.rounds(few, many)`: as many seeds, in `make test` and in `make soak`."""
    if rounds := metafunc.definition.get_closest_marker("rounds"):
        few, many = rounds.args
        first = int(os.environ.get("LINGPT_SOAK_SEED", 0))
        count = many if os.environ.get("LINGPT_SOAK") else few
        metafunc.parametrize("seed", range(first, first + count), ids=lambda seed: f"seed{seed}")


@dataclass
class Undisturbed:
    """What the recipe's run comes to where nothing happens."""

    losses: dict[int, tuple[float, float]]
    state: dict[str, str]
    calls: int
    options: tuple[str, ...]


@pytest.fixture(scope="session")
def new_harness(corpus: DataConfig, tmp_path_factory) -> Iterator[Callable[..., Harness]]:
    """`new_harness(**{"train.max_steps": 3})`: a harness in a folder of its own."""
    with contextlib.ExitStack() as stack:

        def make(folder: Path | None = None, **overrides: Any) -> Harness:
            recipe = {
                "model": {"name": "demo", "n_layer": 2, "n_embd": 64},
                "data": {
                    name: getattr(corpus, name)
                    for name in ("source", "val_source", "seq_len", "cache_dir", "num_workers")
                },
                "train": {
                    "name": "run", "max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4,
                    "warmup_steps": 2, "eval_interval": 3, "eval_tokens": 320, "save_interval": 3,
                    "sample_tokens": 0, "log_interval": 1, "wandb": False, "accelerator": "cpu",
                },
            }  # fmt: skip
            harness = Harness(folder or tmp_path_factory.mktemp("faults"), merged(recipe, overrides))
            stack.callback(harness.close)
            return harness

        yield make


@pytest.fixture
def harness(new_harness, tmp_path: Path) -> Harness:
    return new_harness(tmp_path)


@pytest.fixture(scope="session")
def shimmed() -> None:
    if shim() is None:
        pytest.skip("no C compiler for the shim that fails calls")


@pytest.fixture(scope="session")
def undisturbed(new_harness) -> Undisturbed:
    return _undisturbed(new_harness())


@pytest.fixture(scope="session", params=[TWO, PIECES], ids=["sequences", "pieces"])
def undisturbed_two(new_harness, request: pytest.FixtureRequest) -> Undisturbed:
    """Of two processes, which have sequences of their own, or pieces of the same."""
    return _undisturbed(new_harness(), *request.param)


def _undisturbed(harness: Harness, *options: str) -> Undisturbed:
    command = harness.start(*TRAIN, *options)
    outcome = command.end()
    assert outcome.code == 0, outcome.output
    return Undisturbed(losses(command.run), last_state(command.run), command.calls, options)
