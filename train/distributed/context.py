"""Context parallelism: neighbouring ranks hold the pieces of the same sequences.

Every rank still holds the model (DDP) or its part of it (FSDP2) and the gradients are summed over all ranks:
a piece's loss is a part of the sum, and what other pieces owe to its tokens reaches it through the
collectives of kernels/context_parallel.py.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lingpt.common.errors import UserError
from lingpt.common.format import counted
from lingpt.data import Batch
from lingpt.kernels.context_parallel import Context
from lingpt.models import ATTENTIONS, GPT, Attention
from lingpt.models.attention.short_conv import WIDTH
from lingpt.train.config import Recipe


def check_context_parallel(recipe: Recipe, gpt: GPT, world_size: int) -> None:
    """Raises UserError if the recipe's sequences cannot be divided over these devices."""
    n, seq_len = recipe.train.context_parallel, recipe.data.seq_len
    if n == 1:
        return
    option = f"train.context_parallel is {n}"
    if world_size % n:
        raise UserError(
            f"{option}, and the run has {counted(world_size, 'device')}, no multiple of it: lower it, or "
            f"give --train.devices {n}"
        )
    if seq_len % n or seq_len // n < WIDTH:
        raise UserError(
            f"{option}, and data.seq_len {seq_len} does not divide into {n} pieces of {WIDTH} tokens or "
            "more: change one of them"
        )
    if recipe.train.teacher is not None:
        raise UserError(f"{option}, and train.teacher needs whole sequences: leave one of them out")
    for name in dict.fromkeys(gpt.config.attention_per_layer):
        if not ATTENTIONS[name].context_parallel:
            raise UserError(f"{option}, but {name} needs whole sequences: leave it out")


def connect(size: int, rank: int, timeout: timedelta) -> Context:
    """The group of the `size` neighbouring ranks that `rank` is one of; all ranks must call it."""
    group, _ = dist.new_subgroups(size, timeout=timeout)
    assert group is not None
    return Context(group, rank % size, size)


def apply(model: nn.Module, context: Context) -> None:
    """From now on the sequences of the GPT in `model` are this process's pieces, all of one length."""
    for part in model.modules():
        if isinstance(part, GPT | Attention):
            part.context = context


def own_piece(batch: torch.Tensor | Batch, context: Context) -> torch.Tensor | Batch:
    """This rank's N / size tokens of each sequence. A tensor `[B, N + 1]` holds N tokens and the last one's
    target; the borders of packed documents stay those of whole sequences."""
    if isinstance(batch, torch.Tensor):
        tokens = (batch.shape[1] - 1) // context.size
        return batch.narrow(1, context.rank * tokens, tokens + 1).contiguous()
    idx, targets = (x.chunk(context.size, 1)[context.rank].contiguous() for x in (batch.idx, batch.targets))
    return batch._replace(idx=idx, targets=targets)
