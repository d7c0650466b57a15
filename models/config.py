"""A model's configuration: its sizes, the attention with its options; and how a recipe names it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from lingpt.common.errors import UserError, unknown
from lingpt.common.run_folder import attention_label
from lingpt.models.architecture import MODELS, Architecture
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

NEEDED = ("n_layer", "n_embd", "n_head")  # sizes that have no default


@dataclass(kw_only=True)
@with_options
class Config(Architecture):
    """A model: its sizes, the attention, and every attention's options.

    Raises UserError for an unknown attention, a list of the wrong length, or numbers that make no model.

    Args:
        attention: one name of `ATTENTIONS`, or a list with one per layer (a hybrid).
    """

    attention: str | list[str] = "ours"

    if TYPE_CHECKING:  # the options, which `with_options` adds

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.attention if isinstance(self.attention, list) else [self.attention]
        if not all(isinstance(name, str) for name in layers):
            raise UserError(f"attention={self.attention!r}: give one name, or a list with one per layer")
        for name in layers:
            if "+" in name or name in ALIASES:
                raise UserError(f"{name!r} is a form: ModelArgs(name, attention={name!r}).config() reads it")
            if name not in ATTENTIONS:
                raise unknown("attention", name, [*ATTENTIONS, *ALIASES])
        if len(self.attention_per_layer) != self.n_layer:
            raise UserError(
                f"attention lists {len(self.attention)} layers, but {self.name!r} has {self.n_layer}: "
                "give one name, or one per layer"
            )
        for name in set(layers):
            options = self.attention_options(name)
            check_options(name, options)
            ATTENTIONS[name].check(self, **options)

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
        values = MODELS.get(name, {}) | {"name": name} | overrides
        if missing := [size for size in NEEDED if size not in values]:
            needs = ", ".join(f"model.{size}" for size in missing)
            raise UserError(f"{unknown('model', name, MODELS)}; a model of your own needs {needs}")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Also reads what LitGPT and earlier versions wrote, with LitGPT's other
        settings. UserError for keys that are unknown or missing, and for what is no GPT-NeoX."""
        if missing := [name for name in ("name", *NEEDED) if name not in values]:
            raise UserError(f"the model's configuration lacks {', '.join(missing)}")
        own = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in values.items() if name in own})
        config.check_other_settings({name: value for name, value in values.items() if name not in own})
        return config

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
