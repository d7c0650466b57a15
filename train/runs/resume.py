"""Starts a new run or resumes one, depending on the run's folder, whose content must match the recipe."""

import contextlib
import math
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import name_aside, remove_partial, set_aside, write_bytes, write_errors
from lingpt.common.format import duration, scaled_count
from lingpt.common.run_folder import (
    ABANDONED,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    WANDB,
    all_checkpoint_folders,
    checkpoint_folder,
    checkpoint_step,
    find_model_folder,
    newest_checkpoint,
    read_config,
    read_environment,
    read_manifest,
    read_metrics,
    valid_checkpoints,
)
from lingpt.models import GPT, Config, check_sizes, load_weights, read_model_config
from lingpt.train.config import DATA_PATHS, MAY_CHANGE, Recipe, differences, recipe_from_dict, with_defaults
from lingpt.train.console import print_rank0
from lingpt.train.model import config_of
from lingpt.train.report import diverged_message
from lingpt.train.runs.checkpoint import clear_leftovers, is_whole_recipe, load_manifest, why_unusable
from lingpt.train.runs.run_lock import RunLock
from lingpt.train.step import learning_rates


def resume_or_create(recipe: Recipe, fingerprint: str, lock: RunLock) -> tuple[Path | None, Path | None]:
    """Takes the `lock` of the recipe's run; returns the checkpoint to resume from, or None for a new run, and
    the model folder that a new run takes its weights from, if the recipe has `init_from`.

    fingerprint: of the data. Raises UserError if another process is using the folder, if it holds another
    run, or if no checkpoint matches. A damaged checkpoint is skipped for the one before.
    """
    folder, resume, init_from = recipe.run_folder, recipe.train.resume, None
    lock.acquire()
    with write_errors(folder, "free some space, make it writable, or choose another --train.out_dir"):
        if resume == "never" and any(path.name != LOCK for path in folder.iterdir()):
            init_from = _find_init_from(recipe)
            _check_move(recipe, init_from)
            _move_aside(folder, lock)
        given = _given_checkpoint(Path(resume), recipe) if resume not in ("auto", "never") else None
        if has_begun(folder):
            if config := _recorded_config(folder):
                recorded = read_environment(folder, "data").get("fingerprint")
                same_data = newest_checkpoint(folder) or recorded == fingerprint
                may_change = MAY_CHANGE | DATA_PATHS if same_data else MAY_CHANGE  # checkpoints: below
                _check_same(recipe, config, f"{folder} holds a run with another config", may_change)
            if given is None:
                _check_not_diverged(folder)
            elif newest := newest_checkpoint(folder):  # `given` may be another run's
                _check_same_data(recipe, newest, load_manifest(newest), fingerprint)
        checkpoint = given or _newest_usable(folder)
        if checkpoint is None:
            init_from = init_from or _find_init_from(recipe)
            print_rank0(f"new run: {folder}")
        else:
            _resume(recipe, checkpoint, fingerprint)
        clear_leftovers(folder)
        remove_partial(folder)
    return checkpoint, init_from


def refusal(recipe: Recipe, config: Config) -> str | None:
    """Why training would refuse the recipe here: a run in its folder with another config, or weights to begin
    from that do not exist or are not of `config`; None if nothing does. The data are not compared."""
    folder = recipe.run_folder
    try:
        if recipe.train.resume != "never" and has_begun(folder) and (old := _recorded_config(folder)):
            _check_same(recipe, old, f"{folder} holds a run with another config", MAY_CHANGE | DATA_PATHS)
        check_init_from(recipe, config)
    except UserError as error:
        return str(error)
    return None


# What changes with an option that may change in a run that resumes.
CHANGES = {
    "train.context_parallel": "the losses stay the same up to rounding",
    "train.segments": "gradients reach back as far as the new segments",
}


def _resume(recipe: Recipe, checkpoint: Path, fingerprint: str) -> None:
    """Checks that recipe and data are those of `checkpoint`, and prints where the run resumes. A recipe
    without `init_from` gets the checkpoint's."""
    manifest = load_manifest(checkpoint)
    complaint = f"{checkpoint} is of a run with another config"
    _check_same(recipe, manifest["config"], complaint, MAY_CHANGE | DATA_PATHS)
    _check_same_data(recipe, checkpoint, manifest, fingerprint)
    if recipe.train.init_from is None:  # so that this start's record also says where the weights came from
        recipe.train.init_from = manifest["config"].get("train", {}).get("init_from")
    _abandon_newer(recipe.run_folder, manifest["step"])
    print_rank0(
        f"resume: {checkpoint}, step {manifest['step']} of {recipe.total_steps} "
        f"({scaled_count(manifest['tokens'])} tokens, {duration(manifest['train_time'])} of training)"
    )
    for key, means in CHANGES.items():
        was, now = (with_defaults(config)[key] for config in (manifest["config"], recipe.to_dict()))
        if was != now:
            print_rank0(f"resume: {key} was {was} and is {now}: {means}")
    if jump := schedule_jump(recipe, manifest):
        print_rank0(jump)


