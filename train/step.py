"""One optimiser step: what a run does again and again, and what `lingpt bench train` times."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from lingpt.models import GPT
from lingpt.train.config import Recipe
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.optim import step_where_finite
from lingpt.train.profile import span


class AsyncHostCopy:
    """The numbers in these tensors, which the device may not have computed yet, on their way to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        values = torch.cat([tensor.double().flatten() for tensor in tensors])
        self._values, self._copied = values, None
        if values.is_cuda:
            pinned = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values, self._copied = pinned.copy_(values, non_blocking=True), torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[float]:
        """Waits for what the device had been given to do by then, and for nothing that was launched since."""
        if self._copied:
            self._copied.synchronize()
        return self._values.tolist()


class Training(Protocol):
    """A model in training: `model` is the loss of `gpt`, wrapped for the devices, as `optimizer` is."""

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
    """A step on the gradient of `n` micro-batches `[B, N + 1]` of this rank, which lie on the device.

    Every token of the global batch weighs the same. A loss or a gradient that is not finite changes nothing.
    All is launched and nothing waited for: the numbers returned are the loss summed over the tokens of all
    ranks, on how many ranks each of the `flags` is set after the last micro-batch, and the gradient's norm.
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
