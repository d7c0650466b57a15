"""`replace_attention`: linear attention in the place of softmax in transformers' GPT-NeoX, Llama and Qwen.

The model becomes one of a class of our own, a subclass that `import lingpt.hf` registers, and so does its
configuration (`lingpt_llama`, …): transformers' Auto classes never load it as the softmax model that it was.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lingpt.common.errors import UserError
from lingpt.hf.model import borders, packed_borders
from lingpt.layers import AttentionLayer, check_standalone
from lingpt.models import Config, ModelArgs, gpt_neox, llama
from lingpt.models.architecture import Architecture
from lingpt.models.attention.hybrid import SOFTMAX

PREFIX = "lingpt_"  # of the model types of models with replaced attention
_NEOX = "gpt_neox"


class ReplacedAttention(AttentionLayer):
    """An `AttentionLayer` with the arguments and results of attention in transformers."""

    model_config: Any  # of the model that it is in

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[B, N, C]` → the same. Padding on the left and packed sequences (position ids that begin again at
        0) are kept apart. ValueError with a cache, by any of its names in transformers."""
        if any(given is not None for given in (past_key_values, layer_past, cache)):
            raise ValueError("a model with replaced attention keeps no cache: give use_cache=False")
        cu_seqlens, (B, N, _) = None, hidden_states.shape
        if attention_mask is not None:
            cu_seqlens = borders(_is_read(attention_mask).expand(B, N), position_ids)
        elif "flash" in self.model_config._attn_implementation:  # of others, no mask is no packing either
            cu_seqlens = packed_borders(position_ids, None, None, B, N)
        return super().forward(hidden_states, cu_seqlens), None


def _is_read(mask: torch.Tensor) -> torch.Tensor:
    """Which tokens are no padding, `[B or 1, N]`. mask: `[B, 1, N, N]`, boolean or added to the scores, or
    `[B, N]`, boolean. ValueError for flex_attention's."""
    if not isinstance(mask, torch.Tensor):
        kind = type(mask).__name__
        raise ValueError(f"replaced attention reads no {kind}: give attn_implementation='sdpa'")
    # A token sees itself in any window.
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1) if mask.ndim == 4 else mask
    return own if own.dtype == torch.bool else own == 0


def replace_attention(
    model: PreTrainedModel, attention: str = "ours-gated", layers: Sequence[int] | None = None
) -> PreTrainedModel:
    """Replaces softmax attention in a model's layers, in place; returns the model.

    The new layers start with the weights of the old projections; their own parameters start as in a new
    model. They keep no cache, so `generate` computes each token from the whole text.

    Args:
        model: a GPT-NeoX, Llama, Qwen2 or Qwen3 for causal language modelling, of any size.
        attention: an attention of LinGPT with its options, as in a recipe: `ours-gated+output_gate`.
        layers: the numbers of the layers; by default all that `attention` does not make softmax (`hybrid`).

    Raises UserError for another kind of model, an unknown attention, or layers that there are not.
    """
    if type(model) in {ours for _, ours in CLASSES.values()}:
        raise UserError("the model's attention has been replaced already: begin with the original model")
    if type(model) not in CLASSES:
        known = ", ".join(stock.__name__ for stock in STOCK)
        raise UserError(f"cannot replace the attention of a {type(model).__name__}: give a model of {known}")
    config = _config(model.config, attention)
    check_standalone(config)
    linear = [i for i, name in enumerate(config.attention_per_layer) if name != SOFTMAX]
    chosen = linear if layers is None else sorted({int(layer) for layer in layers})
    if not chosen or not set(chosen) <= set(range(config.n_layer)):
        raise UserError(
            f"layers={list(chosen)} of attention {attention!r}: give some of 0 to {config.n_layer - 1}"
        )
    if not set(chosen) <= set(linear):
        raise UserError(
            f"attention {attention!r} leaves some of the layers {chosen} softmax: give a linear one"
        )
    _give_own_configuration(model)
    model.config.__class__, model.__class__ = CLASSES[type(model)]
    model.config.lingpt_attention, model.config.lingpt_layers = attention, chosen
    _replace(model)
    return model


