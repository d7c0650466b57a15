"""Checkpoints of a run, written whole or not at all; the newest few are kept.

A checkpoint is a model folder (`lingpt.models.load_model` reads it) with the tokenizer, the train state
(optimizer, random states of all ranks) and the manifest: the run's progress, its recipe, and the data's
fingerprint. In a sharded run, weights and optimizer are in shards, one file per process.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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

# What a run needs of a manifest to resume.
_MANIFEST = {
    "step": int, "tokens": int, "train_time": int | float, "skipped": int, "skipped_in_a_row": int,
    "data_fingerprint": str,
}  # fmt: skip


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
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes the checkpoint of step `manifest["step"]`, then removes those that `retention` does not keep.

    weights: of the whole model; or DTensors, and then all ranks of `group` call this, each writes its own
    parts to a shared disk, and rank zero the rest. state: the train state.

    Raises UserError, on all ranks, if it cannot be written; then nothing of it is left and the older ones are
    untouched.
    """
    final, rank = checkpoint_folder(run, manifest["step"]), dist.get_rank(group) if group else 0
    tensors, optimizer = split_shards(state["optimizer"])
    with contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            if rank or read_manifest(final) is not None:
                return None
            return stack.enter_context(_new_checkpoint(run, manifest, retention))

        def write(folder: Path) -> dict[str, str]:
            """Writes the weights, of a sharded model this rank's; returns the SHA-256 of its shards."""
            if group is None:
                save_model(model, folder, weights)
                return {}
            write_shards(folder, weights | tensors, group)
            return {path.name: file_sha256(path) for path in folder.glob(f"shard-{rank + 1:05d}-*")}

        def complete(folder: Path, hashes: list[dict[str, str]]) -> None:
            if rank == 0:
                shards = {name: sha for own in hashes for name, sha in own.items()}
                _check_all_here(run, folder, shards)
                if group:
                    save_index(model, folder)
                tokenizer.save(folder)
                with open(folder / TRAIN_STATE, "wb") as file:
                    torch.save({**state, "optimizer": optimizer}, file)
                write_manifest(folder, manifest, shards)
            stack.close()

        def together(function: Callable[[], T]) -> list[T]:
            def attempt() -> T:
                return _or_not_written(run, manifest["step"], function)

            return on_all_ranks(attempt, group) if group else [attempt()]

        if folder := together(begin)[0]:
            hashes = together(lambda: write(folder))
            together(lambda: complete(folder, hashes))
    return final


def _check_all_here(run: Path, folder: Path, shards: Iterable[str]) -> None:
    """Raises NotWritten if rank zero does not see a shard that a rank has written."""
    for name in shards:
        if not (folder / name).is_file():
            raise NotWritten(
                f"the checkpoint could not be written: {name} is not there for the first process: {run} must "
                "lie on a disk that all machines see (--train.out_dir)"
            )


class NotWritten(UserError):
    """A checkpoint could not be written."""


def _or_not_written(run: Path, step: int, function: Callable[[], T]) -> T:
    """`function()`; a failure of the disk becomes NotWritten, which the other ranks are told of."""
    try:
        return function()
    except NotWritten:
        raise
    except (OSError, RuntimeError, UserError, CheckpointException) as error:  # PyTorch's of a full disk
        if connection_lost(error):  # another process has died
            raise
        older, cause = newest_checkpoint(run), _os_error(error)
        left = f"{older} is intact" if older else "no older one exists"
        raise NotWritten(
            f"the checkpoint of step {step} could not be written "
            f"({cause.strerror or first_line(error)}); nothing of it is left and {left}: "
            f"{disk_fix(cause, run / CHECKPOINTS)}"
        ) from error


@contextlib.contextmanager
def _new_checkpoint(run: Path, manifest: dict[str, Any], retention: RetentionPolicy) -> Iterator[Path]:
    """A folder to fill, which becomes the run's checkpoint of the manifest's step at the end of the block."""
    final = checkpoint_folder(run, manifest["step"])
    final.parent.mkdir(exist_ok=True)  # not the run's folder: if its disk is gone, do not recreate it
    clear_leftovers(run)
    if (run / METRICS).exists():  # so that metrics up to this step survive a power failure
        sync(run / METRICS)
    with new_folder(final) as folder:
        yield folder
        if final.exists():  # a damaged one: whole ones are never rewritten
            set_aside(final, "damaged")
    # While steps are skipped, a new checkpoint is no better than the old ones: keep all.
    if not manifest["skipped_in_a_row"]:
        prune_checkpoints(run, retention)


def prune_checkpoints(run: Path, retention: RetentionPolicy) -> None:
    """Removes the run's whole checkpoints that `retention` does not keep."""
    whole = valid_checkpoints(run)
    validated = [path for path in whole if val_loss(path) < math.inf] if retention.best else []
    best = min(validated, key=val_loss, default=None)
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
        write_manifest(folder, manifest | {"val_loss": loss}, manifest["sha256"])


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
    if manifest is None:
        raise UserError(f"the checkpoint {checkpoint} is not whole: resume from an older one, or auto")
    wrong = [key for key, kind in _MANIFEST.items() if not isinstance(manifest.get(key), kind)]
    wrong += [] if is_whole_recipe(manifest.get("config")) else ["config"]
    if wrong:
        found = f"{wrong[0]} is {manifest.get(wrong[0])!r:.60}"
        raise UserError(f"the checkpoint {checkpoint} is not of a run ({found}): resume from another one")
    return manifest


def is_whole_recipe(config: Any) -> bool:
    """Whether `config`, of a manifest or config.yaml, has all parts of a recipe."""
    parts = ("model", "data", "train")
    return isinstance(config, dict) and all(isinstance(config.get(part), dict) for part in parts)


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
    try:
        load_manifest(checkpoint)
        load_state(checkpoint)
    except UserError as error:
        return f"is not usable ({error})"
    return None


def random_state() -> dict[str, Any]:
    """The states of PyTorch's random generators in this process: of the CPU, and of its GPU."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets this process's random generators to a `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
