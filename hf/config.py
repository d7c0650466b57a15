"""The configuration of a LinGPT model, as transformers reads and writes it."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from lingpt.models import Config


class LinGPTConfig(PretrainedConfig):
    """
    Args:
        network: the fields of `lingpt.models.Config`: sizes, attention and its options. Sizes also have
            transformers' names (`hidden_size`, …), which are derived from it. Only `vocab_size`, the rows of
            the embedding, may be changed, as `resize_token_embeddings` does.
    """

    model_type = "lingpt"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, network: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.network = dict(network or {})
        if self.network:
            own = Config.from_dict(self.network)
            self.hidden_size, self.intermediate_size = own.n_embd, own.intermediate_size
            self.num_hidden_layers, self.num_attention_heads = own.n_layer, own.n_head
            self.max_position_embeddings = own.block_size
            self.num_key_value_heads, self.head_dim = own.n_query_groups, own.head_size
            kwargs.setdefault("vocab_size", own.padded_vocab_size)
            kwargs.setdefault("tie_word_embeddings", own.tie_embeddings)
        self.vocab_size = kwargs.pop("vocab_size", None)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def lingpt_config(self) -> Config:
        """The model's own configuration. UserError for one of a newer version, or without a network."""
        return Config.from_dict(self.network | {"padded_vocab_size": self.vocab_size})
