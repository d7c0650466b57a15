"""The sizes of a GPT-NeoX and the models that have a name, under LitGPT's names for them."""

from dataclasses import dataclass
from typing import Any

from lingpt.common.errors import UserError

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

# Minimum and maximum of each size. Values beyond are typing errors, which would exhaust memory.
_LIMITS = {
    "block_size": (1, 1 << 24),
    "vocab_size": (1, 1 << 24),
    "padded_vocab_size": (1, 1 << 24),
    "padding_multiple": (1, 1 << 16),
    "n_layer": (1, 1 << 10),
    "n_embd": (2, 1 << 17),
    "n_head": (1, 1 << 16),
    "intermediate_size": (1, 1 << 20),
}

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

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    block_size: int = 2048
    vocab_size: int = 50254
    padding_multiple: int = 128
    padded_vocab_size: int = None  # type: ignore[assignment]  # by default vocab_size, rounded up
    intermediate_size: int = None  # type: ignore[assignment]  # by default 4 n_embd
    rotary_percentage: float = 0.25
    rope_base: float = 10000
    parallel_residual: bool = True
    norm_eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            derived = value is None and name in ("padded_vocab_size", "intermediate_size")
            if not derived and (type(value) is not int or not least <= value <= most):
                raise UserError(f"{name}={value}: it must be a whole number from {least} to {most:,}")
        for name, most in (("rotary_percentage", 1), ("norm_eps", 1), ("rope_base", 1 << 40)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= most:
                raise UserError(f"{name}={value}: it must be above 0 and at most {most:,}")
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
