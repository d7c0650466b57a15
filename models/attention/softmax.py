"""Softmax attention with rotary embeddings, as in Pythia: `softmax(q·k / √D) v` through PyTorch's SDPA.

Equal to LitGPT's `CausalSelfAttention` bit for bit in fp32 (tested), with one concatenation instead of four.

SDPA has several kernels; its choice depends on the card and on cuDNN's version. `sdpa` names the one that
training uses: `flash` is FlashAttention-2, the paper's baseline.

`softmax_conv` and `softmax_gate` are the counterparts of `short_conv` and `output_gate` of `ours*`. They have
their own names, because a hybrid's softmax layers are plain, but a fair comparison with a hybrid needs them.
`softmax_qk_norm` is QK-norm (arXiv 2302.05442): an RMS norm with a gain on each head's q and k, before RoPE.
With `softmax_window` a token sees only so many tokens, the last of which is itself; the cache keeps all.
"""

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lingpt.common.errors import UserError
from lingpt.common.options import Option
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.numerics import first_tokens
from lingpt.kernels.sdpa import causal_mask, packed_attention, sdpa_choice, sdpa_with_logsumexp
from lingpt.models.architecture import Architecture
from lingpt.models.attention.base import (
    GATE_ACTIVATION,
    GATE_NORM,
    VALUE_RESIDUAL,
    GateActivation,
    GateNorm,
    QKVAttention,
)
from lingpt.models.attention.short_conv import WIDTH, ConvState, identity_filter

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Without cuDNN, which PyTorch prefers on Hopper: it makes a plan for each number of keys, so for every token.
DECODING = [kernel for name, kernel in SDPA.items() if name != "cudnn"]
KV_SPLIT = 512  # keys per split of the cache in a static step


def apply_rope(x_BNHD: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor) -> torch.Tensor:
    """LitGPT's `apply_rope` on the leading R dimensions, computed in the dtype of the tables.

    x_BNHD: [B, N, H, D]; cos_NR, sin_NR: [N, R], R even and at most D. Returns [B, N, H, D] in x's dtype.
    """
    half = cos_NR.shape[-1] // 2
    cos, sin = cos_NR[:, None, :half], sin_NR[:, None, :half]  # both halves of the tables are the same
    x1, x2, rest = x_BNHD.split((half, half, x_BNHD.shape[-1] - 2 * half), dim=-1)
    return torch.cat(((x1 * cos - x2 * sin).to(x1.dtype), (x2 * cos + x1 * sin).to(x1.dtype), rest), dim=-1)


@dataclass
class StaticPosition:
    """The position of a static step's token (models/decoding_graph.py), in tensors on the device.

    index: [1], int64, the number of tokens before it. mask: [1, 1, 1, keys], added to the scores: 0 up to the
    token; after it so negative that weights are 0, but not −inf, which would give NaN in a split without
    tokens.
    """

    index: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor, keys: int, dtype: torch.dtype) -> "StaticPosition":
        """The position `index`, which attends to the first `keys` > `index` places; the mask in `dtype`."""
        behind = torch.arange(keys, device=index.device) > index
        least = torch.finfo(dtype).min / 2  # half: leaves room for a score, and for another log base
        mask = torch.zeros(keys, dtype=dtype, device=index.device).masked_fill(behind, least)
        return cls(index, mask.view(1, 1, 1, keys))

    def mask_of(self, window: int | None) -> torch.Tensor:
        """The mask, with a window also of the tokens before it."""
        if window is None:
            return self.mask
        before = torch.arange(self.mask.shape[-1], device=self.index.device) <= self.index - window
        return self.mask.masked_fill(before, torch.finfo(self.mask.dtype).min / 2)


