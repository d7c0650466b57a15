"""Cross-entropy of the next token in pieces, so that the logits never exist all at once.

At N = 8192 and a vocabulary of 50,304 the fp32 logits of one sequence are 1.6 GB, and their gradient as much
again. Here each piece of rows makes its logits, its loss and its part of the gradients, and forgets them: the
backward pass has nothing left to compute, so that the FLOPs are those of the plain form (as in Hsu et al.
2024, "Liger Kernel").
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from lingpt.models import GPT

PIECE_ELEMENTS = 2**26  # logits at a time: 256 MB in fp32


class NextTokenLoss(nn.Module):
    """`[B, N+1]` token ids → the sum over B·N targets of −log p(token | the ones before), nats."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, block_BN1: torch.Tensor) -> torch.Tensor:
        hidden_BNC = self.gpt.hidden(block_BN1[:, :-1])
        with record_function("loss"):
            return cross_entropy_sum(hidden_BNC, self.gpt.lm_head.weight, block_BN1[:, 1:])


def cross_entropy_sum(
    hidden_BNC: torch.Tensor, weight_VC: torch.Tensor, targets_BN: torch.Tensor, rows: int | None = None
) -> torch.Tensor:
    """Sum over all tokens of −log p(target), nats, a scalar in fp32 (float64 for float64 inputs).

    hidden_BNC: what the last linear layer reads. weight_VC: its weight. targets_BN: int64 token ids.
    rows: tokens a piece; by default as many as keep a piece's logits under 256 MB.
    Products are in autocast's dtype where autocast is on, else in the inputs'; the softmax in fp32 or better.
    """
    hidden_TC, targets_T = hidden_BNC.flatten(0, -2), targets_BN.flatten()
    rows = rows or max(1, PIECE_ELEMENTS // weight_VC.shape[0])
    device = hidden_TC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TC.dtype
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            return _CrossEntropySum.apply(hidden_TC, weight_VC, targets_T, rows, dtype)
        weight_VC = weight_VC.to(dtype)
        pieces = zip(hidden_TC.to(dtype).split(rows), targets_T.split(rows), strict=True)
        return sum(_piece(h, weight_VC, t)[0] for h, t in pieces)


def _piece(hidden_RC: torch.Tensor, weight_VC: torch.Tensor, targets_R: torch.Tensor):
    """Loss of a piece, and the log-probabilities it comes from."""
    logits_RV = hidden_RC @ weight_VC.T
    log_p_RV = F.log_softmax(logits_RV, dim=-1, dtype=torch.promote_types(logits_RV.dtype, torch.float32))
    return F.nll_loss(log_p_RV, targets_R, reduction="sum"), log_p_RV


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, targets_T, rows, dtype):
        low_VC = weight_VC.to(dtype)
        total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden_TC.device)
        d_hidden_TC = torch.empty_like(hidden_TC)
        d_weight_VC = torch.zeros_like(weight_VC)
        for start in range(0, hidden_TC.shape[0], rows):
            piece = slice(start, start + rows)
            hidden_RC, targets_R = hidden_TC[piece].to(dtype), targets_T[piece]
            loss, log_p_RV = _piece(hidden_RC, low_VC, targets_R)
            total += loss
            d_logits_RV = log_p_RV.exp_()  # softmax − onehot, in place
            d_logits_RV[torch.arange(len(targets_R), device=targets_R.device), targets_R] -= 1
            d_logits_RV = d_logits_RV.to(dtype)
            d_hidden_TC[piece] = d_logits_RV @ low_VC
            d_weight_VC += d_logits_RV.T @ hidden_RC
        ctx.save_for_backward(d_hidden_TC, d_weight_VC)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total):
        d_hidden_TC, d_weight_VC = ctx.saved_tensors
        return d_hidden_TC * d_total, d_weight_VC * d_total, None, None, None
