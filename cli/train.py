"""`lingpt train`: trains a recipe, or resumes its run."""

from functools import partial

from lingpt.train import train
from lingpt.train.recipe import parse_recipe

HELP = "Train a model, or resume its run: one folder a run, under runs/."
parse = partial(parse_recipe, verb="train", about=HELP)
run = train
