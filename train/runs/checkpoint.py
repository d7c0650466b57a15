"""Checkpoints of a run, written whole or not at all; the newest few are kept.

A checkpoint is a model folder (`lingpt.models.load_model` reads it) with the tokenizer, the train state
(optimizer, random states of all ranks) and the manifest: the run's progress, its recipe, and the data's
fingerprint. In a sharded run, weights and optimizer are in shards, one file per process.
"""

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lingpt.common.errors import UserError, first_line
from lingpt.common.files import (
    PARTIAL,
    disk_fix,
    file_sha256,
    new_folder,
    remove_partial,
    set_aside,
    sync,
    write_errors,
)
from lingpt.common.run_folder import (
    CHECKPOINTS,
    METRICS,
    TRAIN_STATE,
    checkpoint_folder,
    checkpoint_step,
    damage,
    newest_checkpoint,
    read_manifest,
    valid_checkpoints,
    write_manifest,
)
from lingpt.data import Tokenizer
from lingpt.models import GPT, save_index, save_model, write_shards
from lingpt.models.model_folder import read_pickle
from lingpt.train.config import recipe_from_dict
from lingpt.train.distributed.collectives import on_all_ranks
from lingpt.train.distributed.failures import connection_lost
from lingpt.train.distributed.sharding import split_shards

T = TypeVar("T")

_MANIFEST_KEYS = {"step", "tokens", "train_time", "skipped", "config", "data_fingerprint"}


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints are kept: the `newest` few, with `best` the one with the lowest validation loss, and
    always those that a run can be extended from (`is_wsd_decay_start`)."""

    newest: int
    best: bool = False


def save(
    run: Path,
    model: GPT,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    state: dict[str, Any],
    manifest: dict[str, Any],
    retention: RetentionPolicy,
) -> Path:
    """Writes the checkpoint of step `manifest["step"]`, then removes those that `retention` does not keep.

    weights: of the whole model. state: the train state. Raises UserError if it cannot be written; then
    nothing of it is left and the older ones are untouched.
    """
    final = checkpoint_folder(run, manifest["step"])
    if read_manifest(final) is not None:
        return final
    with new_checkpoint(run, manifest, retention) as folder:
        save_model(model, folder, weights)
        tokenizer.save(folder)
        with open(folder / TRAIN_STATE, "wb") as file:
            torch.save(state, file)
        write_manifest(folder, manifest)
    return final


def save_shards(
    run: Path,
    model: GPT,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    state: dict[str, Any],
    manifest: dict[str, Any],
    retention: RetentionPolicy,
    group: dist.ProcessGroup,
) -> None:
    """`save` by all ranks of `group` together: each writes its own parts of the DTensors, to a shared disk.

    Rank zero creates the folder, and renames it once all shards are there. If one rank fails, all raise the
    same UserError.
    """
    final, rank = checkpoint_folder(run, manifest["step"]), dist.get_rank(group)
    tensors, optimizer = split_shards(state["optimizer"])
    with contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            if rank or read_manifest(final) is not None:
                return None
            return stack.enter_context(new_checkpoint(run, manifest, retention))

        def write() -> dict[str, str]:
            assert folder is not None
            write_shards(folder, weights | tensors, group)
            return {path.name: file_sha256(path) for path in folder.glob(f"shard-{rank + 1:05d}-*")}

        def complete() -> None:
            if rank == 0 and folder is not None:
                _check_all_here(run, folder, [name for own in hashes for name in own])
                save_index(model, folder)
                tokenizer.save(folder)
                with open(folder / TRAIN_STATE, "wb") as file:
                    torch.save({**state, "optimizer": optimizer}, file)
                write_manifest(folder, manifest, {name: sha for own in hashes for name, sha in own.items()})
            stack.close()

        def together(function: Callable[[], T]) -> list[T]:
            return on_all_ranks(lambda: _or_not_written(run, manifest["step"], function), group)

        if folder := together(begin)[0]:
            hashes = together(write)
            together(complete)


def _check_all_here(run: Path, folder: Path, shards: list[str]) -> None:
    """Raises NotWritten if rank zero does not see a shard that a rank has written."""
    for name in shards:
        if not (folder / name).is_file():
            raise NotWritten(
                f"the checkpoint could not be written: {name} is not there for the first process: {run} must "
                "lie on a disk that all machines see (--train.out_dir)"
            )


def _or_not_written(run: Path, step: int, function: Callable[[], T]) -> T:
    """`function()`; any failure becomes NotWritten, which the other ranks are told of."""
    try:
        return function()
    except (Exception, CheckpointException) as error:
        if connection_lost(error):  # another process has died: no failure of the disk
            raise
        raise not_written(run, step, error) from error


@contextlib.contextmanager
def new_checkpoint(run: Path, manifest: dict[str, Any], retention: RetentionPolicy) -> Iterator[Path]:
    """A folder to fill, which becomes the run's checkpoint of the manifest's step at the end of the block.

    Raises UserError if the block or the disk fails.
    """
    final = checkpoint_folder(run, manifest["step"])
    try:
        final.parent.mkdir(exist_ok=True)  # not the run's folder: if its disk is gone, do not recreate it
        clear_leftovers(run)
        if (run / METRICS).exists():  # so that metrics up to this step survive a power failure
            sync(run / METRICS)
        with new_folder(final) as folder:
            yield folder
            if final.exists():  # a damaged one: whole ones are never rewritten
                set_aside(final, "damaged")
    except (OSError, RuntimeError, UserError) as error:  # PyTorch raises RuntimeError for a full disk
        if connection_lost(error):
            raise
        raise not_written(run, manifest["step"], error) from error
    # While steps are skipped, a new checkpoint is no better than the old ones: keep all.
    if not manifest.get("skipped_in_a_row"):
        prune_checkpoints(run, retention)


class NotWritten(UserError):
    """A checkpoint could not be written."""


def not_written(run: Path, step: int, error: BaseException) -> NotWritten:
    """The NotWritten for `error`; one from another rank is returned unchanged."""
    if isinstance(error, NotWritten):
        return error
    older, cause = newest_checkpoint(run), _os_error(error)
    left = f"{older} is intact" if older else "no older one exists"
    return NotWritten(
        f"the checkpoint of step {step} could not be written "
        f"({cause.strerror or first_line(error)}); nothing of it is left and {left}: "
        f"{disk_fix(cause, run / CHECKPOINTS)}"
    )


def prune_checkpoints(run: Path, retention: RetentionPolicy) -> None:
    """Removes the run's whole checkpoints that `retention` does not keep."""
    whole = valid_checkpoints(run)
    best = min(whole, key=val_loss, default=None) if retention.best else None
    for old in whole[: -retention.newest]:
        if old != best and not is_wsd_decay_start(old):
            try:  # renamed first: a kill leaves no partial checkpoint
                doomed = old.rename(old.with_name(f".{old.name}.old{PARTIAL}"))
            except OSError:  # removed next time
                continue
            shutil.rmtree(doomed, ignore_errors=True)


