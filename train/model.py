"""The model that a run trains: new, from other weights, or from the checkpoint that the run goes on from; and
the kernels that it trains with."""

from pathlib import Path

import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import check_undamaged
from lingpt.kernels.gla_tuning import Tuning
from lingpt.models import ATTENTIONS, GPT, Config, load_model, load_weights
from lingpt.train.compilation import compile_blocks, compiles
from lingpt.train.config import Recipe
from lingpt.train.parallel import print_rank0
from lingpt.train.throughput import compute_dtype


def model_config(recipe: Recipe) -> Config:
    """The model's config, once the sequence is known to fit it."""
    config = recipe.model.config()
    if recipe.data.seq_len > config.block_size:
        raise UserError(
            f"data.seq_len {recipe.data.seq_len} is longer than the block size {config.block_size} of "
            f"{recipe.model.name}: lower it, or raise --model.block_size"
        )
    return config


def attention_kernels(config: Config, device: torch.device, precision: str) -> dict[str, str]:
    """`{"ours": "cuda", "softmax": "flash"}`: which kernel trains each of the model's attentions.

    precision: Fabric's name. UserError where the kernel that the recipe names cannot run on this device.
    """
    dtype = compute_dtype(precision)
    return {
        name: ATTENTIONS[name].kernel(config, device, dtype, **config.attention_options(name))
        for name in dict.fromkeys(config.attention_per_layer)
    }


def make_model(
    recipe: Recipe, config: Config, checkpoint: Path | None, device: torch.device, sharded: bool = False
) -> GPT:
    """The model on `device`, its blocks compiled where the recipe asks for that; the same on every rank.

    sharded: it will be, by `Parallel.wrap`; until then it is whole.
    """
    t = recipe.train
    if checkpoint:
        gpt = load_model(checkpoint, attention=recipe.model.attention, device=device)
    else:
        gpt = GPT.create(config, t.seed, device)
        if t.init_from:
            check_undamaged(Path(t.init_from))
            print_rank0(f"init_from: {load_weights(gpt, t.init_from)}")
    gpt.recompute_blocks = t.activation_checkpointing
    if compiles(recipe, device):
        compile_blocks(gpt, sharded)
    return gpt


def begin_tuning(recipe: Recipe, config: Config, precision: str, device: torch.device) -> list[Tuning]:
    """What is tuned for a GPU before the first step, begun: for each mechanism of the model that has such."""
    if device.type != "cuda":
        return []
    with torch.device("meta"):
        mechanisms = {type(block.attn): block.attn for block in GPT(config).blocks}.values()
    size = recipe.train.micro_batch_size, recipe.data.seq_len, compute_dtype(precision)
    begun = [attention.tuning(*size, device) for attention in mechanisms]
    return [tuning for tuning in begun if tuning]
