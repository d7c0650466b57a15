"""A recipe that trains in a second: a small corpus of its own, the demo model, short sequences."""

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lingpt.data import DataConfig
from lingpt.models import ModelArgs
from lingpt.train import Recipe, TrainConfig

WORDS = (
    "the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "home", "and", "sang", "of", "rain",
)  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """400 short documents of random words, and a token cache that all tests share."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    rows = [json.dumps({"text": " ".join(rng.choices(WORDS, k=80))}) for _ in range(400)]
    (folder / "train.jsonl").write_text("\n".join(rows[:360]))
    (folder / "val.jsonl").write_text("\n".join(rows[360:]))
    return DataConfig(
        source=str(folder / "train.jsonl"),
        val_source=str(folder / "val.jsonl"),
        seq_len=32,
        num_workers=1,
        cache_dir=str(folder / "cache"),
    )


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
        return Recipe(ModelArgs(name="demo", attention="ours"), corpus, config)

    return make


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the tests run in the background and were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
