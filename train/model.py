"""The model that a run trains: new, from other weights, or from the checkpoint that the run resumes; and the
kernels that it trains with."""

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
    """The model's config; UserError if the sequence length does not fit it."""
    config = recipe.model.config()
    if recipe.data.seq_len > config.block_size:
        raise UserError(
            f"data.seq_len {recipe.data.seq_len} is longer than the block size {config.block_size} of "
            f"{recipe.model.name}: lower it, or raise --model.block_size"
        )
    return config


def attention_kernels(config: Config, device: torch.device, precision: str) -> dict[str, str]:
    """The kernel that trains each of the model's attentions: `{"ours": "cuda", "softmax": "flash"}`.

    precision: Fabric's name. UserError if the kernel that the recipe names cannot run on this device.
    """
    dtype = compute_dtype(precision)
    return {
        name: ATTENTIONS[name].kernel_name(config, device, dtype, **config.attention_options(name))
        for name in dict.fromkeys(config.attention_per_layer)
    }


def make_model(
    recipe: Recipe, config: Config, checkpoint: Path | None, device: torch.device, sharded: bool = False
) -> GPT:
    """The model on `device`, with compiled blocks if the recipe asks for that; the same on every rank.

    sharded: the model stays on the meta device, to be sharded by `Parallel.wrap`; `fill_shards` then sets its
    weights.
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
    """Sets the weights of a sharded model to those of `make_model`; every process only its part."""
    gpt.reset_parameters()
    if checkpoint:
        load_parts(gpt, checkpoint)
    else:
        gpt.init_weights(recipe.train.seed)
        _init_from(gpt, recipe)


def _init_from(gpt: GPT, recipe: Recipe) -> None:
    """Initialises the model from other weights, if the recipe names some."""
    if recipe.train.init_from:
        folder = find_model_folder(Path(recipe.train.init_from))
        print_rank0(f"init_from: {load_weights(gpt, folder)}")


def other_tokens_message(recipe: Recipe, tokenizer: Tokenizer) -> str | None:
    """A line if the tokenizer of the `init_from` weights differs from this run's; None if it is the same or
    there is none beside them."""
    if recipe.train.init_from is None:
        return None
    try:
        theirs = load_tokenizer(find_model_folder(Path(recipe.train.init_from), verify=False))
    except UserError:
        return None
    if not (differing := tokenizer.count_differing_ids(theirs)):
        return None
    return (
        f"init_from: {differing:,} of this run's {tokenizer.vocab_size:,} token ids are other tokens in the "
        f"tokenizer of {theirs.name}, whose embeddings they start with: --data.tokenizer {theirs.name} fits"
    )


def begin_autotuning(
    recipe: Recipe, config: Config, precision: str, device: torch.device
) -> list[Autotuning]:
    """Starts the autotuning of a run's kernels, if it trains on a GPU."""
    if device.type != "cuda":
        return []
    size = recipe.train.micro_batch_size, recipe.data.seq_len, compute_dtype(precision)
    return GPT.on_meta(config).begin_autotuning(*size, device)
