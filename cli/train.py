"""`lingpt train`: trains a recipe, or resumes its run."""

from jsonargparse import Namespace

from lingpt.train import train
from lingpt.train.recipe import configure_recipe, recipe_from

HELP = "Train a model, or go on with its run: one folder a run, under runs/."
configure = configure_recipe


def run(args: Namespace) -> None:
    train(recipe_from(args))
