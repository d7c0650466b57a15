"""Validation: the loss on the first tokens of a validation text, always the same ones."""

import torch

from lingpt.data import Blocks
from lingpt.train.console import progress_bar
from lingpt.train.signals import Stop
from lingpt.train.step import Training, segment_losses


@torch.no_grad()
def validate(training: Training, blocks: Blocks, stop: Stop) -> tuple[float, list[float]] | None:
    """Nats per token on the first of `blocks`, of all tokens and of each segment's; None if all ranks agree
    to stop, which they check at each batch, as all of them may take long."""
    if stop.agreed:
        return None
    recipe, parallel, n = training.recipe, training.parallel, training.recipe.train.segments
    loss_sum, tokens = torch.zeros(n, dtype=torch.float64, device=parallel.device), 0.0
    used = recipe.validation_blocks(len(blocks))
    batches = list(parallel.micro_batches(used, recipe.train.micro_batch_size))
    for batch, counts in progress_bar(batches, desc="validation", leave=False):
        own = parallel.to_device(blocks.gather(batch))
        losses = list(segment_losses(training.model, training.gpt, own, n))
        if counts:
            loss_sum += torch.stack(losses)
            tokens += blocks.num_targets(batch) / parallel.pieces
        if parallel.any_rank(stop.requested):
            stop.agree(parallel.all_gather_object(stop.number))
            return None
    *totals, all_tokens = parallel.all_reduce_sum(*loss_sum, tokens)
    return sum(totals) / all_tokens, [total / (all_tokens / n) for total in totals]
