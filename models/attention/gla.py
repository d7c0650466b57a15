"""`gla`: gated linear attention (Yang et al., arXiv 2312.06635, §4.4).

    α_t = σ(x W_α¹ W_α² + b_α)^(1/τ)         low-rank gate: rank 16, τ = gla_temperature (16)
    S_t = diag(α_t) S_{t−1} + k_tᵀ v_t        per head; over all heads d_k = gla_expand_k·d (d/2) and d_v = d
    y_t = (swish(x W_r + b_r) ⊙ LN(q_t S_t)) W_O

No rotary embeddings, as in the paper. One projection, `qkvr`, gives q, k, v and r, with Pythia's biases.
With `short_conv` a causal convolution of width 4 and a SiLU are applied to q, k and v, as in FLA's layer;
without the SiLU GLA does not learn to recall (docs/results/gate/learning). `gla_unit_qk` divides each head's
q and k by their lengths, as in Gated DeltaNet (arXiv 2412.06464). `gate_activation` (of swish), `gate_norm`
(of LN), `input_gate` and `value_residual` are those of ours.py.
"""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from lingpt.common.errors import UserError
from lingpt.common.options import Option
from lingpt.kernels.channel_decay_operator import gated_linear_attention_flops
from lingpt.kernels.gated_linear_attention import (
    choose,
    gated_linear_attention,
    gated_linear_attention_with_state,
)
from lingpt.kernels.linear_attention.cuda.channel_decay import LONGEST_SEGMENT, MOST_KEYS
from lingpt.models.architecture import Architecture
from lingpt.models.attention.base import (
    GATE_ACTIVATION,
    GATE_ACTIVATIONS,
    GATE_NORM,
    GATE_NORMS,
    INPUT_GATE,
    VALUE_RESIDUAL,
    Attention,
    GateActivation,
    GateNorm,
    RecurrentState,
    gate_values,
    value_mixture,
)
from lingpt.models.attention.short_conv import SHORT_CONV, WIDTH, apply_short_conv, identity_filter

GATE_RANK = 16


