"""The model that a run trains: new, from other weights, or from the checkpoint that the run resumes; and the
kernels that it trains with."""

from dataclasses import replace
from pathlib import Path

import torch

from lingpt.common.errors import UserError
from lingpt.data import Tokenizer, load_tokenizer, vocab_size
from lingpt.models import ATTENTIONS, GPT, MODELS, Config, load_model, load_parts, load_weights
from lingpt.train.compilation import compile_blocks, compiles
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
from lingpt.train.planning.throughput import compute_dtype


def config_of(recipe: Recipe) -> Config:
    """The model's config. The vocabulary of a model without a shipped name is the tokenizer's, if the recipe
    gives none."""
    model = recipe.model
    if model.name not in MODELS and model.vocab_size is None and model.padded_vocab_size is None:
        model = replace(model, vocab_size=vocab_size(recipe.data))  # type: ignore[call-arg]
    return model.config()


def model_config(recipe: Recipe) -> Config:
    """`config_of`; UserError if the sequence length does not fit it."""
    config = config_of(recipe)
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
    recipe: Recipe,
    config: Config,
    device: torch.device,
    resume_from: Path | None = None,
    init_from: Path | None = None,
    sharded: bool = False,
) -> GPT:
    """The model on `device`, with compiled blocks if the recipe asks for that; the same on every rank.

    resume_from: a checkpoint of this model. init_from: the folder of a model, whose weights a new one takes
    where they fit. sharded: the model stays on the meta device, to be sharded by `Parallel.wrap`;
    `fill_shards` then sets its weights.
    """
    if sharded:
        gpt = GPT.on_meta(config)
    elif resume_from:
        gpt = load_model(resume_from, attention=recipe.model.attention, device=device)
    else:
        gpt = GPT.create(config, recipe.train.seed, device)
        _init_from(gpt, init_from)
    gpt.recompute_blocks = recipe.train.activation_checkpointing
    gpt.inputs_on_host = recipe.train.offload_activations
    if compiles(recipe, device):
        compile_blocks(gpt, sharded)
    return gpt


def fill_shards(gpt: GPT, seed: int, resume_from: Path | None, init_from: Path | None) -> None:
    """Sets the weights of a sharded model to those of `make_model`; every process only its part."""
    if resume_from:
        load_parts(gpt, resume_from)
    else:
        gpt.init_weights(seed)
        _init_from(gpt, init_from)


def _init_from(gpt: GPT, folder: Path | None) -> None:
    if folder:
        print_rank0(f"init_from: {load_weights(gpt, folder)}")


def other_tokens_message(init_from: Path, tokenizer: Tokenizer) -> str | None:
    """A line if the tokenizer of the `init_from` weights differs from this run's; None if it is the same or
    there is none beside them."""
    try:
        theirs = load_tokenizer(init_from)
    except UserError:
        return None
    if not (differing := tokenizer.count_differing_ids(theirs)):
        return None
    return (
        f"init_from: {differing:,} of this run's {tokenizer.vocab_size:,} token ids are other tokens in the "
        f"tokenizer of {theirs.name}, whose embeddings they start with: --data.tokenizer {theirs.name} fits"
    )
