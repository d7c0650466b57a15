"""A new run, or an old one that goes on: what is in the run's folder decides, and it must fit the recipe."""

from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.run_folder import (
    CONFIG,
    broken_checkpoints,
    checkpoint_step,
    checkpoints,
    newest_checkpoint,
    read_config,
)
from lingpt.train.checkpoint import clear_leftovers, load_manifest
from lingpt.train.config import Recipe, differences
from lingpt.train.machine import duration
from lingpt.train.parallel import print_rank0


def resume_or_create(recipe: Recipe, fingerprint: str) -> Path | None:
    """The checkpoint that the recipe's run goes on from, or None for a new run.

    fingerprint: of the data. Raises UserError where the folder holds another run, or the checkpoint does not
    fit.
    """
    folder, resume = recipe.run_folder, recipe.train.resume
    if resume == "never":
        _move_aside(folder)
    checkpoint = _given_checkpoint(Path(resume), recipe) if resume not in ("auto", "never") else None
    if (folder / CONFIG).exists():
        _check_same(recipe, read_config(folder), f"{folder} holds a run with another config")
        for path in broken_checkpoints(folder):
            print_rank0(f"resume: {path} is not whole and is passed over")
        checkpoint = checkpoint or newest_checkpoint(folder)
    if checkpoint is None:
        print_rank0(f"new run: {folder}")
    else:
        manifest = load_manifest(checkpoint)
        _check_same(recipe, manifest["config"], f"{checkpoint} is of a run with another config")
        if (was := manifest["data_fingerprint"]) != fingerprint:
            raise UserError(
                f"{checkpoint} was trained on other data (fingerprint {was}, now {fingerprint}): restore the "
                "corpus and the tokenizer it had, or start another run with another --train.name"
            )
        _abandon_newer(folder, manifest["step"])
        print_rank0(
            f"resume: {checkpoint}, step {manifest['step']} of {recipe.total_steps} "
            f"({manifest['tokens'] / 1e6:.1f} M tokens, {duration(manifest['train_time'])} of training)"
        )
    clear_leftovers(folder)
    return checkpoint


def _check_same(recipe: Recipe, old: dict[str, Any], complaint: str) -> None:
    if differ := differences(old, recipe.to_dict()):
        raise UserError(
            f"{complaint} ({'; '.join(differ)}): choose another --train.name, or start from scratch with "
            "--train.resume never (the old run is moved aside)"
        )


def _given_checkpoint(path: Path, recipe: Recipe) -> Path:
    """`path`, once it is known to be a checkpoint of the recipe's model and attention."""
    if not path.is_dir():
        raise UserError(
            f"no checkpoint {path} to resume from: give a folder runs/<name>/checkpoints/step-…, or auto"
        )
    manifest = load_manifest(path)
    for key in ("name", "attention"):
        was, now = manifest["config"]["model"][key], getattr(recipe.model, key)
        if was != now:
            raise UserError(
                f"{path} is a checkpoint of {key} {was!r}, not {now!r}: ask for that, or start a new run "
                f"from its weights with --train.init_from {path}"
            )
    return path


def _move_aside(folder: Path) -> None:
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    print_rank0(f"the old run is now {aside}")


def _abandon_newer(folder: Path, step: int) -> None:
    """Checkpoints after the one resumed from are of a branch that is left: kept, but not found again."""
    for path in checkpoints(folder):
        if (checkpoint_step(path) or 0) > step:
            aside = path.with_name(f"abandoned-{path.name}")
            path.rename(aside)
            print_rank0(f"resume: the newer {path.name} is now {aside}")
