"""`runs/<name>/`: what a run is made of, kept beside its numbers; and whether it may go on."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from lingpt.common.errors import UserError
from lingpt.train.checkpoint import broken, checkpoints, clear_leftovers, manifest
from lingpt.train.config import Recipe, differences
from lingpt.train.machine import Machine, duration

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
_PACKAGES = (
    "lingpt", "torch", "lightning", "litgpt", "transformers", "datasets", "tokenizers", "lm-eval", "wandb",
    "numpy", "cuda-core", "fla-core",
)  # fmt: skip


def claim(recipe: Recipe, fingerprint: str, say) -> Path | None:
    """Makes the run's folder its own, and returns the checkpoint to go on from (None: from the start).

    Raises UserError where the folder holds another run, or the checkpoint to go on from does not fit.
    """
    folder, resume = recipe.run_folder, recipe.train.resume
    if resume == "never":
        _move_aside(folder, say)
    found = _check_checkpoint(Path(resume), recipe) if resume not in ("auto", "never") else None
    if (folder / CONFIG).exists():
        _check_same(
            recipe, yaml.safe_load((folder / CONFIG).read_text()), f"{folder} holds a run with another config"
        )
        for path in broken(folder):
            say(f"resume: {path} is not whole and is passed over")
        whole = checkpoints(folder)
        found = found or (whole[-1] if whole else None)
    if found is None:
        say(f"new run: {folder}")
    else:
        told = manifest(found)
        _check_same(recipe, told["config"], f"{found} is of a run with another config")
        if told["data_fingerprint"] != fingerprint:
            raise UserError(
                f"{found} was trained on other data (fingerprint {told['data_fingerprint']}, now "
                f"{fingerprint}): restore "
                "the corpus and the tokenizer it had, or start another run with another --train.name"
            )
        _abandon_newer(folder, told["step"], say)
        say(
            f"resume: {found}, step {told['step']} of {recipe.total_steps} "
            f"({told['tokens'] / 1e6:.1f} M tokens, {duration(told['train_time'])} of training)"
        )
    clear_leftovers(folder)
    return found


def _check_same(recipe: Recipe, old: dict[str, Any], complaint: str) -> None:
    if differ := differences(old, recipe.to_dict()):
        raise UserError(
            f"{complaint} ({'; '.join(differ)}): choose another --train.name, or start anew with "
            f"--train.resume never "
            "(the old run is moved aside)"
        )


def _check_checkpoint(path: Path, recipe: Recipe) -> Path:
    if not path.is_dir():
        raise UserError(
            f"no checkpoint {path} to resume from: give a folder runs/<name>/checkpoints/step-…, or auto"
        )
    told = manifest(path)
    if told is None:
        raise UserError(f"the checkpoint {path} is not whole: resume from an older one, or auto")
    for key in ("name", "attention"):
        was, now = told["config"]["model"][key], getattr(recipe.model, key)
        if was != now:
            raise UserError(
                f"{path} is a checkpoint of {key} {was!r}, not {now!r}: ask for that, or start a new run "
                f"from its "
                f"weights with --train.init_from {path}"
            )
    return path


def _move_aside(folder: Path, say) -> None:
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    say(f"the old run is now {aside}")


def _abandon_newer(folder: Path, step: int, say) -> None:
    """Checkpoints after the one resumed from belong to a branch that is left: kept, but not found again."""
    for path in checkpoints(folder):
        if manifest(path)["step"] > step:
            aside = path.with_name(f"abandoned-{path.name}")
            path.rename(aside)
            say(f"resume: the newer {path.name} is now {aside}")


def record(recipe: Recipe, machine: Machine, data: dict[str, Any]) -> None:
    """Writes config.yaml and environment.json; earlier starts of the same run stay in the latter."""
    folder = recipe.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True))
    path = folder / ENVIRONMENT
    earlier = []
    if path.exists():
        before = json.loads(path.read_text())
        earlier = [*before.pop("earlier", []), before]
    now = {**environment(), "hardware": asdict(machine) | {"world_size": machine.world_size}, "data": data}
    path.write_text(json.dumps({**now, "earlier": earlier}, indent=1, default=str))


def environment() -> dict[str, Any]:
    """When, with what, from which source, and by which command."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "git": git_revision(),
    }


def git_revision() -> dict[str, Any] | None:
    """Revision of LinGPT's source and whether it has changes, or None outside a git checkout."""
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root)]
    try:
        if Path(_output([*git, "rev-parse", "--show-toplevel"])) != root:
            return None
        return {
            "revision": _output([*git, "rev-parse", "HEAD"]),
            "dirty": bool(_output([*git, "status", "--porcelain"])),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
