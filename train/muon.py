"""Muon (Jordan 2024) on the matrices of the blocks and AdamW on the rest, as one optimizer."""

import torch


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps both; their groups, Muon's first, and their state are this optimizer's."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.parts = (muon, adamw)
        # Muon has no fused form; Parallel.load_optimizer reads both keys of every group.
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": False, "foreach": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # Set anew, as `load_state_dict` replaces both.
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            part.state, part.param_groups = self.state, groups
            part.step()