@dataclass
class KVCache(ConvState):
    """Keys and values `[B, G, room, D]`, G heads of each; the first `length` positions are filled, or in each
    row of a batch that is padded on the left those from `start` `[B]` to there."""

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0
    start: torch.Tensor | None = None
    static: StaticPosition | None = None  # set during a static step, which ignores `length`

    def append(self, k_BHND: torch.Tensor, v_BHND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds N tokens, `[B, H, N, D]` each, and returns all keys and values so far, `[B, H, length, D]`, in
        the dtype of those given; in a static step, those that `static.mask` covers. Raises UserError for more
        tokens than the cache has room for.
        """
        if self.static is not None:
            keys = self.static.mask.shape[-1]
            self.k.index_copy_(2, self.static.index, k_BHND.to(self.k.dtype))
            self.v.index_copy_(2, self.static.index, v_BHND.to(self.v.dtype))
        else:
            start, keys = self.length, self.length + k_BHND.shape[2]
            self.check_length(keys)
            self.length = keys
            self.k[:, :, start:keys] = k_BHND
            self.v[:, :, start:keys] = v_BHND
        return self.k[:, :, :keys].to(k_BHND.dtype), self.v[:, :, :keys].to(v_BHND.dtype)

    def check_length(self, tokens: int) -> None:
        """Raises UserError for more tokens than the cache has room for."""
        if tokens > self.k.shape[2]:
            raise UserError(f"decoding {tokens} tokens with a cache of {self.k.shape[2]}: raise max_seq_len")

    def fill(self, length: int) -> None:
        """Fills the cache with random keys and values, as if it had seen `length` tokens: to measure decoding
        without a prompt."""
        self.k.normal_()
        self.v.normal_()
        self.length = length


class SoftmaxAttention(QKVAttention):
    """Softmax attention with LitGPT's parameters and keys, and those of the options."""

    static_step = True
    context_parallel = True

    def __init__(
        self,
        config: Architecture,
        layer_idx: int,
        *,
        sdpa: Annotated[Literal["auto", "flash", "cudnn", "efficient", "math"], Option(
            "the kernel that trains `softmax`: `flash` is FlashAttention-2; `auto` leaves it to PyTorch"
        )] = "auto",
        softmax_conv: Annotated[bool, Option(
            "a convolution over q, k and v of `softmax`, as `short_conv`")] = False,
        softmax_gate: Annotated[bool, Option(
            "a gate and a norm on the output of `softmax`, as `output_gate`")] = False,
        gate_activation: Annotated[GateActivation, GATE_ACTIVATION] = "silu",
        gate_norm: Annotated[GateNorm, GATE_NORM] = "layer",
        softmax_qk_norm: Annotated[bool, Option("RMS norms with a gain on q and k of `softmax`")] = False,
        softmax_window: Annotated[int | None, Option(
            "tokens that a token of `softmax` sees, itself among them; all by default", least=1)] = None,
        value_residual: Annotated[bool, VALUE_RESIDUAL] = False,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_idx)
        own_norm = softmax_qk_norm and not config.norm_qk
        self.sdpa, self.window = sdpa, softmax_window
        self.hf_exportable = not (
            softmax_conv or softmax_gate or own_norm or softmax_window or value_residual
        )
        self.conv = nn.Parameter(identity_filter(sum(config.qkv_sizes))) if softmax_conv else None  # [4, W]
        self.add_value_residual(value_residual)
        self.add_output_gate(softmax_gate, gate_activation, gate_norm)
        self.add_qk_norm(softmax_qk_norm or config.norm_qk)

    @classmethod
    def check(cls, config: Architecture, *, sdpa: str, softmax_window: int | None, **_: Any) -> None:
        if softmax_window is not None and sdpa not in ("auto", "flash"):
            raise UserError(f"sdpa={sdpa} has no softmax_window: use flash, or auto")

    @classmethod
    def kernel_name(
        cls,
        config: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        *,
        sdpa: str,
        softmax_window: int | None = None,
        **options: Any,
    ) -> str:
        if softmax_window is not None:
            return "flash" if device.type == "cuda" and dtype.itemsize == 2 else "a mask"
        heads = config.n_head, config.n_query_groups
        with torch.enable_grad(), warnings.catch_warnings(record=True) as reasons, _forced_kernel(sdpa):
            warnings.simplefilter("always")
            q, k = (
                torch.zeros(1, n, 128, config.head_size, device=device, dtype=dtype, requires_grad=True)
                for n in heads
            )
            try:
                chosen = sdpa_choice(q, k, k)
            except RuntimeError:
                chosen = SDPBackend.ERROR.value
        if chosen is None:
            return sdpa
        for name, backend in SDPA.items():
            if backend.value == chosen:
                return name
        where = f"on {device.type} in {str(dtype).removeprefix('torch.')} with heads of {config.head_size}"
        why = _reason(reasons)
        raise UserError(f"model.sdpa {sdpa} cannot train {where}{why}: use another kernel, or auto")

    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: KVCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        qkv = self.mix_and_convolve(self.qkv(x_BNC), values_BNV, state, cu_seqlens)
        q, k, v = self.split_heads(qkv)
        q, k = apply_rope(q, cos_NR, sin_NR), apply_rope(k, cos_NR, sin_NR)
        if self.context is None or state is not None:
            o = self._attend(q, k, v, state, cu_seqlens)
        else:
            o = self._attend_piece(q, k, v, self.context, cu_seqlens)
        return self.gate_and_project(o, x_BNC)

    def _attend_piece(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: Context,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """`_attend` of a piece of the sequences: with its share of the heads, or with the tokens of the piece
        before that are in its window."""
        B, N, H, _ = q.shape
        if cu_seqlens is not None:
            cu_seqlens = context.whole_borders(cu_seqlens, B, N)
        if not (before := self._tokens_before(N)):
            q, k, v = context.sequence_to_heads(q, k, v)
            o = self._attend(q, k, v, None, cu_seqlens)
            return context.heads_to_sequence(o)[:, :, :H]
        last = torch.cat((k[:, N - before :], v[:, N - before :]), 2)
        last_k, last_v = context.previous(last).chunk(2, 2)
        k, v, q = torch.cat((last_k, k), 1), torch.cat((last_v, v), 1), F.pad(q, (0, 0, 0, 0, before, 0))
        if cu_seqlens is None:
            cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device) * (context.size * N)
        own = context.own_borders(cu_seqlens, B, N, before)
        rows = torch.arange(B, dtype=own.dtype, device=own.device) * (before + N)
        return self._attend(q, k, v, None, torch.cat((own, rows)).sort().values)[:, before:]

    def _tokens_before(self, tokens: int) -> int:
        """How many tokens before a piece of so many its window reaches; 0 if that is more than a piece."""
        before = 0 if self.window is None else self.window - 1
        return before if before <= tokens else 0

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: KVCache | None,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """o `[B, N, H, D]` of q, k and v, `[B, N, H or G, D]`."""
        N, mask, scale = q.shape[1], None, 1.0 / math.sqrt(self.config.head_size)
        if cu_seqlens is not None or (self.window is not None and state is None):
            if state is not None and cu_seqlens is not None:
                state.append(k.transpose(1, 2), v.transpose(1, 2))
                first = first_tokens(cu_seqlens, len(k), N)
                state.start = (first * torch.arange(N, device=first.device)).amax(1)
            return packed_attention(q, k, v, cu_seqlens, scale, self.window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # views [B, H or G, N, D], SDPA's order
        if state is not None:
            k, v = state.append(k, v)
            if state.static is not None:
                o = split_kv_attention(q, k, v, state.static.mask_of(self.window).to(q.dtype), scale)
                return o.transpose(1, 2)
            keys = k.shape[2]
            if 1 < N < keys or state.start is not None or keys > (self.window or keys):
                # SDPA's own causal mask starts at the first key, not the first new one.
                mask = causal_mask(N, keys, self.window, q.device)
            if mask is not None and state.start is not None:
                mask = mask & (torch.arange(keys, device=q.device) >= state.start[:, None, None, None])
        with self._kernel(decoding=state is not None):
            causal, grouped = N > 1 and mask is None, k.shape[1] < q.shape[1]
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=grouped
            )
        return o.transpose(1, 2)

    def _kernel(self, decoding: bool) -> contextlib.AbstractContextManager:
        """A context that selects SDPA's kernel. `sdpa` applies to training only: not every kernel supports a
        mask or another device."""
        if decoding:
            return sdpa_kernel(DECODING)
        return _forced_kernel(self.sdpa if self.training else "auto")

    def flops_per_token(self, seq_len: int) -> int:
        # q·k and p·v, two FLOPs each, over half of the N × N square, less what is before the window
        before = max(0, seq_len - (self.window or seq_len))
        return 2 * (seq_len**2 - before**2) * self.config.qkv_sizes[0] // seq_len

    def saved_activations_per_token(self) -> int:
        q, k, v = self.config.qkv_sizes
        saved = 3 * q + 2 * k + v  # qkv (v is a view of it), rotated q and k, o
        if self.conv is not None:
            saved += q + k + v  # the convolution's input
        if self.value_mix is not None and self.conv is None:
            saved += v  # u − v
        if self.q_norm is not None:
            saved += (q + k) // 2  # of the norms' results: compiled blocks keep less, eager ones more
        if self.gate_proj is not None:
            saved += 2 * q  # the gate before its silu, and the input of `proj`
        return saved

    def sent_elements(self, tokens: int, pieces: int) -> int:
        q, k, v = self.config.qkv_sizes
        sent = (k + v) * self._tokens_before(tokens) or tokens * (2 * q + k + v) // pieces
        return sent + (0 if self.conv is None else (WIDTH - 1) * (q + k + v))

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        room = max_seq_len if max_seq_len <= KV_SPLIT else -(-max_seq_len // KV_SPLIT) * KV_SPLIT
        shape = (batch_size, self.config.n_query_groups, room, self.config.head_size)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        return KVCache(k, v)

    def initial_constants(self) -> dict[str, float | torch.Tensor]:
        return {"conv": identity_filter(sum(self.config.qkv_sizes)), "value_mix": 0.0}


def split_kv_attention(
    q_BH1D: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, mask_111N: torch.Tensor, scale: float
) -> torch.Tensor:
    """SDPA of one query per head, `[B, H, 1, D]`, with a mask without −inf, in splits of KV_SPLIT keys as in
    Flash-Decoding.

    With a mask SDPA has no kernel that splits a head's keys: one multiprocessor would read all of them. Here
    each split is treated as a head, and outputs are combined by their logsumexp. k and v are views. The
    queries that share a head of keys are treated as so many tokens.
    """
    (B, H, _, D), (G, N) = q_BH1D.shape, k_BGND.shape[1:3]
    q_BGRD, R = q_BH1D.reshape(B, G, H // G, D), H // G
    if N > KV_SPLIT and N % KV_SPLIT == 0:
        k, v = (x.flatten(0, 1).unflatten(1, (-1, KV_SPLIT)) for x in (k_BGND, v_BGND))  # [B·G, splits, ·, D]
        q = q_BGRD.flatten(0, 1).unsqueeze(1).expand(-1, N // KV_SPLIT, -1, -1)
        mask = mask_111N.view(1, -1, 1, KV_SPLIT).expand(B * G, -1, R, -1)
        if (found := sdpa_with_logsumexp(q, k, v, mask, scale)) is not None:
            o, logsumexp = found
            return (logsumexp.softmax(1)[..., None] * o).sum(1).to(q.dtype).view(B, H, 1, D)
    with sdpa_kernel(DECODING):
        o = F.scaled_dot_product_attention(q_BGRD, k_BGND, v_BGND, attn_mask=mask_111N, scale=scale)
    return o.reshape(B, H, 1, D)


def _forced_kernel(sdpa: str) -> contextlib.AbstractContextManager:
    """A context in which SDPA uses the kernel of that name or fails; for `auto`, PyTorch chooses."""
    return contextlib.nullcontext() if sdpa == "auto" else sdpa_kernel(SDPA[sdpa])


def _reason(reasons: list[warnings.WarningMessage]) -> str:
    """` (…)` with PyTorch's warning, without its headings and its remarks on other kernels."""
    lines = [str(reason.message).partition(" (Triggered internally")[0].strip() for reason in reasons]
    own = [line for line in lines if "not used because" not in line and "runtime disabled" not in line]
    return f" ({own[0].rstrip('.')})" if own else ""
