"""`unified`: named recurrences S_t = diag(a_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t, on one operator
(kernels/unified_linear_attention.py). `form` selects the decay a_t, the input's scale and what normalises y;
`dfw` also decays the channels of v, S_{t−1} diag(b_t).

Each is the recurrence of its paper in the same layer, so that losses differ by the recurrence alone:
Pythia's projections, q scaled by 1/√D, y normalised per head behind an output gate (`linear` and
`linear-softplus` have their own normaliser and no gate). Rotary embeddings only where the paper has them.
Decays that a head's channels share are copied to each for the CUDA kernels; that of `dfw` is the one in fp32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingpt.common.options import Option
from lingpt.kernels.channel_decay_operator import gated_linear_attention_flops
from lingpt.kernels.numerics import first_tokens, state_dtype
from lingpt.kernels.unified_linear_attention import choose, unified_linear_attention_with_state
from lingpt.models.architecture import Architecture
from lingpt.models.attention.base import QKVAttention, RecurrentState
from lingpt.models.attention.ours_decay import log_decay, logit
from lingpt.models.attention.short_conv import SHORT_CONV, apply_short_conv, identity_filter
from lingpt.models.attention.softmax import apply_rope

TEMPERATURE = 16.0  # of the gates of GLA and of gated retention
GATE_CAP = 15.0  # of mLSTM's input gate (xLSTM-7B, arXiv 2503.13427)
Gates = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Form:
    """A named recurrence.

    decay, source: in words and where from, for docs/methods.md. start: (H, D) → the initial bias of the
    gates, of shape [gates, H] or [gates, H, D] per channel. gates: (z, k, bias) → k and the log decays
    [B, N, H] or [B, N, H, D], with `right` [B, N, 2, H, D], of k's and of v's channels; z = x W of the shape
    of the bias, in fp32, without it. scales_k: whether `gates` scale k. constant: whether the decay is
    RetNet's, a constant of each head. normalise: y is divided by |q·n_t|, n_t = a_t n_{t−1} + k_t, by at
    least 1 (`mlstm`), or by q·n_t, which needs positive features (`linear`).
    """

    decay: str
    source: str
    start: Callable[[int, int], Tensor] | None = None
    gates: Gates | None = None
    features: Callable[[Tensor], Tensor] = _identity
    scales_k: bool = False
    rope: bool = False
    constant: bool = False
    right: bool = False
    normalise: Literal["none", "sum", "at least 1"] = "none"


def _per_head(H: int, D: int) -> Tensor:
    """The logits of RetNet's decays, to the power that the temperature undoes."""
    return logit(log_decay(H).double() * TEMPERATURE)[None]


def _per_channel(H: int, D: int) -> Tensor:
    """Decays of 1 − 2^−1 … 1 − 2^−10, over the channels of each head."""
    log_alpha = torch.log1p(-torch.exp2(-torch.linspace(1, 10, D, dtype=torch.float64)))
    return logit(log_alpha).expand(1, H, D).clone()


def _rwkv(H: int, D: int) -> Tensor:
    """ln(−ln a) from −6 to −1."""
    return torch.linspace(-6, -1, D).expand(1, H, D).clone()


def _mamba(H: int, D: int) -> Tensor:
    """Time steps from 0.001 to 0.1, before their softplus, and ln A, A from 1 to 16; over the heads."""
    dt = torch.logspace(-3, -1, H)
    return torch.stack((dt + torch.log(-torch.expm1(-dt)), torch.linspace(1, 16, H).log()))


def _mlstm(H: int, D: int) -> Tensor:
    """Forget gates σ(3) to σ(6) over the heads, input gates e^−10."""
    return torch.stack((torch.linspace(3, 6, H), torch.full((H,), -10.0)))


