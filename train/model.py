"""The model that a run trains: new, from other weights, or from the checkpoint that the run goes on from; and
the kernels that it trains with."""

from pathlib import Path

import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import find_model_folder
from lingpt.data import Tokenizer, load_tokenizer
from lingpt.kernels.gla_tuning import Autotuning
from lingpt.models import ATTENTIONS, GPT, Config, load_model, load_parts, load_weights
from lingpt.train.compilation import compile_blocks, compiles
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
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
        name: ATTENTIONS[name].kernel_name(config, device, dtype, **config.attention_options(name))
        for name in dict.fromkeys(config.attention_per_layer)
    }


def make_model(
    recipe: Recipe, config: Config, checkpoint: Path | None, device: torch.device, sharded: bool = False
) -> GPT:
    """The model on `device`, its blocks compiled where the recipe asks for that; the same on every rank.

    sharded: it will be, by `Parallel.wrap`; until then it is on the meta device, and `fill_shards` gives it
    its weights afterwards.
    """
    if sharded:
        gpt = GPT.on_meta(config)
    elif checkpoint:
        gpt = load_model(checkpoint, attention=recipe.model.attention, device=device)
    else:
        gpt = GPT.create(config, recipe.train.seed, device)
        _init_from(gpt, recipe)
    gpt.recompute_blocks = recipe.train.activation_checkpointing
    if compiles(recipe, device):
        compile_blocks(gpt, sharded)
    return gpt


def fill_shards(gpt: GPT, recipe: Recipe, checkpoint: Path | None) -> None:
    """Gives a sharded model the weights that `make_model` would: every process its part alone."""
    gpt.reset_parameters()
    if checkpoint:
        load_parts(gpt, checkpoint)
    else:
        gpt.init_weights(recipe.train.seed)
        _init_from(gpt, recipe)


def _init_from(gpt: GPT, recipe: Recipe) -> None:
    """Starts from other weights where the recipe names some."""
    if recipe.train.init_from:
        folder = find_model_folder(Path(recipe.train.init_from))
        print_rank0(f"init_from: {load_weights(gpt, folder)}")


def other_tokens_message(recipe: Recipe, tokenizer: Tokenizer) -> str | None:
    """The line on weights, of `init_from`, whose embeddings are those of other tokens; None for nothing to
    say, as where no tokenizer lies beside them."""
    if recipe.train.init_from is None:
        return None
    try:
        theirs = load_tokenizer(find_model_folder(Path(recipe.train.init_from)))
    except UserError:
        return None
    if not (other := tokenizer.count_other_tokens(theirs)):
        return None
    return (
        f"init_from: {other:,} of this run's {tokenizer.vocab_size:,} tokens are others in the tokenizer of "
        f"{theirs.name}: the embeddings taken are not theirs (--data.tokenizer {theirs.name} keeps them)"
    )


def begin_autotuning(
    recipe: Recipe, config: Config, precision: str, device: torch.device
) -> list[Autotuning]:
    """What is tuned for a GPU before the first step, begun: for each mechanism of the model that has such."""
    if device.type != "cuda":
        return []
    mechanisms = {type(block.attn): block.attn for block in GPT.on_meta(config).blocks}.values()
    size = recipe.train.micro_batch_size, recipe.data.seq_len, compute_dtype(precision)
    begun = [attention.begin_autotuning(*size, device) for attention in mechanisms]
    return [tuning for tuning in begun if tuning]
