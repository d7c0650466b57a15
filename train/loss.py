"""Cross-entropy of the next token in chunks, so that the logits never exist all at once.

At N = 8192 and a vocabulary of 50,304 the fp32 logits of one sequence are 1.6 GB, and their gradient as much
again. Here each chunk of rows computes its logits, its loss and its part of the gradients, and frees the
logits: the backward pass has nothing left to compute, so the FLOPs are those of the plain form (as in Hsu et
al. 2024, "Liger Kernel"). Compiled, a chunk's logits are read once or twice and their gradient is written
once, both in the products' dtype: the fp32 softmax stays in registers. On a GPU our own kernel does that.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from lingpt.data import Batch
from lingpt.data.packing import NO_TARGET
from lingpt.models import GPT
from lingpt.train.compilation import compile_options

# Maximum logits per chunk: 512 MB in bf16. Each chunk reads and writes the fp32 gradient of the whole weight.
CHUNK_ELEMENTS = 2**28
SMALL_EMBD = 1024  # up to here twice as many: small models need many rows to fill a large GPU
LossAndGradient = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # of a chunk's logits and targets


def loss_and_gradient(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses, in fp32 or wider, and its gradient by the logits, in their dtype.

    z_loss: adds the gradient of z_loss · logsumexp(logits)², which keeps logits from drifting (PaLM, arXiv
    2204.02311); the loss that is returned is without that term.
    """
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    log_p_RV = F.log_softmax(logits_RV, dim=-1, dtype=dtype)
    loss, p_RV = F.nll_loss(log_p_RV, targets_R, reduction="sum"), log_p_RV.exp()
    if z_loss:
        p_RV = p_RV * (1 + 2 * z_loss * logits_RV.to(dtype).logsumexp(-1, keepdim=True))
    is_target_RV = targets_R[:, None] == torch.arange(logits_RV.shape[1], device=targets_R.device)
    # softmax − onehot, by a comparison: a scatter would materialise the fp32 matrix.
    d_RV = torch.where(is_target_RV, p_RV - 1, p_RV)
    return loss, torch.where((targets_R == NO_TARGET)[:, None], 0.0, d_RV).to(logits_RV.dtype)


class NextTokenLoss(nn.Module):
    """`[B, N+1]` token ids, or packed documents (`data.Batch`) → the sum over all targets of −log p(token |
    the tokens before), nats.

    compiled: each chunk's logits are processed by one kernel; on a GPU the gradient overwrites them. z_loss:
    adds z_loss · logsumexp(logits)² of each target, to the gradient alone (`loss_and_gradient`).
    """

    def __init__(self, gpt: GPT, compiled: bool = False, z_loss: float = 0.0) -> None:
        super().__init__()
        self.gpt = gpt
        self.chunk_loss: LossAndGradient = loss_and_gradient
        if compiled and gpt.lm_head.weight.device.type == "cuda":
            # Triton is installed only on machines with such cards.
            from lingpt.kernels.cross_entropy_triton import cross_entropy_in_place

            self.chunk_loss = cross_entropy_in_place
        elif compiled:
            self.chunk_loss = torch.compile(loss_and_gradient, **compile_options())
        if z_loss:
            self.chunk_loss = functools.partial(self.chunk_loss, z_loss=z_loss)

    def forward(self, batch: torch.Tensor | Batch) -> torch.Tensor:
        idx_BN, targets_BN, cu_seqlens = inputs_and_targets(batch)
        hidden_BNC = self.gpt.hidden(idx_BN, cu_seqlens=cu_seqlens)
        with record_function("loss"):
            weight_VC = self.gpt.lm_head.weight
            return cross_entropy_sum(hidden_BNC, weight_VC, targets_BN, chunk_loss=self.chunk_loss)


def inputs_and_targets(batch: torch.Tensor | Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token ids and targets `[B, N]`, and the borders of packed documents."""
    return (batch[:, :-1], batch[:, 1:], None) if isinstance(batch, torch.Tensor) else batch


def rows_per_chunk(vocab_size: int, n_embd: int) -> int:
    """Tokens whose logits exist at a time: a power of two, so that chunks are equal and tiles are whole."""
    elements = CHUNK_ELEMENTS if n_embd > SMALL_EMBD else 2 * CHUNK_ELEMENTS
    return 1 << (elements // vocab_size).bit_length() - 1


def cross_entropy_sum(
    hidden_BNC: torch.Tensor,
    weight_VC: torch.Tensor,
    targets_BN: torch.Tensor,
    rows: int | None = None,
    chunk_loss: LossAndGradient = loss_and_gradient,
) -> torch.Tensor:
    """Sum over all tokens of −log p(target), nats, a scalar in fp32 (float64 for float64 inputs).

    hidden_BNC: input of the last linear layer. weight_VC: its weight. targets_BN: int64 token ids; −100 does
    not count. rows: tokens per chunk; by default `rows_per_chunk`. chunk_loss: `loss_and_gradient`, compiled
    or not; or another function of a chunk's logits and targets, which may then be rows of anything.
    Products are in autocast's dtype if it is enabled, else in the inputs'; the softmax is in fp32 or wider.
    """
    hidden_TC, targets_T = hidden_BNC.flatten(0, -2), targets_BN.flatten(0, hidden_BNC.dim() - 2)
    rows = rows or rows_per_chunk(*weight_VC.shape)
    device = hidden_TC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TC.dtype
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            return _CrossEntropySum.apply(hidden_TC, weight_VC, targets_T, rows, dtype, chunk_loss)
        low_VC = weight_VC.to(dtype)
        chunks = zip(hidden_TC.to(dtype).split(rows), targets_T.split(rows), strict=True)
        losses = [chunk_loss(hidden_RC @ low_VC.T, targets_R)[0] for hidden_RC, targets_R in chunks]
        return torch.stack(losses).sum()


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, targets_T, rows, dtype, chunk_loss):
        low_VC = weight_VC.to(dtype)
        total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden_TC.device)
        d_hidden_TC = torch.empty_like(hidden_TC)
        d_weight_VC = torch.zeros_like(weight_VC, dtype=torch.promote_types(weight_VC.dtype, torch.float32))
        for start in range(0, hidden_TC.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden_RC = hidden_TC[chunk].to(dtype)
            loss, d_logits_RV = chunk_loss(hidden_RC @ low_VC.T, targets_T[chunk])
            total += loss
            d_hidden_TC[chunk] = d_logits_RV @ low_VC
            _addmm_(d_weight_VC, d_logits_RV.T, hidden_RC)
        ctx.save_for_backward(d_hidden_TC, d_weight_VC.to(weight_VC.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total):
        d_hidden_TC, d_weight_VC = ctx.saved_tensors
        return d_hidden_TC * d_total, d_weight_VC * d_total, None, None, None, None


def _addmm_(total_VC: torch.Tensor, x_VR: torch.Tensor, y_RC: torch.Tensor) -> None:
    """total += x y, in place. On a GPU the matrix product of 16-bit x and y accumulates into an fp32 total:
    it is neither rounded to 16 bits nor written and read again. (PyTorch has no such operator on CPUs.)"""
    if total_VC.is_cuda and total_VC.dtype == torch.float32 and x_VR.dtype != torch.float32:
        torch.addmm(total_VC, x_VR, y_RC, out_dtype=torch.float32, out=total_VC)
    else:
        total_VC += x_VR @ y_RC
