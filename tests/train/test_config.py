"""What a recipe may say, and the line that answers what it may not."""

import dataclasses

import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig
from lingpt.models import ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.config import MAY_CHANGE, check, differences, flatten


def recipe(**train) -> Recipe:
    return Recipe(ModelArgs(), DataConfig(), TrainConfig(**{"max_steps": 10, **train}))


def test_steps_are_whole_and_cover_the_tokens():
    assert recipe(max_steps=None, max_tokens=3_000_000_000, global_batch_size=256).total_steps == 45777
    assert recipe(max_steps=7, max_tokens=10**12).total_steps == 7
    with pytest.raises(UserError, match=r"max_steps or --train.max_tokens"):
        _ = recipe(max_steps=None).total_steps


@pytest.mark.parametrize(
    ("train", "world_size", "message"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 4}, 1, r"micro_batch_size 1, 2, 5, 10 would divide"),
        (
            {"global_batch_size": 12, "micro_batch_size": 4},
            2,
            r"4 × 2 devices: --train.micro_batch_size 1, 2, 3, 6",
        ),
        ({"global_batch_size": 10, "micro_batch_size": 1}, 4, r"multiple of 4"),
        ({"micro_batch_size": 0}, 1, "at least 1"),
        ({"learning_rate": 0.0}, 1, "above 0"),
        ({"max_steps": 0}, 1, "no step to train"),
        ({"eval_tokens": 100}, 1, "less than one sequence"),
    ],
)
def test_numbers_that_make_no_run(train, world_size, message):
    """Nothing is floored in silence; the message names what would do."""
    with pytest.raises(UserError, match=message):
        check(recipe(**train), world_size)


def test_names():
    assert recipe().run_name == "demo-ours"
    hybrid = Recipe(ModelArgs(attention=["ours", "ours", "softmax", "ours"]), DataConfig(), TrainConfig())
    assert hybrid.run_name == "demo-ours+softmax"
    assert recipe(name="mine").run_folder.as_posix() == "runs/mine"


def test_differences_name_what_must_stay_and_pass_over_what_may_change():
    old = recipe().to_dict()
    assert differences(old, recipe(max_steps=99, devices=2, save_interval=1, name="x").to_dict()) == []
    assert differences(old, recipe(learning_rate=0.5).to_dict()) == ["train.learning_rate: 0.001 → 0.5"]


def test_a_run_from_before_an_option_existed_had_its_default():
    old = recipe().to_dict()
    del old["model"]["output_gate"]
    assert differences(old, recipe().to_dict()) == []
    changed = recipe().to_dict()
    changed["model"]["output_gate"] = True
    assert differences(old, changed) == ["model.output_gate: False → True"]


def test_what_may_change_exists():
    """A key renamed in the dataclasses must not stay allowed under its old name."""
    assert flatten(recipe().to_dict()).keys() >= MAY_CHANGE


def test_every_field_is_documented():
    """`lingpt train --help` takes its lines from the docstring."""
    for field in dataclasses.fields(TrainConfig):
        assert f"\n        {field.name}: " in TrainConfig.__doc__, field.name
