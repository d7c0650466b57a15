"""Options of recipes, attentions and commands, each declared once.

A field of a dataclass, or a keyword-only parameter of an attention's constructor, as

    warmup_steps: Annotated[int, Option("steps of linear warm-up", least=0)] = 100

is what `--help`, the command line (arguments.py), YAML files, range checks and resuming read.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from lingpt.common.errors import UserError, nearest

T = TypeVar("T")

RARE = "rarely set"  # the last heading of a `--help`
NULLS = ("null", "Null", "NULL", "~")  # in YAML
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "`key: value`"}


@dataclass(frozen=True)
class Option:
    """What an option is, and which values it takes.

    help: a sentence for `--help`. least, most: the range of a number, or of each in a list; above, below: a
    range without its ends. blank: text may be empty. may_change: a resumed run may have another value.
    heading: the heading of this and the next options in `--help`. positional: an argument without `--`.
    """

    help: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    blank: bool = False
    may_change: bool = False
    heading: str = ""
    positional: bool = False


@dataclass(frozen=True)
class Declared:
    """An option with its type and its default, which is `MISSING` if a value must be given."""

    kind: Any
    option: Option
    default: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        """The types that make up a union; else the type alone."""
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)

    @property
    def is_list(self) -> bool:
        """Whether it takes a list and nothing else."""
        return get_origin(self.kind) in (list, tuple)

    def read(self, key: str, value: Any) -> Any:
        """`value`, from YAML, Python or a word of the command line, in the option's type.

        UserError, naming `key`, for another type or a number out of range.
        """
        try:
            found = _read(self.parts, value)
            if self._in_range(found):
                return found
        except (ValueError, OverflowError, RecursionError, InvalidOperation, yaml.YAMLError):
            pass
        raise UserError(f"{key} is {_shown(value)[:80]}; it must be {self.expected}")

    def _in_range(self, value: Any) -> bool:
        option = self.option
        if isinstance(value, list | tuple):
            return all(map(self._in_range, value))
        if isinstance(value, str):
            # A path has no NUL; lone surrogates, which YAML can write, cannot be encoded.
            return b"\0" not in value.encode() and (option.blank or bool(value.strip()))
        if type(value) not in (int, float):
            return True
        return option.least <= value <= option.most and option.above < value < option.below

    @property
    def expected(self) -> str:
        """The values it takes, in words: `a whole number of at least 1 or auto`."""
        return self._in_words(self.parts)

    def _in_words(self, parts: Iterable[Any]) -> str:
        words = []
        for part in parts:
            if get_origin(part) is Literal:
                words.append(("one of " if len(get_args(part)) > 1 else "") + ", ".join(get_args(part)))
            elif get_origin(part) in (list, tuple):
                words.append(f"a list, each {self._in_words(get_args(part)[:1])}")
            elif part is not NoneType:
                words.append(_WORDS[get_origin(part) or part] + self._range(part))
        return " or ".join(words)

    def _range(self, kind: Any) -> str:
        option = self.option
        if kind is str:
            return "" if option.blank else " that is not blank"
        if kind not in (int, float):
            return ""
        if option.least > -math.inf and option.most < math.inf:
            return f" from {option.least:,} to {option.most:,}"
        bounds = {"of at least": option.least, "above": option.above}
        bounds |= {"at most": option.most, "below": option.below}
        found = [f"{word} {bound:,}" for word, bound in bounds.items() if abs(bound) < math.inf]
        return f" {' and '.join(found)}" if found else ""


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and not value.strip()):
        return json.dumps(value)
    return str(value)


def as_word(value: Any) -> str:
    """A value as a command-line argument: YAML on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def declared(name: str, annotation: Any, default: Any) -> Declared:
    """The option that an annotation declares. TypeError if it is not `Annotated[type, Option(…)]`."""
    kind, *options = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    if len(options) != 1 or not isinstance(options[0], Option):
        raise TypeError(f'{name} is declared otherwise than `{name}: Annotated[type, Option("help")] = …`')
    return Declared(kind, options[0], default)


@functools.cache
def options_of(cls: Any) -> Mapping[str, Declared]:
    """The options of a dataclass by name; those of a field that is a dataclass as `field.name`."""
    found: dict[str, Declared] = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if field.name in _groups(cls):
            group = options_of(hints[field.name])
            found |= {f"{field.name}.{key}": option for key, option in group.items()}
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = declared(field.name, hints[field.name], default)
    return found


def flatten(cls: Any, tree: Mapping[Any, Any]) -> dict[str, Any]:
    """`{"train": {"seed": 0}}` as `{"train.seed": 0}`, but for mappings that are an option of `cls`."""
    options, flat = options_of(cls), dict[str, Any]()
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in options and (value or key in _groups(cls)):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[str(key)] = value
    return flat


def read_values(cls: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `flatten` in their options' types. UserError for an unknown key or a wrong value."""
    options = options_of(cls)
    for key in flat:
        if key in _groups(cls):
            inside = next(name for name in options if name.startswith(f"{key}."))
            raise UserError(f"{key!r} is not a group of keys, as {inside!r}")
        if key not in options:
            raise UserError(f"unknown key {key!r}{nearest(key, options)}")
    return {key: options[key].read(key, value) for key, value in flat.items()}


def build(cls: Callable[..., T], values: Mapping[str, Any], prefix: str = "") -> T:
    """An object of the dataclass from the values of `read_values`."""
    groups = _groups(cls).items()
    arguments: dict[str, Any] = {name: build(kind, values, f"{prefix}{name}.") for name, kind in groups}
    for field in fields(cls):  # type: ignore[arg-type]
        if f"{prefix}{field.name}" in values:
            arguments[field.name] = values[f"{prefix}{field.name}"]
    return cls(**arguments)


def check_options(options: Any, prefix: str = "") -> None:
    """Raises UserError for a value of this dataclass object that has another type or is out of range."""
    for key, option in options_of(options.__class__).items():
        option.read(prefix + key, functools.reduce(getattr, key.split("."), options))


@functools.cache
def _groups(cls: Any) -> dict[str, type]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if is_dataclass(hints[field.name])}


def _read(parts: Iterable[Any], value: Any) -> Any:
    """`value` in the first of these types that takes it, text last; ValueError if none does."""
    for part in sorted(parts, key=lambda part: part is str):
        try:
            return _read_as(part, value)
        except (ValueError, OverflowError, InvalidOperation):
            continue
    raise ValueError(value)


def _read_as(kind: Any, value: Any) -> Any:
    origin, text = get_origin(kind), isinstance(value, str)
    if kind is Any:
        return value
    if kind is NoneType and (value is None or (text and value in NULLS)):
        return None
    if origin is Literal and text and value in get_args(kind):
        return value
    if kind is bool and (isinstance(value, bool) or (text and value.lower() in ("true", "false"))):
        return value if isinstance(value, bool) else value.lower() == "true"
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = Decimal(value)  # 3e6 and 3000000.0 are whole, too
        if kind is float and math.isfinite(number):
            return float(value)
        if kind is int and number.adjusted() < 40 and number == int(number):
            return int(number)
    if origin in (list, tuple):
        items = yaml.safe_load(value) if text and value.startswith("[") else value
        if isinstance(items, list | tuple):
            return origin(_read(get_args(kind)[:1], item) for item in items)
    if (origin or kind) is dict:
        found = yaml.safe_load(value) if text and value.startswith("{") else value
        if isinstance(found, dict):
            return {key: _read(get_args(kind)[1:] or (Any,), item) for key, item in found.items()}
    if kind is str and text:
        return value
    raise ValueError(value)
