"""A model's files, tensors and JSON: written whole or not at all, every failure one UserError."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lingpt.common.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise UserError(f"{path} is damaged or no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object")
    return values


def read_tensors(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing, damaged, or no safetensors file: {error}") from error


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that `torch.save` wrote; code in it is never run."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else "empty"
        raise UserError(f"{path} is missing, damaged, or no PyTorch checkpoint: {reason}") from error
    return values.get("model", values)  # LitGPT's own trainer wraps the weights


def write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2) + "\n"
    _write_aside(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    _write_aside(path, lambda aside: save_file(tensors, aside, metadata=metadata))


def _write_aside(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside `path` and renames: who opens `path` finds the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.chmod(0o644)  # safetensors' 0600 would hide a run from other users of a cluster
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}; what was there before is untouched") from error
    finally:
        if aside.exists():
            aside.unlink()
