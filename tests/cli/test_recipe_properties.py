"""Recipes of any values: a plan, or one line; nothing else, and nothing left behind."""

import contextlib
import io
import os
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lingpt.cli.main import main
from lingpt.data import DataConfig
from lingpt.models import ATTENTIONS, ModelArgs
from lingpt.tests.properties import examples
from lingpt.train import TrainConfig

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 8, 64, 256, -1, 10**6, 10**12, 10**30, 0.0, 0.5, 1.0, -0.5, 1e-300, 1e300]
)
TEXTS = ("", "x", "../x", "auto", "é\u2028", "embedded", "demo")
STRANGE = st.sampled_from([None, True, *TEXTS, ["x"], [1], {}, {"a": 1}, float("inf"), float("nan")])
ATTENTION = st.sampled_from([*ATTENTIONS]) | st.lists(st.sampled_from([*ATTENTIONS]), max_size=5)
VALUES = NUMBERS | STRANGE | ATTENTION
KEYS = {"model": ModelArgs, "data": DataConfig, "train": TrainConfig}
SAFE = ("cache_dir", "out_dir", "dry_run")  # would leave the test's folder, or train


def group(kind: type) -> st.SearchStrategy:
    names = [field.name for field in fields(kind) if field.name not in SAFE]
    return st.dictionaries(st.sampled_from(names) | st.just("unknown"), VALUES, max_size=4)


RECIPES = st.fixed_dictionaries({}, optional={name: group(kind) for name, kind in KEYS.items()})


def run(folder: str, content: bytes) -> tuple[int, str]:
    """`lingpt train --config x.yaml`, dry, in `folder`; the exit code and what stderr got."""
    before, err = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        Path("x.yaml").write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(["train", "--config", "x.yaml", "--train.dry_run", "true"])
        assert sorted(os.listdir()) == ["x.yaml"], "a dry run left something"
    finally:
        os.chdir(before)
    return code, err.getvalue()


def is_plan_or_line(code: int, err: str) -> bool:
    return code == 0 or (code == 2 and err.startswith("lingpt: ") and err.strip().count("\n") == 0)


@pytest.mark.fault("a recipe of any keys and values", "a plan, or one line")
@examples(10)
@given(RECIPES)
def test_any_recipe_is_a_plan_or_a_line(figures, recipe):
    figures["faults"] += 1
    recipe.setdefault("train", {}).setdefault("max_steps", 3)
    with tempfile.TemporaryDirectory() as folder:
        code, err = run(folder, yaml.safe_dump(recipe, allow_unicode=True).encode())
    assert is_plan_or_line(code, err), err


@pytest.mark.parametrize(
    "key", ["model.name", "data.seq_len", "train.seed", "train.devices", "train.keep_best"]
)
def test_a_null_where_a_value_belongs_is_a_line(tmp_path, key):
    """Guards: a traceback, as the parser takes a null for a value of any type."""
    group, name = key.split(".")
    code, err = run(str(tmp_path), yaml.safe_dump({group: {name: None}}).encode())
    assert code == 2 and err.startswith(f"lingpt: x.yaml: {key} is null; it must be "), err


@pytest.mark.fault("any bytes as a recipe", "one line")
@examples(10)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_as_a_recipe_are_a_line(figures, content):
    """(Or, if they happen to be YAML without keys, no recipe.)"""
    figures["faults"] += 1
    with tempfile.TemporaryDirectory() as folder:
        code, err = run(folder, content)
    assert is_plan_or_line(code, err), err


@pytest.mark.parametrize("text", ["[" * 5000, "a: " * 3000, "2020-13-45: 1", "? [1]\n: 2", "&a [*a]", "'"])
def test_yaml_that_no_reader_likes_is_a_line(tmp_path, text):
    code, err = run(str(tmp_path), text.encode())
    assert code == 2 and is_plan_or_line(code, err), err
