"""The language model: GPT-NeoX (Pythia) or Llama's shape, with the attention that the configuration names in
each layer.

Notable:
- LitGPT's state-dict keys, and Pythia's numbers bit for bit with softmax attention in fp32 (tested); imports
  only PyTorch and our operators
- one forward for training and for decoding: with a state, the tokens continue those it has seen
- it counts its own parameters and FLOPs; each mechanism declares its part
"""

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lingpt.common.errors import UserError
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.gelu import fast_gelu
from lingpt.models.attention import ATTENTIONS
from lingpt.models.attention.base import ComputedBuffers
from lingpt.models.config import Config
from lingpt.models.host_inputs import HostInputs
from lingpt.models.init import init_weights


@dataclass
class DecodingState:
    """The state of decoding: each layer's own state, and the number of tokens they have seen."""

    layers: list[Any]
    batch_size: int
    position: int = 0

    def detach_(self) -> None:
        """Cuts the gradient of everything in the state."""
        self.layers = [map_tensors(torch.Tensor.detach, layer) for layer in self.layers]

    def check_step(self, batch_size: int, tokens: int) -> None:
        """Raises UserError, before any layer's state changes, for another batch size or more tokens than
        there is room for."""
        if batch_size != self.batch_size:
            raise UserError(f"{batch_size} rows of tokens for a decoding state of {self.batch_size}")
        for layer in self.layers:
            if hasattr(layer, "check_length"):
                layer.check_length(self.position + tokens)

    def num_bytes(self) -> int:
        """Bytes of all tensors in the state, including a cache's unused capacity."""
        return sum(x.nbytes for x in tensors_in(self.layers))


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in a layer's state, however nested, in a fixed order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for part in x:
            yield from tensors_in(part)
    elif isinstance(x, dict):
        yield from tensors_in(list(x.values()))
    elif hasattr(x, "__dict__"):
        yield from tensors_in(vars(x))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], state: Any) -> Any:
    """A copy of a state with the function's results for its tensors."""
    if isinstance(state, torch.Tensor):
        return function(state)
    if isinstance(state, tuple):
        values = [map_tensors(function, part) for part in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    if not hasattr(state, "__dict__"):
        return state
    result = copy.copy(state)
    for name, value in vars(state).items():
        setattr(result, name, map_tensors(function, value))
    return result


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x_BNC: torch.Tensor) -> torch.Tensor:
        x = self.fc(x_BNC)
        # Uncompiled, PyTorch's GELU is faster: a single kernel.
        fast = torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
        return self.proj(fast_gelu(x) if fast else F.gelu(x))


class GatedMLP(nn.Module):
    """Llama's: SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.fc_2 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x_BNC: torch.Tensor) -> torch.Tensor:
        return self.proj(F.silu(self.fc_1(x_BNC)) * self.fc_2(x_BNC))


class TiedHead(nn.Module):
    """A head that multiplies by the embedding's weight, and has no parameter of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list it is no submodule, and its weight has one name

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, x_BNC: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BNC, self.weight)


def linear_flops(module: nn.Module) -> int:
    """FLOPs per token, forward, of the linear layers in `module`: 2 per weight."""
    layers = (m for m in module.modules() if isinstance(m, nn.Linear | TiedHead))
    return sum(2 * layer.weight.numel() for layer in layers)


def make_norm(config: Config) -> nn.LayerNorm | nn.RMSNorm:
    """A norm of the residual stream."""
    norm = nn.RMSNorm if config.norm_class_name == "RMSNorm" else nn.LayerNorm
    return norm(config.n_embd, eps=config.norm_eps)


def make_shared_values(config: Config) -> nn.Sequential | None:
    """The embeddings' projection that layers with `value_residual` mix into their v; None without any."""
    if config.shared_values_width is None:
        return None
    linear = nn.Linear(config.n_embd, config.shared_values_width, bias=config.bias or config.attn_bias)
    return nn.Sequential(OrderedDict(norm=make_norm(config), linear=linear))


