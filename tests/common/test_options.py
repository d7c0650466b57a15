"""How a value, from YAML or a word of the command line, becomes that of an option."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from lingpt.common.arguments import ConfigFile, parse
from lingpt.common.errors import UserError
from lingpt.common.options import Option, check_options, declared


@pytest.mark.parametrize(
    ("kind", "limits", "values", "wrong"),
    [
        (int, {"least": 2, "most": 9}, {"2": 2, "9": 9, "3.0": 3, 4.0: 4}, ("1", "10", True, "true", "1e45")),
        (int, {}, {"1e9": 10**9, "-3": -3}, ("1.5e0", "1e-3", 3.5, "many", "1e45", "3e999", "1e999999", [3])),
        (float, {"above": 0, "below": 2}, {"1": 1.0, 1: 1.0, "1e-9": 1e-9}, ("0", "2", "nan", True, "x")),
        (float, {}, {"-3": -3.0}, ("inf", "-inf", "nan", "1e999", "")),
        (bool, {}, {"True": True, "FALSE": False, False: False}, ("yes", 1, "", None)),
        (str, {}, {"x": "x", "3": "3"}, ("", " \n", "a\0b", "\udce9", 3, None)),
        (str, {"blank": True}, {"": "", " ": " "}, ("a\0b",)),
        (str | None, {}, {"null": None, "~": None, None: None, "x": "x"}, ("",)),
        (str | int, {"least": 1}, {"3": 3, "x": "x"}, ("0",)),
        (Literal["a", "b"], {}, {"a": "a"}, ("c", 1, ["a"])),
        (tuple[int, ...], {"least": 1}, {"[1, 2]": (1, 2), ("3",): (3,)}, ("[1, 0]", "[1", "1", ["x"])),
        (list[int], {}, {"[1, 2]": [1, 2]}, ("[1.5]", "[" * 9999)),
        (dict[str, int], {}, {"{a: 1.0}": {"a": 1}}, ("{a: x}", "{a", "a", ["a"])),
        (dict, {}, {"{a: x}": {"a": "x"}}, ("x",)),
    ],
    ids=lambda part: str(part)[:40],  # one of the values has 9999 characters
)
def test_a_value_is_read_in_its_options_type(kind: Any, limits: dict, values: dict, wrong: tuple):
    option = declared("x", Annotated[kind, Option("help", **limits)], None)
    for value, expected in values.items():
        found = option.read("x", value)
        assert (found, type(found)) == (expected, type(expected))
    for value in wrong:
        with pytest.raises(UserError, match=r"^x is (.|\n){1,80}; it must be "):
            option.read("x", value)


@dataclass
class Group:
    rate: Annotated[float, Option("a rate", above=0)] = 0.5
    on: Annotated[bool, Option("a switch")] = False


@dataclass
class Options:
    names: Annotated[tuple[str, ...], Option("names", positional=True)] = ()
    on: Annotated[bool, Option("a switch")] = False
    count: Annotated[int | None, Option("a number")] = None
    text: Annotated[str, Option("text")] = "x"
    sizes: Annotated[list[int], Option("sizes")] = field(default_factory=lambda: [7])
    table: Annotated[dict, Option("a table")] = field(default_factory=dict)
    group: Group = field(default_factory=Group)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Options()),
        ("a b --on c", Options(names=("a", "b", "c"), on=True)),
        ("--names a --on b", Options(names=("a", "b"), on=True)),
        ("--on False a --count 3 b", Options(names=("a", "b"), count=3)),
        ("--names a b --group.on --count=-3", Options(("a", "b"), count=-3, group=Group(on=True))),
        ("--names=a --sizes 1 2 --count -3", Options(("a",), sizes=[1, 2], count=-3)),
        ("--sizes -1 -2 --text=a=b", Options(sizes=[-1, -2], text="a=b")),
        ("--count 1 --count 2 --group.rate 3", Options(count=2, group=Group(rate=3.0))),
        ("--config first --config=second --count 5", Options(count=5, text="2", group=Group(rate=2.0))),
        ("--count 5 --config second --config first", Options(count=5, text="1", group=Group(rate=1.0))),
        ("--config first --config third", Options(count=1, text="1", table={"a": {"b": 1}})),
    ],
)
def test_words_and_files_become_options(tmp_path, words, expected):
    """A switch is true alone; of files the later one wins, and the command line over all."""
    (tmp_path / "first").write_text("{count: 1, text: '1', group: {rate: 1}}")
    (tmp_path / "second").write_text("{count: 2, text: '2', group.rate: 2}")
    (tmp_path / "third").write_text("{table: {a: {b: 1}}, group: {rate: 0.5}}")
    assert parse("verb", Options, words.split(), ConfigFile(tmp_path.joinpath, "")) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--count", "--count needs a value"),
        ("--count --on", "--count needs a value"),
        ("--count=", "count is"),
        ("--text=", "text is"),
        ("--rate 3", "unknown key 'rate' (did you mean 'group.rate'?)"),
        ("--group 3", "unknown key 'group'"),
        ("--group.rate 0", "group.rate is 0; it must be a number above 0"),
        ("--config empty", "empty has no keys"),
        ("--config bad", "bad: group.rate is 0; it must be"),
        ("--config null", "null: 'group' is not a group of keys, as 'group.rate'"),
    ],
)
def test_words_that_are_no_options_are_a_line(tmp_path, words, line):
    for name, text in (("empty", ""), ("bad", "group: {rate: 0}"), ("null", "group: null")):
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        parse("verb", Options, words.split(), ConfigFile(tmp_path.joinpath, ""))
    assert line in str(error.value)


def test_an_objects_values_are_checked_by_their_whole_names():
    check_options(Options(), "train.")
    with pytest.raises(UserError, match=r"^train\.group\.rate is 0; it must be"):
        check_options(Options(group=Group(rate=0)), "train.")
