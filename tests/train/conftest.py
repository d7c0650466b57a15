"""A recipe that trains in half a second: a model of two small layers, short sequences of a small corpus."""

from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401  before the tests, as its objects are then not the collector's at each training
import pytest

from lingpt.data import DataConfig, prepare
from lingpt.models import ModelArgs
from lingpt.train import Recipe, TrainConfig, loop
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.planning.machine import choose_machine
from lingpt.train.runs.run_lock import RunLock

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "intermediate_size": 128, "vocab_size": 320}


def start(recipe: Recipe) -> loop.Run:
    """A run that has begun but not trained."""
    machine, dataset = choose_machine(recipe.train), prepare(recipe.data, progress=False)
    recipe.run_folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(recipe.run_folder)
    return loop.Run(recipe, machine, recipe.model.config(), dataset, Parallel(machine), lock)


@pytest.fixture
def make_recipe(corpus: DataConfig, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of 6 steps under a folder of the test's own; keywords override the training's."""

    def make(**overrides) -> Recipe:
        config = TrainConfig(
            **{
                "out_dir": str(tmp_path / "runs"),
                "max_steps": 6,
                "global_batch_size": 8,
                "micro_batch_size": 4,
                "warmup_steps": 2,
                "eval_interval": 3,
                "eval_tokens": 320,
                "save_interval": 3,
                "sample_tokens": 0,
                "accelerator": "cpu",
                "wandb": False,
                **overrides,
            }
        )
        return Recipe(ModelArgs(name="demo", attention="ours", **SMALL), corpus, config)

    return make


@pytest.fixture
def picture() -> None:
    """For a test that looks at the picture that a run ends with; it takes a second."""


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("lingpt.train.report.draw_curves", lambda *_, **__: None)
