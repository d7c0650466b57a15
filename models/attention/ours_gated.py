"""`ours-gated`: `ours` with a decay that each token gives for itself, one number a head.

    o_i = Σ_{j≤i} (1 + b q̂_i·k̂_j) exp(g_{j+1} + … + g_i) v_j / Σ_{j≤i} (the same weights)
    g_t = logsigmoid(x_t·w_h + c_h)

The scalar gate of Mamba-2 and mLSTM on the normalised `1 + b·x`. c_h starts at RetNet's constant decays
(`ours-decay`): ln(γ_h / (1 − γ_h)); it is a bias, so it has no weight decay.
"""

import litgpt
import torch
import torch.nn.functional as F
from torch import nn

from lingpt.models.attention.ours import OursAttention
from lingpt.models.attention.ours_decay import log_decay


class OursGatedAttention(OursAttention):
    """`ours` and, per head, `attn.decay_proj.weight` `[H, C]` and `attn.decay_bias` `[H]`."""

    token_decay = True

    def __init__(self, config: litgpt.Config, layer_idx: int, **options: bool) -> None:
        super().__init__(config, layer_idx, **options)
        self.decay_proj = nn.Linear(config.n_embd, config.n_head, bias=False)
        self.decay_bias = nn.Parameter(decay_bias(config.n_head))

    def decay(self, x_BNC: torch.Tensor) -> torch.Tensor:
        # In fp32 from the sum on: γ is within 2⁻¹³ of 1.
        return F.logsigmoid(self.decay_proj(x_BNC).float() + self.decay_bias.float())

    def saved_per_token(self) -> int:
        # The sum, its logsigmoid, and three that the kernel makes of it, in fp32.
        return super().saved_per_token() + 10 * self.config.n_head

    def own_parameters(self) -> dict[str, float | torch.Tensor]:
        return super().own_parameters() | {"decay_bias": decay_bias(self.config.n_head)}


def decay_bias(n_head: int) -> torch.Tensor:
    """`ln(γ_h / (1 − γ_h))`, `[H]` in fp32, with RetNet's γ_h."""
    log_gamma = log_decay(n_head).double()
    return (log_gamma - torch.log(-torch.expm1(log_gamma))).float()
