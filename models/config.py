"""A model's configuration: its sizes, the attention with its options; and how a recipe names it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from lingpt.common.errors import UserError, unknown
from lingpt.common.options import Option, as_word, options_of
from lingpt.common.run_folder import attention_label
from lingpt.models.architecture import MODELS, Architecture
from lingpt.models.attention import (
    ALIASES,
    ATTENTIONS,
    SOFTMAX_EVERY,
    attention_options,
    hybrid_layers,
    parse_form,
    unknown_attention,
    with_options,
)

T = TypeVar("T")
NEEDED = ("n_layer", "n_embd", "n_head")  # sizes that have no default


@dataclass(kw_only=True)
@with_options
class Config(Architecture):
    """A model: its sizes, the attention, and every attention's options.

    Raises UserError for an unknown attention, a list of the wrong length, or numbers that make no model.
    `attention` is one name of `ATTENTIONS`, or a list with one per layer (a hybrid). `shared_values_width`:
    that of the values that layers with `value_residual` share; None if there are no such layers.
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
            if _is_form(name):
                raise UserError(f"{name!r} is a form: ModelArgs(name, attention={name!r}).config() reads it")
            if name not in ATTENTIONS:
                raise unknown_attention(name)
        if len(self.attention_per_layer) != self.n_layer:
            raise UserError(
                f"attention lists {len(self.attention)} layers, but {self.name!r} has {self.n_layer}: "
                "give one name, or one per layer"
            )
        given: dict[str, Any] = {}
        widths = set[int]()  # of v, in layers with `value_residual`
        for name in set(layers):
            for option, declared in ATTENTIONS[name].options().items():
                setattr(self, option, declared.read(option, getattr(self, option)))
            options = self.attention_options(name)
            ATTENTIONS[name].check(self, **options)
            given |= options
            if options.get("value_residual"):
                widths.add(ATTENTIONS[name].v_width(self))
        if len(widths) > 1:
            each = " and ".join(map(str, sorted(widths)))
            raise UserError(
                f"value_residual needs a v of the same width in all layers, not of {each}: leave it out, or "
                f"give n_query_groups and head_size whose product is n_embd={self.n_embd}, gla's width"
            )
        self.shared_values_width = max(widths, default=None)
        gates = given.get("output_gate") or given.get("softmax_gate") or "gla" in layers
        for part, default in (("activation", "silu"), ("norm", "layer")):
            value = given.get(f"gate_{part}", default)
            if value != default and not gates:
                raise UserError(
                    f"gate_{part}={value} needs output_gate, softmax_gate or gla, whose {part} it is"
                )

    @property
    def attention_per_layer(self) -> list[str]:
        """One attention name for each layer."""
        return [self.attention] * self.n_layer if isinstance(self.attention, str) else list(self.attention)

    @property
    def has_linear_attention(self) -> bool:
        """Whether a layer has another attention than softmax: a state of constant size."""
        return any(ATTENTIONS[name].constant_state for name in self.attention_per_layer)

    def attention_options(self, name: str) -> dict[str, Any]:
        """This configuration's values of the options that an attention declares."""
        return {option: getattr(self, option) for option in ATTENTIONS[name].options()}

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Self:
        """The configuration of `demo`, a Pythia or a Llama model, with any field overridden.

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
        settings. UserError for keys that are unknown or missing, and for what is not supported."""
        if missing := [name for name in ("name", *NEEDED) if name not in values]:
            raise UserError(f"the model's configuration lacks {', '.join(missing)}")
        own = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in values.items() if name in own})
        config.check_other_settings({name: value for name, value in values.items() if name not in own})
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON types."""
        return asdict(self)


def _with_sizes_and_options(cls: type[T]) -> type[T]:
    """Class decorator, below `@dataclass`: adds a field for each size, None for that of the named model, and
    for each option of an attention, None if it is not given."""
    for name, declared in {**options_of(Architecture), **attention_options()}.items():
        option, default = declared.option, declared.default
        if name in attention_options():
            text = option.help if default is None else f"{option.help} (default: {as_word(default)})"
            option = replace(option, help=text, heading="options of attentions")
        if name != "name":
            cls.__annotations__[name] = Annotated[declared.kind | None, option]
            setattr(cls, name, None)
    return cls


@dataclass
@_with_sizes_and_options
class ModelArgs:
    """The model that a recipe names, and sizes that differ from the named model's.

    An attention's option may be given in `attention` or in its own field; in both, it must be the same.
    """

    # fmt: off
    name: Annotated[str, Option(
        "`demo`, a Pythia model (`pythia-14m` … `pythia-12b`), `llama-130m` … `llama-1.3b`, or a name for "
        "your own model, whose n_layer, n_embd and n_head must then be given")] = "demo"
    attention: Annotated[str | list[str], Option(
        "one of the attentions, or a list with one per layer. Options may follow a `+` "
        "(`ours-gated+output_gate`); they hold for all layers that have them. `+softmax_every=6` makes the "
        "fourth of each six layers softmax. `hybrid`, `hybrid-best`, `linear-best` and `softmax-best` are "
        f"short for such forms: `hybrid` for {ALIASES['hybrid'].replace('+', ' + ')}")] = "ours"
    # fmt: on

    if TYPE_CHECKING:  # the sizes and options, which the decorator adds

        def __init__(self, name: str = "", attention: str | list[str] = "", **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        """Moves the options in `attention` to their fields, expands a hybrid to a list of its layers, and
        sets options that are not given to their defaults.

        UserError for an option that is unknown, or has two values.
        """
        names = self.attention if isinstance(self.attention, list) else [self.attention]
        forms = [parse_form(name) if _is_form(name) else (name, {}) for name in names]
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
        default = {name: declared.default for name, declared in attention_options().items()}
        given = {name: getattr(self, name) for name in default}
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
        for option, declared in attention_options().items():
            if option not in has and getattr(self, option) != declared.default:
                raise UserError(
                    f"{option} is not an option of {attention_label(self.attention)}, which has "
                    f"{', '.join(sorted(has))}: leave model.{option} out"
                )
        return config


def _is_form(name: Any) -> bool:
    """Whether an attention's name is an alias, or has options behind it."""
    return isinstance(name, str) and ("+" in name or name in ALIASES)


def _aliases_in(attention: str | list[str]) -> str:
    """`; hybrid is ours-gated+…`, for each alias in `attention`."""
    names = [attention] if isinstance(attention, str) else attention
    called = {str(name).partition("+")[0].strip() for name in names}
    return "".join(f"; {name} is {form}" for name, form in ALIASES.items() if name in called)
