"""The shape of a model (GPT-NeoX, Llama, Qwen), under LitGPT's names, and the models that have a name."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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

# Llama's shape with Pythia's vocabulary, so that all train on the same tokens.
_LLAMA: dict[str, Any] = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
_LLAMA |= {"parallel_residual": False, "rotary_percentage": 1.0}
MODELS["llama-130m"] = {"n_layer": 12, "n_embd": 768, "n_head": 12, "intermediate_size": 2048}
# The GLA paper's sizes (arXiv 2312.06635)
MODELS["llama-340m"] = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "intermediate_size": 2816}
MODELS["llama-1.3b"] = {"n_layer": 24, "n_embd": 2048, "n_head": 16, "intermediate_size": 5632}
# Llama 3.2's
MODELS["llama-1b"] = {"n_layer": 16, "n_embd": 2048, "n_head": 32, "intermediate_size": 8192}
MODELS["llama-1b"] |= {"n_query_groups": 8, "rope_base": 500000}
for model in ("llama-130m", "llama-340m", "llama-1b", "llama-1.3b"):
    MODELS[model] |= _LLAMA | {"tie_embeddings": model != "llama-1.3b"}

# LitGPT's other settings, which it and earlier versions of LinGPT write into checkpoints: those that change a
# model, with the values that ours have, and those that change nothing in one.
_FIXED: dict[str, Any] = {"gelu_approximate": "none", "rope_condense_ratio": 1, "norm_qk_type": "default"}
_FIXED |= {"norm_1": True, "norm_2": True}
_OFF = (
    "post_attention_norm", "post_mlp_norm", "shared_attention_norm", "lm_head_bias", "rope_interleave",
    "scale_embeddings",
)  # fmt: skip
_NONE = (
    "attention_scores_scalar", "attention_logit_softcapping", "final_logit_softcapping",
    "sliding_window_size", "latent_attention", "rope_local_base_freq", "rope_indices",
)  # fmt: skip
_FIXED |= dict.fromkeys(_OFF, False) | dict.fromkeys(_NONE)
_WITHOUT_EFFECT = (
    "hf_config", "sliding_window_indices", "moe_intermediate_size", "n_expert",
    "n_shared_expert", "n_expert_groups", "n_topk_groups", "n_topk_scores_per_group", "n_expert_per_token",
    "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob",
)  # fmt: skip
_SCALED_ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}


@dataclass(kw_only=True)
class Architecture:
    """A model's shape; the defaults are Pythia's. Raises UserError for numbers that make no model."""

    # fmt: off
    name: Annotated[str, Option("the model's name")]
    n_layer: Annotated[int, Option("number of layers", least=1, most=1 << 10)]
    n_embd: Annotated[int, Option("dimension of the residual stream", least=2, most=1 << 17)]
    n_head: Annotated[int, Option(
        "number of attention heads; each has n_embd / n_head dimensions", least=1, most=1 << 16)]
    n_query_groups: Annotated[int, Option(
        "heads of keys and values, each for n_head / n_query_groups heads of queries; by default n_head",
        least=1, most=1 << 16)] = None  # type: ignore[assignment]
    head_size: Annotated[int, Option(
        "dimensions of a head; by default n_embd / n_head",
        least=1, most=1 << 16)] = None  # type: ignore[assignment]
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
    rope_adjustments: Annotated[dict[str, float] | None, Option(
        "Llama 3's scaling of the rotary frequencies for contexts longer than the one trained on: factor, "
        "low_freq_factor, high_freq_factor and original_max_seq_len")] = None
    parallel_residual: Annotated[bool, Option(
        "attention and MLP read the same input, as in Pythia; false is one after the other")] = True
    norm_class_name: Annotated[Literal["LayerNorm", "RMSNorm"], Option(
        "the norms before attention, MLP and head; Llama's is RMSNorm")] = "LayerNorm"
    norm_eps: Annotated[float, Option("epsilon of the norms; Pythia's is 1e-5", above=0, most=1)] = 1e-5
    norm_qk: Annotated[bool, Option(
        "RMS norms with a gain on q and k of each head, as in Qwen3; `gla` has none")] = False
    mlp_class_name: Annotated[Literal["GptNeoxMLP", "LLaMAMLP"], Option(
        "the MLP: with GELU, or Llama's gated one (SwiGLU)")] = "GptNeoxMLP"
    bias: Annotated[bool, Option("whether linear layers have biases, as Pythia's do")] = True
    attn_bias: Annotated[bool, Option(
        "a bias of the projection to q, k and v, as in Qwen2; `gla` has none")] = False
    tie_embeddings: Annotated[bool, Option("the head's weight is the embedding's")] = False
    # fmt: on

    def __post_init__(self) -> None:
        for name, declared in options_of(Architecture).items():
            value = getattr(self, name)
            if value is not None or declared.default is not None:
                setattr(self, name, declared.read(name, value))
        if self.head_size is None:
            if self.n_embd % self.n_head:
                raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
            self.head_size = self.n_embd // self.n_head
        self.n_query_groups = self.n_query_groups or self.n_head
        if self.n_head % self.n_query_groups:
            raise UserError(
                f"n_head={self.n_head} must be a multiple of n_query_groups={self.n_query_groups}"
            )
        if self.rope_n_elem < 2 or self.rope_n_elem % 2:
            raise UserError(
                f"rotary_percentage={self.rotary_percentage} of head_size={self.head_size} rotates "
                f"{self.rope_n_elem} dimensions: choose one that gives an even number, 2 or more"
            )
        if self.rope_adjustments is not None and set(self.rope_adjustments) != _SCALED_ROPE:
            raise UserError(
                f"rope_adjustments has {', '.join(self.rope_adjustments) or 'nothing'}: give Llama 3's "
                f"{', '.join(sorted(_SCALED_ROPE))}"
            )
        if (scaled := self.rope_adjustments) is not None and not (
            min(scaled.values()) > 0 and scaled["high_freq_factor"] > scaled["low_freq_factor"]
        ):
            raise UserError(
                "rope_adjustments must be above 0, and high_freq_factor above low_freq_factor: "
                f"{', '.join(f'{name} is {value:g}' for name, value in scaled.items())}"
            )
        if self.padded_vocab_size is None:
            self.padded_vocab_size = -(-self.vocab_size // self.padding_multiple) * self.padding_multiple
        self.vocab_size = min(self.vocab_size, self.padded_vocab_size)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.n_embd

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The widths of q, k and v of all heads, in the order in which `qkv` stacks them."""
        kv = self.n_query_groups * self.head_size
        return self.n_head * self.head_size, kv, kv

    @property
    def rope_n_elem(self) -> int:
        """The dimensions of a head with rotary embedding."""
        return int(self.rotary_percentage * self.head_size)

    def check_other_settings(self, values: dict[str, Any]) -> None:
        """Raises UserError for settings of LitGPT that no model here has, and for unknown ones."""
        for name, value in values.items():
            if name not in _FIXED and name not in _WITHOUT_EFFECT:
                where = "the model's configuration: if a newer LinGPT wrote it, update this one"
                raise UserError(f"unknown key {name!r} in {where}")
            if name in _FIXED and value != _FIXED[name]:
                raise UserError(f"{name}={value!r} is not supported: it must be {_FIXED[name]!r}")
