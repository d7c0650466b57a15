"""Training: recipe, loop, checkpoints, trackers, curves."""

from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.curve_figure import draw_curves
from lingpt.train.curves import find_runs, format_table
from lingpt.train.loop import check_recipe, train

__all__ = ["Recipe", "TrainConfig", "check_recipe", "draw_curves", "find_runs", "format_table", "train"]