def _recorded_config(folder: Path) -> dict[str, Any] | None:
    """The recipe that the folder's run was started with; None for a new run.

    Read from the newest checkpoint, which is always whole; else from config.yaml, which may be truncated,
    empty or missing.
    """
    newest = newest_checkpoint(folder)
    config = (read_manifest(newest) or {}).get("config") if newest else None
    if not is_whole_recipe(config) and (folder / CONFIG).exists():
        try:
            config = read_config(folder)
        except UserError as error:
            print_rank0(f"resume: {error}; it is written again")
            return None
        if not is_whole_recipe(config):
            print_rank0(f"resume: {folder / CONFIG} is cut short; it is written again")
            return None
    return config


def _newest_usable(folder: Path) -> Path | None:
    """The newest readable checkpoint; damaged ones after it are moved aside, with a line for each.

    None if the run has no checkpoint. UserError if it has some, but none is readable.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(all_checkpoint_folders(folder)):
        if (reason := why_unusable(path)) is None:
            break
        damaged.append((path, reason))
    else:
        if damaged:
            named = "; ".join(f"{path.name} {reason}" for path, reason in damaged)
            raise UserError(
                f"no checkpoint of {folder} can be read ({named}), and nothing was "
                "changed: restore one from a copy, or start from scratch with "
                "--train.resume never (the old run is moved aside)"
            )
        return None
    for broken, reason in damaged:
        aside = set_aside(broken, "damaged")
        print_rank0(f"resume: {broken} {reason} and is passed over; it is now {aside.name}")
    return path


def has_begun(folder: Path) -> bool:
    """Whether the run in `folder` has recorded a step; before that, its name counts as free."""
    return bool(all_checkpoint_folders(folder) or read_metrics(folder))


def give_back_name(folder: Path) -> None:
    """Removes what the start of a run wrote, if it has recorded no step."""
    try:
        if has_begun(folder):
            return
    except UserError:  # unreadable: leave it
        return
    for name in (CONFIG, ENVIRONMENT, METRICS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / WANDB, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: other files are not ours
        folder.rmdir()


def _check_not_diverged(folder: Path) -> None:
    """Raises UserError if the run diverged: the same recipe would only repeat the same steps."""
    lines = read_metrics(folder)
    if lines and lines[-1]["kind"] == "diverged":
        skipped = lines[-1].get("skipped")
        raise UserError(diverged_message(folder, lines[-1]["step"], skipped if type(skipped) is int else 0))


def schedule_jump(recipe: Recipe, manifest: dict[str, Any]) -> str | None:
    """The message on how a changed number of steps makes the learning rate jump on resuming; None if it does
    not."""
    before, step = recipe_from_dict(manifest["config"]), manifest["step"]
    if not 0 < step < recipe.total_steps:
        return None
    rate_before = learning_rates(before.train, before.total_steps)
    was, now = rate_before(step - 1), learning_rates(recipe.train, recipe.total_steps)(step)
    if math.isclose(now, rate_before(step)) or math.isclose(now, was):
        return None
    what = f"{before.total_steps} steps are now {recipe.total_steps}"
    if before.total_steps == recipe.total_steps:
        what = f"--train.decay_steps is now {recipe.train.decay_steps}"
    line = f"schedule: {what}, and at step {step + 1} the learning rate goes from {was:.3g} to {now:.3g}"
    start = before.decay_start
    if start is None:
        return f"{line}: the cosine is stretched (a run that is to be extended has --train.schedule wsd)"
    if step <= start:
        return line
    began = checkpoint_folder(recipe.run_folder, start)
    way = f"to extend the run from where its decay began, use --train.resume {began}"
    if read_manifest(began) is None:
        way = f"there is no checkpoint from where it began, at step {start}"
    return f"{line}: the decay is undone; {way}"


def _check_same(recipe: Recipe, old: dict[str, Any], complaint: str, may_change: Set[str]) -> None:
    init_from, was = recipe.train.init_from, old.get("train", {}).get("init_from")
    if init_from and not (was and Path(was).resolve() == Path(init_from).resolve()):
        may_change = may_change - {"train.init_from"}  # it would be silently unused
    if differ := differences(old, recipe.to_dict(), may_change):
        raise UserError(
            f"{complaint} ({'; '.join(differ)}): choose another --train.name, or start from scratch with "
            "--train.resume never (the old run is moved aside)"
        )


def _check_same_data(recipe: Recipe, checkpoint: Path, manifest: dict[str, Any], fingerprint: str) -> None:
    """Raises UserError if the checkpoint, of this manifest, was trained on data of another `fingerprint`."""
    if (was := manifest["data_fingerprint"]) != fingerprint:
        moved = differences(manifest["config"], recipe.to_dict())
        differ = "; ".join([*moved, f"fingerprint {was}, now {fingerprint}"])
        raise UserError(
            f"{checkpoint} was trained on other data ({differ}): restore the "
            "corpus and the tokenizer it had, or start another run with another --train.name"
        )


def _given_checkpoint(path: Path, recipe: Recipe) -> Path:
    """Checks that `path` is a checkpoint of the recipe's model and attention; returns it."""
    check_resume(recipe)
    if reason := why_unusable(path):
        raise UserError(f"the checkpoint {path} {reason}: resume from another one, or auto")
    if path.name.startswith(f"{ABANDONED}-") and path.resolve().is_relative_to(recipe.run_folder.resolve()):
        raise UserError(
            f"{path} is of a branch that this run has left, and its losses are not the run's: continue it as "
            "a run of its own, with another --train.name"
        )
    model = load_manifest(path)["config"].get("model", {})
    for key in ("name", "attention"):
        was, now = model.get(key), getattr(recipe.model, key)
        if was != now:
            raise UserError(
                f"{path} is a checkpoint of {key} {was!r}, not {now!r}: ask for that, or start a new run "
                f"from its weights with --train.init_from {path}"
            )
    return path


