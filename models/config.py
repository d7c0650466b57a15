"""A model's configuration: LitGPT's `Config`, the attention with its options, and the names of models."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import litgpt.config

from lingpt.common.errors import UserError, unknown
from lingpt.common.run_folder import attention_label
from lingpt.models.attention import (
    ALIASES,
    ATTENTIONS,
    SOFTMAX_EVERY,
    check_options,
    hybrid_layers,
    option_defaults,
    parse_form,
    with_options,
)

# Tiny, otherwise like Pythia: trains on a laptop's CPU in minutes. The head size is 64, which the CUDA kernel
# supports.
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

# Defaults of a custom model: Pythia's. Three sizes have no default.
OWN = {"block_size": 2048, "vocab_size": 50254, "padding_multiple": 128}
NEEDED = ("n_layer", "n_embd", "n_head")

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
    "rope_base": (1, 1 << 40),
}

# The GPT-NeoX architecture in LitGPT's terms: what the attentions here assume of the rest of the model.
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
    "lm_head_bias": False,
    "sliding_window_size": None,
    "latent_attention": None,
    "rope_adjustments": None,
    "rope_interleave": False,
    "rope_local_base_freq": None,
    "rope_indices": None,
    "mlp_class_name": "GptNeoxMLP",
    "gelu_approximate": "none",
    "scale_embeddings": False,
}


@dataclass
@with_options
class Config(litgpt.config.Config):
    """LitGPT's `Config`, the attention, and every attention's options.

    Raises UserError for an unknown attention, a list of the wrong length, or an architecture other than
    GPT-NeoX (grouped queries, sliding windows and other variants that LitGPT has but Pythia has not).

    Args:
        attention: one name of `ATTENTIONS`, or a list with one per layer (a hybrid).
    """

    attention: str | list[str] = "ours"

    def __post_init__(self) -> None:
        self._check_sizes()
        super().__post_init__()
        for name in self.attention_per_layer:
            if "+" in name or name in ALIASES:
                raise UserError(f"{name!r} is a form: ModelArgs(name, attention={name!r}).config() reads it")
            if name not in ATTENTIONS:
                raise unknown("attention", name, [*ATTENTIONS, *ALIASES])
        if len(self.attention_per_layer) != self.n_layer:
            raise UserError(
                f"attention lists {len(self.attention)} layers, but {self.name!r} has {self.n_layer}: "
                "give one name, or one per layer"
            )
        for field, value in (_GPT_NEOX | {"n_query_groups": self.n_head}).items():
            if getattr(self, field) != value:
                raise UserError(
                    f"{field}={getattr(self, field)!r} is not a GPT-NeoX model: it must be {value!r}"
                )
        for name in set(self.attention_per_layer):
            options = self.attention_options(name)
            check_options(name, options)
            ATTENTIONS[name].check(self, **options)
        if self.n_embd != self.n_head * self.head_size:
            raise UserError(
                f"n_embd={self.n_embd} is not n_head={self.n_head} times head_size={self.head_size}"
            )
        if self.rope_n_elem < 2 or self.rope_n_elem % 2:
            raise UserError(
                f"rotary_percentage={self.rotary_percentage} of head_size={self.head_size} rotates "
                f"{self.rope_n_elem} dimensions: choose one that gives an even number, 2 or more"
            )

    def _check_sizes(self) -> None:
        """Checks what LitGPT assumes of the sizes. UserError for numbers that make no model."""
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            derived = value is None and name in ("padded_vocab_size", "intermediate_size")
            if not derived and (type(value) is not int or not least <= value <= most):
                raise UserError(f"{name}={value}: it must be a whole number from {least} to {most:,}")
        for name in ("rotary_percentage", "norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise UserError(f"{name}={value}: it must be above 0 and at most 1")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        layers = self.attention if isinstance(self.attention, list) else [self.attention]
        if not all(isinstance(name, str) for name in layers):
            raise UserError(f"attention={self.attention!r}: give one name, or a list with one per layer")

    @property
    def attention_per_layer(self) -> list[str]:
        """One attention name for each layer."""
        return [self.attention] * self.n_layer if isinstance(self.attention, str) else list(self.attention)

    def attention_options(self, name: str) -> dict[str, Any]:
        """This configuration's values of the options that an attention declares."""
        return {option: getattr(self, option) for option in ATTENTIONS[name].options()}

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Self:
        """The configuration of `demo` or of a Pythia model, with any field overridden.

        For another name the sizes in `NEEDED` must be given; the others default to Pythia's.
        """
        if name in MODELS:
            return cls(**(MODELS[name] | overrides))
        if missing := [size for size in NEEDED if size not in overrides]:
            needs = ", ".join(f"model.{size}" for size in missing)
            raise UserError(f"{unknown('model', name, MODELS)}; a model of your own needs {needs}")
        return cls(**(OWN | {"name": name} | overrides))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; keys that are not fields are an error."""
        if surplus := values.keys() - {field.name for field in fields(cls)}:
            raise UserError(f"unknown key {sorted(surplus)[0]!r} in the model's configuration")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON types."""
        return asdict(self)