def val_loss(checkpoint: Path) -> float:
    """The validation loss at the checkpoint's step; infinite if there was no validation."""
    loss = (read_manifest(checkpoint) or {}).get("val_loss")
    return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf


def is_wsd_decay_start(checkpoint: Path) -> bool:
    """Whether the decay of `wsd` begins at this checkpoint, by the recipe it was trained with."""
    with contextlib.suppress(UserError):  # of a version whose recipe is not readable any more
        recipe = recipe_from_dict(load_manifest(checkpoint)["config"])
        return recipe.decay_start == checkpoint_step(checkpoint)
    return False


def best_loss(run: Path) -> float:
    """The lowest validation loss of the run's checkpoints; infinite if there is none."""
    return min(map(val_loss, valid_checkpoints(run)), default=math.inf)


def add_val_loss(run: Path, step: int, loss: float) -> None:
    """Writes the step's validation loss into its checkpoint, which was saved before the validation.

    Does nothing if the run has no such checkpoint (it resumed from another run's). Raises UserError if the
    disk cannot be written; the checkpoint is then unchanged.
    """
    folder = checkpoint_folder(run, step)
    if (manifest := read_manifest(folder)) is None:
        return
    with write_errors(folder, "free some space, or make it writable, and give the same command again"):
        remove_partial(folder)  # left by a killed writer; the manifest would list it
        write_manifest(folder, manifest | {"val_loss": loss}, manifest.get("sha256"))


def clear_leftovers(run: Path) -> None:
    """Removes partial files and folders of killed processes."""
    remove_partial(run / CHECKPOINTS, "step-")


def _os_error(error: BaseException) -> OSError:
    """The OSError behind the errors of PyTorch's writer and ours; an empty one if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CheckpointException):  # one error per rank, with traceback
            cause, _ = next(iter(cause.failures.values()))
        if isinstance(cause, OSError) and cause.strerror:
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError()


def load_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint to resume from. UserError if the checkpoint is not whole."""
    manifest = read_manifest(checkpoint)
    if manifest is None or not isinstance(manifest.get("config"), dict) or _MANIFEST_KEYS - manifest.keys():
        raise UserError(f"the checkpoint {checkpoint} is not whole: resume from an older one, or auto")
    return manifest


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The train state: `optimizer`, and `random` with one entry per rank. UserError if it is damaged."""
    state = read_pickle(checkpoint / TRAIN_STATE)
    if not isinstance(state, dict) or not {"optimizer", "random"} <= state.keys():
        raise UserError(f"{checkpoint / TRAIN_STATE} holds no train state")
    return state


def why_unusable(checkpoint: Path) -> str | None:
    """Why a run cannot resume from the checkpoint, as `is …`; None if it can. Reads all of it."""
    if reason := damage(checkpoint):
        return reason
    try:  # checkpoints of older versions have no checksums
        load_manifest(checkpoint)
        load_state(checkpoint)
    except UserError as error:
        return f"is not usable ({error})"
    return None


def random_state() -> dict[str, Any]:
    """The states of this process's random generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets this process's random generators to a `random_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
