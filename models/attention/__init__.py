"""The attentions by name: `attention: ours` in a recipe picks one, a list gives each layer its own."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from lingpt.common.errors import UserError, unknown
from lingpt.common.run_folder import attention_label
from lingpt.models.attention.base import Attention
from lingpt.models.attention.gla import GLAAttention
from lingpt.models.attention.ours import OursAttention
from lingpt.models.attention.ours_decay import OursDecayAttention
from lingpt.models.attention.ours_gated import OursGatedAttention
from lingpt.models.attention.softmax import SoftmaxAttention

ATTENTIONS: dict[str, type[Attention]] = {
    "ours": OursAttention,
    "ours-decay": OursDecayAttention,
    "ours-gated": OursGatedAttention,
    "softmax": SoftmaxAttention,
    "gla": GLAAttention,
}

T = TypeVar("T")


def with_options(cls: type[T]) -> type[T]:
    """Class decorator, below `@dataclass`: adds a field for each option of each attention, and its help.

    The help becomes the last lines of the docstring's `Args:`, where jsonargparse reads it.
    """
    for attention in ATTENTIONS.values():
        for name, option in attention.options().items():
            if get_origin(option.annotation) is not Annotated or option.default is option.empty:
                declaration = f'`{name}: Annotated[type, "help"] = default`'
                raise TypeError(
                    f"{attention.__name__} declares its option {name} otherwise than {declaration}"
                )
            if name not in cls.__annotations__:  # mechanisms may share an option (`ours`, `ours-decay`)
                cls.__annotations__[name], text = get_args(option.annotation)
                setattr(cls, name, option.default)
                cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n        {name}: {text}\n"
    return cls


def changed_options(attention: str | list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of these attentions those whose value is not the default; `values` has them by name."""
    names = [attention] if isinstance(attention, str) else attention
    declared = {n: p for name in names if name in ATTENTIONS for n, p in ATTENTIONS[name].options().items()}
    return {n: values[n] for n, p in declared.items() if n in values and values[n] != p.default}


def attention_form(attention: str | list[str], values: Mapping[str, Any]) -> str:
    """`ours-gated + output_gate + normalize=false`: the attention and `changed_options`.

    `parse_form` reads it, but for a hybrid's.
    """
    options = changed_options(attention, values).items()
    words = [name if value is True else f"{name}={_text(value)}" for name, value in options]
    return " + ".join([attention_label(attention), *words])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def parse_form(form: str) -> tuple[str, dict[str, Any]]:
    """`ours-gated+output_gate+normalize=false` → the attention and its options, true where no value stands.

    Raises UserError for an attention or an option that there is not.
    """
    attention, *words = (word.strip() for word in form.split("+"))
    if attention not in ATTENTIONS:
        raise unknown("attention", attention, ATTENTIONS)
    declared, options = ATTENTIONS[attention].options(), dict[str, Any]()
    for word in words:
        name, _, text = word.partition("=")
        if name in ATTENTIONS:
            raise UserError(
                f"{form!r}: a hybrid is a list, one attention per layer; after a `+` stands an option"
            )
        if name not in declared:
            takes = ", ".join(declared) or "none"
            raise UserError(f"{form!r}: {name!r} is no option of {attention}, which has {takes}")
        kind = get_args(declared[name].annotation)[0]
        values, text = _values(kind, text), text.lower() or "true"
        if text not in values:
            number = "a number" if kind is float else "a whole number"
            raise UserError(f"{form!r}: {name} takes {', '.join(values) or number}")
        options[name] = values[text]
    return attention, options


def _values(kind: Any, text: str) -> dict[str, Any]:
    """Text → value, of an option of this type: all values or, of numbers, this one."""
    values: dict[str, Any] = {}
    for part in (kind, *get_args(kind)):
        if part is bool:
            values |= {"true": True, "false": False}
        elif part is int and text.isdecimal():
            values[text] = int(text)
        elif part is float and text.replace(".", "", 1).isdecimal():
            values[text] = float(text)
        elif get_origin(part) is Literal:
            values |= {str(value): value for value in get_args(part)}
    return values


__all__ = ["ATTENTIONS", "Attention", "attention_form", "changed_options", "parse_form", "with_options"]
