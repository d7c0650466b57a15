"""The attentions by name: `attention: ours` in a recipe selects one, a list one per layer.

A form is an attention with its options in one word: `ours-gated+output_gate+softmax_every=6`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from lingpt.common.errors import UserError, unknown
from lingpt.common.run_folder import attention_label
from lingpt.models.attention.base import Attention
from lingpt.models.attention.gla import GLAAttention
from lingpt.models.attention.hybrid import ALIASES, SOFTMAX, SOFTMAX_EVERY, find_hybrid, hybrid_layers
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


def option_defaults() -> dict[str, Any]:
    """The default of each option of each attention."""
    return {name: option.default for cls in ATTENTIONS.values() for name, option in cls.options().items()}


def with_options(cls: type[T], unset: bool = False) -> type[T]:
    """Class decorator, below `@dataclass`: adds a field for each option of each attention, with its help.

    The help becomes the last lines of the docstring's `Args:`, where jsonargparse reads it.
    unset: fields are None by default, so that an option that was given its default can be told from one that
    was not given.
    """
    for attention in ATTENTIONS.values():
        for name, option in attention.options().items():
            if get_origin(option.annotation) is not Annotated or option.default is option.empty:
                declaration = f'`{name}: Annotated[type, "help"] = default`'
                raise TypeError(
                    f"{attention.__name__} declares its option {name} otherwise than {declaration}"
                )
            if name not in cls.__annotations__:  # mechanisms may share an option (`ours`, `ours-decay`)
                kind, text = get_args(option.annotation)
                if unset and option.default is not None:
                    text += f" By default {_text(option.default)}."
                cls.__annotations__[name] = kind | None if unset else kind
                setattr(cls, name, None if unset else option.default)
                cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n        {name}: {text}\n"
    return cls


def check_options(attention: str, options: Mapping[str, Any]) -> None:
    """Raises UserError for an option with several named values (`sdpa`) that has another one."""
    for name, option in ATTENTIONS[attention].options().items():
        kind = get_args(option.annotation)[0]
        if get_origin(kind) is Literal and options[name] not in get_args(kind):
            raise unknown(name, options[name], get_args(kind))


def form_parts(attention: str | Sequence[str], values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The attention as one word, and those of its options in `values` that are not at their defaults; for a
    hybrid of `hybrid_layers`, the linear attention, with `softmax_every` among the options.
    """
    names = [attention] if isinstance(attention, str) else attention
    declared = {n: p for name in names if name in ATTENTIONS for n, p in ATTENTIONS[name].options().items()}
    options = {n: values[n] for n, p in declared.items() if n in values and values[n] != p.default}
    label, every = attention_label(attention), values.get(SOFTMAX_EVERY)
    if not isinstance(attention, str) and (hybrid := find_hybrid(attention)):
        label, every = hybrid
    return label, options if every is None else options | {SOFTMAX_EVERY: every}


def attention_form(attention: str | Sequence[str], values: Mapping[str, Any]) -> str:
    """The form as text, `ours-gated + output_gate + softmax_every=4`, from `form_parts`; or its alias
    `hybrid`.

    `parse_form` reads it, except for a list of layers that is no hybrid of `hybrid_layers`.
    """
    label, options = form_parts(attention, values)
    words = [name if value is True else f"{name}={_text(value)}" for name, value in options.items()]
    names = {form: name for name, form in ALIASES.items()}
    return names.get("+".join([label, *words]), " + ".join([label, *words]))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def parse_form(form: str) -> tuple[str, dict[str, Any]]:
    """`ours-gated+output_gate+normalize=false` → the attention and its options; one without a value is true.

    `softmax_every`, an option of the whole model (`hybrid_layers`), may be among them, and then softmax's
    options. Raises UserError for an unknown attention or option.
    """
    attention, *words = (word.strip() for word in form.split("+"))
    if attention in ALIASES:
        attention, *own = ALIASES[attention].split("+")
        words = own + words
    if attention not in ATTENTIONS:
        raise unknown("attention", attention, [*ATTENTIONS, *ALIASES])
    declared = {name: get_args(p.annotation)[0] for name, p in ATTENTIONS[attention].options().items()}
    if any(word.startswith(f"{SOFTMAX_EVERY}=") for word in words):
        declared |= {name: get_args(p.annotation)[0] for name, p in ATTENTIONS[SOFTMAX].options().items()}
    declared[SOFTMAX_EVERY], options = int, dict[str, Any]()
    for word in words:
        name, _, text = word.partition("=")
        if name in ATTENTIONS:
            raise UserError(
                f"{form!r}: after a `+` stands an option; a hybrid is {attention}+{SOFTMAX_EVERY}=6, or a "
                "list with one attention per layer"
            )
        if name not in declared:
            raise UserError(
                f"{form!r}: {name!r} is not an option of {attention}, which has {', '.join(declared)}"
            )
        values, text = _values(declared[name], text), text.lower() or "true"
        if text not in values:
            number = "a number" if declared[name] is float else "a whole number"
            raise UserError(f"{form!r}: {name} takes {', '.join(values) or number}")
        options[name] = values[text]
    return attention, options


def _values(kind: Any, text: str) -> dict[str, Any]:
    """Text → value, for an option of type `kind`: all its values or, for numbers, only that of `text`."""
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


__all__ = [
    "ALIASES",
    "ATTENTIONS",
    "SOFTMAX_EVERY",
    "Attention",
    "attention_form",
    "check_options",
    "form_parts",
    "hybrid_layers",
    "option_defaults",
    "parse_form",
    "with_options",
]
