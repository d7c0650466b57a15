"""`ours-gated`: `ours` with a data-dependent decay per token and head.

    o_i = Σ_{j≤i} (1 + b q̂_i·k̂_j) exp(g_{j+1} + … + g_i) v_j / Σ_{j≤i} (the same weights)
    g_t = logsigmoid(x_t·w_h + c_h)

This is the scalar gate of Mamba-2 and mLSTM with the normalised `1 + b·x`. c_h is initialised to RetNet's
constant decays (`ours-decay`), ln(γ_h / (1 − γ_h)); as a bias it has no weight decay.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lingpt.kernels.linear_attention.call import logarithm_of_gate
from lingpt.models.architecture import Architecture
from lingpt.models.attention.base import RecurrentState, gate_values, is_plain_linear
from lingpt.models.attention.ours import OursAttention
from lingpt.models.attention.ours_decay import log_decay, logit

CACHE_LINE = 64  # 16-bit numbers


class OursGatedAttention(OursAttention):
    """`ours` with the parameters `attn.decay_proj.weight` `[H, C]` and `attn.decay_bias` `[H]`."""

    token_decay = True

    def __init__(self, config: Architecture, layer_idx: int, **options: Any) -> None:
        super().__init__(config, layer_idx, **options)
        self.decay_proj = nn.Linear(config.n_embd, config.n_head, bias=False)
        self.decay_bias = nn.Parameter(torch.empty(config.n_head).copy_(decay_bias(config.n_head)))

    def operator_inputs(
        self,
        x_BNC: torch.Tensor,
        state: RecurrentState | None,
        cu_seqlens: torch.Tensor | None,
        values_BNV: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The operator's inputs. In training, q, k, v and the gates come from one matrix product, so that x
        is read once and its gradient written once.

        If one of the layers is more than its weights (LoRA, a parametrisation, a hook), or q, k and v are
        not packed, both are called instead.
        """
        if state is None and self.is_packed and all(map(is_plain_linear, self.projections())):
            gates = {"gate_bias": self.decay_bias, "head_size": self.config.head_size}
            return self.project_qkv_and_decay(x_BNC, cu_seqlens, values_BNV), gates
        log_decay = logarithm_of_gate(self.decay_proj(x_BNC), self.decay_bias)
        return self.packed_qkv(x_BNC, state, cu_seqlens, values_BNV), {"log_decay": log_decay}

    def project_qkv_and_decay(
        self,
        x_BNC: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        values_BNV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, N, 3·H·D + P]`: q, k and v (convolved), the gates before their bias, those of v, if it has
        some, and zeros as padding."""
        fill = self.row_fill()
        weight = F.pad(torch.cat([layer.weight for layer in self.projections()]), (0, 0, 0, fill))
        bias = None if self.qkv.bias is None else F.pad(self.qkv.bias, (0, self.gates() + fill))
        rows = self.mix_and_convolve(F.linear(x_BNC, weight, bias), values_BNV, None, cu_seqlens)
        if self.input_gate is None:
            return rows
        H, D = self.config.n_head, self.config.head_size
        qk, v, decay, behind = rows.split((2 * H * D, H * D, H, H + fill), dim=2)
        v = gate_values(v.unflatten(2, (H, D)), behind[..., :H]).flatten(2)
        return torch.cat((qk, v, decay, behind), dim=2)

    def projections(self) -> list[nn.Linear]:
        """The layers whose products are one."""
        return [self.qkv, self.decay_proj, *([self.input_gate] if self.input_gate is not None else [])]

    def gates(self) -> int:
        """The number of gates after q, k and v."""
        return self.config.n_head * (len(self.projections()) - 1)

    def row_fill(self) -> int:
        """The number of zeros after the gates, which pad rows to whole 128-byte cache lines (in 16-bit
        numbers).

        The kernel and tensor cores need multiples of 16 bytes only, but padding to no more is the likely
        cause of a slower step of pythia-1.4b (docs/results/training).
        """
        return -(3 * self.config.n_head * self.config.head_size + self.gates()) % CACHE_LINE

    def saved_activations_per_token(self) -> int:
        # Three fp32 numbers per head that the kernel derives from the gates; the columns after q, k and v,
        # once more for each of convolution and input gate that they pass through.
        H = self.config.n_head
        copies = 1 + (self.conv is not None) + (self.input_gate is not None)
        behind = (self.gates() + self.row_fill()) * copies if self.is_packed else H
        return super().saved_activations_per_token() + 6 * H + behind

    def initial_constants(self) -> dict[str, float | torch.Tensor]:
        return super().initial_constants() | {"decay_bias": decay_bias(self.config.n_head)}


def decay_bias(n_head: int) -> torch.Tensor:
    """`ln(γ_h / (1 − γ_h))`, `[H]` in fp32, with RetNet's γ_h."""
    return logit(log_decay(n_head).double())