class _InputGate(nn.Linear):
    """A linear layer of few columns, multiplied as a multiple of 8: products with rows that do not begin at
    multiples of 16 bytes are slow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.pad(self.weight, (0, 0, 0, -self.out_features % 8))
        return F.linear(x, weight)[..., : self.out_features]


def _n_head(gla_n_head: int, n_embd: int) -> int:
    return gla_n_head or next(n for n in range(-(-n_embd // MOST_KEYS), n_embd + 1) if n_embd % n == 0)


class GLAAttention(Attention):
    static_step = True
    constant_state = True
    context_parallel = True

    def __init__(
        self,
        config: Architecture,
        layer_idx: int,
        *,
        gla_n_head: Annotated[int, Option(
            "number of heads of `gla`, independent of the model's; 0: the fewest with at most "
            f"{MOST_KEYS} channels of v each", least=0)] = 4,
        gla_expand_k: Annotated[float, Option(
            "width of q and k of `gla` as a part of the model's (FLA's expand_k); 1 doubles its state",
            above=0, most=64)] = 0.5,
        gla_temperature: Annotated[float, Option(
            "τ of `gla`'s decays σ(·)^(1/τ) (FLA's gate_logit_normalizer); larger forgets more slowly",
            above=0, most=4096)] = 16.0,
        gla_unit_qk: Annotated[bool, Option("q and k of unit length in `gla`, as in `ours*`")] = False,
        gla_backend: Annotated[Literal["auto", "fla"], Option(
            "what trains `gla`: `fla` are FLA's kernels, on a GPU; `auto` our own, or PyTorch's")] = "auto",
        short_conv: Annotated[bool, SHORT_CONV] = False,
        gate_activation: Annotated[GateActivation, GATE_ACTIVATION] = "silu",
        gate_norm: Annotated[GateNorm, GATE_NORM] = "layer",
        input_gate: Annotated[bool, INPUT_GATE] = False,
        value_residual: Annotated[bool, VALUE_RESIDUAL] = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_activation = GATE_ACTIVATIONS[gate_activation]
        self.backend, self.temperature, self.unit_qk = gla_backend, gla_temperature, gla_unit_qk
        self.n_head = _n_head(gla_n_head, config.n_embd)
        self.d_k, self.d_v = int(gla_expand_k * config.n_embd), config.n_embd
        self.qkvr = nn.Linear(config.n_embd, 2 * self.d_k + 2 * self.d_v, bias=config.bias)
        self.conv = nn.Parameter(identity_filter(2 * self.d_k + self.d_v)) if short_conv else None
        self.gate_down = nn.Linear(config.n_embd, GATE_RANK, bias=False)
        self.gate_up = nn.Linear(GATE_RANK, self.d_k, bias=True)
        self.input_gate = _InputGate(config.n_embd, self.n_head, bias=False) if input_gate else None
        self.value_mix = nn.Parameter(torch.zeros(self.n_head)) if value_residual else None
        self.norm = GATE_NORMS[gate_norm](self.d_v // self.n_head, eps=config.norm_eps)
        self.proj = nn.Linear(self.d_v, config.n_embd, bias=config.bias)

    @classmethod
    def check(cls, config: Architecture, *, gla_n_head: int, gla_expand_k: float, **_: Any) -> None:
        d_k, n_head = gla_expand_k * config.n_embd, _n_head(gla_n_head, config.n_embd)
        if config.n_embd % n_head or d_k % n_head:
            raise UserError(
                f"gla_n_head={n_head} must divide n_embd={config.n_embd} and "
                f"gla_expand_k={gla_expand_k:g} times it, {d_k:g}"
            )

    @classmethod
    def v_width(cls, config: Architecture) -> int:
        return config.n_embd

    @classmethod
    def kernel_name(
        cls,
        config: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        *,
        gla_n_head: int,
        gla_expand_k: float,
        gla_backend: str,
        **_: Any,
    ) -> str:
        n_head = _n_head(gla_n_head, config.n_embd)
        Dk, Dv = (int(part * config.n_embd) // n_head for part in (gla_expand_k, 1))
        try:
            return choose(gla_backend, torch.empty(1, 2, 1, Dk, device=device, dtype=dtype), Dv)
        except UserError as error:
            raise UserError(f"model.gla_backend: {error}") from error

    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: RecurrentState | None = None,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, N, C]` → the same; cos and sin are not read. `state.value`: `[B, H, d_k/H, d_v/H]` in fp32."""
        qkv, r = self.qkvr(x_BNC).split((2 * self.d_k + self.d_v, self.d_v), dim=-1)
        mixture = value_mixture(2 * self.d_k, values_BNV, self.value_mix)
        qkv = apply_short_conv(
            qkv, self.conv, state, cu_seqlens, silu=True, context=self.context, mixture=mixture
        )
        q, k, v = (  # [B, N, H, d_k/H or d_v/H]
            t.unflatten(-1, (self.n_head, -1)) for t in qkv.split((self.d_k, self.d_k, self.d_v), dim=-1)
        )
        if self.unit_qk:
            q, k = (F.normalize(t.float(), dim=-1).to(v.dtype) for t in (q, k))
        if self.input_gate is not None:
            v = gate_values(v, self.input_gate(x_BNC))
        log_gate = F.logsigmoid(self.gate_up(self.gate_down(x_BNC)).float()) / self.temperature
        if v.dtype == torch.bfloat16:  # its logits have no more bits
            log_gate = log_gate.bfloat16()
        log_gate = log_gate.unflatten(-1, (self.n_head, -1))
        backend = self.backend if self.trains(state) else "auto"
        if state is None:
            o = gated_linear_attention(
                q, k, v, log_gate, cu_seqlens=cu_seqlens, context=self.context, backend=backend
            )
        else:
            o, state.value = gated_linear_attention_with_state(
                q, k, v, log_gate, initial_state=state.value, cu_seqlens=cu_seqlens, backend=backend
            )
        return self.proj(self.gate_activation(r) * self.norm(o).flatten(2))

    def flops_per_token(self, seq_len: int) -> int:
        H = self.n_head
        return gated_linear_attention_flops(1, seq_len, H, self.d_k // H, self.d_v // H) // seq_len

    def saved_activations_per_token(self) -> int:
        # qkvr; the gates and what their logarithm is of; the states between segments, in fp32;
        # o and the input of `proj`
        states = 2 * self.d_k * self.d_v // self.n_head // LONGEST_SEGMENT
        saved = 2 * (self.d_k + self.d_v) + 2 * self.d_k + states + 2 * self.d_v
        if self.conv is not None:
            saved += 2 * (2 * self.d_k + self.d_v)  # the convolution's input, and the SiLU's
        if self.unit_qk:
            saved += 2 * self.d_k + 4 * self.n_head  # q and k before it, and their lengths in fp32
        if self.input_gate is not None:
            saved += 2 * self.d_v + self.n_head  # v before it, with and without the SiLU, and the gate
        if self.value_mix is not None and self.gate_activation is F.silu:  # a sigmoid needs no qkvr besides
            saved += 2 * (self.d_k + self.d_v)  # the new q, k and v, and u − v: not on a GPU
        return saved

    def sent_elements(self, tokens: int, pieces: int) -> int:
        conv = 0 if self.conv is None else (WIDTH - 1) * (2 * self.d_k + self.d_v)
        return 2 * self.d_k * (self.d_v // self.n_head + 1) + conv  # the state and its decay

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        return RecurrentState()

    def initial_constants(self) -> dict[str, float | torch.Tensor]:
        conv = identity_filter(2 * self.d_k + self.d_v)
        return {"conv": conv, "input_gate.weight": 0.0, "value_mix": 0.0}
