"""torch.compile of the blocks and of the loss."""

from typing import Any

import torch

from lingpt.models import GPT
from lingpt.train.config import Recipe


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether blocks and loss go through torch.compile."""
    return recipe.train.compile == "always" or (recipe.train.compile == "auto" and device.type == "cuda")


def compile_options() -> dict[str, Any]:
    """What torch.compile is given here: sizes are fixed, and the same graph always gives the same kernels.

    The latter where PyTorch is asked for deterministic algorithms. Otherwise Inductor chooses block sizes by
    timing them, in each process, and sums over other blocks round differently. It is said with the call, not
    in Inductor's configuration: that may be a thread's own, and autograd's thread compiles the backward pass.
    """
    options: dict[str, Any] = {"dynamic": False}
    if torch.are_deterministic_algorithms_enabled():
        options["options"] = {"deterministic": True}
    return options


def compile_blocks(gpt: GPT, sharded: bool = False, **options: Any) -> None:
    """torch.compile, block by block and in place: one compilation serves all layers, and no key changes.

    sharded: `forward` alone, without the hooks in which FSDP2 gathers and reshards parameters.
    """
    options = compile_options() | options
    for block in gpt.blocks:
        if sharded:
            block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]
        else:
            block.compile(**options)
