"""LinGPT's network as transformers' classes: the base model, and the one with a head for the next token.

A linear attention has no mask that could hide a token: whatever it reads enters its state. But every
attention keeps sequences apart that are packed into a row, and padding on the left is one of them. Padding on
the right changes nothing that is not padding, and runs as it is.
"""

import re
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from lingpt.common.errors import UserError
from lingpt.hf.cache import LinGPTCache
from lingpt.hf.config import LinGPTConfig
from lingpt.kernels.numerics import first_tokens
from lingpt.models import Attention, Block
from lingpt.models.attention.base import ComputedBuffers
from lingpt.models.gpt import make_norm, make_shared_values, rope_tables
from lingpt.models.init import init_weights

# The cache's name in what a model returns: `past_key_values` in transformers 5.3, `cache` later.
CACHE = "cache" if any(f.name == "cache" for f in fields(CausalLMOutputWithPast)) else "past_key_values"


class LinGPTPreTrainedModel(PreTrainedModel):
    config: LinGPTConfig
    config_class = LinGPTConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = True  # a state cannot go back: no assisted decoding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` then leaves it to the first forward pass to make a cache

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """UserError if the configuration and the weights are of different attentions."""
        options = {"ignore_mismatched_sizes": True} | kwargs
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        keys = [*info["missing_keys"], *info["unexpected_keys"]]
        wrong = [key for key in keys if re.search(r"(^|\.)h\.\d", key)]
        if not kwargs.get("ignore_mismatched_sizes"):
            wrong += [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
        if wrong:
            raise UserError(
                f"config.json and the weights are of different models, as {min(wrong)} shows: "
                "load both from one export"
            )
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called for each module that was built on the meta device, or was not loaded."""
        if isinstance(module, LinGPTModel):
            module.reset_buffers(module.cos.device)
        if isinstance(module, Attention):
            module.reset_buffers(next(module.parameters()).device)
        if module is self:
            seed = torch.initial_seed()
            init_weights(self, self.config.lingpt_config(), seed, loaded=_is_loaded)


def _is_loaded(parameter: nn.Parameter) -> bool:
    return parameter.is_meta or getattr(parameter, "_is_hf_initialized", False)


class LinGPTModel(ComputedBuffers, LinGPTPreTrainedModel):
    """The network without its head: token ids → `last_hidden_state`."""

    config: LinGPTConfig
    cos: torch.Tensor
    sin: torch.Tensor
    post_init: Any
    _gradient_checkpointing_func: Any

    def __init__(self, config: LinGPTConfig) -> None:
        super().__init__(config)
        own = config.lingpt_config()
        self.wte = nn.Embedding(own.padded_vocab_size, own.n_embd)
        self.h = nn.ModuleList(Block(own, layer_idx) for layer_idx in range(own.n_layer))
        self.ln_f = make_norm(own)
        self.shared_values = make_shared_values(own)
        for name, table in zip(("cos", "sin"), rope_tables(own, torch.get_default_device()), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.gradient_checkpointing = False
        self.post_init()

    def reset_buffers(self, device: torch.device) -> None:
        self.cos, self.sin = rope_tables(self.config.lingpt_config(), device)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: LinGPTCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cache: LinGPTCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids, inputs_embeds: `[B, N]` or `[B, N, C]`, one of them.
            attention_mask: `[B, N]`, with a cache also `[B, columns seen + N]`; 0 is padding.
            position_ids: `[B, N]`; where one is 0, a packed sequence begins. Otherwise not read.
            past_key_values, cache: the cache of the columns before these, by either name; it is updated.
            use_cache: return a cache for the columns after these, as `generate` asks for. It costs time and,
                as training's fused kernels compute no states, a rounding.
            cu_seq_lens_q: borders of the sequences that are packed into one row, `[sequences + 1]`.

        Raises ValueError for a mask of another shape or with a row of padding only, for padding between
        tokens, and with a cache for any on the right; for packed sequences with a cache; for a cache of other
        rows or layers; for more columns than the model's block size.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        x_BNC = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        B, N, _ = x_BNC.shape
        cache = past_key_values if cache is None else cache
        if N == 0:
            raise ValueError("nothing to continue: give each row at least one token")
        if cache is not None and not isinstance(cache, LinGPTCache):
            raise ValueError(f"a {type(cache).__name__} holds no states: give a LinGPTCache, or none")
        if cache is not None:
            cache.check(B, len(self.h))
        padded = read_BN = None
        keeps, seen = bool(use_cache) or cache is not None, 0 if cache is None else cache.seen
        if attention_mask is not None:
            if attention_mask.shape not in ((B, N), (B, seen + N)):
                raise ValueError(f"an attention_mask of {list(attention_mask.shape)}: give {[B, seen + N]}")
            read_BN = attention_mask[:, -N:].bool()
            padded = padded_borders(read_BN, keeps, seen > 0)
        packed = packed_borders(None if seen else position_ids, cu_seq_lens_q, read_BN, B, N)
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: list[torch.Tensor] | None = [] if shown else None
        if packed is not None:
            if keeps:
                raise ValueError("packed sequences keep no cache: give use_cache=False")
            row, packed = x_BNC.flatten(0, 1)[None], packed.to(x_BNC.device)
            last_BNC = self._run(row, None, packed, restart=True, hidden=hidden).view(B, N, -1)
        else:
            if keeps and cache is None:
                cache = self.new_cache(B, N, x_BNC.dtype)
            last_BNC = self._run(x_BNC, cache, padded, hidden=hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=last_BNC,
            hidden_states=None if hidden is None else tuple(x.view(B, N, -1) for x in hidden),
            **{CACHE: cache},
        )

    def _run(
        self,
        x_BNC: torch.Tensor,
        cache: LinGPTCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        restart: bool = False,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The last hidden state of columns that follow those in the cache, if there is one.

        restart: x is one row of packed sequences, whose positions restart; it may be longer than the block
        size. hidden: gets the embeddings, the output of each layer but the last, and what is returned."""
        N = x_BNC.shape[1]
        start = 0 if cache is None else cache.seen
        end = start + N
        where: slice | torch.Tensor = slice(start, end)
        if restart and cu_seqlens is not None:
            columns = torch.arange(N, device=x_BNC.device)
            where = columns - (columns * first_tokens(cu_seqlens, 1, N)[0]).cummax(0).values
            where, end = where.to(self.cos.device), int(where.max()) + 1
        if end > len(self.cos):
            raise UserError(
                f"a sequence of {end} tokens, but the model's block size is {len(self.cos)}: shorten it"
            )
        if cache is not None:
            cache.reserve(end)
            cache.seen = end
        cos_NR, sin_NR = (table[where].to(x_BNC.device) for table in (self.cos, self.sin))
        values_BNV = None if self.shared_values is None else self.shared_values(x_BNC)
        for block, state in zip(self.h, cache.layers if cache else [None] * len(self.h), strict=True):
            if hidden is not None:
                hidden.append(x_BNC)
            if self.gradient_checkpointing and self.training and state is None:
                x_BNC = self._gradient_checkpointing_func(
                    block, x_BNC, cos_NR, sin_NR, None, cu_seqlens, values_BNV
                )
            else:
                x_BNC = block(x_BNC, cos_NR, sin_NR, state, cu_seqlens, values_BNV)
        last_BNC = self.ln_f(x_BNC)
        if hidden is not None:
            hidden.append(last_BNC)
        return last_BNC

    def new_cache(self, batch_size: int, columns: int, dtype: torch.dtype) -> LinGPTCache:
        """An empty cache with room for so many columns."""
        blocks = [block for block in self.h if isinstance(block, Block)]
        states = [b.attn.new_state(batch_size, columns, b.norm_1.weight.device, dtype) for b in blocks]
        return LinGPTCache(states)


def padded_borders(mask_BN: torch.Tensor, keeps_cache: bool, continues: bool) -> torch.Tensor | None:
    """The borders, as in `GPT.hidden`, of each row and of its padding; None if there is none on the left."""
    if mask_BN.all():
        return None
    if continues:
        raise ValueError("padding after tokens that the cache has seen: pad the prompt on the left, once")
    N, numbers = mask_BN.shape[1], mask_BN.int()
    starts, ends, counts = numbers.argmax(1), N - numbers.flip(1).argmax(1), numbers.sum(1)
    if not counts.all():
        raise ValueError("a row of padding only: give each row at least one token")
    if (counts < ends - starts).any():
        raise ValueError("padding between tokens: pad on the left or the right")
    if keeps_cache and (ends < N).any():
        raise ValueError("padding on the right would enter the states: set padding_side='left'")
    return borders(mask_BN) if starts.any() else None


def packed_borders(
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    read_BN: torch.Tensor | None,
    B: int,
    N: int,
) -> torch.Tensor | None:
    """The borders of the sequences packed into each row, and of its padding; None if there is one in each."""
    if cu_seq_lens is not None:
        return cu_seq_lens.int() if len(cu_seq_lens) > 2 else None
    if position_ids is None:
        return None
    if read_BN is None:
        read_BN = torch.ones(B, N, dtype=torch.bool, device=position_ids.device)
    packed = borders(read_BN, position_ids.masked_fill(~read_BN, 1))
    return None if len(packed) == len(borders(read_BN)) else packed


def borders(read_BN: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """cu_seqlens, in the B·N tokens: a border where a row begins, where its padding on the left ends, and
    where positions begin again. read_BN: `[B, N]`, true where a token is no padding."""
    begins_BN = read_BN & ~read_BN.roll(1, dims=1)
    if position_ids is not None:
        begins_BN = begins_BN | (position_ids == 0)
    begins_BN[:, 0] = True
    return F.pad(begins_BN.flatten().nonzero().flatten(), (0, 1), value=begins_BN.numel()).int()


class LinGPTForCausalLM(LinGPTPreTrainedModel, GenerationMixin):
    """The network with its head: token ids → logits of each next token, and the loss of `labels`."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012 (if the config says so)

    def __init__(self, config: LinGPTConfig) -> None:
        super().__init__(config)
        self.transformer = LinGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in any model. Rows that were no token, which `generate` leaves out, may be new tokens."""
        if self.generation_config is not None:
            self.generation_config.suppress_tokens = None
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: LinGPTCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cu_seq_lens_q: torch.Tensor | None = None,
        cache: LinGPTCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As `LinGPTModel`.

        Args:
            labels: `[B, N]`, the input ids again; −100 is ignored, as for padding.
            logits_to_keep: only the logits of so many last columns (0: all), or of these columns.
        """
        base = self.transformer(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=cu_seq_lens_q,
            cache=cache,
            return_dict=True,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(base.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=base.hidden_states, **{CACHE: base.get(CACHE)}
        )
