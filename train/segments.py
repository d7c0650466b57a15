"""Truncated back-propagation: a sequence is trained on in consecutive segments, one after another.

Each segment's forward pass starts from the states that the one before has left, each linear attention's and
its convolution's last tokens, without their gradient: memory is that of a segment, and no gradient reaches
back beyond one (GLA, arXiv 2312.06635, trains so on 12 × 2K tokens). Softmax layers attend within a segment.
A step's sequences begin with empty states and end within the step, so that checkpoints need none.
"""

from collections.abc import Generator
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.data import Batch
from lingpt.models import GPT
from lingpt.train.config import Recipe


def check_segments(recipe: Recipe, gpt: GPT) -> None:
    """Raises UserError if the recipe's sequences cannot be trained on in segments."""
    t, seq_len = recipe.train, recipe.data.seq_len
    if t.segments == 1:
        return
    option = f"train.segments is {t.segments}"
    if seq_len % t.segments:
        raise UserError(f"{option}, which does not divide data.seq_len {seq_len}: change one of them")
    if not any(block.attn.constant_state for block in gpt.blocks):
        raise UserError(f"{option}, and {recipe.attention_label} has no state to carry: leave it out")
    others = {"context_parallel": t.context_parallel > 1, "teacher": t.teacher is not None}
    for name, given in others.items():
        if given:
            raise UserError(f"{option}, and train.{name} needs whole sequences: leave one of them out")
    if recipe.data.packing == "documents" or recipe.data.rows == "answers":
        raise UserError(f"{option}, and packed documents begin with empty states: leave one of them out")


def segment_losses(
    model: Any, gpt: GPT, batch: torch.Tensor | Batch, n: int
) -> Generator[torch.Tensor, None, None]:
    """The losses of the `n` segments of a batch `[B, N + 1]`, computed one after another: the gradient of
    each must be computed before the next is asked for. `model`: the wrapped loss of `gpt`."""
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
