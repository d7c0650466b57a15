"""`ours`: normalised linear attention with the kernel `1 + b·x` on unit q and k (LinGPT's paper, §3–4).

    o_i = Σ_{j≤i} (1 + b q̂_i·k̂_j) v_j / Σ_{j≤i} (1 + b q̂_i·k̂_j)

The paper's `a + b·x` has a redundant coefficient: with the normaliser only b/a matters. Rotary embeddings are
Pythia's, applied inside the operator, which reads the fused projection without a transpose, split or copy.

Its options are not in the paper; `ours-decay` and `ours-gated` have them too:

    learnable_b     b per head is learned; without the normaliser also a
    output_gate     y = W_O (silu(x W_r) ⊙ LayerNorm_head(o)), as in GLA (base.py)
    gate_activation sigmoid instead of that SiLU (Kimi Linear, arXiv 2510.26692)
    gate_norm       RMSNorm instead of that LayerNorm, as in FLA's layers, or none
    normalize       false (only with output_gate, and its default then): o_i = Σ_{j≤i} (a + b q̂_i·k̂_j) v_j.
                    LayerNorm removes any factor per token, such as the normaliser; a and b may then have any
                    size and sign. It learns as well (docs/results/gate/learning)
    short_conv      a causal convolution of width 4 over q, k and v (short_conv.py)
    input_gate      each token's v, convolved, times 2·sigmoid(x·w_h), a number per head that starts at 1; the
                    normaliser does not count it
    value_residual  v, before the convolution, plus σ(p)·(u − v), p a number per head that starts at 0; u is a
                    projection of the token embeddings, one for all layers (`value_mixture` in base.py)
    conv_silu       a SiLU after it, as in FLA's GLA layer and in Mamba-2 (arXiv 2405.21060)
    constant        false (only without the normaliser): a = 0. `ours-decay` is then RetNet's retention (arXiv
                    2307.08621) with unit q and k, `ours-gated` simple GLA, the same as Mamba-2's SSD
    backend         the operator's in training: `cuda`, `chunkwise` (PyTorch), or `auto`. Scores and decoding
                    always choose, as a checkpoint may be on another device
"""

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from lingpt.common.errors import UserError
from lingpt.common.options import Option
from lingpt.kernels.linear_attention import (
    chunkwise,
    linear_attention_flops,
    linear_attention_qkv,
    linear_attention_qkv_with_state,
)
from lingpt.kernels.linear_attention.call import Call
from lingpt.kernels.linear_attention.operator import choose
from lingpt.models.architecture import Architecture
from lingpt.models.attention.base import (
    GATE_ACTIVATION,
    GATE_NORM,
    INPUT_GATE,
    VALUE_RESIDUAL,
    GateActivation,
    GateNorm,
    QKVAttention,
    RecurrentState,
    gate_values,
)
from lingpt.models.attention.short_conv import SHORT_CONV, WIDTH, identity_filter


