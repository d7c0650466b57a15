"""Model folders in shards: every process writes its own part, and any number of processes can read them.

Uses torch.distributed.checkpoint (DCP) with safetensors files, which contain no code; `shards.json` names the
files. Besides the weights a checkpoint has other tensors there, whose names have a prefix. DCP is imported
where it is needed, as that takes a second.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, write_json
from lingpt.common.run_folder import MODEL_CONFIG

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SHARDS = "shards.json"
OPTIMIZER = "optimizer."  # the prefix of the tensors that are not weights


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Writes this rank's parts of the DTensors among `tensors`; every rank of `group` must call it.

    A tensor that is on every rank is written once. Raises CheckpointException on all ranks if one fails.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def write_index(folder: Path, config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Turns the shards in `folder` into a model folder; called by one rank after all are written."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    write_json(folder / MODEL_CONFIG, config, indent=2)
    write_json(folder / SHARDS, {"metadata": dict(metadata), "files": files})


def is_sharded(folder: Path) -> bool:
    """Whether the weights in a model folder or a checkpoint are in shards."""
    return (folder / SHARDS).is_file()


def read_shards(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Fills the tensors `into` in place, of a DTensor this rank's part. Processes do not wait for each other.

    Raises UserError if a shard is missing or damaged, or a tensor is not in them.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    found = _described(folder)
    try:
        for name, tensor in into.items():
            if name not in found:
                raise UserError(f"{folder} does not hold {name}")
            if found[name].size != tensor.shape:
                raise UserError(f"{folder}: {name} is {list(found[name].size)}, not {list(tensor.shape)}")
        with warnings.catch_warnings():  # reading without a process group is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (SafetensorError, OSError, CheckpointException) as error:
        raise _damaged(folder, error) from error


def read_sharded_weights(
    folder: Path, device: torch.device | str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's weights, unsharded, and the metadata of the folder."""
    metadata = shards_metadata(folder)
    tensors = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device=device)
        for name, tensor in _weights(folder).items()
    }
    read_shards(folder, tensors)
    return tensors, metadata


def shards_metadata(folder: Path) -> dict[str, str]:
    """The metadata that `write_index` was given."""
    return _index(folder)["metadata"]


def sharded_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights (of the largest tensor). UserError if a shard is missing."""
    return max(_weights(folder).values(), key=lambda tensor: tensor.size.numel()).properties.dtype


def sharded_parameters(folder: Path) -> int:
    """The number of parameters. UserError if a shard is missing."""
    return sum(tensor.size.numel() for tensor in _weights(folder).values())


def _weights(folder: Path) -> dict[str, TensorStorageMetadata]:
    """`_described`, without the optimizer's tensors."""
    return {name: value for name, value in _described(folder).items() if not name.startswith(OPTIMIZER)}


def _described(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in the shards, by name. UserError if a shard is missing."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    files = _index(folder)["files"]
    for name in files:
        if not (folder / name).is_file():
            raise UserError(f"the shard {folder / name} is missing: restore it, or use another checkpoint")
    for path in folder.glob("*.safetensors"):  # DCP would read its tensors, too
        if path.name not in files:
            raise UserError(f"{path} is none of the shards that {SHARDS} names: move it elsewhere")
    try:
        described = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, json.JSONDecodeError, KeyError) as error:
        raise _damaged(folder, error) from error
    return {name: value for name, value in described.items() if isinstance(value, TensorStorageMetadata)}


def _damaged(folder: Path, error: BaseException) -> UserError:
    """The UserError for `error`, with the name of the first shard that cannot be opened."""
    for name in _index(folder)["files"]:
        try:
            with safe_open(str(folder / name), framework="pt"):
                pass
        except (SafetensorError, OSError) as broken:
            return UserError(
                f"the shard {folder / name} is damaged ({broken}): restore it, or use another checkpoint"
            )
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return UserError(f"a shard of {folder} is damaged: {reason}")


def _index(folder: Path) -> dict[str, Any]:
    index = read_json_object(folder / SHARDS)
    if not isinstance(index.get("files"), list) or not isinstance(index.get("metadata"), dict):
        raise UserError(f"{folder / SHARDS} is damaged: it names no shards")
    return index
