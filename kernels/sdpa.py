"""Softmax attention of packed sequences; and functions of `scaled_dot_product_attention` that PyTorch has,
but not in its public interface."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.numerics import first_tokens


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None = None
) -> Tensor:
    """Causal softmax attention within each of the sequences packed into the rows of a batch; with a window a
    token sees the last so many tokens only, itself among them.

    q, k, v: [B, N, H, D]; k and v may have fewer heads, and are then repeated. cu_seqlens: int32
    [sequences + 1], their borders in the B·N tokens, row after row; each row begins with one; None: each
    row is one. Returns [B, N, H, D]. On CUDA in 16 bits it is FlashAttention's kernel for sequences of
    different lengths, which needs neither a mask nor the lengths on the host; else SDPA with a mask.
    """
    B, N = q.shape[:2]
    if (repeats := q.shape[2] // k.shape[2]) > 1:  # PyTorch 2.11's kernel takes no fewer
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn  # which loads PyTorch's compiler

        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, B * N + 1, N, dtype=torch.int32, device=q.device)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        sizes = (-1 if window is None else window - 1, 0)  # before a token, and after it
        o = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, N, N, scale=scale, window_size=sizes)
        assert isinstance(o, Tensor)
        return o.unflatten(0, (B, N))
    mask = causal_mask(N, N, window, q.device)
    if cu_seqlens is not None:
        sequence = first_tokens(cu_seqlens, B, N).cumsum(1)
        mask = (mask & (sequence[:, :, None] == sequence[:, None]))[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Bool `[queries, keys]`, of queries that are the last of the keys: the keys up to each query's own, with
    a window the last so many of these."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


def sdpa_choice(q: Tensor, k: Tensor, v: Tensor) -> int | None:
    """The number of the `SDPBackend` that causal `scaled_dot_product_attention` uses for `[B, H, N, D]`;
    k and v may have fewer heads.

    PyTorch has no public function for it, and the choice depends on the card and on cuDNN's version. If none
    of the enabled backends can run: RuntimeError, after warnings that say why, or ERROR. None: this PyTorch
    does not tell.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and choose(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def sdpa_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor] | None:
    """`scaled_dot_product_attention` with an additive mask, and the logsumexp of each row's scores.

    q [B, H, N, D], k and v [B, H, M, D], mask [B, H, N, M] of one dtype; expanded and strided views are fine.
    Returns o [B, H, N, D] and [B, H, N] in fp32. None: this PyTorch, or the device, has no such operator. The
    public function does not return the logsumexp, which is needed to combine splits of the keys.
    """
    names = {
        "cuda": "_scaled_dot_product_efficient_attention",
        "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    }
    operator = getattr(torch.ops.aten, names.get(q.device.type, ""), None)
    if operator is None:
        return None
    if q.is_cuda:
        o, logsumexp, *_ = operator(q, k, v, mask, True, scale=scale)
    else:
        o, logsumexp = operator(q, k, v, attn_mask=mask, scale=scale)
    return o, logsumexp[..., : q.shape[2]]  # on CUDA its rows are padded
