"""One optimiser step, used by training and timed by `lingpt bench train`; its optimizer (AdamW as in Pythia's
recipe, or Muon) and its learning rate, a pure function of the step."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from lingpt.data import Batch
from lingpt.models import GPT
from lingpt.models.attention import Attention
from lingpt.models.weight_decay import parameter_groups
from lingpt.train.config import Recipe, TrainConfig, decay_steps, warmup_steps
from lingpt.train.distributed.parallel import Parallel


def learning_rates(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate of each optimiser step (0-based): a linear warm-up, then the schedule's decay.

    A run too short for its warm-up warms up over a tenth of its steps. The last step has the minimum, unless
    the warm-up is all there is. `wsd` decays with 1 − √progress (Hägele et al. 2024, "Scaling laws and
    compute-optimal training beyond fixed training durations").
    """
    warmup, decay = warmup_steps(config, total_steps), decay_steps(config, total_steps)
    least, span = config.min_learning_rate, config.learning_rate - config.min_learning_rate
    last = total_steps - 1

    def rate(step: int) -> float:
        if step < warmup:
            return config.learning_rate * (step + 1) / warmup
        if config.schedule == "wsd":
            done = min(1.0, max(0, step - (last - decay)) / decay)
            return least + span * (1 - math.sqrt(done))
        progress = min(1.0, (step - warmup) / (last - warmup)) if last > warmup else 1.0
        return least + span * 0.5 * (1 + math.cos(math.pi * progress))

    return rate


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, fused on a GPU, with weight decay as in `parameter_groups`, and maybe a rate of their own for
    linear attentions; for `config.optimizer` `muon`, also Muon, for the weights of linear layers except
    `lm_head`."""
    groups = parameter_groups(model, config.weight_decay)
    fused = all(p.is_cuda for group in groups for p in group["params"])
    matrices = muon_matrices(model, config)
    by_muon = set(map(id, matrices))
    groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in by_muon]
    if config.attention_learning_rate is not None:
        linear = {
            id(p)
            for m in model.modules()
            if isinstance(m, Attention) and m.constant_state
            for p in m.parameters()
        }
        ratios = {False: 1.0, True: config.attention_learning_rate / config.learning_rate}
        groups = [
            group | {"params": [p for p in group["params"] if (id(p) in linear) == own], "lr_ratio": ratio}
            for group in groups
            for own, ratio in ratios.items()
        ]
    betas = config.beta1, config.beta2
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)
    if not matrices:
        return adamw
    rate = config.muon_learning_rate or config.learning_rate
    muon = torch.optim.Muon(matrices, rate, config.weight_decay, adjust_lr_fn="match_rms_adamw")
    muon.param_groups[0]["lr_ratio"] = rate / config.learning_rate
    return MuonAndAdamW(muon, adamw)


def muon_matrices(model: nn.Module, config: TrainConfig) -> list[torch.Tensor]:
    """What Muon trains, if it does: the weights of linear layers but the head, those that are trained."""
    if config.optimizer != "muon":
        return []
    layers = (m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head")
    return [layer.weight for layer in layers if layer.weight.requires_grad]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan 2024) on the matrices of linear layers and AdamW on the rest, as one optimizer: their
    groups, Muon's first, and their state are its own."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.parts = (muon, adamw)
        # Muon has no fused form; Parallel.load_optimizer reads both keys of every group.
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": False, "foreach": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # Set anew, as `load_state_dict` replaces both.
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            part.state, part.param_groups = self.state, groups
            part.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of each group: `rate`, times the group's `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


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
    """A model in training: `model` computes the loss of `gpt`; it and `optimizer` are wrapped.

    tokens_per_step: of the global batch.
    """

    recipe: Recipe
    tokens_per_step: int
    parallel: Parallel
    gpt: GPT
    model: Any
    optimizer: Any


def optimizer_step(
    training: Training,
    micro_batches: Iterable[torch.Tensor | Batch],
    n: int,
    flags: Callable[[], Sequence[bool]] = lambda: (),
    targets: int | None = None,
) -> AsyncHostCopy:
    """A step with the gradient of `n` micro-batches `[B, N + 1]` of this rank, which are on the device.

    targets: how many the global batch has; by default each of its tokens is one, except the first of a row.

    Every target of the global batch has the same weight. If the loss or the gradient is not finite, nothing
    changes. Launches everything without synchronisation. The returned numbers are the loss summed over the
    targets of all ranks, on how many ranks each of the `flags` is set after the last micro-batch, and the
    gradient's norm.
    """
    parallel, optimizer = training.parallel, training.optimizer
    parallel.zero_gradients(optimizer)
    loss_sum = torch.zeros((), dtype=torch.float64, device=parallel.device)
    segments = training.recipe.train.segments
    for i, micro_batch in enumerate(micro_batches):
        losses = segment_losses(training.model, training.gpt, micro_batch, segments)
        for segment in range(segments):
            last = i == n - 1 and segment == segments - 1
            with parallel.accumulate(training.model, enabled=not last):
                with record_function("forward"):
                    loss = next(losses)
                with record_function("backward"):
                    parallel.backward(loss, targets or training.tokens_per_step)
            loss_sum += loss.detach()
        losses.close()
    with record_function("optimizer"):
        norm = parallel.clip_gradients(training.gpt, training.recipe.train.grad_clip)
        sums = parallel.all_reduce_sum_async(loss_sum, *flags())
        numbers = AsyncHostCopy(sums, norm)
        step_where_finite(optimizer, sums[0], norm)
    return numbers


def segment_losses(
    model: Any, gpt: GPT, batch: torch.Tensor | Batch, n: int
) -> Generator[torch.Tensor, None, None]:
    """The losses of the `n` consecutive segments of a batch `[B, N + 1]`, for truncated back-propagation, by
    which GLA trains on 12 × 2K tokens (arXiv 2312.06635). `model`: the wrapped loss of `gpt`.

    They are computed one after another: the gradient of each must be computed before the next is asked for.
    Each segment's forward pass starts from the states that the one before has left, each linear attention's
    and its convolution's last tokens, without their gradient: memory is that of a segment. Softmax layers
    attend within a segment. The first one begins with empty states, so that checkpoints need none.
    """
    if n == 1 or not isinstance(batch, torch.Tensor):
        yield model(batch)
        return
    tokens = (batch.shape[1] - 1) // n
    # Not an argument of `model`: what wraps it may copy its arguments, and the states are updated.
    gpt.carried = gpt.carried_state(len(batch))
    try:
        for i in range(n):
            yield model(batch.narrow(1, i * tokens, tokens + 1))
            gpt.carried.detach_()
    finally:
        gpt.carried = None


def step_where_finite(optimizer: torch.optim.Optimizer, *numbers: torch.Tensor) -> None:
    """A step of the optimizer that changes nothing if one of `numbers`, scalars, is not finite.

    A fused optimizer checks that on the device, as with GradScaler, without synchronisation; others
    synchronise.
    """
    finite = torch.stack([number.isfinite() for number in numbers]).all()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if optimizer.defaults["fused"] and not isinstance(next(parameters), DTensor):
        bare: Any = getattr(optimizer, "optimizer", optimizer)  # unwrapped from Fabric
        bare.found_inf = finite.logical_not().float()
        optimizer.step()
    elif finite.item():
        optimizer.step()
