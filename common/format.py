"""Formats numbers for people."""

from collections.abc import Iterable


def counted(number: int, what: str, ending: str = "s") -> str:
    """`1 device`, `2 devices`."""
    return f"{number} {what}{'' if number == 1 else ending}"


def join_distinct(values: Iterable[str | int | None]) -> str:
    """`512, 1,024 and 2,048`: the distinct values; numbers with separators."""
    shown = (f"{value:,}" if isinstance(value, int) else str(value) for value in values if value)
    words = list(dict.fromkeys(shown))
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def with_error(value: float, error: float | None, spec: str, error_spec: str = "") -> str:
    """`4.512 ± 0.031`, or `+0.044 ± 0.003` for the spec `+.3f`; the value alone if the error is None.

    spec: the format of both; `error_spec` that of the error if it is another.
    """
    text = f"{value:{spec}}".replace("-", "−")
    return text if error is None else f"{text} ± {error:{error_spec or spec.removeprefix('+')}}"


def duration(seconds: float, rough: bool = False) -> str:
    """`45 s`, `3.2 min`, `5.1 h`, `12.0 days`, `3.4 years`. rough: to one digit, `3 min`, `10 days`."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{one_digit(seconds / size):.0f} {unit}" if rough else f"{seconds / size:.1f} {unit}"
    return f"{one_digit(seconds) if rough else seconds:.0f} s"


def one_digit(number: float) -> float:
    """`number` rounded to its first digit: of an estimate that says no more."""
    return float(f"{number:.0e}")


def scaled_count(number: float) -> str:
    """`162 M`, `1.4 B`."""
    return scaled(number, "", "B")


def scaled(value: float, unit: str, billion: str = "G") -> str:
    """`value` to three significant digits with an SI prefix: `47.4 MB`; with `billion="B"`, `3 B tokens`."""
    prefixes = {1e12: "T", 1e9: billion, 1e6: "M", 1e3: "k"}
    size = next((size for size in prefixes if value >= 0.9995 * size), 1)
    return " ".join(f"{value / size:.3g} {prefixes.get(size, '')}{unit}".split())
