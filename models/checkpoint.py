"""Writes model folders, and reads them in two ways.

The attention is recorded in both files of a folder: as their keys are the same, weights could otherwise load
silently as another attention. `load_model` returns the saved model, or refuses; `load_weights` starts a new
run from other weights on purpose, and reports which tensors it took.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, read_yaml
from lingpt.common.run_folder import MODEL_CONFIG, WEIGHTS
from lingpt.models import gpt_neox, llama
from lingpt.models.architecture import MODELS, Architecture
from lingpt.models.attention import attention_form
from lingpt.models.config import Config
from lingpt.models.gpt import GPT
from lingpt.models.init import set_weight
from lingpt.models.model_folder import read_pickled_tensors, read_tensors, write_model_folder
from lingpt.models.shards import is_sharded, read_sharded_weights, read_shards, shards_metadata, write_index

_ATTENTION = "lingpt.attention"  # key in the metadata of the weights
_LITGPT_WEIGHTS = "lit_model.pth"

# The sizes, and settings that determine how weights are used but do not show in their shapes.
_MAY_DIFFER = ("name", "block_size", "vocab_size", "padding_multiple")
_ARCHITECTURE = [field.name for field in fields(Architecture) if field.name not in _MAY_DIFFER]


def save_model(model: GPT, folder: str | Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Writes the model's folder, each file whole or not at all. Raises UserError if it cannot.

    weights: the model's state dict, if it has been gathered already (sharded training).
    """
    write_model_folder(Path(folder), _config_of(model), weights or model.state_dict(), _metadata(model))


def save_index(model: GPT, folder: str | Path) -> None:
    """Turns a folder with all shards of the model's weights (models/shards.py) into a model folder."""
    write_index(Path(folder), _config_of(model), _metadata(model))


def _config_of(model: GPT) -> dict[str, Any]:
    return {"model_type": "lingpt", **model.config.to_dict()}


def _metadata(model: GPT) -> dict[str, str]:
    return {_ATTENTION: json.dumps(model.config.attention)}


