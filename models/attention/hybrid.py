"""Hybrids: linear attention with softmax attention in some layers.

A linear attention's state has a fixed size and cannot recall everything. One softmax layer in six makes up
for that, and decoding's memory grows with the context only in those layers.
"""

from collections.abc import Sequence

from lingpt.common.errors import UserError
from lingpt.common.format import counted

SOFTMAX = "softmax"
SOFTMAX_EVERY = "softmax_every"  # in an attention's form: `ours-gated+softmax_every=6`
_LINEAR = (
    "gla+short_conv+gla_n_head=0+gla_expand_k=1+gla_unit_qk+gla_temperature=4"
    "+gate_activation=sigmoid+input_gate"
)
# Aliases (docs/results/study): the fast hybrid, and the best hybrid, linear attention and softmax.
ALIASES = {
    "hybrid": f"ours-gated+output_gate+gate_activation=sigmoid+short_conv+{SOFTMAX_EVERY}=6",
    "hybrid-best": f"{_LINEAR}+softmax_conv+softmax_gate+softmax_qk_norm+{SOFTMAX_EVERY}=3",
    "linear-best": _LINEAR,
    "softmax-best": f"{SOFTMAX}+softmax_conv+softmax_gate+gate_activation=sigmoid+softmax_qk_norm",
}


def hybrid_layers(attention: str, n_layer: int, every: int) -> list[str]:
    """The attention of each layer: the middle one of each `every` is softmax, as in Jamba (arXiv 2403.19887),
    whose attn_layer_period and attn_layer_offset are 8 and 4. UserError if that is not a hybrid.
    """
    if attention == SOFTMAX:
        raise UserError(
            f"{SOFTMAX_EVERY}={every} is for a linear attention, and {SOFTMAX} is none: leave it out"
        )
    if every < 2 or every // 2 >= n_layer:
        mend = f"give 2 to {2 * n_layer - 1}" if n_layer > 1 else "leave it out"
        raise UserError(
            f"{SOFTMAX_EVERY}={every} makes no hybrid of {attention} in {counted(n_layer, 'layer')}: {mend}"
        )
    return [SOFTMAX if layer % every == every // 2 else attention for layer in range(n_layer)]


def find_hybrid(layers: Sequence[str]) -> tuple[str, list[int]] | None:
    """The attention and each `every` with which `hybrid_layers` gives these layers; None if none does."""
    others = set(layers) - {SOFTMAX}
    if len(others) != 1 or SOFTMAX not in layers:
        return None
    (attention,), n_layer = others, len(layers)
    periods = range(2, 2 * n_layer)
    found = [every for every in periods if hybrid_layers(attention, n_layer, every) == list(layers)]
    return (attention, found) if found else None
