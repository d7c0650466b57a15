"""AdamW as in Pythia's recipe, and the learning rate as a pure function of the step."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lingpt.models.weight_decay import parameter_groups
from lingpt.train.config import TrainConfig, decay_steps, warmup_steps


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The learning rate of optimiser step `step` (0-based): linear warm-up to the peak, then the schedule's
    decay.

    A run too short for its warm-up warms up over a tenth of its steps. The last step has the minimum, unless
    the warm-up is all there is. `wsd` decays with 1 − √progress (Hägele et al. 2024, "Scaling laws and
    compute-optimal training beyond fixed training durations").
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    span = config.learning_rate - config.min_learning_rate
    if config.schedule == "wsd":
        decay = decay_steps(config, total_steps)
        done = min(1.0, max(0, step - (total_steps - 1 - decay)) / decay)
        return config.min_learning_rate + span * (1 - math.sqrt(done))
    last = total_steps - 1 - warmup
    progress = min(1.0, (step - warmup) / last) if last > 0 else 1.0
    return config.min_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, fused on a GPU, with weight decay as in `parameter_groups`."""
    groups = parameter_groups(model, config.weight_decay)
    fused = all(p.is_cuda for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


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