class OursAttention(QKVAttention):
    """Has LitGPT's parameters and keys. `learnable_b` adds `attn.b_offset` `[H]`, initially 0, b = 1 +
    b_offset; without the normaliser also `attn.a_offset`.

    Stored as offsets so that a and b start at exactly 1 and small steps are not lost in bf16.
    """

    static_step = True
    constant_state = True
    context_parallel = True
    token_decay: ClassVar[bool] = False  # whether decays are per token
    log_decay: torch.Tensor | None  # None in `ours`; a buffer that moves with the model in `ours-decay`

    def __init__(
        self,
        config: Architecture,
        layer_idx: int,
        *,
        learnable_b: Annotated[bool, Option(
            "learn the coefficient b of `ours*` per head (without `normalize` a, too) instead of using 1"
        )] = False,
        output_gate: Annotated[bool, Option("a gate and a norm on the output of `ours*`, as in GLA")] = False,
        gate_activation: Annotated[GateActivation, GATE_ACTIVATION] = "silu",
        gate_norm: Annotated[GateNorm, GATE_NORM] = "layer",
        normalize: Annotated[bool | None, Option(
            "divide by the weights' sum in `ours*`; by default without `output_gate`, whose norm will do"
        )] = None,
        short_conv: Annotated[bool, SHORT_CONV] = False,
        input_gate: Annotated[bool, INPUT_GATE] = False,
        value_residual: Annotated[bool, VALUE_RESIDUAL] = False,
        conv_silu: Annotated[bool, Option("a SiLU after the convolution of `ours*`, as in `gla`")] = False,
        constant: Annotated[bool, Option(
            "the 1 in the `1 + b·x` of `ours*`; without it, behind `output_gate`, RetNet or simple GLA"
        )] = True,
        backend: Annotated[Literal["auto", "cuda", "chunkwise"], Option(
            "what trains `ours*`: the CUDA kernel, or the same in PyTorch; `auto` takes the first if it can"
        )] = "auto",
    ) -> None:  # fmt: skip
        super().__init__(config, layer_idx)
        self.normalize = normalize = self.normalizes(normalize, output_gate, gate_norm)
        self.constant, self.conv_silu, self.backend = constant, conv_silu, backend
        free_a = learnable_b and constant and not normalize
        self.b_offset = nn.Parameter(torch.zeros(config.n_head)) if learnable_b else None
        self.a_offset = nn.Parameter(torch.zeros(config.n_head)) if free_a else None
        self.conv = nn.Parameter(identity_filter(sum(config.qkv_sizes))) if short_conv else None  # [4, W]
        self.input_gate = nn.Linear(config.n_embd, config.n_head, bias=False) if input_gate else None
        self.add_value_residual(value_residual)
        self.add_output_gate(output_gate, gate_activation, gate_norm)
        self.add_qk_norm(config.norm_qk)
        self.register_buffer("log_decay", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    @staticmethod
    def normalizes(normalize: bool | None, output_gate: bool, gate_norm: GateNorm) -> bool:
        """Whether to normalise: the option `normalize`, or its default."""
        return not (output_gate and gate_norm != "none") if normalize is None else normalize

    @classmethod
    def check(
        cls,
        config: Architecture,
        *,
        normalize: bool | None,
        output_gate: bool,
        gate_norm: GateNorm,
        short_conv: bool,
        conv_silu: bool,
        constant: bool,
        **_: Any,
    ) -> None:
        if conv_silu and not short_conv:
            raise UserError("conv_silu=True needs short_conv=True, behind which the SiLU stands")
        normalizes = cls.normalizes(normalize, output_gate, gate_norm)
        if normalizes and not constant:
            raise UserError(
                "constant=False needs output_gate=True without the normaliser: a sum of signed q̂·k̂ may be 0"
            )
        if not normalizes and not (output_gate and gate_norm != "none"):
            raise UserError(
                "normalize=False needs output_gate=True and its norm: the output must be normalised by one "
                "of them"
            )

    @classmethod
    def kernel_name(
        cls, config: Architecture, device: torch.device, dtype: torch.dtype, *args: Any, **options: Any
    ) -> str:
        """`cuda`, or `chunkwise`, the PyTorch form."""
        rope = torch.empty(1, config.rope_n_elem, device=device)
        call = Call(
            qkv=torch.empty(1, 1, 3, config.n_head, config.head_size, device=device, dtype=dtype),
            cos=rope,
            sin=rope,
            token_log_decay=torch.empty(1, 1, config.n_head, device=device) if cls.token_decay else None,
            normalize=cls.normalizes(options["normalize"], options["output_gate"], options["gate_norm"]),
            backend=options["backend"],
        )
        try:
            return "chunkwise" if choose(call) is chunkwise else "cuda"
        except UserError as error:
            raise UserError(f"model.backend: {error}; use chunkwise, or auto") from error

    def a(self) -> float | torch.Tensor:
        """The constant: 1.0, or `[H]` in fp32, unbounded; 0.0 without `constant`."""
        return float(self.constant) if self.a_offset is None else 1.0 + self.a_offset.float()

    def b(self) -> float | torch.Tensor:
        """The coefficient: 1.0, or `[H]` in fp32, within [-1, 1]; unbounded without the normaliser.

        Clamped in the forward pass with a straight-through gradient: with a plain clamp, the gradient outside
        of the interval would be zero for ever.
        """
        if self.b_offset is None:
            return 1.0
        b = 1.0 + self.b_offset.float()
        if not self.normalize:
            return b
        return b + (b.clamp(-1.0, 1.0) - b).detach()

    def operator_inputs(
        self,
        x_BNC: torch.Tensor,
        state: RecurrentState | None,
        cu_seqlens: torch.Tensor | None,
        values_BNV: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The operator's inputs: qkv `[B, N, 3, H, D]`, convolved, and the arguments that give the decay."""
        return self.packed_qkv(x_BNC, state, cu_seqlens, values_BNV), {"log_decay": self.log_decay}

    @property
    def is_packed(self) -> bool:
        """Whether the projection's rows are what the operator reads: no norms, and one head of k and v for
        each of q."""
        return self.q_norm is None and self.config.n_query_groups == self.config.n_head

    def packed_qkv(
        self,
        x_BNC: torch.Tensor,
        state: RecurrentState | None,
        cu_seqlens: torch.Tensor | None,
        values_BNV: torch.Tensor | None,
    ) -> torch.Tensor:
        """qkv `[B, N, 3, H, D]`, convolved, v behind its gate; updates the state's `conv`. A view of the
        projection's output, or a copy in which k and v are repeated for all heads of q that share them."""
        H, G, D = self.config.n_head, self.config.n_query_groups, self.config.head_size
        rows = self.mix_and_convolve(self.qkv(x_BNC), values_BNV, state, cu_seqlens)
        if self.is_packed:
            qkv = rows.unflatten(2, (3, H, D))
        else:
            q, k, v = self.split_heads(rows)
            k, v = (t.unsqueeze(3).expand(-1, -1, -1, H // G, -1) for t in (k, v))
            qkv = torch.stack((q.unflatten(2, (G, -1)), k, v), dim=2).flatten(3, 4)
        if self.input_gate is None:
            return qkv
        qk, v = qkv.split((2, 1), dim=2)
        return torch.cat((qk, gate_values(v, self.input_gate(x_BNC).unsqueeze(2))), dim=2)

    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: RecurrentState | None = None,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, N, C]` → the same; `state.value` is the operator's state after the last token, fp32."""
        qkv, decay = self.operator_inputs(x_BNC, state, cu_seqlens, values_BNV)
        inputs = qkv, cos_NR, sin_NR, self.b()
        backend = self.backend if self.trains(state) else "auto"
        options: dict[str, Any] = dict(a=self.a(), normalize=self.normalize, backend=backend, **decay)
        if state is None:
            o_BNHD = linear_attention_qkv(*inputs, cu_seqlens=cu_seqlens, context=self.context, **options)
        else:
            o_BNHD, state.value = linear_attention_qkv_with_state(
                *inputs, cu_seqlens=cu_seqlens, initial_state=state.value, **options
            )
        return self.gate_and_project(o_BNHD, x_BNC)

    def flops_per_token(self, seq_len: int) -> int:
        return linear_attention_flops(1, seq_len, self.config.n_head, self.config.head_size) // seq_len

    def saved_activations_per_token(self) -> int:
        H, width, projected = self.config.n_head, self.config.qkv_sizes[0], sum(self.config.qkv_sizes)
        saved = 4 * width + 2 * H  # qkv, o, and the normaliser in fp32
        if self.conv is not None:
            saved += projected * (2 if self.conv_silu else 1)  # the convolution's input, and the SiLU's
        if self.input_gate is not None:
            saved += projected + H  # what it multiplies, and the gate
        if self.value_mix is not None and self.conv is None:
            saved += self.config.qkv_sizes[2]  # u − v
        if self.q_norm is not None:
            saved += projected  # the norms' input
        if self.gate_proj is not None:
            saved += 2 * width  # the gate before its silu, and the input of `proj`
        return saved

    def sent_elements(self, tokens: int, pieces: int) -> int:
        D = self.config.head_size
        conv = 0 if self.conv is None else (WIDTH - 1) * sum(self.config.qkv_sizes)
        return 2 * self.config.n_head * (D * D + 2 * D + 2) + conv  # the state and its decay

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        return RecurrentState()

    def initial_constants(self) -> dict[str, float | torch.Tensor]:
        conv = identity_filter(sum(self.config.qkv_sizes))
        zeros = dict.fromkeys(("a_offset", "b_offset", "input_gate.weight", "value_mix"), 0.0)
        return zeros | {"conv": conv}