def _give_own_configuration(model: PreTrainedModel) -> None:
    """Models that were made from one configuration share it."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _config(hf: Any, attention: str) -> Config:
    """The configuration of a model in transformers, with another attention."""
    values = hf.to_dict() | {"model_type": hf.model_type.removeprefix(PREFIX), "use_sliding_window": False}
    read = gpt_neox if values["model_type"] == _NEOX else llama
    own = read.config_of_hf(values, Path(hf._name_or_path or "model"))
    sizes = {field.name: getattr(own, field.name) for field in fields(Architecture)}
    return ModelArgs(attention=attention, **sizes).config()


@torch.no_grad()
def _replace(model: PreTrainedModel) -> None:
    """Replaces the layers that the model's configuration names."""
    config, name = _config(model.config, model.config.lingpt_attention), "self_attn"
    if model.config.model_type == PREFIX + _NEOX:
        name = "attention"
    config = replace(config, block_size=min(config.block_size, 8192))  # the tables of RoPE grow
    for layer_idx in model.config.lingpt_layers:
        block = model.base_model.layers[layer_idx]
        old = getattr(block, name)
        like = next(old.parameters())
        with like.device:
            layer = ReplacedAttention(config, layer_idx).to(like.dtype)
        layer.model_config = model.config
        if not like.is_meta:
            layer.attn.load_state_dict(_projections(old, layer.attn, config), strict=False)
        setattr(block, name, layer.train(model.training))
    model.config.use_cache = False
    if model.generation_config is not None:
        model.generation_config.use_cache = False


def _projections(old: nn.Module, new: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """The weights of the old attention that the new one has a place for, under its names."""
    weights, found = old.state_dict(), dict[str, torch.Tensor]()
    names = {"dense": "proj", "o_proj": "proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    for kind in ("weight", "bias"):
        found |= {
            f"{ours}.{kind}": x
            for hf, ours in names.items()
            if (x := weights.get(f"{hf}.{kind}")) is not None
        }
        if f"query_key_value.{kind}" in weights:
            rows = weights[f"query_key_value.{kind}"].unflatten(0, (config.n_head, 3, config.head_size))
            found[f"qkv.{kind}"] = rows.transpose(0, 1).flatten(0, 2)
        elif f"q_proj.{kind}" in weights:
            found[f"qkv.{kind}"] = torch.cat([weights[f"{part}_proj.{kind}"] for part in "qkv"])
    own = new.state_dict()
    return {key: x for key, x in found.items() if key in own and own[key].shape == x.shape}


def _register(stock_config: Any, stock_model: Any) -> tuple[type, type]:
    """The classes of a stock model with replaced attention."""

    class Configuration(stock_config):
        model_type = PREFIX + stock_config.model_type

    class Model(stock_model):
        config_class = Configuration

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _replace(self)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            """Also computes the constants, which are not in the file."""
            found = super().from_pretrained(*args, **kwargs)
            for module in (found[0] if isinstance(found, tuple) else found).modules():
                if isinstance(module, AttentionLayer):
                    module.reset_buffers(next(module.parameters()).device)
            return found

    for ours, stock in ((Configuration, stock_config), (Model, stock_model)):
        ours.__name__ = ours.__qualname__ = f"LinGPT{stock.__name__}"
        globals()[ours.__name__] = ours  # where pickle looks for it
    AutoConfig.register(Configuration.model_type, Configuration, exist_ok=True)
    AutoModelForCausalLM.register(Configuration, Model, exist_ok=True)
    return Configuration, Model


STOCK = {
    GPTNeoXForCausalLM: GPTNeoXConfig,
    LlamaForCausalLM: LlamaConfig,
    Qwen2ForCausalLM: Qwen2Config,
    Qwen3ForCausalLM: Qwen3Config,
}
CLASSES = {model: _register(config, model) for model, config in STOCK.items()}
