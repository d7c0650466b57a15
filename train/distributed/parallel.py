"""The processes of a run: the only place that knows how many there are and how they cooperate.

Every process runs the same loop and makes the same calls of `Parallel` and of the wrapped module, in the same
order, because most of them wait for all other processes. Each process holds the whole model (DDP), or a part
of it (FSDP2, train/distributed/sharding.py). Another strategy needs another `wrap`, `clip_gradients` and
`load_optimizer`; the loop does not change.
"""

import contextlib
import functools
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lingpt.common.errors import Interrupted, UserError, first_line
from lingpt.data import Batch
from lingpt.kernels.context_parallel import Context
from lingpt.train.console import print_stderr
from lingpt.train.distributed import context
from lingpt.train.distributed.collectives import all_gather_object, on_all_ranks
from lingpt.train.distributed.fabric_setup import FSDP2Strategy, cluster_environment, ddp_strategy
from lingpt.train.distributed.failures import connection_lost, failure_message, lost_message
from lingpt.train.distributed.heartbeats import Heartbeats
from lingpt.train.distributed.sharding import join_shards, shard, shard_state, stay_unsharded
from lingpt.train.distributed.watch import Watch
from lingpt.train.planning.machine import Machine

if TYPE_CHECKING:
    from lightning.fabric.wrappers import _FabricModule as WrappedModule

T = TypeVar("T")
TensorOrBatch = TypeVar("TensorOrBatch", torch.Tensor, torch.Tensor | Batch)


def separate_gradients(module: nn.Module) -> None:
    """Copies a gradient that shares memory with another parameter's gradient.

    Two biases that are added to the same sum have the same gradient, and a backward pass compiled by Inductor
    returns one buffer for both. The next micro-batch would be added to it twice, and clipping would scale it
    twice.
    """
    seen = set()
    for parameter in module.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            if parameter.grad.data_ptr() in seen:
                parameter.grad = parameter.grad.clone()
            seen.add(parameter.grad.data_ptr())


