"""The attentions by name: `attention: ours` in a recipe picks one, a list gives each layer its own."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

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
    """`ours-gated + output_gate + normalize=false`: the attention and `changed_options`."""
    options = changed_options(attention, values).items()
    words = [name if value is True else f"{name}={str(value).lower()}" for name, value in options]
    return " + ".join([attention_label(attention), *words])


__all__ = ["ATTENTIONS", "Attention", "attention_form", "changed_options", "with_options"]
