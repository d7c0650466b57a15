"""Parses a verb's arguments, with the parser's errors in one line; writes values as arguments."""

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any, Literal, get_args, get_origin

import jsonargparse
import yaml

from lingpt.common.errors import UserError, nearest

_NULLS = ("", "~", "null", "Null", "NULL")  # in YAML


class Parser(jsonargparse.ArgumentParser):
    """A parser that accepts `3e6` for an integer option in a file, as on the command line."""

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        return super().parse_string(_whole_numbers_in_file(self, cfg_str), *args, **kwargs)


def parse_arguments(
    verb: str,
    configure: Callable[[jsonargparse.ArgumentParser], None],
    words: Sequence[str],
    about: str = "",
    renamed: Mapping[str, str] | None = None,
) -> jsonargparse.Namespace:
    """Parses `words` as the arguments of `lingpt <verb>`; UserError if they are invalid.

    configure: adds the verb's options. about: what the verb does, for its `--help`. renamed: old name → new
    name of an option, for the error message.

    `options_given` of the result lists the options on the command line, even those set to their default.
    """
    parser = parser_of(verb, configure, about)
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            # Python decodes non-UTF-8 bytes in argv to lone surrogates, which cannot be encoded again.
            raise UserError(f"{word!r} is not UTF-8: convert it or, of a file, rename it") from error
    try:
        args = parser.parse_args(_config_first(_whole_numbers(parser, words)))
    except argparse.ArgumentError as error:
        raise UserError(_explain(parser, str(error), renamed or {})) from error
    _refuse_nulls(parser, args)
    _refuse_hidden_nulls(parser, args, words)
    args = parser.instantiate_classes(args)
    args.options_given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return args


@functools.lru_cache(maxsize=16)  # a study parses a recipe for each run; to build the parser takes as long
def parser_of(verb: str, configure: Callable[[jsonargparse.ArgumentParser], None], about: str) -> Parser:
    """The parser of `lingpt <verb>` (`parse_arguments`); the same one for the same arguments."""
    parser = Parser(prog=f"lingpt {verb}", description=about, exit_on_error=False, allow_abbrev=False)
    configure(parser)
    return parser


def as_word(value: Any) -> str:
    """A value as a command-line argument: YAML on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def _config_first(words: Sequence[str]) -> list[str]:
    """Moves each `--config X` to the front, keeping their order, so that other options override the files."""
    configs, others, rest = list[str](), list[str](), iter(words)
    for word in rest:
        if word == "--config":
            configs += [word, *islice(rest, 1)]
        else:
            (configs if word.startswith("--config=") else others).append(word)
    return configs + others


def _whole_numbers(parser: jsonargparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Writes out `3e9` for options that take an integer: the parser would read a float."""
    options = {option for action in _take_whole(parser) for option in action.option_strings}
    found = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = ("", "", word) if before in options else word.partition("=")
        if option in options or before in options:
            value = _written_out(value)
        found.append(option + equals + value)
    return found


def _take_whole(parser: jsonargparse.ArgumentParser) -> list[argparse.Action]:
    """The options that take an integer."""
    kinds = {action: getattr(action, "_typehint", None) for action in parser._actions if not action.nargs}
    return [action for action, kind in kinds.items() if int in (kind, *get_args(kind))]


def _written_out(value: str) -> str:
    """`3e6` and `3000000.0` as 3000000; anything else unchanged."""
    if not re.fullmatch(r"\d+(\.\d*|(\.\d*)?[eE]\+?\d\d?)", value):
        return value
    number = Decimal(value)
    return str(int(number)) if number == int(number) else value


def _whole_numbers_in_file(parser: jsonargparse.ArgumentParser, text: str) -> str:
    """The recipe's text with the numbers of integer options `_written_out`; the rest unchanged."""
    keys = {action.dest for action in _take_whole(parser)}
    try:
        found = [value for key, value in _values(text) if key in keys]
    except (yaml.YAMLError, RecursionError):  # the parser will report it
        return text
    for value in sorted(found, key=lambda node: node.start_mark.index, reverse=True):
        start, end = value.start_mark.index, value.end_mark.index
        if text[start:end] == value.value:  # neither quoted nor with an anchor
            text = text[:start] + _written_out(value.value) + text[end:]
    return text


