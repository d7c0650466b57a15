"""Which layers of a hybrid keep softmax when a softmax model is linearised: those of its teacher that look
furthest back.

A recipe spaces them evenly. The teacher shows where they are needed: with a window in every layer, each of
the hybrid's softmax layers in turn goes to the layer that lowers the loss most when it gets its whole context
back (docs/results/linearize).
"""

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import cast

import torch

from lingpt.common.devices import decoding_dtype
from lingpt.common.errors import UserError
from lingpt.common.local_rank import local_rank
from lingpt.common.run_folder import find_model_folder, read_model
from lingpt.data import Batch, prepare
from lingpt.models import GPT, load_model
from lingpt.models.attention.hybrid import SOFTMAX, find_hybrid
from lingpt.models.attention.softmax import SoftmaxAttention
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0, progress_bar
from lingpt.train.loss import NextTokenLoss
from lingpt.train.runs.resume import has_begun
from lingpt.train.start import check_recipe

WINDOW = 64
TOKENS = 2**17  # of the validation text


def place_softmax_layers(recipe: Recipe) -> None:
    """Moves the evenly spaced softmax layers of the recipe's model to where its teacher needs them, those of
    a run that has begun to where it has them. A model that is no such hybrid, or whose teacher is not softmax
    in every layer, stays as it is; so does that of a dry run before it has begun."""
    gpt, machine, _ = check_recipe(recipe)  # before the text is tokenised
    layers = gpt.config.attention_per_layer
    if recipe.train.teacher is None or (hybrid := find_hybrid(layers)) is None:
        return
    if (recorded := _recorded(recipe, layers)) or recipe.train.dry_run:
        recipe.model.attention = recorded or recipe.model.attention
        return
    device = torch.device("cuda", local_rank()) if machine.accelerator == "cuda" else torch.device("cpu")
    folder = find_model_folder(Path(recipe.train.teacher))
    teacher = load_model(folder, device=device, dtype=decoding_dtype(None, device)).eval()
    if teacher.config.attention_per_layer != [SOFTMAX] * len(layers) or teacher.config.softmax_window:
        return
    blocks = prepare(recipe.data, padded_vocab_size=teacher.config.padded_vocab_size).val
    used, rows = min(len(blocks), max(1, TOKENS // blocks.seq_len)), recipe.train.micro_batch_size
    batches = [blocks.gather(range(i, min(i + rows, used))).to(device) for i in range(0, used, rows)]
    placed = layers_that_need_context(teacher, batches, layers.count(SOFTMAX))
    recipe.model.attention = [SOFTMAX if i in placed else hybrid[0] for i in range(len(layers))]
    names = ", ".join(map(str, sorted(placed)))
    print_rank0(f"softmax layers: {names} of 0 … {len(layers) - 1}, which the teacher needs most")


def _recorded(recipe: Recipe, layers: Sequence[str]) -> list[str] | None:
    """The layers of the recipe's run, if it has begun; None if they are not `layers` in some order."""
    with contextlib.suppress(UserError):  # damaged
        if recipe.train.resume != "never" and has_begun(recipe.run_folder):
            _, attention = read_model(recipe.run_folder)
            return list(attention) if sorted(attention) == sorted(layers) else None
    return None


@torch.no_grad()
def layers_that_need_context(teacher: GPT, batches: Sequence[torch.Tensor | Batch], number: int) -> set[int]:
    """So many layers of a softmax model, by greedy search: each is the one whose whole context, beside a
    window of WINDOW tokens in the layers not chosen, gives the lowest loss. Leaves no windows behind."""
    loss = NextTokenLoss(teacher)
    attentions = [cast(SoftmaxAttention, block.attn) for block in teacher.blocks]

    def with_context(layers: Collection[int]) -> float:
        for i, attention in enumerate(attentions):
            attention.window = None if i in layers else WINDOW
        return sum(loss(batch).item() for batch in batches)

    chosen: set[int] = set()
    for _ in progress_bar(range(number), desc="softmax layers", leave=False):
        others = set(range(len(attentions))) - chosen
        chosen.add(min(others, key=lambda i: with_context({*chosen, i})))
    for attention in attentions:
        attention.window = None
    return chosen
