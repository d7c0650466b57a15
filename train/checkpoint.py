"""Checkpoints: written aside, fsynced and renamed, so that one that carries its name is whole.

`checkpoints/step-00000300/` is a model folder (`lingpt.models.load_model` reads it) with `tokenizer.json`,
`train_state.pt` (optimizer, random states of all ranks) and, written last, `manifest.json`: how far the run
was, its config, the data's fingerprint, and the size of every file, by which a truncated checkpoint is known.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lingpt.common.errors import UserError
from lingpt.models import GPT, save_model

MANIFEST, STATE = "manifest.json", "train_state.pt"


def checkpoints(run_folder: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first. Truncated ones are left out."""
    return [path for path in _named(run_folder) if manifest(path) is not None]


def broken(run_folder: Path) -> list[Path]:
    """Checkpoints that carry the name but are not whole."""
    return [path for path in _named(run_folder) if manifest(path) is None]


def _named(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob("step-[0-9]*"))


def manifest(checkpoint: Path) -> dict[str, Any] | None:
    """What the checkpoint says of itself, or None where a file is missing or of another size."""
    try:
        told = json.loads((checkpoint / MANIFEST).read_text())
        whole = all((checkpoint / name).stat().st_size == size for name, size in told["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return told if whole else None


def save(
    run_folder: Path,
    model: GPT,
    save_tokenizer: Callable[[Path], Any],
    state: dict[str, Any],
    told: dict[str, Any],
    keep: int,
) -> Path:
    """Writes the checkpoint of step `told["step"]`, then removes all but the newest `keep`.

    state: for `train_state.pt`. told: for the manifest. Raises UserError where it cannot be written; then
    nothing of it is left and the older ones are untouched.
    """
    folder = run_folder / "checkpoints"
    final = folder / f"step-{told['step']:08d}"
    aside = folder / f".{final.name}.partial"
    if manifest(final) is not None:
        return final
    try:
        clear_leftovers(run_folder)
        aside.mkdir(parents=True)
        save_model(model, aside)
        save_tokenizer(aside)
        with open(aside / STATE, "wb") as file:
            torch.save(state, file)
        files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({**told, "files": files}, indent=1))
        for path in (*aside.iterdir(), aside):
            _sync(path)
        if final.exists():  # a truncated one
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except (OSError, RuntimeError, UserError) as error:  # a full disk is a RuntimeError to PyTorch's writer
        shutil.rmtree(aside, ignore_errors=True)
        older = checkpoints(run_folder)
        left = f"{older[-1]} is intact" if older else "no older one exists"
        reason = _reason(error)
        raise UserError(
            f"the checkpoint of step {told['step']} could not be written ({reason}); nothing of it is left "
            f"and {left}: "
            f"free some space on the disk of {folder}, then run the same command again to go on"
        ) from error
    for old in checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _reason(error: BaseException) -> str:
    """What the system said, which PyTorch's writer hides behind an error of its own."""
    cause = error
    while cause is not None and not getattr(cause, "strerror", None):
        cause = cause.__cause__ or cause.__context__
    return cause.strerror if cause is not None else str(error).splitlines()[0]


def clear_leftovers(run_folder: Path) -> None:
    """Removes what a killed process left half-written."""
    for path in (run_folder / "checkpoints").glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """`train_state.pt`: `optimizer` and `random`, one entry a rank."""
    return torch.load(checkpoint / STATE, map_location="cpu", weights_only=True, mmap=True)


def random_states() -> list[dict[str, Any]]:
    """The state of every random generator of every rank; to be called by all ranks."""
    kind, keys, *rest = np.random.get_state()
    own = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def restore_random_state(states: list[dict[str, Any]], rank: int) -> None:
    """Sets this rank's generators; a rank that the checkpoint does not know keeps its seed."""
    if rank >= len(states):
        return
    own = states[rank]
    random.setstate(own["python"])
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(own["torch"])
    if own["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
