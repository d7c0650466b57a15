"""Which parameters weight decay is on: Pythia's recipe, in training and in the small models of MQAR alike."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's: matrices decay; biases, norms and a learnable b (fewer dimensions) don't."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
