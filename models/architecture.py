"""The sizes of a GPT-NeoX and the models that have a name, under LitGPT's names for them."""

from dataclasses import dataclass
from typing import Annotated, Any

from lingpt.common.errors import UserError
from lingpt.common.options import RARE, Option, options_of

# block_size, n_layer, n_embd, n_head, padding_multiple
_PYTHIA = {
    "14m": (512, 6, 128, 4, 128),
    "31m": (1024, 6, 256, 8, 128),
    "70m": (2048, 6, 512, 8, 128),
    "160m": (2048, 12, 768, 12, 128),
    "410m": (2048, 24, 1024, 16, 128),
    "1b": (2048, 16, 2048, 8, 128),
    "1.4b": (2048, 24, 2048, 16, 128),
    "2.8b": (2048, 32, 2560, 32, 128),
    "6.9b": (2048, 32, 4096, 32, 256),
    "12b": (2048, 36, 5120, 40, 512),
}
_SIZES = ("block_size", "n_layer", "n_embd", "n_head", "padding_multiple")
MODELS: dict[str, dict[str, Any]] = {
    # Trains on a laptop's CPU in minutes. The head size is 64, which the CUDA kernel supports.
    "demo": {"n_layer": 4, "n_embd": 128, "n_head": 2, "block_size": 256}
    | {"vocab_size": 2048, "padding_multiple": 64},
}
for size, numbers in _PYTHIA.items():
    MODELS[f"pythia-{size}"] = dict(zip(_SIZES, numbers, strict=True))
    if size not in ("14m", "31m"):
        MODELS[f"pythia-{size}-deduped"] = MODELS[f"pythia-{size}"]

# LitGPT's other settings, which it and earlier versions of LinGPT write into checkpoints: those that change a
# GPT-NeoX, with its values, and those that change nothing in one.
_GPT_NEOX: dict[str, Any] = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP"}
_GPT_NEOX |= {"gelu_approximate": "none", "rope_condense_ratio": 1, "norm_1": True, "norm_2": True}
_OFF = (
    "norm_qk", "post_attention_norm", "post_mlp_norm", "shared_attention_norm", "attn_bias", "lm_head_bias",
    "rope_interleave", "scale_embeddings",
)  # fmt: skip
_NONE = (
    "attention_scores_scalar", "attention_logit_softcapping", "final_logit_softcapping",
    "sliding_window_size", "latent_attention", "rope_adjustments", "rope_local_base_freq", "rope_indices",
)  # fmt: skip
_GPT_NEOX |= dict.fromkeys(_OFF, False) | dict.fromkeys(_NONE)
_WITHOUT_EFFECT = (
    "hf_config", "norm_qk_type", "sliding_window_indices", "moe_intermediate_size", "n_expert",
    "n_shared_expert", "n_expert_groups", "n_topk_groups", "n_topk_scores_per_group", "n_expert_per_token",
    "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob",
)  # fmt: skip


@dataclass(kw_only=True)
class Architecture:
    """A GPT-NeoX's sizes; the defaults are Pythia's. Raises UserError for numbers that make no model."""

    # fmt: off
    name: Annotated[str, Option("the model's name")]
    n_layer: Annotated[int, Option("number of layers", least=1, most=1 << 10)]
    n_embd: Annotated[int, Option("dimension of the residual stream", least=2, most=1 << 17)]
    n_head: Annotated[int, Option(
        "number of attention heads; each has n_embd / n_head dimensions", least=1, most=1 << 16)]
    block_size: Annotated[int, Option(
        "longest sequence, in tokens; 2048 for most Pythia models", least=1, most=1 << 24)] = 2048
    vocab_size: Annotated[int, Option(
        "size of the vocabulary, before padding; your own model's is by default the tokenizer's",
        least=1, most=1 << 24)] = 50254
    padding_multiple: Annotated[int, Option(
        "the number of rows of the embedding is a multiple of it",
        least=1, most=1 << 16, heading=RARE)] = 128
    padded_vocab_size: Annotated[int, Option(
        "rows of the embedding; by default vocab_size, rounded up",
        least=1, most=1 << 24)] = None  # type: ignore[assignment]
    intermediate_size: Annotated[int, Option(
        "hidden dimension of the MLP; by default 4 n_embd",
        least=1, most=1 << 20)] = None  # type: ignore[assignment]
    rotary_percentage: Annotated[float, Option(
        "part of each head's dimensions with rotary embedding; Pythia's is 0.25", above=0, most=1)] = 0.25
    rope_base: Annotated[float, Option(
        "base of the rotary frequencies; Pythia's is 10000", above=0, most=1 << 40)] = 10000
    parallel_residual: Annotated[bool, Option(
        "attention and MLP read the same input, as in Pythia; false is one after the other")] = True
    norm_eps: Annotated[float, Option("epsilon of the layer norms; Pythia's is 1e-5", above=0, most=1)] = 1e-5
    bias: Annotated[bool, Option("whether linear layers have biases, as Pythia's do")] = True
    # fmt: on

    def __post_init__(self) -> None:
        for name, declared in options_of(Architecture).items():
            value = getattr(self, name)
            if value is not None or declared.default is not None:
                setattr(self, name, declared.read(name, value))
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if self.rope_n_elem < 2 or self.rope_n_elem % 2:
            raise UserError(
                f"rotary_percentage={self.rotary_percentage} of head_size={self.head_size} rotates "
                f"{self.rope_n_elem} dimensions: choose one that gives an even number, 2 or more"
            )
        if self.padded_vocab_size is None:
            self.padded_vocab_size = -(-self.vocab_size // self.padding_multiple) * self.padding_multiple
        self.vocab_size = min(self.vocab_size, self.padded_vocab_size)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.n_embd

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_query_groups(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.n_head

    @property
    def rope_n_elem(self) -> int:
        """The dimensions of a head with rotary embedding."""
        return int(self.rotary_percentage * self.head_size)

    def check_other_settings(self, values: dict[str, Any]) -> None:
        """Raises UserError for settings of LitGPT that this GPT-NeoX has not, and for unknown ones."""
        fixed = _GPT_NEOX | {"n_query_groups": self.n_query_groups, "head_size": self.head_size}
        for name, value in values.items():
            if name not in fixed and name not in _WITHOUT_EFFECT:
                raise UserError(f"unknown key {name!r} in the model's configuration")
            if name in fixed and value != fixed[name]:
                raise UserError(f"{name}={value!r} is not a GPT-NeoX model: it must be {fixed[name]!r}")
