"""Cross-entropy of rows of logits and its gradient, in PyTorch; in cross_entropy_triton.py as a kernel.

A target of IGNORED, as PyTorch has it, is of a token that does not count: no loss and no gradient.
"""

import torch
import torch.nn.functional as F

IGNORED = -100


def loss_and_gradient(logits_RV: torch.Tensor, targets_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses, in fp32 or wider, and its gradient by the logits, in their dtype."""
    log_p_RV = F.log_softmax(logits_RV, dim=-1, dtype=torch.promote_types(logits_RV.dtype, torch.float32))
    loss, p_RV = F.nll_loss(log_p_RV, targets_R, reduction="sum"), log_p_RV.exp()
    is_target_RV = targets_R[:, None] == torch.arange(logits_RV.shape[1], device=targets_R.device)
    # softmax − onehot, by a comparison: a scatter would materialise the fp32 matrix.
    d_RV = torch.where(is_target_RV, p_RV - 1, p_RV)
    return loss, torch.where((targets_R == IGNORED)[:, None], 0.0, d_RV).to(logits_RV.dtype)
