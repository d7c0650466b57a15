"""Cross-entropy of rows of logits and its gradient, in PyTorch; in cross_entropy_triton.py as a kernel.

A target of IGNORED, as PyTorch has it, is of a token that does not count: no loss and no gradient.

z_loss, a number above 0, adds the gradient of z_loss · logsumexp(logits)², which keeps logits from drifting
(PaLM, arXiv 2204.02311); the loss that is returned is without that term.
"""

import torch
import torch.nn.functional as F

IGNORED = -100


def loss_and_gradient(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses, in fp32 or wider, and its gradient by the logits, in their dtype."""
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    log_p_RV = F.log_softmax(logits_RV, dim=-1, dtype=dtype)
    loss, p_RV = F.nll_loss(log_p_RV, targets_R, reduction="sum"), log_p_RV.exp()
    if z_loss:
        p_RV = p_RV * (1 + 2 * z_loss * logits_RV.to(dtype).logsumexp(-1, keepdim=True))
    is_target_RV = targets_R[:, None] == torch.arange(logits_RV.shape[1], device=targets_R.device)
    # softmax − onehot, by a comparison: a scatter would materialise the fp32 matrix.
    d_RV = torch.where(is_target_RV, p_RV - 1, p_RV)
    return loss, torch.where((targets_R == IGNORED)[:, None], 0.0, d_RV).to(logits_RV.dtype)
