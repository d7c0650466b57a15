"""FSDP2: every process holds a part of each parameter, of its gradient and of its optimizer state.

A block's parameters are all-gathered right before its forward and its backward pass, and its gradient is
reduce-scattered right after, in every micro-batch: a device holds two blocks and the embeddings unsharded at
a time. If memory allows it (`gathers_once`), parameters are gathered in a step's first micro-batch, gradients
reduce-scattered in its last, and both stay unsharded until then. All of it is fp32 (bf16 if the run's
precision is bf16-true), and autocast casts as with DDP, so the losses are those of DDP.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lingpt.models import OPTIMIZER, Block, read_shards


def shard(module: nn.Module, mesh: DeviceMesh, reduce_bf16: bool, gathers_once: bool) -> nn.Module:
    """Shards the parameters of `module` over the processes of `mesh`, in place, block by block."""
    policy = MixedPrecisionPolicy(
        reduce_dtype=torch.bfloat16 if reduce_bf16 else None, cast_forward_inputs=False
    )
    blocks: list[nn.Module] = [part for part in module.modules() if isinstance(part, Block)]
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False if gathers_once else None)
    return module


def stay_unsharded(module: nn.Module, enabled: bool) -> None:
    """Sets whether a sharded module's parameters and gradient stay unsharded after its next backward pass."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(not enabled)
    module.set_reshard_after_backward(not enabled)


def split_shards(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Splits an optimizer's state dict into its DTensors, by name, and the rest, with None in their place."""
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        tensors |= {_name(index, key): v for key, v in values.items() if isinstance(v, DTensor)}
        rest[index] = {key: None if isinstance(v, DTensor) else v for key, v in values.items()}
    return tensors, {**state, "state": rest}


def join_shards(optimizer: torch.optim.Optimizer, state: dict[str, Any], shards: Path) -> dict[str, Any]:
    """The inverse of `split_shards`: reads the tensors from the folder `shards`, sharded like the parameters.

    Raises UserError if a shard is missing or damaged.
    """
    parameters = _parameters(optimizer)
    into = {
        _name(index, key): torch.zeros_like(parameters[index], requires_grad=False)
        for index, values in state["state"].items()
        for key, value in values.items()
        if value is None
    }
    if into:
        read_shards(shards, into)
    whole = {
        index: {key: into.get(_name(index, key), value) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": whole}


def shard_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with its unsharded tensors sharded like the parameters."""
    parameters = _parameters(optimizer)

    def divide(index: int, value: Any) -> Any:
        like = parameters[index]
        if not isinstance(like, DTensor) or isinstance(value, DTensor) or not torch.is_tensor(value):
            return value
        if value.shape != like.shape:
            return value
        # No communication: each process takes its part of its own copy.
        value = value.to(like.device_mesh.device_type)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    parts = {
        index: {key: divide(index, value) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": parts}


def _name(index: int, key: str) -> str:
    """The name of an entry of one parameter's optimizer state in the shards."""
    return f"{OPTIMIZER}{index}.{key}"


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters by index, as in the optimizer's state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
