"""The attentions by name: `attention: ours` in a recipe picks one, a list gives each layer its own."""

from lingpt.models.attention.base import Attention
from lingpt.models.attention.gla import GLAAttention
from lingpt.models.attention.ours import OursAttention
from lingpt.models.attention.ours_decay import OursDecayAttention
from lingpt.models.attention.softmax import SoftmaxAttention

ATTENTIONS: dict[str, type[Attention]] = {
    "ours": OursAttention,
    "ours-decay": OursDecayAttention,
    "softmax": SoftmaxAttention,
    "gla": GLAAttention,
}

__all__ = ["ATTENTIONS", "Attention"]
