"""Converts sequences to chunks of C tokens, the layout of the chunkwise PyTorch forms, and back."""

from __future__ import annotations

from torch import Tensor


def pad_to_chunks(x: Tensor, C: int) -> Tensor:
    """[B, N, H, D] → [B, H, chunks, C, D], a copy; the last chunk is padded with zeros."""
    B, N, H, D = x.shape
    chunks = -(-N // C)
    padded = x.new_zeros(B, H, chunks * C, D)
    padded[:, :, :N] = x.transpose(1, 2)
    return padded.unflatten(2, (chunks, C))


def to_tokens(x: Tensor, N: int) -> Tensor:
    """[B, H, chunks, C, D] → [B, N, H, D], a view without the padding of the last chunk."""
    return x.flatten(2, 3)[:, :, :N].transpose(1, 2)
