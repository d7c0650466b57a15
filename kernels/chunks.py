"""Sequences as chunks of C tokens, and back: the layout of the chunkwise forms in PyTorch."""

from __future__ import annotations

from torch import Tensor


def pad_to_chunks(x: Tensor, C: int) -> Tensor:
    """[B, N, H, D] → [B, H, chunks, C, D], a copy; zeros fill up the last chunk."""
    B, N, H, D = x.shape
    chunks = -(-N // C)
    padded = x.new_zeros(B, H, chunks * C, D)
    padded[:, :, :N] = x.transpose(1, 2)
    return padded.unflatten(2, (chunks, C))


def to_tokens(x: Tensor, N: int) -> Tensor:
    """[B, H, chunks, C, D] → [B, N, H, D], a view without what filled up the last chunk."""
    return x.flatten(2, 3)[:, :, :N].transpose(1, 2)
