"""Reads and writes Hugging Face's GPT-NeoX, Pythia's own format.

The tensors are the same except for their names and the fused projection: Hugging Face interleaves q, k, v per
head (`[H, 3, D]` rows), LitGPT stacks them (`[3, H, D]`). LitGPT's converters handle both.
"""

from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object
from lingpt.common.run_folder import MODEL_CONFIG, WEIGHTS
from lingpt.models.config import Config
from lingpt.models.gpt import GPT
from lingpt.models.model_folder import read_pickled_tensors, read_tensors, write_model_folder

# Names of weight files in order of preference; each may be in shards, with `<name>.index.json` next to them.
_WEIGHTS = {WEIGHTS: lambda path: read_tensors(path)[0], "pytorch_model.bin": read_pickled_tensors}

# Buffers of older releases of `transformers`: constants, not weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


def read_weights(folder: Path, config: Config) -> dict[str, torch.Tensor]:
    """The tensors of a GPT-NeoX folder under LitGPT's keys."""
    import lingpt.models.lightning_import  # noqa: F401 (before LitGPT imports Lightning)

    # isort: split
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_gpt_neox

    tensors: dict[str, torch.Tensor] = {}
    try:
        copy_weights_gpt_neox(config, tensors, read_hf_weights(folder))
    except KeyError as error:
        raise UserError(f"{folder} has a tensor {error} that is none of GPT-NeoX's") from error
    except RuntimeError as error:  # wrong shape of a tensor that is split
        raise UserError(f"{folder / MODEL_CONFIG} does not fit the weights beside it: {error}") from error
    return tensors


def read_hf_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder that transformers wrote, in whichever files."""
    for name, read in _WEIGHTS.items():
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = _shards(index)
        elif (folder / name).is_file():
            shards = [name]
        else:
            continue
        tensors = {key: tensor for shard in shards for key, tensor in read(folder / shard).items()}
        return {key: tensor for key, tensor in tensors.items() if not key.endswith(_CONSTANTS)}
    raise UserError(f"no weights in {folder}: looked for {' and '.join(_WEIGHTS)}")


def _shards(index: Path) -> list[str]:
    """The files that an index of weights names, all in its folder."""
    names = read_json_object(index).get("weight_map")
    shards = list(names.values()) if isinstance(names, dict) else []
    if not shards or not all(isinstance(name, str) and Path(name).name == name for name in shards):
        raise UserError(f"{index} names no files of its folder: fetch it again")
    return sorted(set(shards))


def sizes_of_hf(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The name, sizes and attention of a `Config` by the keys that all of transformers' decoders share.
    KeyError for one that is missing."""
    return {
        "name": Path(hf.get("_name_or_path") or folder.resolve()).name,
        "block_size": hf["max_position_embeddings"],
        "vocab_size": hf["vocab_size"],
        "padded_vocab_size": hf["vocab_size"],
        "n_layer": hf["num_hidden_layers"],
        "n_embd": hf["hidden_size"],
        "n_head": hf["num_attention_heads"],
        "intermediate_size": hf["intermediate_size"],
        "attention": "softmax",
    }


def hf_sizes(config: Config) -> dict[str, Any]:
    """The keys of `sizes_of_hf` for a model of this configuration."""
    return {
        "max_position_embeddings": config.block_size,
        "vocab_size": config.padded_vocab_size,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.intermediate_size,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_of_hf(hf: dict[str, Any], folder: Path) -> Config:
    """The configuration, with softmax attention, of `folder`'s config.json. UserError for other variants."""
    rope = hf.get("rope_parameters")  # in transformers 5; earlier releases have separate keys
    rope = rope if isinstance(rope, dict) else {}
    scaled = hf.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    unbiased = not hf.get("attention_bias", True)  # of attention only: the MLP has biases all the same
    if hf.get("hidden_act", "gelu") != "gelu" or hf.get("tie_word_embeddings") or scaled or unbiased:
        raise UserError(
            f"{folder} is a variant of GPT-NeoX that is not supported (activation, tied, scaled or without "
            "biases)"
        )
    try:
        return Config(
            **sizes_of_hf(hf, folder),
            norm_eps=hf.get("layer_norm_eps", 1e-5),
            rotary_percentage=rope.get("partial_rotary_factor", hf.get("rotary_pct", 0.25)),
            rope_base=rope.get("rope_theta", hf.get("rotary_emb_base", 10000)),
            parallel_residual=hf.get("use_parallel_residual", True),
        )
    except KeyError as error:
        raise UserError(f"{folder / MODEL_CONFIG} lacks {error}") from error
    except UserError as error:
        raise UserError(f"{folder / MODEL_CONFIG} has a value that is none of GPT-NeoX's: {error}") from error


def is_gpt_neox(config: Config) -> bool:
    """Whether transformers' GPT-NeoX, with plain softmax, computes a model of this shape."""
    names = config.norm_class_name, config.mlp_class_name
    more = config.norm_qk or config.tie_embeddings or config.rope_adjustments is not None
    usual = config.qkv_sizes == (config.n_embd,) * 3
    return names == ("LayerNorm", "GptNeoxMLP") and config.bias and usual and not more


def write_gpt_neox(model: GPT, folder: Path, about: dict[str, Any]) -> None:
    """Writes the folder of a model that GPT-NeoX computes, with `about` in its config.json."""
    import lingpt.models.lightning_import  # noqa: F401 (before LitGPT imports Lightning)

    # isort: split
    from litgpt.scripts.convert_lit_checkpoint import copy_weights_gpt_neox

    config, tensors = model.config, dict[str, torch.Tensor]()
    copy_weights_gpt_neox(config, tensors, model.state_dict())
    values = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        **hf_sizes(config),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "hidden_act": "gelu",
        # In both forms: transformers 5 reads the first one if it is alone, but `rotary_pct` overrides it.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.rope_base),
            "partial_rotary_factor": config.rotary_percentage,
        },
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": config.rope_base,
    }
    write_model_folder(folder, values | about, tensors, metadata={})
