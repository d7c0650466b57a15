"""Whether values that were read from JSON are what the code that uses them expects."""

from types import UnionType
from typing import Any


def what_is_wrong(value: Any, expected: Any, at: str = "", *, partial: bool = False) -> str | None:
    """The first part of `value` that is not as expected, as `data.train.tokens is 'many'`; None if all is.

    expected: a type or a union of types (with None for what may be missing); a function that says whether a
    value is right; a dict with what is expected of these keys (there may be others); or `[expected]`, for a
    list of any length. at: name of `value` itself. partial: everything may be missing.
    """
    if value is None and partial:
        return None
    if isinstance(expected, dict) and isinstance(value, dict):
        parts = [(f"{at}.{key}" if at else key, value.get(key), expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(value, list):
        parts = [(f"{at}[{i}]", item, expected[0]) for i, item in enumerate(value)]
    elif _is(value, expected):
        return None
    else:
        return f"{at or 'it'} is " + ("missing" if value is None else f"{value!r:.60}")
    wrong = (what_is_wrong(part, kind, name, partial=partial) for name, part, kind in parts)
    return next(filter(None, wrong), None)


def _is(value: Any, expected: Any) -> bool:
    if isinstance(expected, type | UnionType):
        return isinstance(value, expected)
    return callable(expected) and expected(value)


def is_positive_int(value: Any) -> bool:
    return type(value) is int and value > 0