def _values(text: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """(`train.max_tokens`, its value's node), for every key of every group in a recipe's text."""
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    for group, keys in tree.value if isinstance(tree, yaml.MappingNode) else ():
        for key, value in keys.value if isinstance(keys, yaml.MappingNode) else ():
            if isinstance(value, yaml.ScalarNode):
                yield f"{group.value}.{key.value}", value


def _explain(parser: jsonargparse.ArgumentParser, message: str, renamed: Mapping[str, str]) -> str:
    """The parser's error on one line; for an unknown key, with its new name or the nearest key."""
    line = " ".join(message.split())
    unknown = (
        re.search(r"Group '(?P<group>\S+)' does not accept nested key '(?P<key>\S+)'", line)
        or re.search(r"Key '(?P<key>\S+)' is not expected", line)
        or re.search(r"Unrecognized arguments: --(?P<option>[^\s=]+)", line)
    )
    if unknown is None:
        return _explain_value(parser, line)
    found = unknown.groupdict()
    key = found.get("option") or ".".join(filter(None, (found.get("group"), found["key"])))
    if key in renamed:
        return f"unknown key {key!r}: it is now called {renamed[key]!r}"
    keys = set(parser.get_defaults(skip_validation=True).keys()) - {"config"}
    hint = nearest(key, keys)
    if "option" in found:  # perhaps given as a flag; our switches take a value
        for action in parser._actions:
            kind = getattr(action, "_typehint", None)
            if bool in (kind, *get_args(kind)):
                hint = hint.replace(f"'{action.dest}'", f"'--{action.dest} true'")
    return f"unknown key {key!r}{hint}; `{parser.prog} --help` lists the keys"


def _explain_value(parser: jsonargparse.ArgumentParser, line: str) -> str:
    """The error about a value, with what the key takes in words instead of the parser's types."""
    options = {action.dest: action for action in parser._actions}
    if missing := re.search(r'Key "(\S+)" is required', line):
        option = options[missing[1]]
        name = option.option_strings[0] if option.option_strings else f"<{option.dest}>"
        return f"{parser.prog} needs {name}: {option.help}"
    if bare := re.fullmatch(r"argument --(\S+): expected one argument", line):
        takes = _words_for(getattr(options.get(bare[1]), "_typehint", None))
        return f"--{bare[1]} needs a value{f': {takes}' if takes else ''}"
    keys = [key for key in re.findall(r'[Pp]arser key "(\S+?)"', line) if key in options]
    if not keys:
        return line
    key, (_, *given) = keys[-1], line.rsplit(" value: ", 1)
    takes = _words_for(getattr(options[key], "_typehint", None))
    if takes is None:
        return f"--{key} takes a YAML file of its keys; or give them one by one, as --{key}.<key>"
    was = f" is {given[-1][:80]}; it" if given else ""
    return f"{key}{was} must be {takes}"


def _refuse_nulls(parser: jsonargparse.ArgumentParser, args: jsonargparse.Namespace) -> None:
    """Raises UserError for a null whose option takes none: the parser accepts null for any type."""
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        words = _words_for(kind) if type(None) not in get_args(kind) else None
        if words and action.default is not None and args.get(action.dest, action.default) is None:
            raise UserError(f"{action.dest} is null; it must be {words}")


def _refuse_hidden_nulls(
    parser: jsonargparse.ArgumentParser, args: jsonargparse.Namespace, words: Sequence[str]
) -> None:
    """Raises UserError for a word that YAML reads as null and that does not say so: `#1` is a comment."""
    keys = {option: action.dest for action in parser._actions for option in action.option_strings}
    given = dict[str, str]()
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = (before, "", word) if before in keys else word.partition("=")
        given[option] = value
    for option, value in given.items():
        if option in keys and args.get(keys[option], value) is None and value.strip() not in _NULLS:
            raise UserError(f"{option} {value!r} is a null in YAML: begin it with another character")


def _words_for(kind: Any) -> str | None:
    """The values of a type, in words; None if options are not of that type."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list[str]: "a list",
    }
    if get_origin(kind) is Literal:
        values = [str(value) for value in get_args(kind)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if kind in words:
        return words[kind]
    parts = [_words_for(part) for part in get_args(kind) if part is not type(None)]
    return " or ".join(filter(None, parts)) or None
