"""Reads and writes Hugging Face's GPT-NeoX, Pythia's own format.

The tensors are the same except for their names and the fused projection: Hugging Face interleaves q, k, v per
head (`[H, 3, D]` rows), LitGPT stacks them (`[3, H, D]`). LitGPT's converters handle both.
"""

import warnings
from pathlib import Path
from typing import Any

import tokenizers
import torch

from lingpt.common.errors import UserError, first_line
from lingpt.common.files import read_errors, read_json_object, write_errors, write_json, write_text
from lingpt.common.run_folder import MODEL_CONFIG, TOKENIZER, WEIGHTS
from lingpt.models.attention import attention_form
from lingpt.models.config import Config
from lingpt.models.gpt import GPT
from lingpt.models.model_folder import read_pickled_tensors, read_tensors, write_model_folder

END_OF_TEXT = "<|endoftext|>"

# Names of weight files in order of preference; each may be in shards, with `<name>.index.json` next to them.
_WEIGHTS = {WEIGHTS: lambda path: read_tensors(path)[0], "pytorch_model.bin": read_pickled_tensors}

# Buffers of older releases of `transformers`: constants, not weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


def is_gpt_neox_folder(folder: Path) -> bool:
    """Whether `folder` is one of `transformers`' GPT-NeoX."""
    config = folder / MODEL_CONFIG
    return config.is_file() and read_json_object(config).get("model_type") == "gpt_neox"


def export_hf(model: GPT, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Writes `config.json` and `model.safetensors` that `transformers` loads as `GPTNeoXForCausalLM`.

    tokenizer: a `tokenizer.json`, or a folder that holds one, such as the model's checkpoint; with it
    `AutoTokenizer` loads the same tokenizer from `folder`. Without it, `AutoTokenizer` would silently give an
    empty tokenizer, so there is a warning.

    Raises UserError for a model that a stock GPT-NeoX does not compute (another attention would load there
    with the same keys, and run as softmax attention), and for a file that is not a tokenizer.
    """
    from litgpt.scripts.convert_lit_checkpoint import copy_weights_gpt_neox

    import lingpt.models.lightning_import  # noqa: F401

    for name, block in zip(model.config.attention_per_layer, model.blocks, strict=True):
        if not block.attn.hf_exportable:
            form = attention_form(name, model.config.to_dict())
            raise UserError(
                f"a model with attention {form!r} cannot be exported: GPT-NeoX would run it as plain softmax"
            )
    if not model.config.bias:
        raise UserError("a model with bias=False cannot be exported: GPT-NeoX would run it with bias=True")
    text, eos_id = _read_tokenizer(Path(tokenizer)) if tokenizer else ("", 0)
    if not text:
        warnings.warn(
            f"{folder} gets no tokenizer, and AutoTokenizer makes an empty one of it: give export_hf one",
            stacklevel=2,
        )
    tensors: dict[str, torch.Tensor] = {}
    copy_weights_gpt_neox(model.config, tensors, model.state_dict())
    write_model_folder(Path(folder), _to_hf_config(model, eos_id), tensors, metadata={})
    if text:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.block_size}
        about |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        with write_errors(Path(folder)):
            write_text(Path(folder) / TOKENIZER, text)
            write_json(Path(folder) / "tokenizer_config.json", about)


def _read_tokenizer(path: Path) -> tuple[str, int]:
    """A tokenizer.json's content, and the id of the token that separates documents."""
    path = path / TOKENIZER if path.is_dir() else path
    with read_errors(path):
        text = path.read_text(encoding="utf-8")
    try:
        eos_id = tokenizers.Tokenizer.from_str(text).token_to_id(END_OF_TEXT)
    except Exception as error:  # `tokenizers` raises a bare Exception for what it cannot parse
        raise UserError(f"{path} is not a tokenizer.json: {first_line(error)}") from error
    if eos_id is None:
        raise UserError(f"{path} has no token {END_OF_TEXT}: give the model's own tokenizer.json")
    return text, eos_id


def read_gpt_neox(folder: Path) -> tuple[Config, dict[str, torch.Tensor]]:
    """The configuration of a GPT-NeoX folder, and its tensors under LitGPT's keys."""
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_gpt_neox

    import lingpt.models.lightning_import  # noqa: F401

    config = _from_hf_config(read_json_object(folder / MODEL_CONFIG), folder)
    tensors: dict[str, torch.Tensor] = {}
    try:
        copy_weights_gpt_neox(config, tensors, _read_weights(folder))
    except KeyError as error:
        raise UserError(f"{folder} has a tensor {error} that is none of GPT-NeoX's") from error
    except RuntimeError as error:  # wrong shape of a tensor that is split
        raise UserError(f"{folder / MODEL_CONFIG} does not fit the weights beside it: {error}") from error
    return config, tensors


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
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


def _from_hf_config(hf: dict[str, Any], folder: Path) -> Config:
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
            name=Path(hf.get("_name_or_path") or folder.resolve()).name,
            block_size=hf["max_position_embeddings"],
            vocab_size=hf["vocab_size"],
            padded_vocab_size=hf["vocab_size"],
            n_layer=hf["num_hidden_layers"],
            n_embd=hf["hidden_size"],
            n_head=hf["num_attention_heads"],
            intermediate_size=hf["intermediate_size"],
            norm_eps=hf.get("layer_norm_eps", 1e-5),
            rotary_percentage=rope.get("partial_rotary_factor", hf.get("rotary_pct", 0.25)),
            rope_base=rope.get("rope_theta", hf.get("rotary_emb_base", 10000)),
            parallel_residual=hf.get("use_parallel_residual", True),
            attention="softmax",
        )
    except KeyError as error:
        raise UserError(f"{folder / MODEL_CONFIG} lacks {error}") from error
    except UserError as error:
        raise UserError(f"{folder / MODEL_CONFIG} has a value that is none of GPT-NeoX's: {error}") from error


def _to_hf_config(model: GPT, eos_id: int) -> dict[str, Any]:
    config = model.config
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "dtype": str(model.lm_head.weight.dtype).removeprefix("torch."),
        "max_position_embeddings": config.block_size,
        "vocab_size": config.padded_vocab_size,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        # In both forms: transformers 5 reads the first one if it is alone, but `rotary_pct` overrides it.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.rope_base),
            "partial_rotary_factor": config.rotary_percentage,
        },
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": config.rope_base,
    }
