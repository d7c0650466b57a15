"""Guards the values of arguments: whole numbers as people write large ones."""

import pytest

from lingpt.cli import study, train
from lingpt.cli.main import parse
from lingpt.common.errors import UserError


@pytest.mark.parametrize("words", [["--tokens", "3e9"], ["--tokens=3E+9"], ["--tokens", "3.0e9"]])
def test_a_whole_number_with_an_exponent(words):
    """Guards: `TOKENS=3e9`, three billion, that was no whole number; of `study` and of `train` alike."""
    assert parse("study", study, words).tokens == 3_000_000_000
    named = [word.replace("--tokens", "--train.max_tokens") for word in words]
    assert parse("train", train, ["--config", "demo", *named]).train.max_tokens == 3_000_000_000


def test_what_is_not_whole_is_refused_and_text_is_left_alone():
    for value in ("1.5e0", "1e-3", "3e999"):
        with pytest.raises(UserError, match=f"tokens is {value}; it must be a whole number"):
            parse("study", study, ["--tokens", value])
    assert parse("study", study, ["--name", "1e3", "--minutes", "1e1"]).name == "1e3"
    args = parse("train", train, ["--train.name", "2e3", "--train.learning_rate", "1e-3"])
    assert args.train.name == "2e3" and args.train.learning_rate == 1e-3
