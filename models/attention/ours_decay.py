"""`ours-decay`: `ours` with RetNet's constant decay per head, `γ_h = 1 − 2^(−5 − 8h/H)` (arXiv 2307.08621).

A token m positions back has weight `(1 + b q̂·k̂) γ^m`: the first heads attend to tens of tokens, the last to
thousands. The decay is not a parameter: the state-dict keys are those of `ours`.
"""

import torch

from lingpt.models.attention.ours import OursAttention


class OursDecayAttention(OursAttention):
    def reset_buffers(self, device: torch.device) -> None:
        self.log_decay = log_decay(self.config.n_head).to(device)


def log_decay(n_head: int) -> torch.Tensor:
    """`ln γ_h`, `[H]` in fp32, computed in fp64, as γ may be within 2⁻¹³ of 1."""
    head = torch.arange(n_head, dtype=torch.float64, device="cpu")
    return torch.log1p(-torch.exp2(-5.0 - 8.0 * head / n_head)).float()


def logit(log_p: torch.Tensor) -> torch.Tensor:
    """The logit of p in fp32, given ln p in fp64."""
    return (log_p - torch.log(-torch.expm1(log_p))).float()
