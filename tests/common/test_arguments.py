"""Guards the values of arguments: whole numbers as people write large ones."""

import pytest

from lingpt.cli import export, replay, study, train
from lingpt.cli.main import parse
from lingpt.common.arguments import help_text
from lingpt.common.errors import UserError
from lingpt.train.recipe import parse_recipe


@pytest.mark.parametrize("words", [["--tokens", "3e9"], ["--tokens=3E+9"], ["--tokens", "3.0e9"]])
def test_a_whole_number_with_an_exponent(words):
    """Guards: `TOKENS=3e9`, three billion, that was no whole number; of `study` and of `train` alike."""
    assert parse("study", study, words).tokens == 3_000_000_000
    named = [word.replace("--tokens", "--train.max_tokens") for word in words]
    assert parse("train", train, ["--config", "demo", *named]).train.max_tokens == 3_000_000_000


def test_a_whole_number_in_a_file(tmp_path):
    """Guards: `max_tokens: 3e6` in a recipe, which YAML reads as text or as 3000000.0, and the command line
    as a number. What else stands in the file stays as it is."""
    recipe = tmp_path / "mine.yaml"
    for value in ("3e6", "3.0e+6", "3000000.0", "3E6", "3000000"):
        recipe.write_text(
            f"train:  # mine: 3e6\n  name: '2e3'\n  max_tokens: {value} # so many\n  devices: 2.0\n"
            "  learning_rate: 1e-3\n  grad_clip: 2e0\nmodel: {n_layer: 3.0}\ndata: {vocab_size: 1e3}\n"
        )
        args = parse("train", train, ["--config", str(recipe)])
        train_, numbers = args.train, (args.train.max_tokens, args.model.n_layer, args.data.vocab_size)
        assert numbers == (3_000_000, 3, 1000) and {type(number) for number in numbers} == {int}
        assert (train_.name, train_.devices, train_.learning_rate) == ("2e3", 2, 1e-3)
        assert train_.grad_clip == 2.0 and type(train_.grad_clip) is float
        assert parse_recipe(["--config", str(recipe)]).train.max_tokens == 3_000_000
    assert parse("train", train, ["--train.max_tokens", "3000000.0"]).train.max_tokens == 3_000_000


def test_numbers_are_whole_only_where_an_option_is():
    assert parse("study", study, ["--name", "1e3", "--minutes", "1e1"]).name == "1e3"
    args = parse("train", train, ["--train.name", "2e3", "--train.learning_rate", "1e-3"])
    assert args.train.name == "2e3" and args.train.learning_rate == 1e-3


@pytest.mark.parametrize("name", ["#1-seed0", "&a-seed0", "[a", "2e3", "true"])
def test_text_is_no_yaml(name):
    """Guards: a row `#1` of a study, whose runs were trained into a folder of another name."""
    for words in ([f"--train.name={name}"], ["--train.name", name]):
        assert parse("train", train, words).train.name == name
    for null in ("null", "~"):
        assert parse("train", train, [f"--train.name={name}", f"--train.name={null}"]).train.name is None
    assert parse("train", train, [f"--data.source={name}"]).data.source == name


def test_an_argument_without_a_key_may_be_given_by_it():
    """Guards: `lingpt export --model runs/a out`, which took `out` for the model and asked for <out>."""
    for words in (["--model", "a", "b"], ["--out=b", "a"], ["a", "--out", "b"], ["a", "b"]):
        options = parse("export", export, words)
        assert (options.model, options.out) == ("a", "b")
    with pytest.raises(UserError, match="'c' belongs to no option"):
        parse("export", export, ["--model", "a", "b", "c"])


def test_a_studys_help_has_the_keys_of_its_file():
    """Guards: keys that only the source named."""
    text = help_text("study", study.Options, "", None)
    options, keys = text.split("\nkeys of the file:\n")
    assert "  learning_rates " in keys and "  --learning_rates" not in options and "{}" not in keys
    assert "keys of the file" not in help_text("export", export.Options, "", None)


def test_a_range_is_what_the_verb_takes():
    """Guards: `lingpt replay --help`, which said that --samples is at least 0; the verb refused 0."""
    with pytest.raises(UserError, match="samples is 0; it must be a whole number of at least 1"):
        parse("replay", replay, ["runs/a", "--step", "1", "--samples", "0"])