def check_resume(recipe: Recipe) -> None:
    """Raises UserError if the recipe's run is to resume from what is no checkpoint; reads none of it."""
    if recipe.train.resume in ("auto", "never"):
        return
    path, instead = Path(recipe.train.resume), "give runs/<name>/checkpoints/step-…, auto or never"
    if not path.is_dir():
        raise UserError(f"no checkpoint {path} to resume from: {instead}")
    if checkpoint_step(path) is None and read_manifest(path) is None:
        raise UserError(f"{path} is not a checkpoint: {instead}")


def check_init_from(recipe: Recipe, config: Config) -> None:
    """Raises UserError if the recipe's run begins from weights that do not exist, or from a model of other
    sizes than `config`; reads no weights."""
    t = recipe.train
    begins = t.resume == "never" or (t.resume == "auto" and newest_checkpoint(recipe.run_folder) is None)
    if t.init_from and begins:
        folder = find_model_folder(Path(t.init_from), verify=False)
        check_sizes(config, read_model_config(folder), folder)


def _find_init_from(recipe: Recipe) -> Path | None:
    """The undamaged model folder of the recipe's `init_from`, if it has one; UserError if it is damaged."""
    init_from = recipe.train.init_from
    return None if init_from is None else find_model_folder(Path(init_from))


def _check_move(recipe: Recipe, init_from: Path | None) -> None:
    """Raises UserError, before the old run is moved aside, if the new one would lose its first weights or its
    teacher by that, or could not start from the model folder `init_from`."""
    for option in ("init_from", "teacher"):
        given = getattr(recipe.train, option)
        if given and Path(given).resolve().is_relative_to(recipe.run_folder.resolve()):
            raise UserError(
                f"--train.{option} {given} is in the run that --train.resume never would move aside: choose "
                "another --train.name"
            )
    if init_from is not None:
        load_weights(GPT.on_meta(config_of(recipe)), init_from)


def _move_aside(folder: Path, lock: RunLock) -> None:
    """Renames the run in `folder`, and takes the lock of the new folder."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    lock.acquire()
    print_rank0(f"the old run is now {aside}")


def _abandon_newer(folder: Path, step: int) -> None:
    """Renames checkpoints newer than `step`, which belong to an abandoned branch, so that they are kept but
    not found again; also keeps a copy of the losses."""
    newer = [path for path in valid_checkpoints(folder) if (checkpoint_step(path) or 0) > step]
    metrics = folder / METRICS
    if newer and metrics.exists():
        with write_errors(metrics):
            aside = name_aside(metrics, ABANDONED)
            write_bytes(aside, metrics.read_bytes())  # a damaged line may not be text
        print_rank0(f"resume: the losses so far are in {aside}, too")
    for path in newer:
        aside = set_aside(path, ABANDONED)
        print_rank0(f"resume: the newer {path.name} is now {aside}")
