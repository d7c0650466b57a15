"""Training: a recipe becomes a run: `start.py` starts it, `loop.py` trains it."""

import lingpt.models.lightning_import  # noqa: F401 (before anything else imports Lightning)
from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.start import check_recipe, train

__all__ = ["Recipe", "TrainConfig", "check_recipe", "train"]
