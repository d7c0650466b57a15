"""The attentions by name: `attention: ours` in a recipe picks one, a list gives each layer its own."""

from typing import TypeVar, get_args

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


__all__ = ["ATTENTIONS", "Attention", "with_options"]
