"""What `lingpt train` and `lingpt data` share: `--config` and `--model.*`, `--data.*`, `--train.*`."""

import os

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.errors import UserError, nearest
from lingpt.configs import recipe_names, recipe_path
from lingpt.data import DataConfig
from lingpt.models import ModelArgs
from lingpt.train import Recipe, TrainConfig


class RecipeFile(ActionConfigFile):
    """`--config`: a YAML file, or the name of a recipe that ships with LinGPT."""

    def __call__(self, parser, cfg, values, option_string=None):
        super().__call__(parser, cfg, _readable(find_recipe(values)), option_string)


def find_recipe(name: str) -> str:
    """The path of a recipe given as a file or as a shipped name; UserError names the nearest."""
    if os.path.isfile(name):
        return name
    shipped = recipe_path(name)
    if shipped is None:
        known = training_recipes()
        raise UserError(
            f"no recipe {name!r}{nearest(name, known)}; it is a file or one of: {', '.join(known)}"
        )
    return str(shipped)


def training_recipes() -> list[str]:
    """The shipped recipes that say what to train (not the evaluation's defaults)."""
    return [name for name in recipe_names() if "model" in yaml.safe_load(recipe_path(name).read_text())]


def _readable(path: str) -> str:
    """`path`, once it is known to hold YAML with keys; UserError names the file and the line."""
    try:
        with open(path) as file:
            content = yaml.safe_load(file)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path} is no YAML: {error.problem}, line {error.problem_mark.line + 1}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no recipe: it has no keys `model`, `data`, `train`")
    return path


def configure_recipe(parser: ArgumentParser) -> None:
    """Adds `--config`, `--model.*`, `--data.*` and `--train.*` to `parser`."""
    parser.add_argument(
        "--config", action=RecipeFile, help=f"recipe: a YAML file or one of {', '.join(training_recipes())}"
    )
    parser.add_class_arguments(ModelArgs, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(TrainConfig, "train")


def recipe_from(args: Namespace) -> Recipe:
    """The recipe that the parsed (and instantiated) arguments describe."""
    return Recipe(model=args.model, data=args.data, train=args.train)
