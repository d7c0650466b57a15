"""torch.compile of the blocks and of the loss."""

from typing import Any

import torch

from lingpt.models import GPT
from lingpt.train.config import Recipe


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether blocks and loss are compiled by torch.compile."""
    return recipe.train.compile == "always" or (recipe.train.compile == "auto" and device.type == "cuda")


def compile_options() -> dict[str, Any]:
    """Options of torch.compile: sizes are static and, in deterministic mode, a graph always gives the same
    kernels.

    Otherwise Inductor chooses block sizes by timing them, in each process, and sums over other blocks round
    differently. The option is passed in the call, not set in Inductor's configuration: that may be per
    thread, and autograd's thread compiles the backward pass.
    """
    options: dict[str, Any] = {"dynamic": False}
    if torch.are_deterministic_algorithms_enabled():
        options["options"] = {"deterministic": True}
    return options


def compile_blocks(gpt: GPT, sharded: bool = False, **options: Any) -> None:
    """Compiles the blocks one by one, in place: one compilation serves all layers, and state-dict keys are
    unchanged.

    sharded: compile only `forward`, without the hooks in which FSDP2 gathers and reshards parameters.
    """
    options = compile_options() | options
    for block in gpt.blocks:
        if sharded:
            block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]
        else:
            block.compile(**options)