class Parallel:
    """One process's view of all processes. Its constructor starts the others.

    reduce_bf16: sum gradients over the processes in bf16. timeout_minutes: how long one process waits for
    another. context_parallel: the number of processes that hold the pieces of the same sequences. Raises
    UserError if they cannot connect.
    """

    _error_of_all: UserError | None = None  # the UserError that all processes raised
    context: Context | None = None  # the processes with the other pieces of the same sequences

    def __init__(
        self,
        machine: Machine,
        reduce_bf16: bool = False,
        timeout_minutes: float = 30.0,
        context_parallel: int = 1,
    ) -> None:
        self.watch, self.sharded, self._reduce_bf16 = Watch(), machine.strategy == "fsdp", reduce_bf16
        self._gathers_once, self._ddp = machine.gathers_once, machine.strategy == "ddp"
        self._timeout = timedelta(minutes=timeout_minutes + 2)  # later than `watch`, which reports more
        # Fabric names the precision, as our own first line does, and advises against exact products in fp32.
        rank_zero.log.setLevel(logging.WARNING)
        self.fabric = Fabric(
            accelerator=machine.accelerator,
            devices=machine.devices,
            num_nodes=machine.num_nodes,
            strategy=self._strategy(machine),
            precision=machine.precision,
            plugins=[cluster_environment()],
        )
        with self._connection(machine), self.watch.launched_by(self.fabric.strategy.launcher):
            self.fabric.launch()
        if self.world_size > 1:
            # A separate connection: other threads would have to wait while the main thread waits in its own.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            heartbeats = Heartbeats(store, self.rank, self.world_size, 60 * timeout_minutes)
            self.watch.start_straggler_detection(heartbeats, self._collectives, self.local_rank_zero)
        if context_parallel > 1:
            self.context = context.connect(context_parallel, self.rank, self._timeout)

    def check_same_settings(self, machine: Machine, settings: dict[str, object]) -> None:
        """Raises UserError on all processes if they differ, before they build anything together.

        machine: what each process chose for its cards. settings: what else must be the same, by name.
        """
        everyone = self.all_gather_object((machine, settings))
        if difference := _difference_message(everyone):
            self._error_of_all = UserError(difference)
            raise self._error_of_all
        self._gathers_once = all(other.gathers_once for other, _ in everyone)

    @functools.cached_property
    def host_mesh(self) -> DeviceMesh | None:
        """A separate process group on the host for the threads that write sharded checkpoints; None if the
        model is not sharded. Training does not use it.
        """
        if not self.sharded:
            return None
        return DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=self._timeout), "cpu")

    def _collectives(self) -> int:
        """The number of collectives this process has reached, including those of checkpoint writers."""
        if not dist.is_initialized():
            return -1
        mesh = self.__dict__.get("host_mesh")  # if it exists already
        groups = [dist.group.WORLD, *([mesh.get_group()] if mesh else [])]
        groups += [self.context.group] if self.context else []
        return sum(group._get_sequence_number_for_group() for group in groups)

    def _strategy(self, machine: Machine) -> DDPStrategy | str:
        if machine.strategy == "fsdp":
            return FSDP2Strategy(self._shard, timeout=self._timeout)
        return ddp_strategy(self._timeout) if machine.strategy == "ddp" else "auto"

    def _shard(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        return shard(module, mesh, self._reduce_bf16, self._gathers_once).to_empty(device=self.device)

    @contextlib.contextmanager
    def _connection(self, machine: Machine) -> Iterator[None]:
        """Turns errors in the first connection of the processes into a UserError."""
        try:
            yield
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            if isinstance(error, dist.DistBackendError) and not connection_lost(error):
                line = failure_message(error, self.rank, self.world_size)
                if not self.local_rank_zero:  # rank zero of the machine raises it, others print it
                    print_stderr(line)
                raise UserError(line) from error
            if "EADDRINUSE" in str(error):
                raise UserError(
                    f"the port of {where} is taken, by another run perhaps: choose another "
                    "(torchrun --master_port, or MASTER_PORT)"
                ) from error
            raise UserError(
                f"the {machine.world_size} processes did not meet at {where}: are all of them started, with "
                f"the same address and port, and may they connect? ({first_line(error)})"
            ) from error

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Wraps the run: if a process dies or fails, all end, with one message.

        Raises UserError with the message in the main process; the others exit.
        """
        try:
            yield
        except BaseException as error:
            if self.world_size == 1:
                raise
            is_lost, failed = connection_lost(error), isinstance(error, dist.DistError)
            is_said = self.local_rank_zero or error is self._error_of_all  # printed by the command line
            if self.watch.children:
                line = self.watch.first_death_message() if is_lost or failed else None
                self.watch.end_children()
                if self.watch.interrupted and line:
                    raise Interrupted(self.watch.interrupted) from error
                if failed:
                    line = line or failure_message(error, self.rank, self.world_size)
                elif is_lost and isinstance(error, RuntimeError):  # no process died: gloo timed out
                    line = line or lost_message(self.rank, self.world_size)
                if line:
                    raise UserError(line) from error
            elif is_lost or failed:
                if not is_lost:
                    line = failure_message(error, self.rank, self.world_size)
                else:
                    line = lost_message(self.rank, self.world_size) if self.local_rank_zero else ""
                self.watch.leave(line)
            elif isinstance(error, UserError) and not is_said:
                print_stderr(f"process {self.rank}: {error}")
            raise

    @property
    def rank(self) -> int:
        return self.fabric.global_rank

    @property
    def local_rank_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.fabric.local_rank == 0

    @property
    def world_size(self) -> int:
        return self.fabric.world_size

    @property
    def pieces(self) -> int:
        """The number of ranks that hold pieces of the same sequences."""
        return self.context.size if self.context else 1

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def peak_memory(self) -> int:
        """The peak memory of this process so far in bytes: of the GPU, or of the host."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def seed(self, seed: int) -> None:
        """Seeds the global random generators, with a different seed on each rank."""
        self.fabric.seed_everything((seed + self.rank) % 2**32, verbose=False)  # numpy's largest is 2³² − 1

    # -- the model ------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> "WrappedModule":
        """Wraps `module` for all processes, in the run's precision. Create its optimizer after this.

        If sharded, `module` must be on the meta device, and its weights must be set afterwards.
        """
        if self.context:
            context.apply(module, self.context)
        wrapped = self.fabric.setup_module(module, move_to_device=not self.sharded)
        for inner in wrapped.children():
            if self._reduce_bf16 and isinstance(inner, DistributedDataParallel):
                inner.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        wrapped = self.fabric.setup_optimizers(optimizer)
        assert isinstance(wrapped, torch.optim.Optimizer)
        return wrapped

    @contextlib.contextmanager
    def accumulate(self, module: "WrappedModule", enabled: bool) -> Iterator[None]:
        """Wraps a forward and a backward pass whose gradients may stay on this rank, if enabled.

        Sharded gradients are reduced in every pass, unless there is memory for unsharded ones.
        """
        if self._gathers_once:
            stay_unsharded(module.module, enabled)
        stays_here = enabled and self.world_size > 1 and not self.sharded
        with self.fabric.no_backward_sync(module) if stays_here else contextlib.nullcontext():
            yield
        separate_gradients(module)

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees the gradients; DDP's, views of its buckets, are zeroed: new ones would double the memory."""
        optimizer.zero_grad(set_to_none=not self._ddp)

    def backward(self, loss_sum: torch.Tensor, count: int) -> None:
        """Adds this rank's part of the gradient of (the sum of all ranks' `loss_sum`) / `count`."""
        # DDP and FSDP average over ranks; the factor turns that into the sum.
        self.fabric.backward(loss_sum * (self.world_size / count))

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        """Clips gradients to the norm `max_norm` over all parameters; returns the norm before, a scalar."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict, checkpoint: Path) -> None:
        """Sets the optimizer to the `state` of a checkpoint, written by any number of processes."""
        state = shard_state(optimizer, join_shards(optimizer, state, checkpoint))
        # How a step is computed depends on this device, not on the one that wrote the checkpoint.
        groups = [
            loaded | {key: own[key] for key in ("fused", "foreach")}
            for loaded, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict(state | {"param_groups": groups})

    def autocast(self) -> AbstractContextManager:
        """A context with the run's precision, for a module that is not wrapped."""
        return self.fabric.autocast()

    # -- the data -------------------------------------------------------------------------------------------

    def micro_batches(self, n: int, size: int) -> Iterator[tuple[range, bool]]:
        """This rank's share of `n` samples in micro-batches of `size`, and whether each counts. Ranks with
        pieces of the same sequences have the same share.

        Every rank gets the same number, since all must make the same calls. If the samples run out, the very
        first micro-batch is repeated (its shape is already compiled) and does not count.
        """
        rounds = -(-n // (size * (self.world_size // self.pieces)))
        for i in range(rounds):
            start = (self.rank // self.pieces * rounds + i) * size
            samples = range(n)[start : start + size]
            yield samples or range(n)[:size], bool(samples)

    def to_device(self, batch: TensorOrBatch) -> TensorOrBatch:
        """Copies this rank's piece of sequences, the input of `NextTokenLoss`, from the CPU to its device; to
        a GPU from pinned memory and asynchronously, in order with the current stream.
        """
        if self.context:
            batch = context.own_piece(batch, self.context)  # type: ignore[assignment]
        if self.device.type == "cuda" and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)

    # -- agreement ------------------------------------------------------------------------------------------

    def all_reduce_sum(self, *values: torch.Tensor | float) -> list[float]:
        """Each value summed over all ranks, in float64. Synchronises with the device."""
        return self.all_reduce_sum_async(*values).tolist()

    def all_reduce_sum_async(self, *values: torch.Tensor | float) -> torch.Tensor:
        """`all_reduce_sum` on the device, [n] float64, without synchronisation."""
        own = [
            value.double() if isinstance(value, torch.Tensor)
            # Filled by a kernel: copying a number from the host would synchronise.
            else torch.full((), value, dtype=torch.float64, device=self.device)
            for value in values
        ]  # fmt: skip
        sums = torch.stack(own)
        if self.world_size > 1:  # not by Fabric, which adds a barrier
            dist.all_reduce(sums)
        return sums

    def any_rank(self, value: bool) -> bool:
        """Whether `value` holds on any rank."""
        return value if self.world_size == 1 else self.all_reduce_sum(value)[0] > 0

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        return [value] if self.world_size == 1 else all_gather_object(value)

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """`function()` on rank zero; all ranks get its result or its UserError, so none is left waiting."""
        outcome: list[T | UserError] = []
        if self.rank == 0:
            try:
                outcome.append(function())
            except UserError as error:
                outcome.append(error)
        (result,) = self.fabric.broadcast(outcome)
        if isinstance(result, UserError):
            self._error_of_all = result
            raise result
        return result

    def on_checkpoint_ranks(self, function: Callable[[], object]) -> None:
        """Calls `function` on the ranks that write checkpoints: rank zero, or all ranks if sharded.

        The first UserError of any is raised on all ranks.
        """
        if not self.sharded:
            self.on_rank_zero(function)
            return
        try:
            on_all_ranks(function)
        except UserError as error:
            self._error_of_all = error
            raise

    def close(self) -> None:
        """Destroys the process group. There must be no references to the wrapped module any more.

        DDP's reducer must not hold the last reference to the group: it would destroy it while holding the
        GIL, and wait for gloo's thread, which may be waiting for the GIL.
        """
        if dist.is_available() and dist.is_initialized():
            self.fabric.barrier()
            self.watch.stop()
            dist.destroy_process_group()


def _difference_message(everyone: list[tuple[Machine, dict[str, object]]]) -> str | None:
    """The message on the settings that differ between processes, by rank; None if none does."""
    for name in everyone[0][1]:
        values = [str(settings.get(name)) for _, settings in everyone]
        if len(set(values)) > 1:
            return (
                f"the processes differ in {name} (ranks of {_ranks(values)}): start each with the same "
                "command, on the same data"
            )
    ways = [f"{machine.strategy}, {machine.precision}" for machine, _ in everyone]
    if len(set(ways)) > 1:
        return (
            "the processes would not train the same way, since their cards differ (ranks of "
            f"{_ranks(ways)}): say --train.strategy and --train.precision"
        )
    return None


def _ranks(values: list[str]) -> str:
    """Which ranks have which of the `values` (by rank), as `ddp: 0, 2; fsdp: 1`."""
    return "; ".join(
        f"{value}: {', '.join(str(rank) for rank, other in enumerate(values) if other == value)}"
        for value in dict.fromkeys(values)
    )
