"""Causal attention layers for any model: `[B, N, C]` → the same, with rotary embeddings of their own.

    from lingpt.layers import GatedLinearAttention
    layer = GatedLinearAttention(hidden_size=512, num_heads=8, num_kv_heads=2)
    y = layer(x)
    y = layer(x, cu_seqlens=cu_seqlens)  # sequences packed into the rows
    state = layer.new_state(batch_size)
    y = layer(x, state=state)  # x continues what the state has seen

They compute what `lingpt.models` does, bit for bit: `attn` is a model's attention, with its keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.kernels.checks import check_cu_seqlens
from lingpt.models import ATTENTIONS, Config, ModelArgs
from lingpt.models.attention.base import ComputedBuffers
from lingpt.models.gpt import rope_tables


@dataclass
class LayerState:
    """What a layer has seen: its attention's state, and the number of tokens."""

    value: Any
    batch_size: int
    attention: str
    position: int = 0


def check_standalone(config: Config) -> None:
    """Raises UserError for an attention that cannot stand alone, outside of a whole model."""
    if config.shared_values_width is not None:
        raise UserError("value_residual mixes in values that a whole model shares: leave it out of a layer")


class AttentionLayer(ComputedBuffers):
    """The attention of one layer of a model with this configuration.

    Its rotary tables grow with the sequences. Linear layers start from PyTorch's default weights.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Config, layer_idx: int = 0) -> None:
        super().__init__()
        check_standalone(config)
        name = self.attention_name = config.attention_per_layer[layer_idx]
        self.config = config
        self.attn = ATTENTIONS[name](config, layer_idx, **config.attention_options(name))
        for table in ("cos", "sin"):
            self.register_buffer(table, torch.empty(0), persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device, length: int | None = None) -> None:
        """Recomputes the rotary tables, of `length` tokens, and the attention's buffers."""
        config = replace(self.config, block_size=length or self.config.block_size)
        with torch.inference_mode(False):  # training may come after
            self.cos, self.sin = rope_tables(config, device)
            self.attn.reset_buffers(device)

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        state: LayerState | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: `[B, N, C]`, C = hidden_size.
            cu_seqlens: int32 or int64 `[sequences + 1]`, the borders of sequences packed into the rows,
                counted over all B·N tokens, row after row, from 0 to B·N. A row begins with a sequence of its
                own.
            state: of `new_state`; x continues the tokens that it has seen, and it is updated.

        Returns `[B, N, C]`. Raises UserError for another shape, for a state of another layer, and for both a
        state and cu_seqlens.
        """
        C, start = self.config.n_embd, 0
        if x.ndim != 3 or x.shape[2] != C:
            raise UserError(f"the layer takes [B, N, {C}]; got {list(x.shape)}")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x)
        if state is not None:
            if cu_seqlens is not None:
                raise UserError("cu_seqlens goes without a state: call a sequence by itself to continue it")
            if len(x) != state.batch_size:
                raise UserError(f"{len(x)} rows for a state of {state.batch_size}: make one by new_state")
            if state.attention != self.attention_name:
                raise UserError(
                    f"a state of {state.attention} in a layer of {self.attention_name}: make one by new_state"
                )
            start = state.position
        end = start + x.shape[1]
        if end > len(self.cos) or self.cos.device != x.device:
            self.reset_buffers(x.device, max(len(self.cos), 1 << (end - 1).bit_length()))
        value = None if state is None else state.value
        y = self.attn(x, self.cos[start:end], self.sin[start:end], value, cu_seqlens)
        if state is not None:
            state.position = end
        return y

    def new_state(self, batch_size: int, max_seq_len: int = 2048) -> LayerState:
        """A state before the first token, on the weights' device. Of a linear attention its size is constant,
        and max_seq_len is not read."""
        weight = next(self.attn.parameters())
        value = self.attn.new_state(batch_size, max_seq_len, weight.device, weight.dtype)
        return LayerState(value, batch_size, self.attention_name)


class LinearAttention(AttentionLayer):
    """Linear attention with the kernel `1 + b·x` on unit q and k and a normaliser (models/attention/ours.py).

    Args:
        hidden_size: width of the input and the output.
        num_heads, num_kv_heads, head_dim: heads of queries; of keys and values, by default as many; and their
            width, by default hidden_size / num_heads.
        bias: of the projections.
        rope_base, rotary_percentage: rotary embeddings, of a part of each head's dimensions.
        norm_qk: RMS norms with a gain on q and k.
        options: the attention's, such as `learnable_b`, `output_gate`, `short_conv`.

    Raises UserError for an unknown option and for numbers that make no layer.
    """

    attention = "ours"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        rope_base: float = 10000.0,
        rotary_percentage: float = 1.0,
        norm_qk: bool = False,
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {"n_embd": hidden_size, "n_head": num_heads, "n_query_groups": num_kv_heads}
        sizes |= {"head_size": head_dim, "rope_base": rope_base, "rotary_percentage": rotary_percentage}
        super().__init__(_config(self.attention, sizes | {"bias": bias, "norm_qk": norm_qk}, options))


class GatedLinearAttention(LinearAttention):
    """Linear attention with a decay per token and head, an output gate and a short convolution: the linear
    layer of `hybrid` (models/attention/ours_gated.py). The arguments are `LinearAttention`'s."""

    attention = "ours-gated"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        output_gate: bool = True,
        short_conv: bool = True,
        **options: Any,
    ) -> None:
        gates = {"output_gate": output_gate, "short_conv": short_conv}
        if output_gate:
            options.setdefault("gate_activation", "sigmoid")
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **gates, **options)


class GLA(AttentionLayer):
    """Gated linear attention (arXiv 2312.06635; models/attention/gla.py): no rotary embeddings.

    Args:
        hidden_size: width of the input and the output.
        num_heads: each with hidden_size / num_heads dimensions of v, and expand_k times as many of q and k.
        bias: of the projections.
        options: `short_conv`, `gate_activation`, `gate_norm`, `gla_temperature`, `gla_unit_qk`, `input_gate`.
    """

    attention = "gla"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 0.5,
        bias: bool = False,
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {"n_embd": hidden_size, "n_head": num_heads, "bias": bias}
        sizes |= {"gla_n_head": num_heads, "gla_expand_k": expand_k}
        sizes |= {"head_size": 2, "rotary_percentage": 1.0}  # not read: the least tables of RoPE
        super().__init__(_config(self.attention, sizes, options))


def _config(attention: str, sizes: dict[str, Any], options: dict[str, Any]) -> Config:
    """Of one layer. sizes: its fields; options: those that the caller has named, checked."""
    known = ATTENTIONS[attention].options().keys() - sizes.keys()
    for name in options:
        if name not in known:
            raise UserError(f"{name} is not an option of the layer, which has {', '.join(sorted(known))}")
    return ModelArgs("layer", attention, n_layer=1, **sizes, **options).config()


__all__ = ["GLA", "AttentionLayer", "GatedLinearAttention", "LayerState", "LinearAttention"]
