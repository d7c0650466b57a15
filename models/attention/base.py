"""The interface of an attention mechanism. To add one: a file with a subclass of `Attention`, a registry
line, a test.

Shapes: B batch, N tokens, C = n_embd, H heads, D head dimension, R rotated dimensions.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import nn

from lingpt.common.options import Declared, Option, declared
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.short_conv import Mixture
from lingpt.models.architecture import Architecture
from lingpt.models.attention.short_conv import ConvState, apply_short_conv


class ComputedBuffers(nn.Module):
    """A module whose buffers, positions and decays, are computed and not saved.

    They stay in fp32 when the model is cast, as they need more than bf16's 8 bits, and are computed again
    when it leaves the meta device, by `to_empty`.
    """

    def reset_buffers(self, device: torch.device) -> None:
        """Computes the buffers again."""

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, constant in before.items():
            moved = self._buffers[name]
            if constant is None or moved is None:
                continue
            if constant.is_meta and not moved.is_meta:
                self.reset_buffers(moved.device)
                break
            if moved.dtype != constant.dtype:
                self._buffers[name] = constant.to(moved.device)
        return self


class Attention(ComputedBuffers, ABC):
    """One layer's causal attention; a subclass declares everything that depends on the mechanism.

    A subclass must define all abstract methods: a missing one fails when the model is built, not when a run
    generates its first sample of text.

    Its constructor takes the model's architecture, the layer's index and, keyword-only, the mechanism's
    options, each `name: Annotated[type, Option("help")] = default`. A recipe sets them as `model.<name>`. The
    linear layer that writes to the residual stream must be called `proj`: initialisation uses that name.

    `static_step` lets decoding replay a CUDA graph of one token's step (models/decoding_graph.py), if all
    layers have it; else decoding is eager. It promises for `forward` with one token and a state that has seen
    tokens:

    - it does not synchronise with the device, and runs the same kernels whatever the state has seen: none of
      its shapes and Python numbers grows. For keys and values this needs a `KVCache` (softmax.py)
    - the state is an object with attributes, whose tensors keep their number, shapes and dtypes, although
      they may be new tensors; its other attributes do not change
    """

    hf_exportable: bool = False  # can a stock model of transformers compute the same from its tensors?
    static_step: bool = False  # can a CUDA graph replay one token's step?
    constant_state: bool = False  # is a decoding state as large after any number of tokens?
    context_parallel: bool = False  # does `forward` without a state respect `context`?
    context: Context | None = None  # who has the other pieces of the sequences; None: they are whole

    @classmethod
    @functools.cache  # a study asks for them hundreds of times
    def options(cls) -> Mapping[str, Declared]:
        """The keyword-only parameters of the constructor, by name; a subclass inherits those of its bases.

        TypeError for one that is not declared as an option, or has no default.
        """
        found: dict[str, Declared] = {}
        for base in reversed(cls.__mro__):
            if "__init__" in vars(base):
                parameters = inspect.signature(vars(base)["__init__"], eval_str=True).parameters.values()
                options = [option for option in parameters if option.kind is option.KEYWORD_ONLY]
                found |= {o.name: declared(o.name, o.annotation, o.default) for o in options}
        return found

    @classmethod
    def check(cls, config: Architecture, *args: Any, **options: Any) -> None:
        """Raises UserError for a configuration and options that the mechanism cannot be built from."""

    @classmethod
    def v_width(cls, config: Architecture) -> int:
        """The width of v of all heads."""
        return config.qkv_sizes[2]

    @classmethod
    @abstractmethod
    def kernel_name(
        cls, config: Architecture, device: torch.device, dtype: torch.dtype, *args: Any, **options: Any
    ) -> str:
        """The name of the kernel that trains it on this device, for a run's record.

        dtype: that of the projections' output. UserError if the kernel that the options name cannot run. A
        mechanism without a choice may return `pytorch`.
        """

    @abstractmethod
    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: Any = None,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, N, C]` → the same, in the dtype of `proj`'s output. cos and sin `[N, R]` are those of x's
        positions. cu_seqlens: borders of packed documents, as in `GPT.hidden`; no token reads another's.
        values: those that the model's layers share, of `v_width`, for the option `value_residual`.

        With a decoding state, x continues the tokens it has seen, and the state is updated.
        Raises UserError for more tokens than the state has room for.
        """

    def trains(self, state: Any) -> bool:
        """Whether a call with this decoding state is one of training, in segments if there is a state, and
        not one of decoding, before which nobody need call `eval`."""
        return self.training and (state is None or torch.is_grad_enabled())

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs per token of the attention itself, causal half only; `GPT` counts linear layers."""

    @abstractmethod
    def saved_activations_per_token(self) -> int:
        """Activation elements per token that torch.compile saves for backward in this layer, from norm_1's
        output (not counted) to proj's input (counted). fp32 elements count twice under bf16."""

    def sent_elements(self, tokens: int, pieces: int) -> int:
        """With `context`: activation elements that each process sends to each other one per sequence in a
        forward pass, and as many in the backward pass, if there are so many pieces of `tokens` each. fp32
        elements count twice."""
        return 0

    @abstractmethod
    def new_state(self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype) -> Any:
        """An empty decoding state, which the layer's forward updates in place."""

    def initial_constants(self) -> dict[str, float | torch.Tensor]:
        """Initial values by name: of the parameters that are neither in linear layers nor in norms, and of
        linear layers that are not drawn."""
        return {}