@dataclass
@partial(with_options, unset=True)
class ModelArgs:
    """The model that a recipe names, and sizes that differ from the named model's.

    An attention's option may be given in `attention` or in its own field; in both, it must be the same.

    Args:
        name: `demo`, a Pythia model (`pythia-14m` … `pythia-12b`), or a name for your own model, whose
            n_layer, n_embd and n_head must then be given.
        attention: one of the attentions, or a list with one per layer. Options may follow a `+`
            (`ours-gated+output_gate`); they hold for all layers that have them. `+softmax_every=6` makes the
            fourth of each six layers softmax; `hybrid` is ours-gated+output_gate+short_conv+softmax_every=6.
        block_size: longest sequence, in tokens; None keeps the model's own (2048 for most Pythia models).
        vocab_size: size of the vocabulary, before padding; None keeps the model's own.
        padded_vocab_size: rows of the embedding; None derives it from vocab_size.
        padding_multiple: the number of rows of the embedding is a multiple of it.
        n_layer: number of layers.
        n_embd: dimension of the residual stream.
        n_head: number of attention heads; each has n_embd / n_head dimensions.
        intermediate_size: hidden dimension of the MLP; None is four times n_embd.
        rotary_percentage: part of each head's dimensions with rotary embedding; Pythia's is 0.25.
        rope_base: base of the rotary frequencies; Pythia's is 10000.
        parallel_residual: attention and MLP read the same input, as in Pythia; false is one after the other.
        norm_eps: epsilon of the layer norms; Pythia's is 1e-5.
        bias: whether linear layers have biases, as Pythia's do.
    """

    name: str = "demo"
    attention: str | list[str] = "ours"
    block_size: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    padding_multiple: int | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    n_head: int | None = None
    intermediate_size: int | None = None
    rotary_percentage: float | None = None
    rope_base: int | None = None
    parallel_residual: bool | None = None
    norm_eps: float | None = None
    bias: bool | None = None

    def __post_init__(self) -> None:
        """Moves the options in `attention` to their fields, expands a hybrid to a list of its layers, and
        sets options that are not given to their defaults.

        UserError for an option that is unknown, or has two values.
        """
        names = self.attention if isinstance(self.attention, list) else [self.attention]
        is_form = [isinstance(name, str) and ("+" in name or name in ALIASES) for name in names]
        forms = [parse_form(name) if form else (name, {}) for name, form in zip(names, is_form, strict=True)]
        every = [options.pop(SOFTMAX_EVERY, None) for _, options in forms]
        self._set_options(item for _, options in forms for item in options.items())
        bare = [name for name, _ in forms]
        if not isinstance(self.attention, list):
            self.attention = bare[0] if every[0] is None else self._hybrid(bare[0], every[0])
        elif any(every):
            raise UserError(
                f"attention {self.attention!r}: {SOFTMAX_EVERY} is of all layers, and none in a list"
            )
        else:
            self.attention = bare

    def _set_options(self, in_forms: Iterable[tuple[str, Any]]) -> None:
        """Sets options from their fields, the forms in `attention` or defaults. UserError for two values."""
        default = option_defaults()
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in default}
        for option, value in in_forms:
            if given[option] is not None and given[option] != value:
                raise UserError(
                    f"{option} is {value} in attention {self.attention!r}, and {given[option]} besides: "
                    f"leave one of the two out{_aliases_in(self.attention)}"
                )
            given[option] = value
        for option, value in given.items():
            setattr(self, option, default[option] if value is None else value)

    def _hybrid(self, attention: str, every: int) -> str | list[str]:
        """`hybrid_layers` for this model; only the name if n_layer is unknown (`config` then raises)."""
        n_layer = self.n_layer or MODELS.get(self.name, {}).get("n_layer")
        return attention if n_layer is None else hybrid_layers(attention, n_layer, every)

    def config(self) -> Config:
        """The `Config`. UserError if the names or numbers make no model, or no layer has a given option."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        config = Config.from_name(**given)
        has = {option for name in config.attention_per_layer for option in ATTENTIONS[name].options()}
        for option, default in option_defaults().items():
            if option not in has and getattr(self, option) != default:
                raise UserError(
                    f"{option} is not an option of {attention_label(self.attention)}, which has "
                    f"{', '.join(sorted(has))}: leave model.{option} out"
                )
        return config


def _aliases_in(attention: str | list[str]) -> str:
    """`; hybrid is ours-gated+…`, for each alias in `attention`."""
    names = [attention] if isinstance(attention, str) else attention
    called = {str(name).partition("+")[0].strip() for name in names}
    return "".join(f"; {name} is {form}" for name, form in ALIASES.items() if name in called)
