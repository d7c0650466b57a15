"""A command's arguments: `--key value` and YAML files, for the options of a dataclass (options.py)."""

import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lingpt.common.errors import UserError, nearest
from lingpt.common.files import read_yaml
from lingpt.common.options import RARE, Declared, Option, as_word, build, flatten, options_of, read_values

T = TypeVar("T")

CONFIG = Declared(str, Option("a YAML file"), "")  # may be given more than once


class ConfigFile(NamedTuple):
    """`--config`: how its file is found, and a sentence for `--help`."""

    find: Callable[[str], Path]
    help: str


class Layer(NamedTuple):
    """The values of one file, or of the command line, whose `file` is None. Later layers override."""

    file: Path | None
    values: dict[str, Any]


def parse(verb: str, cls: Callable[..., T], words: Sequence[str], config: ConfigFile | None = None) -> T:
    """An object of the dataclass `cls` from the arguments of `lingpt <verb>`; UserError if they are invalid.

    The docstring of `cls` says in `--help` what the verb does.
    """
    values: dict[str, Any] = {}
    for layer in read_layers(verb, cls, words, cls.__doc__ or "", config):
        values |= layer.values
    for key, declared in options_of(cls).items():
        if declared.default is MISSING and key not in values:
            name = f"<{key}>" if declared.option.positional else f"--{key}"
            raise UserError(f"lingpt {verb} needs {name}: {declared.option.help}")
    return build(cls, values)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """The arguments that `parse` reads: `{"steps": 500, "widths": [64]}` → `--steps 500 --widths 64`; None is
    left out."""
    lists = {key: value if isinstance(value, list | tuple) else [value] for key, value in options.items()}
    given = {key: values for key, values in lists.items() if values != [None]}
    return [word for key, values in given.items() for word in (f"--{key}", *map(as_word, values))]


def read_layers(
    verb: str,
    cls: Any,
    words: Sequence[str],
    about: str,
    config: ConfigFile | None = None,
    shown: str | tuple[str, ...] = "",
) -> list[Layer]:
    """The files of `--config`, in their order, then the command line, wherever `--config` stands on it.

    shown: `--help` lists only keys that begin so. Raises SystemExit after `--help`.
    """
    for word in words:
        if word in ("-h", "--help"):
            print(help_text(verb, cls, about, config, shown))
            raise SystemExit(0)
        try:
            word.encode()
        except UnicodeEncodeError as error:
            # Python decodes non-UTF-8 bytes in argv to lone surrogates, which cannot be encoded again.
            raise UserError(f"{word!r} is not UTF-8: convert it or, of a file, rename it") from error
    options = {**options_of(cls), "config": CONFIG} if config else options_of(cls)
    given = _split(verb, options, words)
    layers = [_file_layer(cls, config.find(name)) for name in given.pop("config", [])] if config else []
    return [*layers, Layer(None, read_values(cls, given))]


def _file_layer(cls: Any, path: Path) -> Layer:
    """The values of a YAML file; UserError, naming the file, if they are none of `cls`."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} has no keys such as {', '.join(list(options_of(cls))[:3])}")
    try:
        return Layer(path, read_values(cls, flatten(cls, tree)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _split(verb: str, options: Mapping[str, Declared], words: Sequence[str]) -> dict[str, Any]:
    """The values of the options, each a word, a list of words, or True; of CONFIG all of them, in a list."""
    given, rest = dict[str, Any](), deque(words)
    positional = [key for key, declared in options.items() if declared.option.positional]
    while rest:
        key, equals, value = rest[0].partition("=")
        if not key.startswith("--"):
            if not positional:
                raise UserError(f"{rest[0]!r} belongs to no option; `lingpt {verb} --help` lists them")
            if options[positional[0]].is_list:
                given[positional[0]] = given.get(positional[0], []) + _values(rest)
            else:
                given[positional.pop(0)] = rest.popleft()
            continue
        rest.popleft()
        name = key.removeprefix("--")
        if name not in options:
            elsewhere = [o for o in options if o.endswith("." + name.rpartition(".")[2])]  # in another group
            hint = nearest(name, elsewhere or options)
            raise UserError(f"unknown key {name!r}{hint}; `lingpt {verb} --help` lists them")
        declared = options[name]
        if equals:
            found: Any = [value] if declared.is_list else value
        else:
            found = _value(key, declared, rest, bool(positional))
        given[name] = [*given.get(name, []), found] if declared is CONFIG else found
        if name in positional and not declared.is_list:
            positional.remove(name)
    return given


def _value(key: str, declared: Declared, rest: deque[str], positional: bool) -> Any:
    """Takes the words after `--key` that are its value.

    positional: whether the word after a switch, which is true alone, may be an argument without a key.
    """
    if declared.is_list:
        return _values(rest)
    found = bool(rest) and not rest[0].startswith("--")
    if declared.kind is bool and (not found or (positional and rest[0].lower() not in ("true", "false"))):
        return True
    if not found:
        raise UserError(f"{key} needs a value: {declared.expected}")
    return rest.popleft()


def _values(rest: deque[str]) -> list[str]:
    """Takes the words up to the next option."""
    found = []
    while rest and not rest[0].startswith("--"):
        found.append(rest.popleft())
    return found


def help_text(
    verb: str, cls: Any, about: str, config: ConfigFile | None, shown: str | tuple[str, ...] = ""
) -> str:
    """What `lingpt <verb> --help` prints: options under their headings, the rarely set ones last; then the
    keys of the file that the verb takes, those of the dataclass `cls.FILE` if there is one."""
    places, sections = "", dict[str, list[str]]()
    if config:
        sections["options"] = [_entry("--config", config.help)]
    heading = last_group = ""
    for key, declared in options_of(cls).items():
        if not key.startswith(shown):
            continue
        group, name = key.rpartition(".")[0], f"--{key}"
        heading = declared.option.heading or (heading if group == last_group else group)
        last_group = group
        if declared.option.positional:
            name = f"[{key} …]" if declared.is_list else f"<{key}>"
            places += f" {name}"
        sections.setdefault(heading or "options", []).append(_entry(name, _about(declared)))
    if RARE in sections:
        sections[RARE] = sections.pop(RARE)
    if file := getattr(cls, "FILE", None):
        keys = options_of(file).items()
        sections["keys of the file"] = [_entry(key, _about(declared)) for key, declared in keys]
    lines = [f"usage: lingpt {verb}{places} [--option value …]", "", _filled(" ".join(about.split()))]
    for heading, entries in sections.items():
        lines += ["", f"{heading}:", *entries]
    return "\n".join(lines)


def _about(declared: Declared) -> str:
    """An option's help, with its numbers' range or its words, and its default, which the help may name."""
    text, _, named = declared.option.help.rstrip(".").partition(" (default: ")
    notes, default = list[str](), declared.default
    if set(declared.parts) & {int, float} or "one of" in declared.expected:
        notes.append(declared.expected)
    if isinstance(default, list | tuple):
        default = " ".join(map(as_word, default)) or None
    if default not in (None, MISSING, "", {}):
        notes.append(f"default: {as_word(default)}")
    if named:
        notes.append(f"default: {named.removesuffix(')')}")
    return text + (f" ({'; '.join(notes)})" if notes else "")


def _entry(name: str, text: str) -> str:
    filled = _filled(text, " " * 28)
    return f"  {name:<25} {filled.lstrip()}" if len(name) <= 25 else f"  {name}\n{filled}"


def _filled(text: str, indent: str = "") -> str:
    width = min(shutil.get_terminal_size().columns, 110)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
