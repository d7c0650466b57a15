"""One optimiser step, used by training and timed by `lingpt bench train`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from lingpt.models import GPT
from lingpt.train.config import Recipe
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.optim import step_where_finite
from lingpt.train.profile import span


class AsyncHostCopy:
    """An asynchronous copy to the host of the numbers in tensors that may not have been computed yet."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        values = torch.cat([tensor.double().flatten() for tensor in tensors])
        self._values, self._copied = values, None
        if values.is_cuda:
            pinned = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values, self._copied = pinned.copy_(values, non_blocking=True), torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[float]:
        """Waits for the work launched before the copy, not for work launched since; returns the numbers."""
        if self._copied:
            self._copied.synchronize()
        return self._values.tolist()


class Training(Protocol):
    """A model in training: `model` computes the loss of `gpt`; it and `optimizer` are wrapped."""

    recipe: Recipe
    parallel: Parallel
    gpt: GPT
    model: Any
    optimizer: Any


def optimizer_step(
    training: Training,
    micro_batches: Iterable[torch.Tensor],
    n: int,
    flags: Callable[[], Sequence[bool]] = lambda: (),
) -> AsyncHostCopy:
    """A step with the gradient of `n` micro-batches `[B, N + 1]` of this rank, which are on the device.

    Every token of the global batch has the same weight. If the loss or the gradient is not finite, nothing
    changes. Launches everything without synchronisation. The returned numbers are the loss summed over the
    tokens of all ranks, on how many ranks each of the `flags` is set after the last micro-batch, and the
    gradient's norm.
    """
    recipe, parallel, optimizer = training.recipe, training.parallel, training.optimizer
    parallel.zero_gradients(optimizer)
    loss_sum = torch.zeros((), dtype=torch.float64, device=parallel.device)
    for i, micro_batch in enumerate(micro_batches):
        with parallel.accumulate(training.model, enabled=i < n - 1):
            with span("forward"):
                loss = training.model(micro_batch)
            with span("backward"):
                parallel.backward(loss, recipe.tokens_per_step)
        loss_sum += loss.detach()
    with span("optimizer"):
        norm = parallel.clip_gradients(training.gpt, recipe.train.grad_clip)
        sums = parallel.all_reduce_sum_async(loss_sum, *flags())
        numbers = AsyncHostCopy(sums, norm)
        step_where_finite(optimizer, sums[0], norm)
    return numbers
