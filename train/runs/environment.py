"""Records a run's environment in its folder at each start."""

import functools
import hashlib
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
from lingpt.common.files import read_json_object, set_aside, write_errors, write_json, write_text
from lingpt.common.install import installed_version
from lingpt.common.run_folder import CONFIG, ENVIRONMENT
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
from lingpt.train.planning.machine import Machine

_PACKAGES = (
    "lingpt", "torch", "lightning", "litgpt", "transformers", "datasets", "tokenizers", "lm-eval", "wandb",
    "numpy", "cuda-bindings", "fla-core",
)  # fmt: skip

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    "common", "configs", "kernels", "models", "hf", "layers", "data", "train", "plots", "eval", "bench",
    "study", "cli",
)  # fmt: skip


def record_start(recipe: Recipe, machine: Machine, data: dict[str, Any], kernels: dict[str, str]) -> None:
    """Writes the resolved recipe and the environment, which also keeps those of the run's earlier starts.

    data: `Dataset.describe()`. kernels: `attention_kernels`. UserError if the folder cannot be written.
    """
    folder, earlier = recipe.run_folder, []
    path = folder / ENVIRONMENT
    if path.exists():
        try:
            before = read_json_object(path)
            earlier = before.pop("earlier", [])
            if not isinstance(earlier, list):
                raise UserError(f"{path} is damaged: `earlier` is not a list")
            earlier.append(before)
        except UserError as error:
            earlier = []
            with write_errors(path):
                print_rank0(f"{error}; it is now {set_aside(path, 'damaged')}, and a new one is written")
    hardware = asdict(machine) | {"world_size": machine.world_size}
    with write_errors(folder, "free some space, or choose another place with --train.out_dir"):
        config = recipe.to_dict()
        config["train"] |= {"resume": "auto", "profile": False}  # options of this start only
        write_text(folder / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        record = {**environment(), "hardware": hardware, "attention_kernels": kernels, "data": data}
        write_json(path, record | {"earlier": earlier})


def environment() -> dict[str, Any]:
    """Date, versions, source and command of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "git": git_revision(),
        "source": package_hash(),
    }


@functools.cache
def package_hash() -> str:
    """Hash of all of LinGPT's code except tests: identifies a run's source without git, or with changes.

    Computed once: a process keeps running the code that it imported.
    """
    digest = hashlib.sha256()
    for path in (path for folder in _CODE for path in sorted((_ROOT / folder).rglob("*"))):
        if path.suffix in (".py", ".cu", ".cuh", ".yaml"):
            digest.update(f"{path.relative_to(_ROOT).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def git_revision() -> dict[str, Any] | None:
    """Revision of LinGPT's source and whether it has changes, or None outside a git checkout."""
    git = ["git", "-C", str(_ROOT)]
    try:
        if Path(_output([*git, "rev-parse", "--show-toplevel"])) != _ROOT:
            return None
        return {
            "revision": _output([*git, "rev-parse", "HEAD"]),
            "dirty": bool(_output([*git, "status", "--porcelain"])),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
