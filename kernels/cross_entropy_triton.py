"""Cross-entropy of rows of logits and its gradient, in place: a Triton kernel.

A block reads its row twice, the second time from a cache, and writes it once. It is memory-bound, by reading
and writing the logits once: an element costs only two exponentials (base 2) and ten other instructions.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
IGNORED = tl.constexpr(-100)  # PyTorch's target of a token that does not count

# A block has WARPS warps; each thread loads DEPTH × 8 logits at a time, pipelined in STAGES.
WARPS, DEPTH, STAGES = 16, 2, 1


def cross_entropy_in_place(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of −log softmax(logits)[target] over R rows, nats, fp32, and its gradient by the logits.

    logits_RV: bf16, fp16 or fp32, contiguous, overwritten by the gradient. targets_R: int64, contiguous;
    a row whose target is IGNORED adds nothing and gets zeros. The softmax is computed in fp32. z_loss: adds
    the gradient of z_loss · logsumexp(logits)².
    """
    R, V = logits_RV.shape
    losses_R = torch.empty(R, dtype=torch.float32, device=logits_RV.device)
    _row[(R,)](logits_RV, targets_R, losses_R, V, 8 * 32 * WARPS, DEPTH, STAGES, z_loss, num_warps=WARPS)
    return losses_R.sum(), logits_RV


@triton.jit
def _row(
    logits, targets, losses,
    V: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    Z_LOSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    counts = target != IGNORED
    at_target = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # Per lane: the largest logit · log2 e (`top`) and the sum of 2^(logit · log2 e − top). `top` starts
    # finite, as ∞ − ∞ would be NaN, and is rounded once, so that every use subtracts the same number, however
    # large.
    top = tl.full([LANES], -1e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, V, DEPTH * LANES, num_stages=STAGES):
        at = start + columns
        x = tl.load(logits + at, mask=at < V, other=float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x * LOG2E - higher[None, :]), 0)
        top = higher
    highest = tl.max(top, 0)
    sum_all = tl.sum(total * tl.exp2(top - highest), 0)
    scale = tl.where(counts, 1.0 / sum_all, 0.0)
    if Z_LOSS > 0:
        scale *= 1.0 + 2.0 * Z_LOSS * (tl.log2(sum_all) + highest) / LOG2E
    loss = (tl.log2(sum_all) - (at_target * LOG2E - highest)) / LOG2E
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    for start in tl.range(0, V, DEPTH * LANES, num_stages=STAGES):
        at = start + columns
        x = tl.load(logits + at, mask=at < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(logits + at, tl.exp2(x * LOG2E - highest) * scale, mask=at < V)
    tl.debug_barrier()  # the target's gradient overwrites what the loop wrote
    tl.store(logits + target, tl.exp2(at_target * LOG2E - highest) * scale - 1.0, mask=counts)
