"""What a model is: LitGPT's `Config`, the attention with its options, and the names that a user may give."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import litgpt.config

from lingpt.common.errors import UserError, unknown
from lingpt.models.attention import ATTENTIONS, with_options

# Tiny, Pythia in every other respect: trains on a laptop's CPU in minutes. Heads of 64: the CUDA kernel
# takes those.
DEMO = {
    "name": "demo",
    "block_size": 256,
    "vocab_size": 2048,
    "padding_multiple": 64,
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 2,
}
MODELS: dict[str, dict[str, Any]] = {"demo": DEMO}
MODELS |= {
    name: config for name, config in litgpt.config.name_to_config.items() if name.startswith("pythia-")
}

# The GPT-NeoX architecture in LitGPT's terms: what the attentions here assume of everything around them.
_GPT_NEOX = {
    "norm_class_name": "LayerNorm",
    "norm_qk": False,
    "norm_1": True,
    "norm_2": True,
    "post_attention_norm": False,
    "post_mlp_norm": False,
    "shared_attention_norm": False,
    "attention_scores_scalar": None,
    "attention_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_size": None,
    "latent_attention": None,
    "rope_adjustments": None,
    "rope_interleave": False,
    "rope_local_base_freq": None,
    "rope_indices": None,
    "mlp_class_name": "GptNeoxMLP",
    "scale_embeddings": False,
}


@dataclass
@with_options
class Config(litgpt.config.Config):
    """LitGPT's `Config`, the attention, and every attention's options.

    Raises UserError for an unknown attention, a list of the wrong length, or an architecture that is not
    GPT-NeoX's (grouped queries, sliding windows and other variants that LitGPT has and Pythia has not).

    Args:
        attention: one name of `ATTENTIONS`, or a list with one per layer (a hybrid).
    """

    attention: str | list[str] = "ours"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.attention_per_layer:
            if name not in ATTENTIONS:
                raise unknown("attention", name, ATTENTIONS)
        if len(self.attention_per_layer) != self.n_layer:
            raise UserError(
                f"attention lists {len(self.attention)} layers, but {self.name!r} has {self.n_layer}: "
                "give one name, or one per layer"
            )
        for field, value in (_GPT_NEOX | {"n_query_groups": self.n_head}).items():
            if getattr(self, field) != value:
                raise UserError(
                    f"{field}={getattr(self, field)!r} is no GPT-NeoX model: it must be {value!r}"
                )
        for name in set(self.attention_per_layer):
            ATTENTIONS[name].check(self, **self.attention_options(name))
        if self.n_embd != self.n_head * self.head_size:
            raise UserError(
                f"n_embd={self.n_embd} is not n_head={self.n_head} times head_size={self.head_size}"
            )
        if self.block_size < 1:
            raise UserError(f"block_size={self.block_size}: it must be at least 1")

    @property
    def attention_per_layer(self) -> list[str]:
        """One attention name for each layer."""
        return [self.attention] * self.n_layer if isinstance(self.attention, str) else list(self.attention)

    def attention_options(self, name: str) -> dict[str, Any]:
        """The values here of the options that an attention declares."""
        return {option: getattr(self, option) for option in ATTENTIONS[name].options()}

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Self:
        """The configuration of `demo` or of a Pythia model, with any field overridden."""
        if name not in MODELS:
            raise unknown("model", name, MODELS)
        return cls(**(MODELS[name] | overrides))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; keys that are no field are an error."""
        if surplus := values.keys() - {field.name for field in fields(cls)}:
            raise UserError(f"unknown key {sorted(surplus)[0]!r} in the model's configuration")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in types that JSON knows."""
        return asdict(self)


@dataclass
@with_options
class ModelArgs:
    """The model as a recipe names it.

    Args:
        name: `demo` or a Pythia model (`pythia-14m` … `pythia-12b`).
        attention: one of the attentions, or a list with one per layer.
        block_size: longest sequence, in tokens; None keeps the model's own (2048 for most Pythia models).
        vocab_size: size of the vocabulary; None keeps the model's own. Padded as the model pads its own.
        padded_vocab_size: rows of the embedding; None derives it from vocab_size.
    """

    name: str = "demo"
    attention: str | list[str] = "ours"
    block_size: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None

    def config(self) -> Config:
        """Raises UserError where the names or numbers make no model."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        return Config.from_name(**given)
