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


def run(folder: str, content: bytes, *words: str) -> tuple[int, str]:
    """`lingpt train --config x.yaml`, dry, in `folder`; the exit code and what stderr got."""
    before, err = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        Path("x.yaml").write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(["train", "--config", "x.yaml", "--train.dry_run", "true", *words])
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


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", LONG],
        ["train", "--train.out_dir", LONG],
        ["train", "--train.out_dir", f"{LONG}/runs"],
        ["train", "--train.init_from", LONG],
        ["train", "--train.resume", LONG],
        ["train", "--data.source", LONG],
        ["train", "--data.tokenizer", LONG],
        ["train", "--data.cache_dir", LONG],
        ["data", "--data.val_source", LONG],
        ["eval", "--config", LONG],
        ["eval", "--runs", LONG],
        ["study", "--config", LONG],
        ["study", "--name", LONG],
        ["curves", LONG],
        ["export", LONG, "out"],
        ["export", ".", LONG],
        ["generate", LONG],
        ["replay", LONG, "--step", "1"],
    ],
)
def test_a_name_that_no_file_can_have_is_a_line(tmp_path, monkeypatch, capsys, words):
    """Guards: a traceback of OSError, `File name too long`."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert is_plan_or_line(2, capsys.readouterr().err)
    assert not [path for path in Path().rglob("*") if path.is_file()]


BLANK = ["", " ", "\t\n"]
TEXTS_ANYWHERE = st.text(max_size=40) | st.sampled_from([*BLANK, LONG, "a/b", "..", "\0", "~", "é" * 200])
TEXT_KEYS = ["model.name", "train.name", "train.wandb_project", "train.resume"]
TEXT_KEYS += ["data.source", "data.tokenizer"]


@pytest.mark.fault("any text as a name or a path, in a file or as an argument", "a plan, or one line")
@examples(10)
@given(st.sampled_from(TEXT_KEYS), TEXTS_ANYWHERE, st.sampled_from(["file", "argument"]))
def test_any_text_is_a_plan_or_a_line(figures, key, text, where):
    figures["faults"] += 1
    group, name = key.split(".")
    given = {group: {name: text}} if where == "file" else {}
    words = [] if where == "file" else [f"--{key}={text}"]
    with tempfile.TemporaryDirectory() as folder:
        code, err = run(folder, yaml.safe_dump(given, allow_unicode=True).encode(), *words)
    assert is_plan_or_line(code, err), err
    assert code == 2 or text.strip(), "a blank name was taken"


@pytest.mark.fault("a recipe in any encoding", "a plan, or one line")
@examples(10)
@given(st.text(max_size=20), st.sampled_from(["utf-8", "latin-1", "utf-16", "utf-8-sig", "cp1252"]))
def test_a_recipe_is_utf_8(figures, name, encoding):
    """Guards: a wrong name that is recorded, from a file read in the locale's encoding."""
    figures["faults"] += 1
    text = yaml.safe_dump({"train": {"name": f"ä{name}", "max_steps": 1}}, allow_unicode=True)
    with tempfile.TemporaryDirectory() as folder:
        code, err = run(folder, text.encode(encoding, errors="replace"))
    assert is_plan_or_line(code, err), err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {seed: 1}\ntrain: {max_steps: 3}\n", "the key 'train' stands twice"),
        ("train:\n  seed: 1\n  seed: 2\n", "the key 'seed' stands twice"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{'bcdefghi'[i]}: &{'bcdefghi'[i]} [{','.join(['*' + 'abcdefghi'[i]] * 9)}]\n" for i in range(8)
        ), "its anchors make more than 100,000 values"),
        ("a: &a {x: 1}\n" + "".join(
            f"{'bcdefghi'[i]}: &{'bcdefghi'[i]} {{<<: [{','.join(['*' + 'abcdefghi'[i]] * 9)}]}}\n"
            for i in range(8)
        ), "its anchors make more than 100,000 values"),
        ("train: &a [*a]\n", "its anchors make more than 100,000 values"),
    ],
)  # fmt: skip
def test_a_file_that_says_two_things_or_too_many_is_a_line(tmp_path, text, line):
    """Guards: the last of two values, without a word; anchors that took over a minute."""
    code, err = run(str(tmp_path), text.encode())
    assert code == 2 and line in err and is_plan_or_line(code, err), err


def test_an_anchor_may_be_used(tmp_path):
    code, err = run(str(tmp_path), b"train: {max_steps: &n 3, save_interval: *n}\n")
    assert code == 0, err


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
