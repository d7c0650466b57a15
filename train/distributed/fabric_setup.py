"""How Fabric starts the processes of a run and wraps the model in them."""

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
    """Starts and connects the processes as DDP does, and has `shard` shard the module over them.

    (Lightning's own for FSDP2 makes groups of processes while it connects them, before they can agree.)
    """

    def __init__(self, shard: Callable[[nn.Module], nn.Module], timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._shard = shard

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        return self._shard(module)


def cluster_environment() -> ClusterEnvironment:
    """Where the processes' numbers come from. (Lightning would take any SLURM job for one of `srun`.)"""
    launcher = launched()
    if launcher is None:
        return LightningEnvironment()
    return SLURMEnvironment() if launcher.by == "SLURM" else TorchElasticEnvironment()


def ddp_strategy(timeout: timedelta) -> DDPStrategy:
    # Fabric builds DDP on a stream of its own, and autograd's last nodes stay there: harmless.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    # Dynamo would cut each compiled block at the edges of DDP's buckets, for the sake of gradients that come
    # early. Blocks are compiled one by one, and their gradients come early enough.
    torch._dynamo.config.optimize_ddp = False
    # The buffers are constants: no need to broadcast them at every forward. PyTorch 2.13 renamed the option.
    known = inspect.signature(DistributedDataParallel).parameters
    broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {broadcast: False, "gradient_as_bucket_view": True}
    return DDPStrategy(timeout=timeout, **options)
