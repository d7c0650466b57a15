"""The runs of a study: the command of each, its recipe, and how far it is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonargparse

from lingpt.cli.recipe import configure_recipe, find_recipe, recipe_from
from lingpt.common.errors import UserError
from lingpt.common.run_folder import CONFIG, METRICS, newest_checkpoint, read_metrics, read_model
from lingpt.eval.study import Study
from lingpt.train import Recipe


@dataclass(frozen=True)
class StudyRun:
    """One training: a row of the study, its seed, and the options that it is started with."""

    row: str
    name: str
    seed: int
    recipe_name: str
    options: dict[str, Any]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Of `lingpt`, as a child process gets them."""
        options = [f"--{key}={_word(value)}" for key, value in self.options.items()]
        return ["train", "--config", self.recipe_name, *options]

    @cached_property
    def recipe(self) -> Recipe:
        """What these arguments mean; UserError where they mean nothing."""
        try:
            return _recipe(tuple(self.arguments[1:]))
        except jsonargparse.ArgumentError as error:
            raise UserError(f"{self.row}: {' '.join(str(error).split())}") from error

    @property
    def step(self) -> int:
        """The last step that its metrics have; 0 where it has not begun."""
        return max((line["step"] for line in read_metrics(self.folder)), default=0)

    def halfway(self) -> bool:
        return 2 * self.step >= self.recipe.total_steps

    @property
    def loss(self) -> float | None:
        """The validation loss at the last step; None of a run that has not got there."""
        lines = [line for line in read_metrics(self.folder) if line.get("kind") == "val"]
        at_end = [line["loss"] for line in lines if line["step"] >= self.recipe.total_steps]
        return at_end[-1] if at_end else None

    def trouble(self) -> str | None:
        """Why the run cannot stand in the tables, in a line; None where it can."""
        if not (self.folder / METRICS).exists():
            return f"{self.name} is missing: it has not been trained"
        if any(line.get("kind") == "diverged" for line in read_metrics(self.folder)[-2:]):
            return f"{self.name} diverged at step {self.step}: its loss was not finite"
        if (self.folder / CONFIG).exists():
            wanted, trained = self.recipe.model.attention, read_model(self.folder)[1]
            found = trained if isinstance(trained, str) else list(trained)
            if found != wanted:
                return f"{self.name} was trained with {found}, and its row is {wanted}: it is left out"
        if self.loss is None:
            return f"{self.name} is unfinished: step {self.step} of {self.recipe.total_steps}"
        return None

    def is_done(self) -> bool:
        return self.trouble() is None

    def status(self) -> str:
        lines = [line for line in read_metrics(self.folder) if line.get("kind") == "train"]
        loss = f", loss {lines[-1]['loss']:.3f}" if lines and lines[-1].get("loss") is not None else ""
        return f"at step {self.step} of {self.recipe.total_steps}{loss}"


@cache
def _recipe(arguments: tuple[str, ...]) -> Recipe:
    """What `lingpt train` makes of its arguments; kept, since parsing takes a second."""
    parser = _parser()
    recipe = recipe_from(parser.instantiate_classes(parser.parse_args(list(arguments))))
    recipe.model.config()  # an attention that there is not, or a list that is too short
    return recipe


@cache
def _parser() -> jsonargparse.ArgumentParser:
    """That of `lingpt train`."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False, prog="lingpt train")
    configure_recipe(parser)
    return parser


def _word(value: Any) -> str:
    """A value as the command line takes it: YAML in a line."""
    return value if isinstance(value, str) else json.dumps(value)


def study_runs(study: Study, folder: Path, rates: dict[str, float], cards: int | None) -> list[StudyRun]:
    """Every run of the study; `rates` has the chosen peak learning rate of a row, where one was chosen."""
    return [
        _run(study, folder, row, name, seed, study.tokens, rates.get(row), cards)
        for row, name, seed in study.run_names()
    ]


def rate_runs(study: Study, folder: Path, cards: int | None) -> list[StudyRun]:
    """The short runs that find the learning rate of each row."""
    extra = {"train.wandb": False, "train.sample_tokens": 0, **study.rate_options}
    return [
        _run(
            study, folder, row, f"{row}-rate{rate:g}", 0, study.rate_tokens, rate, cards, extra
        )
        for row in study.attentions
        for rate in study.rates
    ]  # fmt: skip


def _run(
    study: Study,
    folder: Path,
    row: str,
    name: str,
    seed: int,
    tokens: int,
    rate: float | None,
    cards: int | None,
    extra: dict[str, Any] | None = None,
) -> StudyRun:
    options = {
        **study.options,
        **study.attentions[row],
        "model.attention": study.attention(row),
        "train.max_steps": None,  # the tokens decide
        "train.max_tokens": tokens,
        "train.seed": seed,
        "train.name": name,
        "train.out_dir": str(folder),
        "train.wandb_group": f"study-{study.name}",
        **(extra or {}),
    }
    if cards is not None:
        options["train.devices"] = cards
    recipe = str(find_recipe(study.recipe)) if Path(study.recipe).is_file() else study.recipe
    if rate is not None:
        options["train.learning_rate"] = rate
        options["train.min_learning_rate"] = rate * _least_of_peak(recipe, options)
    return StudyRun(row, name, seed, recipe, options, folder / name)


def _least_of_peak(recipe: str, options: dict[str, Any]) -> float:
    """Where the schedule ends, as a share of the peak, in the recipe with the study's options."""
    from lingpt.common.files import read_yaml

    train = read_yaml(find_recipe(recipe)).get("train", {})
    values = [options.get(f"train.{key}", train.get(key)) for key in ("min_learning_rate", "learning_rate")]
    return values[0] / values[1] if all(values) else 0.05


def chosen_rates(runs: Sequence[StudyRun]) -> dict[str, float]:
    """Of each row the rate whose short run ended with the lowest validation loss; rows without one are left
    out."""
    best: dict[str, tuple[float, float]] = {}
    for run in runs:
        loss, rate = run.loss, run.options["train.learning_rate"]
        if loss is not None and loss < best.get(run.row, (float("inf"), 0.0))[0]:
            best[run.row] = loss, rate
    return {row: rate for row, (_, rate) in best.items()}


def with_checkpoint(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Those that are done and whose weights are still there."""
    return [run for run in runs if run.is_done() and newest_checkpoint(run.folder)]
