"""A recipe from arguments: `--config`, a file or a shipped name, and `--model.*`, `--data.*`, `--train.*`."""

import contextlib
from collections.abc import Sequence, Set
from dataclasses import fields, replace
from pathlib import Path

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.arguments import parse_arguments, parser_of
from lingpt.common.errors import UserError, nearest
from lingpt.common.files import read_yaml
from lingpt.common.run_folder import CONFIG, read_config
from lingpt.data import DataConfig
from lingpt.data.paths import expand
from lingpt.models import ATTENTIONS, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.config import differences

RECIPES = Path(__file__).parents[1] / "configs"  # those that ship with LinGPT


def recipe_names() -> list[str]:
    """The names of the recipes that ship: their files without `.yaml`."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


class RecipeFile(ActionConfigFile):
    """`--config`: a YAML file, or the name of a recipe that ships with LinGPT."""

    def __call__(self, parser, cfg, values, option_string=None):
        super().__call__(parser, cfg, str(find_recipe(values)), option_string)


def find_recipe(name: str) -> Path:
    """The path of a recipe given as a file or as a shipped name. UserError if it is not a recipe."""
    known, path = recipe_names(), Path(name)
    if not path.is_file() and name in known:
        path = RECIPES / f"{name}.yaml"
    elif not path.is_file():
        raise UserError(
            f"no recipe {name!r}{nearest(name, known)}; it is a file or one of: {', '.join(known)}"
        )
    recipe = read_yaml(path)
    if not isinstance(recipe, dict):
        raise UserError(f"{path} is not a recipe: it has no keys `model`, `data`, `train`")
    for key, value in recipe.items():
        if (
            not isinstance(key, str)
            or not isinstance(value, dict)
            or not all(isinstance(k, str) for k in value)
        ):
            raise UserError(f"{path}: {key!r} is not a group of keys; they are `model`, `data` and `train`")
    return path


def configure_recipe(parser: ArgumentParser) -> None:
    """Adds `--config`, `--model.*`, `--data.*` and `--train.*` to `parser`."""
    parser.add_argument(
        "--config", action=RecipeFile, help=f"recipe: a YAML file or one of {', '.join(recipe_names())}"
    )
    parser.add_class_arguments(ModelArgs, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(TrainConfig, "train")


def parse_recipe(words: Sequence[str]) -> Recipe:
    """The recipe that these arguments of `lingpt train` describe; UserError if they are invalid."""
    return recipe_from(parse_arguments("train", configure_recipe, words))


def recipe_from(args: Namespace) -> Recipe:
    """The recipe that the parsed (and instantiated) arguments describe, and the name of its run."""
    recipe = Recipe(model=args.model, data=args.data, train=args.train)
    for key in ("out_dir", "resume", "init_from"):
        if (path := getattr(recipe.train, key)) and path.startswith("~"):
            setattr(recipe.train, key, str(expand(path)))
    files = [Path(path) for path in args.get("config") or []]
    if None not in (recipe.train.max_steps, recipe.train.max_tokens):
        _keep_the_length_given(recipe.train, files, args.options_given)
    if recipe.train.name is None:
        name = _run_name(recipe, files[0] if files else None)
        recipe.train.name = None if name == recipe.run_name else name
    return recipe


def _keep_the_length_given(train: TrainConfig, files: Sequence[Path], options: Set[str]) -> None:
    """Keeps max_steps or max_tokens, whichever the command line gives, or else the last file that gives one;
    UserError if the command line gives both, even with the file's own value."""
    keys, in_files = {"max_steps", "max_tokens"}, _recipe_in(*files).train
    given = {
        key for key in keys if f"--train.{key}" in options or getattr(train, key) != getattr(in_files, key)
    }
    if given == keys:
        raise UserError("--train.max_steps and --train.max_tokens both say how long to train: give one")
    for file in reversed(files):
        given = given or {key for key in keys if getattr(_recipe_in(file).train, key) is not None}
    for key in keys - given:
        setattr(train, key, None)


def _run_name(recipe: Recipe, file: Path | None) -> str:
    """The run's name: `<recipe>-<attention>…` and the sizes given on the command line.

    An existing run under the old naming scheme (model-attention) keeps its name.
    """
    in_file = _recipe_in(file) if file else Recipe()
    of = recipe.model.name
    if file and _names_its_run(file):
        of = file.stem if of == in_file.model.name else f"{file.stem}-{of}"
    name = "-".join([recipe.default_name(of), *_sizes_given(recipe.model, in_file.model)])
    before = Path(recipe.train.out_dir) / f"{recipe.model.name}-{recipe.attention_label}"
    if (before / CONFIG).exists() and not (Path(recipe.train.out_dir) / name).exists():
        with contextlib.suppress(UserError):
            if not differences(read_config(before), recipe.to_dict()):
                return before.name
    return name


def _names_its_run(file: Path) -> bool:
    """Whether a run is named after this file: not a shipped one, nor one that has a name."""
    train = read_yaml(file).get("train", {})
    # A run's resolved recipe has every key, and resumes that run even if its name is null.
    resolved = file.name == CONFIG and "name" in train
    return train.get("name") is None and not resolved and file.resolve().parent != RECIPES


def _recipe_in(*files: Path) -> Recipe:
    """The recipe of the files, without the command line."""
    parser = parser_of("train", configure_recipe, "")
    words = [word for file in files for word in ("--config", str(file))]
    args = parser.instantiate_classes(parser.parse_args(words))
    return Recipe(model=args.model, data=args.data, train=args.train)


def _sizes_given(model: ModelArgs, in_file: ModelArgs) -> list[str]:
    """`n_layer_3` for each size that differs both from `in_file` and from the model of its name."""
    options = {option for attention in ATTENTIONS.values() for option in attention.options()}
    sizes = [field.name for field in fields(ModelArgs) if field.name not in {"name", "attention", *options}]
    differ = [size for size in sizes if getattr(model, size) != getattr(in_file, size)]
    if not differ:
        return []
    now, own = model.config(), None
    with contextlib.suppress(UserError):  # a custom model whose sizes are on the command line
        own = replace(in_file, name=model.name, attention=model.attention).config()
    return [
        f"{size}_{getattr(now, size)}" for size in differ if getattr(now, size) != getattr(own, size, None)
    ]
