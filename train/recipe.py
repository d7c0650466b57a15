"""A recipe from arguments: `--config`, a file or a shipped name, and `--model.*`, `--data.*`, `--train.*`."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lingpt.common.arguments import ConfigFile, Layer, read_layers
from lingpt.common.errors import UserError, nearest
from lingpt.common.files import expand
from lingpt.common.options import build, options_of
from lingpt.common.run_folder import CONFIG, find_model_folder
from lingpt.models import MODELS, Config, ModelArgs, check_source, read_model_config
from lingpt.models.architecture import Architecture
from lingpt.models.attention import attention_options
from lingpt.train.config import Recipe

RECIPES = Path(__file__).parents[1] / "configs"  # those that ship with LinGPT
_LENGTHS = ("train.max_steps", "train.max_tokens")
_PATHS = ("train.out_dir", "train.resume", "train.init_from", "train.teacher")


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """The names of the recipes (or studies) that ship, in `folder`: their files without `.yaml`."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_recipe(name: str, folder: Path = RECIPES, kind: str = "recipe") -> Path:
    """The path of a recipe (or study) given as a file or as a shipped name. UserError if there is none."""
    if Path(name).is_file():
        return Path(name)
    if name not in (known := recipe_names(folder)):
        raise UserError(f"no {kind} {name!r}{nearest(name, known)}; a file, or one of {', '.join(known)}")
    return folder / f"{name}.yaml"


def parse_recipe(
    words: Sequence[str],
    verb: str = "train",
    about: str = "",
    shown: str | tuple[str, ...] = "",
    cls: type[Recipe] = Recipe,
) -> Recipe:
    """The recipe that these arguments of `lingpt <verb>` describe, and the name of its run; UserError if they
    are invalid.

    about: what the verb does, for its `--help`, which lists only keys that begin with `shown`. cls: has the
    verb's own options, too.
    """
    config = ConfigFile(find_recipe, f"recipe: a YAML file or one of {', '.join(recipe_names())}")
    layers = read_layers(verb, cls, words, about, config, shown)
    if None not in map(layers[-1].values.get, _LENGTHS):
        raise UserError("--train.max_steps and --train.max_tokens both say how long to train: give one")
    values = _merged(layers)
    values |= {key: str(expand(path)) for key in _PATHS if (path := str(values.get(key, ""))).startswith("~")}
    sizes = _sizes_of_source(values)
    recipe = build(cls, sizes | {k: v for k, v in values.items() if k not in sizes or v is not None})
    if recipe.train.name is None:
        name = _run_name(recipe, layers[0], sizes)
        recipe.train.name = None if name == recipe.run_name else name
    return recipe


def _merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """The values of all layers. One that gives max_steps, or max_tokens, overrides both."""
    values: dict[str, Any] = {}
    for layer in layers:
        if any(layer.values.get(key) is not None for key in _LENGTHS):
            values |= dict.fromkeys(_LENGTHS)
        values |= layer.values
    return values


def _sizes_of_source(values: dict[str, Any]) -> dict[str, Any]:
    """Name and sizes of the model of `train.init_from`, those that its name does not say. Empty if the recipe
    names a model that ships, or if there is no model: a new run then says so when it starts."""
    source = values.get("train.init_from")
    if source is None or values.get("model.name") in MODELS:
        return {}
    try:
        folder = find_model_folder(Path(source), verify=False)
        check_source(folder)
    except (UserError, OSError):
        return {}
    config = read_model_config(folder)
    named = Config.from_name(config.name).to_dict() if config.name in MODELS else {}
    sizes = {size: getattr(config, size) for size in options_of(Architecture)}
    known = {f"model.{size}": value for size, value in sizes.items() if value != named.get(size)}
    return known | {"model.name": config.name}


def _run_name(recipe: Recipe, first: Layer, sizes: dict[str, Any]) -> str:
    """The run's name: `<recipe>-<attention>…` and the sizes that are not those of the first file, or else
    these `sizes`."""
    in_file, of = build(Recipe, sizes | (first.values if first.file else {})), recipe.model.name
    if first.file and _names_its_run(first):
        of = first.file.stem if of == in_file.model.name else f"{first.file.stem}-{of}"
    return "-".join([recipe.default_name(of), *_sizes_given(recipe.model, in_file.model)])


def _names_its_run(layer: Layer) -> bool:
    """Whether a run is named after this file: not a shipped one, nor one that has a name."""
    assert layer.file
    # A run's resolved recipe has every key, and resumes that run even if its name is null.
    resolved = layer.file.name == CONFIG and "train.name" in layer.values
    return layer.values.get("train.name") is None and not resolved and layer.file.resolve().parent != RECIPES


def _sizes_given(model: ModelArgs, in_file: ModelArgs) -> list[str]:
    """`n_layer_3` for each size that differs both from `in_file` and from the model of its name."""
    others = {"name", "attention", *attention_options()}
    sizes = [name for name in options_of(ModelArgs) if name not in others]
    differ = [size for size in sizes if getattr(model, size) != getattr(in_file, size)]
    if not differ:
        return []
    now, own = model.config(), None
    with contextlib.suppress(UserError):  # a custom model whose sizes are on the command line
        own = replace(in_file, name=model.name, attention=model.attention).config()
    values = {size: getattr(now, size) for size in differ if getattr(now, size) != getattr(own, size, None)}
    return [f"{size}_{_in_a_name(value)}" for size, value in values.items()]


def _in_a_name(value: Any) -> str:
    """A size as part of a folder's name; of `rope_adjustments` its numbers: `8_1_4_2048`."""
    return "_".join(f"{number:.10g}" for number in value.values()) if isinstance(value, dict) else str(value)
