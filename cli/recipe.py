"""What `lingpt train` and `lingpt data` share: `--config` and `--model.*`, `--data.*`, `--train.*`."""

import contextlib
from pathlib import Path

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.errors import UserError, nearest
from lingpt.common.files import read_yaml
from lingpt.common.run_folder import CONFIG, read_config
from lingpt.configs import FOLDER, recipe_names, recipe_path
from lingpt.data import DataConfig
from lingpt.models import ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.config import differences


class RecipeFile(ActionConfigFile):
    """`--config`: a YAML file, or the name of a recipe that ships with LinGPT."""

    def __call__(self, parser, cfg, values, option_string=None):
        super().__call__(parser, cfg, str(find_recipe(values)), option_string)


def find_recipe(name: str) -> Path:
    """The path of a recipe given as a file or as a shipped name. UserError where it is no recipe."""
    path = Path(name) if Path(name).is_file() else recipe_path(name)
    if path is None:
        known = training_recipes()
        raise UserError(
            f"no recipe {name!r}{nearest(name, known)}; it is a file or one of: {', '.join(known)}"
        )
    recipe = read_yaml(path)
    if not isinstance(recipe, dict):
        raise UserError(f"{path} is no recipe: it has no keys `model`, `data`, `train`")
    for key, value in recipe.items():
        if (
            not isinstance(key, str)
            or not isinstance(value, dict)
            or not all(isinstance(k, str) for k in value)
        ):
            raise UserError(f"{path}: {key!r} is no group of keys; a recipe has `model`, `data` and `train`")
    return path


def training_recipes() -> list[str]:
    """The shipped recipes that say what to train (not the evaluation's defaults)."""
    paths = {name: recipe_path(name) for name in recipe_names()}
    return [name for name, path in paths.items() if path and "model" in read_yaml(path)]


def configure_recipe(parser: ArgumentParser) -> None:
    """Adds `--config`, `--model.*`, `--data.*` and `--train.*` to `parser`."""
    parser.add_argument(
        "--config", action=RecipeFile, help=f"recipe: a YAML file or one of {', '.join(training_recipes())}"
    )
    parser.add_class_arguments(ModelArgs, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(TrainConfig, "train")


def recipe_from(args: Namespace) -> Recipe:
    """The recipe that the parsed (and instantiated) arguments describe; a file of one's own names its run."""
    recipe = Recipe(model=args.model, data=args.data, train=args.train)
    for path in map(Path, args.get("config") or []):
        if recipe.train.name is None and path.name != CONFIG and path.resolve().parent != FOLDER:
            recipe.train.name = _name_of_own(recipe, path.stem)
    return recipe


def _name_of_own(recipe: Recipe, stem: str) -> str:
    """`<stem>-<attention>…`; or, from before files named runs, the name of a run of this very recipe that
    is called as its model.
    """
    name = recipe.default_name(stem)
    before = Path(recipe.train.out_dir) / f"{recipe.model.name}-{recipe.attention_label}"
    if (before / CONFIG).exists() and not (Path(recipe.train.out_dir) / name).exists():
        with contextlib.suppress(UserError):
            if not differences(read_config(before), recipe.to_dict()):
                return before.name
    return name
