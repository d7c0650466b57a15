"""Configures Fabric: how it starts the processes of a run and wraps the model."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lingpt.train.distributed.launch import launched


class FSDP2Strategy(DDPStrategy):
    """Starts and connects the processes as DDP does, and shards the module over them with `shard`.

    (Lightning's own FSDP2 strategy creates process groups while connecting, before the processes can agree.)
    """

    def __init__(self, shard: Callable[[nn.Module], nn.Module], timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._shard = shard

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        return self._shard(module)


def cluster_environment() -> ClusterEnvironment:
    """The source of the processes' ranks. (Lightning would treat any SLURM job as started by `srun`.)"""
    launcher = launched()
    if launcher is None:
        return LightningEnvironment()
    return SLURMEnvironment() if launcher.by == "SLURM" else TorchElasticEnvironment()


def ddp_strategy(timeout: timedelta) -> DDPStrategy:
    # Fabric builds DDP on a separate stream, where autograd's last nodes stay: harmless.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    # Dynamo would split each compiled block at the boundaries of DDP's buckets, to get gradients earlier.
    # Blocks are compiled one by one, so their gradients come early enough.
    torch._dynamo.config.optimize_ddp = False
    # Buffers are constants and need no broadcast at every forward. PyTorch 2.13 renamed the option.
    known = inspect.signature(DistributedDataParallel).parameters
    broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {broadcast: False, "gradient_as_bucket_view": True}
    return DDPStrategy(timeout=timeout, **options)