class RMSNorm(nn.RMSNorm):
    """In the weight's dtype, which autocast sees to for a LayerNorm, but not for an RMS norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


GateActivation = Literal["silu", "sigmoid"]
GATE_ACTIVATIONS: dict[GateActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
GATE_ACTIVATION = Option("the activation in `output_gate`, `softmax_gate` and the gate of `gla`")
GateNorm = Literal["layer", "rms", "none"]
GATE_NORMS: dict[GateNorm, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm, "none": nn.Identity}
GATE_NORM = Option("the norm of each head's output in `output_gate`, `softmax_gate` and the gate of `gla`")
INPUT_GATE = Option("scale each token's v in `ours*` and `gla`, by a number per head")
VALUE_RESIDUAL = Option("mix into each layer's v a projection of the token embeddings that all layers share")


def gate_values(v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """v `[…, H, D]` times 2·sigmoid of the gate `[…, H]`."""
    return v * (2 * torch.sigmoid(gate)).unsqueeze(-1).to(v.dtype)


def value_mixture(column: int, values_BNV: torch.Tensor | None, mix_H: torch.Tensor | None) -> Mixture | None:
    """v + σ(mix)·(values − v), a mix for each head, in the place of v, the columns from `column` on; None
    without a mix.

    Value residuals (arXiv 2410.17897), but of values that come from the token embeddings alone: decoding
    keeps none of them, and the first layer is like all others.
    """
    if mix_H is None:
        return None
    assert values_BNV is not None
    share_V = torch.sigmoid(mix_H).repeat_interleave(values_BNV.shape[-1] // len(mix_H))
    return Mixture(column, values_BNV, share_V)


class QKVAttention(Attention):
    """A mechanism on Pythia's projections, `qkv` and `proj`, with LitGPT's state-dict keys.

    Keys and values may have fewer heads, G = n_query_groups, than queries (H = n_head): W = (H + 2G)·D.
    """

    conv: nn.Parameter | None
    conv_silu: bool = False
    gate_proj: nn.Linear | None
    norm: nn.Module | None
    gate_activation: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Architecture, layer_idx: int) -> None:
        super().__init__()
        self.config, width = config, config.qkv_sizes[0]
        self.qkv = nn.Linear(config.n_embd, sum(config.qkv_sizes), bias=config.bias or config.attn_bias)
        self.proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def add_output_gate(self, wanted: bool, activation: GateActivation, norm: GateNorm) -> None:
        """Creates the parameters of the output gate, or sets them to None."""
        config, self.gate_activation = self.config, GATE_ACTIVATIONS[activation]
        width = config.qkv_sizes[0]
        self.gate_proj = nn.Linear(config.n_embd, width, bias=config.bias) if wanted else None
        self.norm = GATE_NORMS[norm](config.head_size, eps=config.norm_eps) if wanted else None

    def add_qk_norm(self, wanted: bool) -> None:
        """Creates the norms of q and k, or sets them to None."""
        config = self.config
        self.q_norm = RMSNorm(config.head_size, eps=config.norm_eps) if wanted else None
        self.k_norm = RMSNorm(config.head_size, eps=config.norm_eps) if wanted else None

    def add_value_residual(self, wanted: bool) -> None:
        """Creates the parameter of `value_mixture`, or sets it to None."""
        self.value_mix = nn.Parameter(torch.zeros(self.config.n_query_groups)) if wanted else None

    def mix_and_convolve(
        self,
        rows_BNW: torch.Tensor,
        values_BNV: torch.Tensor | None,
        state: ConvState | None,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """The projection's rows, v mixed with the shared values, then convolved, with these options; updates
        the state's `conv`."""
        mixture = value_mixture(sum(self.config.qkv_sizes[:2]), values_BNV, self.value_mix)
        return apply_short_conv(
            rows_BNW, self.conv, state, cu_seqlens, silu=self.conv_silu, context=self.context, mixture=mixture
        )

    def split_heads(self, rows_BNW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, N, H, D]`, k and v `[B, N, G, D]`; q and k after their norms, if they have some."""
        H, G = self.config.n_head, self.config.n_query_groups
        q, k, v = rows_BNW.unflatten(2, (-1, self.config.head_size)).split((H, G, G), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def gate_and_project(self, o_BNHD: torch.Tensor, x_BNC: torch.Tensor) -> torch.Tensor:
        """The layer's output `[B, N, C]` from the heads' outputs o and the layer's input x: `W_O o`.

        With an output gate, as in GLA (arXiv 2312.06635), `W_O (silu(x W_r) ⊙ LayerNorm_head(o))`, or with a
        sigmoid instead of the SiLU, and an RMSNorm or nothing instead of the LayerNorm.
        """
        if self.gate_proj is None or self.norm is None:
            return self.proj(o_BNHD.flatten(2))
        return self.proj(self.gate_activation(self.gate_proj(x_BNC)) * self.norm(o_BNHD).flatten(2))


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether calling the layer only multiplies by its weight and adds its bias: it is no subclass or wrapper
    of nn.Linear (LoRA, a parametrisation), and its instance has no own `forward` and no hooks."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not any(hooks)


@dataclass
class RecurrentState(ConvState):
    """A decoding state of constant size. `value`: the state last returned by the operator, at first None."""

    value: Any = None