class Block(nn.Module):
    """One layer. Attention and MLP read the same input, or with `parallel_residual: false` one after the
    other."""

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__()
        name = config.attention_per_layer[layer_idx]
        self.config = config
        self.norm_1 = make_norm(config)
        self.attn = ATTENTIONS[name](config, layer_idx, **config.attention_options(name))
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config) if config.mlp_class_name == "GptNeoxMLP" else GatedMLP(config)

    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: Any = None,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, N, C]` → the same; `state` is the attention's decoding state, cu_seqlens are those of
        `GPT.hidden`, values `make_shared_values`'s."""
        attended = self.attn(self.norm_1(x_BNC), cos_NR, sin_NR, state, cu_seqlens, values_BNV) + x_BNC
        return self.mlp(self.norm_2(x_BNC if self.config.parallel_residual else attended)) + attended


def _with_copied_state(
    block: Callable, state: Any, others: tuple[torch.Tensor | None, ...], *inputs: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """`block(*inputs, state, *others)` and the state after it; `state` is unchanged, as the block may run
    again."""
    after = copy.copy(state)
    return block(*inputs, after, *others), after


def rope_tables(
    config: Config, device: torch.device, positions: range | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary embedding, `[block_size, R]` in fp32; both halves of a row are the same.

    Always computed on the CPU, so that they are bit-identical on every device. positions: those of the rows
    instead; their angles are in float64, as fp32 rounds those of a million by up to 0.06.
    """
    where = device if device.type == "meta" else torch.device("cpu")  # a plan costs no memory
    exponents = torch.arange(0, config.rope_n_elem, 2, device=where).float() / config.rope_n_elem
    if positions is None:
        numbers = torch.arange(config.block_size, device=where).float()
    else:
        numbers = torch.arange(positions.start, positions.stop, device=where).double()
    frequencies = 1.0 / config.rope_base**exponents
    if config.rope_adjustments is not None:
        frequencies = scaled_frequencies(frequencies, **config.rope_adjustments)
    angles = torch.outer(numbers, frequencies.to(numbers.dtype)).repeat(1, 2)
    return torch.cos(angles).float().to(device), torch.sin(angles).float().to(device)


def scaled_frequencies(
    frequencies: torch.Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_seq_len: float,
) -> torch.Tensor:
    """Llama 3's rotary frequencies for contexts longer than `original_max_seq_len`: those that turn fewer
    than `low_freq_factor` times in it are divided by `factor`, those that turn more than `high_freq_factor`
    times are kept, and between them it is a blend of both."""
    turns = original_max_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


class GPT(ComputedBuffers):
    """A causal language model, `[B, N]` token ids → `[B, N, padded_vocab_size]` logits.

    The constructor leaves PyTorch's default weights; `init_weights(seed)` sets those a run starts from.
    Raises UserError if a sequence is longer than the model's block size.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    recompute_blocks: bool = False  # activation checkpointing: only the input of each block is kept
    inputs_on_host: bool = False  # and that in host memory
    context: Context | None = None  # the processes with the other pieces of the sequences
    carried: DecodingState | None = None  # what `forward` continues in training: `segment_losses`
    any_length: bool = False  # may a sequence be longer than the block size?

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Linear | TiedHead = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config, layer_idx) for layer_idx in range(config.n_layer)),
                "ln_f": make_norm(config),
            }
        )
        if (values := make_shared_values(config)) is not None:
            self.transformer["shared_values"] = values
        if config.tie_embeddings:
            self.lm_head = TiedHead(cast(nn.Embedding, self.transformer["wte"]))
        for name, table in zip(("cos", "sin"), rope_tables(config, torch.get_default_device()), strict=True):
            self.register_buffer(name, table, persistent=False)

    @property
    def max_seq_length(self) -> int:
        return self.config.block_size

    @property
    def blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.transformer["h"].children()))

    @classmethod
    def on_meta(cls, config: Config) -> Self:
        """A model without memory, to be counted or to be filled."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def create(
        cls, config: Config, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Self:
        """A model with `init_weights(seed)`, built on its device without drawing default weights first."""
        model = cls.on_meta(config)
        model = model.to(dtype or torch.get_default_dtype()).to_empty(device=device)
        model.init_weights(seed)
        return model

    def forward(self, idx_BN: torch.Tensor) -> torch.Tensor:
        """Logits of each position's next token, `[B, N, padded_vocab_size]`."""
        return self.lm_head(self.hidden(idx_BN))

    def hidden(
        self,
        idx_BN: torch.Tensor,
        state: DecodingState | None = None,
        cu_seqlens: torch.Tensor | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The input of `lm_head`, `[B, N, C]`: lets a loss compute its logits in pieces.

        outputs: without a state, gets each block's output.

        cu_seqlens: int32 `[documents + 1]`, from 0 to B·N and not decreasing, the borders of documents that
        are packed into the rows, over the B·N tokens row after row as in FlashAttention's varlen functions;
        each row begins with one. A token sees its own document only. Equal numbers are empty documents: they
        pad cu_seqlens to a fixed size, for which nothing is compiled anew. RoPE's positions do not restart
        with a document: only distances within one matter. With `context` they are the borders in whole
        sequences, not in this process's piece. With a state, which must be new, the tokens that follow
        continue each row's last document: so prompts of different lengths, padded on the left with anything,
        are one batch.
        """
        tokens = idx_BN.shape[1]
        if state is not None:
            if cu_seqlens is not None and state.position:
                raise UserError(
                    "the state has seen tokens, and packed documents begin anew: give a new state"
                )
            tables = self._rope(state.position, tokens)
            state.check_step(*idx_BN.shape)
            hidden_BNC = self.hidden_with_state(idx_BN, *tables, state.layers, cu_seqlens)
            state.position += tokens
            return hidden_BNC
        carried = self.carried or DecodingState([None] * len(self.blocks), len(idx_BN))
        if self.context is not None:
            carried.position = self.context.rank * tokens
            if cu_seqlens is not None:
                cu_seqlens = self.context.own_borders(cu_seqlens, *idx_BN.shape)
        tables = self._rope(carried.position, tokens)
        x_BNC, values_BNV = self.embed(idx_BN)
        recomputes = self.recompute_blocks and torch.is_grad_enabled()
        inputs = HostInputs() if recomputes and self.inputs_on_host else contextlib.nullcontext()
        for i, (block, before) in enumerate(zip(self.blocks, carried.layers, strict=True)):
            # No argument of `checkpoint`, which would offload the values.
            run: Any = partial(_with_copied_state, block, before, (cu_seqlens, values_BNV))
            if recomputes:  # no dropout, so there is no random state to keep
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            with inputs:
                x_BNC, carried.layers[i] = run(x_BNC, *tables)
            if outputs is not None:
                outputs.append(x_BNC)
        carried.position += tokens
        return self.transformer["ln_f"](x_BNC)

    def hidden_with_state(
        self,
        idx_BN: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        layers: list[Any],
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`hidden`, `[B, N, C]`, of tokens that continue those the layers' states have seen; updates the
        states. cos and sin `[N, R]` are those of the tokens' positions."""
        x_BNC, values_BNV = self.embed(idx_BN)
        for block, layer_state in zip(self.blocks, layers, strict=True):
            # `forward`, as a compiled call would recompile for each length.
            x_BNC = block.forward(x_BNC, cos_NR, sin_NR, layer_state, cu_seqlens, values_BNV)
        return self.transformer["ln_f"](x_BNC)

    def embed(self, idx_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The embeddings `[B, N, C]` and, if layers share values, these, `[B, N, V]`."""
        x_BNC = self.transformer["wte"](idx_BN)
        if self.config.shared_values_width is None:
            return x_BNC, None
        return x_BNC, self.transformer["shared_values"](x_BNC)

    def _rope(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[N, R]` of so many tokens, the first of them at position `start`."""
        end = start + tokens
        self.check_length(end)
        if end > self.max_seq_length:
            return rope_tables(self.config, self.cos.device, range(start, end))
        return self.cos[start:end], self.sin[start:end]

    def check_length(self, tokens: int) -> None:
        """Raises UserError for a sequence longer than the block size, the length of the rotary tables."""
        if tokens > self.max_seq_length and not self.any_length:
            raise UserError(
                f"a sequence of {tokens} tokens, but the model's block size is {self.max_seq_length}: "
                "shorten it, or build the model with a larger block_size"
            )

    def carried_state(self, batch_size: int) -> DecodingState:
        """An empty state of the layers whose states are of constant size; None for the others."""
        state = self.new_state(batch_size, 1)
        for i, block in enumerate(self.blocks):
            if not block.attn.constant_state:
                state.layers[i] = None
        return state

    @property
    def constant_state(self) -> bool:
        """Whether the size of a decoding state does not depend on the number of tokens it has seen."""
        return all(block.attn.constant_state for block in self.blocks)

    def new_state(
        self,
        batch_size: int,
        max_seq_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> DecodingState:
        """An empty decoding state for sequences of up to `max_seq_len` tokens (the block size by default).

        dtype: that of keys and values; by default autocast's if it is enabled, else the weights'.
        """
        max_seq_len = max_seq_len or self.max_seq_length
        device = device or self.lm_head.weight.device
        if dtype is None:
            autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else self.lm_head.weight.dtype
        layers = [block.attn.new_state(batch_size, max_seq_len, device, dtype) for block in self.blocks]
        return DecodingState(layers, batch_size)

    @torch.no_grad()
    def step(self, idx_BN: torch.Tensor, state: DecodingState) -> torch.Tensor:
        """Logits `[B, n, padded_vocab_size]` of n more tokens, one or a prompt; updates the state."""
        return self.lm_head(self.hidden(idx_BN, state))

    @torch.no_grad()
    def next_logits(self, idx_BN: torch.Tensor, state: DecodingState) -> torch.Tensor:
        """`step` with the logits of the last token only, `[B, padded_vocab_size]`: enough for a prompt."""
        return self.lm_head(self.hidden(idx_BN, state)[:, -1])

    def init_weights(self, seed: int) -> None:
        """Sets the weights of a new run, a function of the seed only (models/init.py)."""
        init_weights(self, self.config, seed)

    def reset_buffers(self, device: torch.device) -> None:
        """Recomputes the RoPE tables and the attentions' buffers, for a model from the meta device."""
        self.cos, self.sin = rope_tables(self.config, device)
        for block in self.blocks:
            block.attn.reset_buffers(device)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs per token of a training step at this sequence length: forward, and twice that backward.

        Matrix products only: 2 per weight of a linear layer (including `lm_head`; the embedding is a
        look-up), and what each layer's attention declares, of causal attention only the causal half.
        """
        return 3 * (linear_flops(self) + sum(block.attn.flops_per_token(seq_len) for block in self.blocks))