def load_model(
    folder: str | Path,
    *,
    attention: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> GPT:
    """The model of a LinGPT, Hugging Face or LitGPT folder, with the attention it was trained with.

    Args:
        attention: the attention that the caller expects; UserError if the model has another.
        device, dtype: of the loaded model; by default the CPU and the saved dtype.
    """
    folder, device = Path(folder), device or "cpu"
    config, tensors, _ = _read_model(folder, device)
    _check_requested(folder, config, attention)
    return model_from_tensors(config, tensors, str(folder), device, dtype)


def model_from_tensors(
    config: Config,
    tensors: dict[str, torch.Tensor],
    source: str,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> GPT:
    """A model with these tensors; UserError, naming `source`, if they do not match it exactly."""
    model = GPT.on_meta(config)
    _check_same_tensors(model.state_dict(), tensors, f"{source} does not hold a {config.name!r}")
    model.load_state_dict(tensors, assign=True)
    model.reset_buffers(torch.device(device))
    return model.to(device=device, dtype=dtype)


@torch.no_grad()
def load_parts(model: GPT, folder: Path) -> None:
    """Overwrites a sharded model's weights with those of a checkpoint, each process only its parts. Raises
    the UserErrors of `load_model`.
    """
    own = model.state_dict()
    if is_sharded(folder):
        config = _read_config(folder)
        _check_recorded(folder, config, shards_metadata(folder))
        _check_requested(folder, config, model.config.attention)
        return read_shards(folder, own)
    config, tensors, _ = _read_model(folder)
    _check_requested(folder, config, model.config.attention)
    _check_same_tensors(own, tensors, f"{folder} does not hold a {model.config.name!r}")
    for name, weight in own.items():
        set_weight(weight, tensors[name])


def _check_recorded(folder: Path, config: Config, metadata: Mapping[str, str]) -> None:
    """Raises UserError if the configuration's attention is not the one in the weights' metadata."""
    if metadata.get(_ATTENTION) != json.dumps(config.attention):
        raise UserError(
            f"{folder}: {MODEL_CONFIG} says attention {config.attention!r}, but the weights were trained "
            f"with {metadata.get(_ATTENTION, 'one that they do not name')}: restore the file that belongs to "
            "them"
        )


def _check_requested(folder: Path, config: Config, attention: str | Sequence[str] | None) -> None:
    """Raises UserError if the model has not the attention that was asked for."""
    asked = [attention] * config.n_layer if isinstance(attention, str) else attention
    if asked is not None and list(asked) != config.attention_per_layer:
        raise UserError(
            f"{folder} was trained with attention {config.attention!r}, not {attention!r}: "
            "ask for that, move the checkpoint to the run that it belongs to, or start a new run from its "
            "weights with init_from"
        )


@dataclass
class LoadReport:
    """The result of `load_weights`, by tensor name: taken from the source, new (as initialised), unused. A
    tensor that has another shape in the source is both new and unused."""

    source: str
    taken: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"weights from {self.source}"]
        for kind in ("taken", "new", "unused"):
            names = getattr(self, kind)
            lines.append(f"  {kind:<6} {len(names):>4} tensors" + (f": {_summary(names)}" if names else ""))
        return "\n".join(lines)


@torch.no_grad()
def load_weights(model: GPT, path: str | Path) -> LoadReport:
    """Initialises `model` from other weights (`init_from`): overwrites the parameters that the source has.

    Args:
        path: a Hugging Face folder of GPT-NeoX (Pythia), Llama, SmolLM, Qwen2 or Qwen3, a LitGPT one
            (`lit_model.pth`), or a LinGPT model folder with any attention.

    Only attention layers and `shared_values` may differ. Raises UserError for a source of another size or
    architecture.
    """
    folder = Path(path)
    source, tensors, kind = _read_model(folder)
    own, complaint = model.state_dict(), f"{folder} is another model than {model.config.name!r}"
    check_sizes(model.config, source, folder)
    _check_same_tensors(own, tensors, complaint, optional=(".attn.", ".shared_values."))
    taken = [name for name in own if name in tensors and own[name].shape == tensors[name].shape]
    for name in taken:
        set_weight(own[name], tensors[name])
    return LoadReport(
        f"{folder} ({kind})",
        taken=taken,
        new=[name for name in own if name not in taken],
        unused=[name for name in tensors if name not in taken],
    )


def check_sizes(config: Config, source: Config, folder: Path) -> None:
    """UserError unless a model of `config` can take its weights from that in `folder`, of config `source`.

    `rope_adjustments` may be new, as they are made for a context longer than that of `source`.
    """
    names = [name for name in _ARCHITECTURE if name != "rope_adjustments" or source.rope_adjustments]
    pairs = ((name, getattr(source, name), getattr(config, name)) for name in names)
    if differ := [f"{name} is {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]:
        raise UserError(
            f"{folder} is another model than {config.name!r}: {', '.join(differ)} (a recipe that leaves out "
            "the model's name and sizes has those of init_from)"
        )


def check_source(folder: Path) -> None:
    """Raises UserError if there is no model in `folder`; reads no weights."""
    if not any((folder / name).is_file() for name in (_LITGPT_WEIGHTS, MODEL_CONFIG)):
        missing = f"it has no {MODEL_CONFIG}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"no model in {folder}: {missing}")


def _read_model(
    folder: Path, device: torch.device | str = "cpu"
) -> tuple[Config, dict[str, torch.Tensor], str]:
    """The configuration and tensors (LitGPT's keys) of a folder of any kind, and its kind in words."""
    config = read_model_config(folder)
    if (folder / _LITGPT_WEIGHTS).is_file():
        tensors = read_pickled_tensors(folder / _LITGPT_WEIGHTS)
        tensors = {re.sub(r"\.norm_([qk])\.", r".\1_norm.", name): x for name, x in tensors.items()}
        return config, tensors, "LitGPT checkpoint"
    values = read_json_object(folder / MODEL_CONFIG)
    if (model_type := values["model_type"]) == "gpt_neox":
        return config, gpt_neox.read_weights(folder, config), "Hugging Face GPT-NeoX"
    if model_type in llama.KINDS:
        return config, llama.read_weights(folder, config), f"Hugging Face {model_type}"
    kind = f"LinGPT model with attention {attention_form(config.attention, config.to_dict())}"
    if "network" in values:  # transformers may have written it: without our metadata, and in other files
        return config, gpt_neox.read_hf_weights(folder), kind
    if is_sharded(folder):
        tensors, metadata = read_sharded_weights(folder, device)
    else:
        tensors, metadata = read_tensors(folder / WEIGHTS, device)
    _check_recorded(folder, config, metadata)
    return config, tensors, kind


def read_model_config(folder: Path) -> Config:
    """The configuration of a model folder of any kind; reads no weights. UserError if it holds no model."""
    check_source(folder)
    if (folder / _LITGPT_WEIGHTS).is_file():
        return _litgpt_config(folder)
    hf = read_json_object(folder / MODEL_CONFIG)
    if hf.get("model_type") == "gpt_neox":
        return gpt_neox.config_of_hf(hf, folder)
    return llama.config_of_hf(hf, folder) if hf.get("model_type") in llama.KINDS else _read_config(folder)


def _litgpt_config(folder: Path) -> Config:
    """The configuration of a LitGPT checkpoint, from its file or else the name of its folder."""
    path = folder / "model_config.yaml"
    if not path.is_file() and folder.name in MODELS:
        return Config.from_name(folder.name, attention="softmax")
    values = read_yaml(path)
    return Config.from_dict((values if isinstance(values, dict) else {}) | {"attention": "softmax"})


def _read_config(folder: Path) -> Config:
    values = read_json_object(folder / MODEL_CONFIG)
    if (kind := values.pop("model_type", None)) != "lingpt":
        raise UserError(
            f"{folder} holds a {kind} model: LinGPT reads its own, LitGPT's, gpt_neox, "
            f"{', '.join(llama.KINDS)}"
        )
    if (network := values.get("network")) is None:
        return Config.from_dict(values)
    if not isinstance(network, dict):  # of `export_hf`, or saved by transformers
        raise UserError(f"{folder / MODEL_CONFIG} is damaged: its network is no object")
    return Config.from_dict(network | {"padded_vocab_size": values.get("vocab_size")})


def _check_same_tensors(
    own: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    complaint: str,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Raises UserError, with `complaint`, for the first tensor that is missing, surplus or of another shape.

    Names that contain one of `optional` may be missing, surplus or of another shape.
    """
    for name in own | given:
        if any(part in name for part in optional):
            continue
        if name not in own or name not in given:
            raise UserError(f"{complaint}: {name} {'is missing' if name in own else 'has no place in it'}")
        if own[name].shape != given[name].shape:
            shapes = f"{list(given[name].shape)}, not {list(own[name].shape)}"
            raise UserError(f"{complaint}: {name} is {shapes}")


def _summary(names: list[str]) -> str:
    """`transformer.h.*.attn.qkv.weight ×24, …`: one entry for all layers together."""
    counts = Counter(re.sub(r"\.h\.\d+\.", ".h.*.", name) for name in names)
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.items())
