"""The runs of a study: the command of each, its recipe, and its progress."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.options import as_word
from lingpt.common.run_folder import (
    CONFIG,
    METRICS,
    checkpoint_folder,
    read_config,
    read_environment,
    read_manifest,
    read_metrics,
)
from lingpt.data import DataConfig, content_hashes
from lingpt.study.config import Study
from lingpt.study.portable import differs
from lingpt.train import Recipe, check_recipe
from lingpt.train.config import DATA_PATHS, MAY_CHANGE, differences, recipe_from_dict
from lingpt.train.recipe import parse_recipe

_NEW_NAME = "give the study another --name, or remove the folder of the run"
_AGAIN = "remove the folder of the run to train it again"


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
        """The arguments of `lingpt` for a child process."""
        options = [f"--{key}={as_word(value)}" for key, value in self.options.items()]
        return ["train", "--config", self.recipe_name, *options]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of these arguments; UserError if they are invalid."""
        try:
            return _recipe(tuple(self.arguments[1:]))
        except UserError as error:
            raise UserError(f"{self.row}: {error}") from error

    def check(self, dry_run: bool = False) -> None:
        """Raises UserError, with the row's name, for what `lingpt train` refuses before any work. dry_run: as
        in a dry run of `lingpt train`, it may be a run for another machine."""
        recipe = self.recipe
        try:
            check_recipe(replace(recipe, train=replace(recipe.train, dry_run=dry_run)))
        except UserError as error:
            raise UserError(f"{self.row}: {error}") from error

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines that `read_metrics` finds; the file is read again only if it has changed."""
        try:
            stat = (self.folder / METRICS).stat()
        except OSError:  # there is none, or it cannot be read, which `read_metrics` says
            return read_metrics(self.folder)
        return _metrics(self.folder, stat.st_ino, stat.st_mtime_ns, stat.st_size)

    @property
    def step(self) -> int:
        """The last step in its metrics; 0 if it has not begun."""
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def loss(self) -> float | None:
        """The validation loss at the last step; None if the run has not reached it."""
        end = [line for line in self.metrics if line["step"] >= self.recipe.total_steps]
        losses = [line.get("loss") for line in end if line["kind"] == "val"]
        number = losses and isinstance(losses[-1], int | float) and math.isfinite(losses[-1])
        return losses[-1] if number else None

    @property
    def diverged(self) -> bool:
        return any(line["kind"] == "diverged" for line in self.metrics[-2:])

    @property
    def started(self) -> bool:
        return (self.folder / METRICS).exists()

    def config_mismatch(self) -> str | None:
        """How its record differs from the study's current configuration, in what determines losses; None if
        it does not, or if nothing has been trained.
        """
        if not self.started:
            return None
        try:
            config = read_config(self.folder)
            found = _differences(config, self.recipe)
            but_for_paths = [one for one in found if one.partition(":")[0] not in DATA_PATHS]
            if found != but_for_paths and self._same_data():
                found = but_for_paths
        except (UserError, TypeError) as error:
            return f"it does not say what it was trained with ({error}): {_NEW_NAME}"
        if not found:
            return None
        some = "; ".join(found[:3]) + ("; …" if len(found) > 3 else "")
        mend = _NEW_NAME
        if not but_for_paths:
            mend = f"give its --source and --tokenizer (its {CONFIG} has them); else {mend}"
        return f"trained otherwise than the study now says ({some}): {mend}"

    def _same_data(self) -> bool:
        """Whether text and tokenizer, wherever they are now, are those that the run was trained on."""
        try:
            record = read_environment(self.folder, "data")
            return _content_hashes(*astuple(self.recipe.data)).items() <= record.items()
        except UserError:
            return False

    def exclusion_reason(self) -> str | None:
        """Why the run is left out of the tables, in words that other runs may share; None if it is not."""
        if not self.started:
            return "not trained"
        if mismatch := self.config_mismatch():
            return mismatch
        if self.diverged:
            return f"diverged at step {self.step}, its loss was not finite: {_AGAIN}"
        if self.loss is None and self.step >= self.recipe.total_steps:
            return f"no validation loss at its last step: {_AGAIN}"
        if self.loss is None:
            return f"unfinished, at step {self.step} of {self.recipe.total_steps}"
        return None

    def has_weights(self) -> bool:
        """Whether the checkpoint of its last step, which is scored, exists and is whole."""
        return read_manifest(checkpoint_folder(self.folder, self.recipe.total_steps)) is not None

    def has_result(self) -> bool:
        return self.exclusion_reason() is None

    def is_finished(self) -> bool:
        """Whether nothing is left to train: done, or diverged, which counts as a result."""
        return self.has_result() or self.diverged

    def status(self) -> str:
        lines = [line for line in self.metrics if line["kind"] == "train"]
        last = lines[-1].get("loss") if lines else None
        loss = f", loss {last:.3f}" if isinstance(last, int | float) else ""
        return f"at step {self.step} of {self.recipe.total_steps}{loss}"


def _differences(config: dict[str, Any], recipe: Recipe) -> list[str]:
    """`key: old → new` for every difference that affects losses, including those that a resumed run may have
    but that make it another run of the study."""
    recorded = recipe_from_dict(config)
    found = differences(config, recipe.to_dict(), MAY_CHANGE)
    for key in ("decay_steps", "init_from", "segments"):
        before, now = getattr(recorded.train, key), getattr(recipe.train, key)
        found += [f"train.{key}: {before} → {now}"] if differs(before, now) else []
    steps = recorded.total_steps, recipe.total_steps
    return found + ([f"steps: {steps[0]} → {steps[1]}"] if steps[0] != steps[1] else [])


@cache
def _recipe(arguments: tuple[str, ...]) -> Recipe:
    """The recipe that `lingpt train` makes of its arguments; cached, as parsing takes a tenth of a second."""
    recipe = parse_recipe(arguments)
    recipe.model.config()  # raises for an unknown attention, or a list that is too short
    return recipe


@lru_cache(maxsize=64)
def _metrics(folder: Path, *_state: int) -> list[dict[str, Any]]:
    return read_metrics(folder)


@cache
def _content_hashes(*data: Any) -> dict[str, str]:
    """`content_hashes` of the files that this `DataConfig` names; cached, as the tokenizer is read for it."""
    return content_hashes(DataConfig(*data))


def clear_caches() -> None:
    """Clears the caches, for a process that runs several studies: files may have changed since."""
    _recipe.cache_clear()
    _content_hashes.cache_clear()
    _metrics.cache_clear()


def study_runs(study: Study, folder: Path, rates: dict[str, float], cards: int | None) -> list[StudyRun]:
    """Every run of the study. rates: row → its chosen peak learning rate, for rows that have one. cards: GPUs
    of a run; None on the CPU.

    A row whose runs have begun keeps their rate, even if another has been chosen since.
    """
    used = {**rates, **_kept_rates(study, folder)}
    common = {"train.max_tokens": study.tokens}
    return [
        _run(study, folder, row, name, common | {"train.seed": seed}, used.get(row), cards)
        for row, name, seed in study.run_names()
    ]


def rate_runs(study: Study, folder: Path, cards: int | None) -> list[StudyRun]:
    """The short runs that choose the learning rate of each row."""
    short = {"train.wandb": False, "train.sample_tokens": 0, **study.rate_options}
    short |= {"train.max_tokens": study.rate_tokens, "train.seed": 0}
    return [
        _run(study, folder, row, f"{row}-rate{rate:g}", short, rate, cards)
        for row in study.attentions
        for rate in study.learning_rates
    ]


def _kept_rates(study: Study, folder: Path) -> dict[str, float | None]:
    """Row → learning rate of its first run that has begun: one of the study's rates, or None for that of the
    recipe. A run with any other rate is not part of this study."""
    kept: dict[str, float | None] = {}
    for row, name, _ in study.run_names() if study.learning_rates else ():
        if row in kept or not (folder / name / METRICS).exists():
            continue
        try:
            found = read_config(folder / name).get("train", {}).get("learning_rate")
        except UserError:
            continue
        if found in study.learning_rates:
            kept[row] = found
        elif found == _row_recipe(study, row).train.learning_rate:
            kept[row] = None
    return kept


def _row_recipe(study: Study, row: str) -> Recipe:
    """The recipe with the options of the study and of the row."""
    return StudyRun(row, row, 0, study.recipe, _row_options(study, row), Path(row)).recipe


def _row_options(study: Study, row: str) -> dict[str, Any]:
    return study.options | study.attentions[row] | {"model.attention": study.attention(row)}


def _run(
    study: Study,
    folder: Path,
    row: str,
    name: str,
    more: dict[str, Any],
    rate: float | None,
    cards: int | None,
) -> StudyRun:
    """The run with `more` options; with a `rate`, the final learning rate keeps its ratio to the peak."""
    options = {
        **_row_options(study, row),
        "train.max_steps": None,  # `max_tokens` decides
        "train.name": name,
        "train.out_dir": str(folder),
        "train.wandb_group": f"study-{study.name}",
        **more,
    }
    if cards is not None:
        options["train.devices"] = cards
        if _row_recipe(study, row).train.accelerator == "auto":
            options["train.accelerator"] = "cuda"  # if a card died, do not train on the CPU
    if rate is not None:
        train = _row_recipe(study, row).train
        least = rate * (train.min_learning_rate / train.learning_rate)
        options |= {"train.learning_rate": rate, "train.min_learning_rate": least}
    return StudyRun(row, name, more["train.seed"], study.recipe, options, folder / name)


@dataclass(frozen=True)
class RateSearch:
    """The results of the short runs, each read once.

    losses: row → rate → validation loss, of finished runs. unfinished: row → the names of its unfinished
    runs, for rows that have some.
    """

    losses: dict[str, dict[float, float]]
    unfinished: dict[str, list[str]]

    @property
    def chosen(self) -> dict[str, float]:
        """Row → the rate whose run ended with the lowest validation loss. Left out are rows without results,
        and rows with an unfinished run, which may be the best.
        """
        rows = self.losses.items()
        return {row: min(found, key=found.__getitem__) for row, found in rows if row not in self.unfinished}


def read_rate_search(runs: Sequence[StudyRun]) -> RateSearch:
    """The results of the study's `rate_runs`."""
    losses, unfinished = dict[str, dict[float, float]](), dict[str, list[str]]()
    for run in runs:
        if run.has_result() and (loss := run.loss) is not None:
            losses.setdefault(run.row, {})[run.options["train.learning_rate"]] = loss
        elif not run.diverged:
            unfinished.setdefault(run.row, []).append(run.name)
    return RateSearch(losses, unfinished)