def _mamba_gates(z: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dt = F.softplus(z[..., 0, :] + bias[0])
    return dt.unsqueeze(-1) * k, -bias[1].exp() * dt


def _mlstm_gates(z: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    forget, write = (z + bias).unbind(-2)
    return (GATE_CAP * torch.tanh(write / GATE_CAP)).exp().unsqueeze(-1) * k, F.logsigmoid(forget)


def _hgrn_gates(z: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    log_f = F.logsigmoid((z + bias).squeeze(-3))
    return -torch.expm1(log_f), log_f


def _one_plus_elu(x: Tensor) -> Tensor:
    """1 + elu(x), positive in any dtype: 1 + elu(−8) would be 0 in bf16."""
    return x.clamp(max=0).exp() + F.relu(x)


_LINEAR = "Katharopoulos et al., arXiv 2006.16236"
FORMS = {
    "linear": Form("1; q and k through 1 + elu; y_t / q_t·n_t", _LINEAR, features=_one_plus_elu,
                   normalise="sum"),
    "linear-softplus": Form("1; q and k through softplus; y_t / q_t·n_t", _LINEAR, features=F.softplus,
                            normalise="sum"),
    "linear-unnormalised": Form("1; q and k through 1 + elu", _LINEAR, features=_one_plus_elu),
    "linear-softplus-unnormalised": Form("1; q and k through softplus", _LINEAR, features=F.softplus),
    "linear-identity": Form("1", _LINEAR),
    "retnet": Form("γ_h = 1 − 2^(−5 − 8h/H)", "RetNet, arXiv 2307.08621", rope=True, constant=True),
    "lightning": Form("γ_h as in `retnet`; q and k through a SiLU", "TransNormerLLM, arXiv 2307.14995",
                      features=F.silu, constant=True),
    "gated-retention": Form("σ(x W)^(1/16) per head", "YOCO, arXiv 2405.05254", _per_head, rope=True,
                            gates=lambda z, k, bias: (k, F.logsigmoid((z + bias)[..., 0, :]) / TEMPERATURE)),
    "mamba2": Form("exp(−A Δ_t) per head; Δ_t k_t", "Mamba-2, arXiv 2405.21060", _mamba, _mamba_gates,
                   scales_k=True),
    "mlstm": Form("σ(f_t) per head; exp(i_t) k_t, i_t below 15; y_t / max(|q_t·n_t|, 1)",
                  "xLSTM, arXiv 2405.04517", _mlstm, _mlstm_gates, scales_k=True, normalise="at least 1"),
    "hgrn2": Form("f_t = σ(x W) per channel, without the lower bound γ; k_t = 1 − f_t, and the projection of "
                  "k is not read",
                  "HGRN2, arXiv 2404.07904", _per_channel, _hgrn_gates, features=F.silu),
    "rwkv6": Form("exp(−exp(x W)) per channel, without the bonus of the present token",
                  "Eagle and Finch, arXiv 2404.05892", _rwkv,
                  gates=lambda z, k, bias: (k, -(z + bias).squeeze(-3).exp())),
    "gateloop": Form("σ(x W) per channel, real where the paper has complex ones",
                     "GateLoop, arXiv 2311.01927", _per_channel,
                     gates=lambda z, k, bias: (k, F.logsigmoid((z + bias).squeeze(-3)))),
    "dfw": Form("σ(x W) per channel of the key, and σ(x W′) per channel of the value",
                "Mao, arXiv 2210.04243", lambda H, D: _per_channel(H, D).repeat(2, 1, 1),
                gates=lambda z, k, bias: (k, F.logsigmoid(z + bias)), right=True),
}  # fmt: skip


class UnifiedAttention(QKVAttention):
    """`decay_proj` and `decay_bias` give the gates of the forms that have some."""

    static_step = True
    constant_state = True

    def __init__(
        self,
        config: Architecture,
        layer_idx: int,
        *,
        form: Annotated[
            Literal[*FORMS],  # type: ignore[valid-type]
            Option("which recurrence `unified` is; docs/methods.md lists them"),
        ] = "gated-retention",
        short_conv: Annotated[bool, SHORT_CONV] = False,
    ) -> None:
        super().__init__(config, layer_idx)
        H, D, self.form = config.n_head, config.head_size, FORMS[form]
        self.decay_proj, self.decay_bias = None, None
        if self.form.start is not None:
            bias = self.form.start(H, D)
            self.gate_shape = bias.shape
            gates = bias.numel() if form != "mamba2" else H  # its A does not depend on x
            self.decay_proj = nn.Linear(config.n_embd, gates, bias=False)
            # As a vector it has no weight decay.
            self.decay_bias = nn.Parameter(torch.empty(bias.numel()).copy_(bias.flatten()))
        self.conv = nn.Parameter(identity_filter(sum(config.qkv_sizes))) if short_conv else None
        self.add_output_gate(self.form.normalise != "sum", "silu", "layer")
        self.add_qk_norm(config.norm_qk)
        self.register_buffer("log_decay", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        self.log_decay = log_decay(self.config.n_head).to(device) if self.form.constant else None

    @classmethod
    def kernel_name(
        cls, config: Architecture, device: torch.device, dtype: torch.dtype, *, form: str, **_: Any
    ) -> str:
        Dv = config.head_size + (FORMS[form].normalise != "none")
        q = torch.empty(1, 2, 1, config.head_size, device=device, dtype=dtype)
        return choose("auto", q, Dv, FORMS[form].right)

    def recurrence(
        self,
        x_BNC: Tensor,
        cos_NR: Tensor,
        sin_NR: Tensor,
        state: RecurrentState | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v `[B, N, H, D]`, the log decays `[B, N, H]` or `[B, N, H, D]` in fp32 (float64), and
        those of v's channels, if there are any."""
        H, G = self.config.n_head, self.config.n_query_groups
        rows = apply_short_conv(self.qkv(x_BNC), self.conv, state, cu_seqlens, silu=True)
        q, k, v = self.split_heads(rows)
        if self.form.rope:
            q, k = apply_rope(q, cos_NR, sin_NR), apply_rope(k, cos_NR, sin_NR)
        q, k = self.form.features(q), self.form.features(k)
        k, v = (t.repeat_interleave(H // G, dim=2) for t in (k, v))
        left, right = x_BNC.new_zeros(*x_BNC.shape[:2], H, dtype=state_dtype(x_BNC.dtype)), None
        if self.decay_proj is not None and self.form.gates is not None:
            assert self.decay_bias is not None
            z = self.decay_proj(x_BNC).to(left.dtype).unflatten(-1, (-1, *self.gate_shape[1:]))
            k, left = self.form.gates(z, k, self.decay_bias.view(self.gate_shape).to(left.dtype))
            if self.form.right:
                left, right = left.unbind(-3)
        elif self.log_decay is not None:
            left = left + self.log_decay
        if cu_seqlens is not None:  # nothing before a document's first token has weight
            first = first_tokens(cu_seqlens, *x_BNC.shape[:2])
            left = left.masked_fill(first.view(*first.shape, *[1] * (left.dim() - 2)), -math.inf)
        return q / math.sqrt(q.shape[-1]), k.to(q.dtype), v, left, right

    def forward(
        self,
        x_BNC: Tensor,
        cos_NR: Tensor,
        sin_NR: Tensor,
        state: RecurrentState | None = None,
        cu_seqlens: Tensor | None = None,
        values_BNV: Tensor | None = None,
    ) -> Tensor:
        """`[B, N, C]` → the same; `state.value`: `[B, H, D, D]` in fp32, `[B, H, D, D + 1]` with a
        normaliser."""
        q, k, v, left, right = self.recurrence(x_BNC, cos_NR, sin_NR, state, cu_seqlens)
        if self.form.normalise != "none":
            v = F.pad(v, (0, 1), value=1.0)
        before = None if state is None else state.value
        y, after = unified_linear_attention_with_state(q, k, v, left, right, initial_state=before)
        if state is not None:
            state.value = after
        if self.form.normalise != "none":
            y, sums = y.split((self.config.head_size, 1), dim=-1)
            y = y / (sums if self.form.normalise == "sum" else sums.abs().clamp(min=1.0))
        return self.gate_and_project(y, x_BNC)

    def flops_per_token(self, seq_len: int) -> int:
        H, D = self.config.n_head, self.config.head_size
        return gated_linear_attention_flops(1, seq_len, H, D, D) // seq_len

    def saved_activations_per_token(self) -> int:
        # q, k, v and y; the log decays and the zeros of the value's, in fp32; the convolution's and its
        # SiLU's input; the output gate's
        width, projected = self.config.qkv_sizes[0], sum(self.config.qkv_sizes)
        decays = 0 if self.decay_bias is None else self.decay_bias.numel()
        saved = 4 * width + 2 * (2 * decays + 2 * self.config.n_head)
        if self.form.right:  # its kernel keeps them in fp32
            saved += 4 * width
        if self.form.features is not _identity:  # what q and k are computed from
            saved += sum(self.config.qkv_sizes[:2])
        elif self.form.scales_k:
            saved += self.config.qkv_sizes[1]
        if self.form.normalise != "none":  # v with its column of ones; y before it is divided
            saved += 2 * width
        saved += 0 if self.conv is None else 2 * projected
        return saved + (0 if self.gate_proj is None else 2 * width)

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        return RecurrentState()

    def initial_constants(self) -> dict[str, float | Tensor]:
        constants: dict[str, float | Tensor] = {"conv": identity_filter(sum(self.config.qkv_sizes))}
        if self.form.start is not None:
            constants["decay_bias"] = self.form.start(self.config.n_head, self.config.head_size).flatten()
        return constants
