"""Model folders with `config.json` and `model.safetensors`, for both LinGPT's and Hugging Face's format.

Each file is written whole or not at all; every failure is a UserError that names the file.
"""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lingpt.common.errors import UserError, first_line
from lingpt.common.files import replacing, write_errors, write_json
from lingpt.common.run_folder import MODEL_CONFIG, WEIGHTS


def write_model_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Writes both files. metadata: of the safetensors file, in addition to its format."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with write_errors(folder / WEIGHTS), replacing(folder / WEIGHTS) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"} | metadata)
        except SafetensorError as error:  # safetensors raises it, not OSError, for a full disk
            raise _os_error(error) from error
    with write_errors(folder / MODEL_CONFIG):
        write_json(folder / MODEL_CONFIG, config, indent=2)


def _os_error(error: SafetensorError) -> OSError:
    """The OSError that safetensors reports only in its text, `… (os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def read_tensors(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing, damaged, or no safetensors file: {error}") from error


def read_pickle(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads a file of `torch.save`: tensors and plain values. Code in the file is never run."""
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=True)
    except Exception as error:  # damaged pickles raise anything: KeyError, UnicodeError, …
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain values, and no code in a file is run"
        else:
            reason = first_line(error)
        raise UserError(f"{path} is missing, damaged, or not a PyTorch checkpoint: {reason}") from error


def read_pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file of `torch.save`, by name."""
    values = read_pickle(path)
    values = values.get("model", values) if isinstance(values, dict) else {}  # LitGPT's trainer wraps them
    if not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise UserError(f"{path} holds no tensors by name: give the weights of a model")
    return values
