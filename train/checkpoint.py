"""Checkpoints of a run, whole or not there at all: the newest few are kept.

A checkpoint is a model folder (`lingpt.models.load_model` reads it) with the tokenizer, the train state
(optimizer, random states of all ranks) and the manifest: how far the run was, its recipe, and the data's
fingerprint.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lingpt.common.errors import UserError
from lingpt.common.files import new_folder, remove_partial
from lingpt.common.run_folder import (
    CHECKPOINTS,
    TRAIN_STATE,
    checkpoint_folder,
    checkpoints,
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from lingpt.data import Tokenizer
from lingpt.models import GPT, save_model


def save(
    run: Path,
    model: GPT,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    state: dict[str, Any],
    manifest: dict[str, Any],
    keep: int,
) -> Path:
    """Writes the checkpoint of step `manifest["step"]`, then removes all but the newest `keep`.

    weights: the whole model's. state: the train state. Raises UserError where it cannot be written; then
    nothing of it is left and the older ones are untouched.
    """
    final = checkpoint_folder(run, manifest["step"])
    if read_manifest(final) is not None:
        return final
    clear_leftovers(run)
    try:
        with new_folder(final) as folder:
            save_model(model, folder, weights)
            tokenizer.save(folder)
            with open(folder / TRAIN_STATE, "wb") as file:
                torch.save(state, file)
            write_manifest(folder, manifest)
            if final.exists():  # a broken one: whole ones are never written again
                shutil.rmtree(final)
    except (OSError, RuntimeError, UserError) as error:  # a full disk is a RuntimeError to PyTorch's writer
        older = newest_checkpoint(run)
        left = f"{older} is intact" if older else "no older one exists"
        raise UserError(
            f"the checkpoint of step {manifest['step']} could not be written ({_reason(error)}); nothing of "
            f"it is left and {left}: free some space on the disk of {final.parent}, then run the same "
            "command again to go on"
        ) from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def clear_leftovers(run: Path) -> None:
    """Removes what a killed process left half-written."""
    remove_partial(run / CHECKPOINTS, "step-")


def _reason(error: BaseException) -> str:
    """The system's own words, which PyTorch's writer hides behind an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]


def load_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint to go on from. UserError where the checkpoint is not whole."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise UserError(f"the checkpoint {checkpoint} is not whole: resume from an older one, or auto")
    return manifest


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The train state: `optimizer` and `random`, one entry a rank."""
    return torch.load(checkpoint / TRAIN_STATE, map_location="cpu", weights_only=True, mmap=True)


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
