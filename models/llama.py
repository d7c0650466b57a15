"""Reads and writes Hugging Face's Llama (also SmolLM), Qwen2 and Qwen3.

Their tensors are ours under other names, except for q, k and v, which `qkv` stacks.
"""

from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.run_folder import MODEL_CONFIG
from lingpt.models.config import Config
from lingpt.models.gpt import GPT
from lingpt.models.gpt_neox import hf_sizes, read_hf_weights, sizes_of_hf
from lingpt.models.model_folder import write_model_folder

KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
_ROPE |= {"original_max_seq_len": "original_max_position_embeddings"}
# Parts of names: ours, theirs.
_NAMES = {
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm",
    "transformer.h": "model.layers", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attn": "self_attn",
    "mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
    "self_attn.proj": "self_attn.o_proj",
}  # fmt: skip
_PARTS = ("q_proj", "k_proj", "v_proj")


def read_weights(folder: Path, config: Config) -> dict[str, torch.Tensor]:
    """The tensors of such a folder under our keys."""
    tensors = read_hf_weights(folder)
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    for layer in range(config.n_layer):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{part}.{kind}" for part in _PARTS]
            if all(name in tensors for name in names):
                tensors[names[0].replace("q_proj", "qkv")] = torch.cat([tensors.pop(name) for name in names])
    for ours, theirs in reversed(_NAMES.items()):
        tensors = {name.replace(f"{theirs}.", f"{ours}."): tensor for name, tensor in tensors.items()}
    return tensors


def config_of_hf(hf: dict[str, Any], folder: Path) -> Config:
    """The configuration, with softmax attention, of `folder`'s config.json. UserError for other variants."""
    kind, rope = hf["model_type"], hf.get("rope_parameters")  # in transformers 5; separate keys before
    rope = rope if isinstance(rope, dict) else hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    biases = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    for unsupported, what in (
        (hf.get("hidden_act", "silu") != "silu", f"the activation {hf.get('hidden_act')}"),
        (rope_type not in ("default", "llama3"), f"RoPE of type {rope_type}"),
        (rope.get("partial_rotary_factor", 1.0) != 1, "RoPE of a part of its dimensions"),
        (biases not in ((False, False), (kind == "llama",) * 2), "biases in a part of its layers"),
        (hf.get("use_sliding_window"), "a sliding window"),
    ):
        if unsupported:
            raise UserError(f"{folder} is a variant of {kind} that is not supported: it has {what}")
    heads: dict[str, Any] = {"n_query_groups": hf.get("num_key_value_heads"), "head_size": hf.get("head_dim")}
    try:
        return Config(
            **sizes_of_hf(hf, folder),
            **heads,
            norm_class_name="RMSNorm",
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            norm_qk=kind == "qwen3",
            mlp_class_name="LLaMAMLP",
            parallel_residual=False,
            bias=all(biases),
            attn_bias=kind == "qwen2",
            tie_embeddings=hf.get("tie_word_embeddings", False),
            rotary_percentage=1.0,
            rope_base=rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
            rope_adjustments={ours: rope[theirs] for ours, theirs in _ROPE.items()}
            if rope_type == "llama3"
            else None,
        )
    except KeyError as error:
        raise UserError(f"{folder / MODEL_CONFIG} lacks {error}") from error
    except UserError as error:
        raise UserError(f"{folder / MODEL_CONFIG} has a value that is none of {kind}'s: {error}") from error


def llama_kind(config: Config) -> str | None:
    """The kind of model in transformers that computes this one with plain softmax; None if there is none."""
    names = config.norm_class_name, config.mlp_class_name
    if names != ("RMSNorm", "LLaMAMLP") or config.parallel_residual or config.rotary_percentage != 1:
        return None
    kinds = {(False, False): "llama", (True, False): "qwen3", (False, True): "qwen2"}
    kind = kinds.get((config.norm_qk, config.attn_bias and not config.bias))
    return kind if kind == "llama" or not config.bias else None


def write_llama(model: GPT, folder: Path, about: dict[str, Any]) -> None:
    """Writes the folder of a model that has a `llama_kind`, with `about` in its config.json."""
    config, kind, tensors = model.config, llama_kind(model.config), dict[str, torch.Tensor]()
    assert kind is not None
    for name, tensor in model.state_dict().items():
        split = ".qkv." in name
        parts = tensor.split(config.qkv_sizes) if split else [tensor]
        for ours, theirs in _NAMES.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        names = [name.replace(".qkv.", f".{part}.") for part in _PARTS] if split else [name]
        tensors |= dict(zip(names, parts, strict=True))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_base)}
    if config.rope_adjustments is not None:
        rope |= {theirs: config.rope_adjustments[ours] for ours, theirs in _ROPE.items()}
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
        rope["rope_type"] = "llama3"
    values = {
        "model_type": kind,
        "architectures": [KINDS[kind]],
        **hf_sizes(config),
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
    }
    if kind != "qwen2":
        values["attention_bias"] = config.bias
    if kind == "llama":
        values["mlp_bias"] = config.bias
    write_model_folder(folder, values | about, tensors, metadata={})
