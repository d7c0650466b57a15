"""Training: recipe, loop, checkpoints, trackers."""

from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.loop import check_recipe, train

__all__ = ["Recipe", "TrainConfig", "check_recipe", "train"]
