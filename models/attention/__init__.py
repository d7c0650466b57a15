"""The attentions by name: `attention: ours` in a recipe selects one, a list one per layer.

A form is an attention with its options in one word: `ours-gated+output_gate+softmax_every=6`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from lingpt.common.errors import UserError, nearest, unknown
from lingpt.common.options import Declared, Option
from lingpt.common.run_folder import attention_label
from lingpt.models.attention.base import Attention
from lingpt.models.attention.gla import GLAAttention
from lingpt.models.attention.hybrid import ALIASES, SOFTMAX, SOFTMAX_EVERY, find_hybrid, hybrid_layers
from lingpt.models.attention.ours import OursAttention
from lingpt.models.attention.ours_decay import OursDecayAttention
from lingpt.models.attention.ours_gated import OursGatedAttention
from lingpt.models.attention.softmax import SoftmaxAttention
from lingpt.models.attention.unified import FORMS, UnifiedAttention

ATTENTIONS: dict[str, type[Attention]] = {
    "ours": OursAttention,
    "ours-decay": OursDecayAttention,
    "ours-gated": OursGatedAttention,
    "softmax": SoftmaxAttention,
    "gla": GLAAttention,
    "unified": UnifiedAttention,
}

T = TypeVar("T")


def attention_options() -> dict[str, Declared]:
    """The options of all attentions."""
    return {name: option for cls in ATTENTIONS.values() for name, option in cls.options().items()}


def with_options(cls: type[T]) -> type[T]:
    """Class decorator, below `@dataclass`: adds a field for each option of each attention."""
    for name, declared in attention_options().items():
        cls.__annotations__[name] = Annotated[declared.kind, declared.option]
        setattr(cls, name, declared.default)
    return cls


def attention_form(attention: str | Sequence[str], values: Mapping[str, Any]) -> str:
    """The attention and those of its options in `values` that are not at their defaults, as text:
    `ours-gated + output_gate + softmax_every=4`, or `hybrid + value_residual`: an alias of whose own options
    at most three are at their defaults is used where that takes fewer words. Of several `softmax_every` that
    give the same layers it is an alias's, or else the smallest.

    `parse_form` reads it, except for a list of layers that is no hybrid of `hybrid_layers`.
    """
    label, every = attention_label(attention), values.get(SOFTMAX_EVERY)
    names = [attention] if isinstance(attention, str) else attention
    names = [*names, SOFTMAX] if every is not None else names
    declared = {n: p for name in names if name in ATTENTIONS for n, p in ATTENTIONS[name].options().items()}
    options = {n: values[n] for n, p in declared.items() if n in values and values[n] != p.default}
    periods = [] if every is None else [every]
    if not isinstance(attention, str) and (hybrid := find_hybrid(attention)):
        label, periods = hybrid
    every_words = [f"{SOFTMAX_EVERY}={every}" for every in periods]
    words = [label, *(_word(name, value) for name, value in options.items())]
    forms = [[*words, *every_words[:1]]]
    for alias, form in ALIASES.items():
        own_label, *own = form.split("+")
        own_names = {word.partition("=")[0] for word in own} - {SOFTMAX_EVERY}
        own_every = [word for word in own if word.startswith(SOFTMAX_EVERY)]
        if own_label != label or not own_names <= declared.keys() or not set(own_every) <= set(every_words):
            continue
        undone = [_word(n, p.default) for n, p in declared.items() if n in own_names - options.keys()]
        if len(undone) <= 3:
            others = [word for word in words[1:] if word not in own] + undone
            forms.append([alias, *others, *([] if own_every else every_words[:1])])
    shortest = min(forms, key=len)  # the first of equal ones
    return " + ".join(shortest)


def _word(name: str, value: Any) -> str:
    return name if value is True else f"{name}={_text(value)}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def unknown_attention(name: str) -> UserError:
    """The error for a name that is neither an attention nor an alias."""
    if name in FORMS:
        return UserError(f"unknown attention {name!r}: it is a form of unified, unified+form={name}")
    return unknown("attention", name, [*ATTENTIONS, *ALIASES])


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
        raise unknown_attention(attention)
    known = dict(ATTENTIONS[attention].options())
    if any(word.startswith(f"{SOFTMAX_EVERY}=") for word in words):
        known |= ATTENTIONS[SOFTMAX].options()
    known[SOFTMAX_EVERY] = Declared(int, Option("one layer in so many is softmax", least=1), None)
    options = dict[str, Any]()
    for word in words:
        name, _, text = word.partition("=")
        if name in ATTENTIONS:
            raise UserError(
                f"{form!r}: after a `+` stands an option; a hybrid is {attention}+{SOFTMAX_EVERY}=6, or a "
                "list with one attention per layer"
            )
        if name not in known:
            near = "" if name in attention_options() else nearest(name, known)  # it may be another's
            raise UserError(
                f"{form!r}: {name!r} is not an option of {attention}, which has {', '.join(known)}{near}"
            )
        options[name] = known[name].read(f"{form!r}: {name}", text or "true")
    return attention, options


__all__ = [
    "ALIASES",
    "ATTENTIONS",
    "SOFTMAX_EVERY",
    "Attention",
    "attention_form",
    "attention_options",
    "hybrid_layers",
    "parse_form",
    "unknown_attention",
    "with_options",
]
