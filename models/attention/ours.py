"""`ours`: normalised linear attention with the kernel `1 + b·x` on unit q and k (LinGPT's paper, §3–4).

    o_i = Σ_{j≤i} (1 + b q̂_i·k̂_j) v_j / Σ_{j≤i} (1 + b q̂_i·k̂_j)

The paper's `a + b·x` has one coefficient too many: under the normaliser only b/a counts. Rotary embeddings
are Pythia's, inside the operator, which reads the fused projection as it is: no transpose, split or copy.
"""

from typing import Annotated

import litgpt
import torch
from torch import nn

from lingpt.kernels.linear_attention import linear_attention_flops, linear_attention_qkv
from lingpt.models.attention.base import QKVAttention, RecurrentState


class OursAttention(QKVAttention):
    """LitGPT's parameters and keys; `learnable_b` adds `attn.b_offset` `[H]`, b = 1 + b_offset, at first 0.

    Stored as an offset so that b starts at exactly 1 and small steps are not lost in bf16.
    """

    log_decay: torch.Tensor | None  # None in `ours`; a buffer that moves with the model in `ours-decay`

    def __init__(
        self,
        config: litgpt.Config,
        layer_idx: int,
        *,
        learnable_b: Annotated[
            bool, "learn the coefficient b of `ours` and `ours-decay` per head instead of keeping it at 1."
        ] = False,
    ) -> None:
        super().__init__(config, layer_idx)
        self.b_offset = nn.Parameter(torch.zeros(config.n_head)) if learnable_b else None
        self.register_buffer("log_decay", None, persistent=False)
        self.reset_constants(torch.get_default_device())

    def b(self) -> float | torch.Tensor:
        """The coefficient: 1.0, or `[H]` in fp32 within [-1, 1].

        Clamped forward, its gradient passed as it is: a step out of the interval is held at the edge and can
        come back, where the gradient of a plain clamp would be zero for ever.
        """
        if self.b_offset is None:
            return 1.0
        b = 1.0 + self.b_offset.float()
        return b + (b.clamp(-1.0, 1.0) - b).detach()

    def forward(
        self,
        x_BNC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        state: RecurrentState | None = None,
    ) -> torch.Tensor:
        qkv_BN3HD = self.packed_qkv(x_BNC)
        if state is None:
            o_BNHD = linear_attention_qkv(qkv_BN3HD, cos_NR, sin_NR, self.b(), log_decay=self.log_decay)
        else:
            o_BNHD, state.value = linear_attention_qkv(
                qkv_BN3HD, cos_NR, sin_NR, self.b(),
                log_decay=self.log_decay, initial_state=state.value, return_state=True,
            )  # fmt: skip
        return self.proj(o_BNHD.flatten(2))

    def flops_per_token(self, seq_len: int) -> int:
        return linear_attention_flops(1, seq_len, self.config.n_head, self.config.head_size) // seq_len

    def saved_per_token(self) -> int:
        return 4 * self.config.n_embd + 2 * self.config.n_head  # qkv, o, and the normaliser in fp32

    def new_state(
        self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        return RecurrentState()

    def own_parameters(self) -> dict[str, float]:
        return {} if self.b_offset is None else {"b_offset": 0.0}
