"""The recurrent state of linear attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels.torch_internals import name_for_export


class LinearAttentionState(NamedTuple):
    """The state after the tokens seen so far, fp32 (float64 for float64 inputs); its size is constant.

    States add up: that of a sequence is the sum of the states of its parts, each decayed to the end. With a
    decay γ, token j of N has weight γ^(N−1−j) in each of the sums. z and n are for the normaliser: without it
    (`normalize=False`) they are zeros and are not read; a call with the normaliser must not take it.
    """

    S: Tensor  # Σ k̂ⱼ vⱼᵀ  [B, H, D, D], key index before value index
    z: Tensor  # Σ k̂ⱼ      [B, H, D]
    c: Tensor  # Σ vⱼ       [B, H, D]
    n: Tensor  # Σ 1        [B, H]

    @classmethod
    def zeros(
        cls, batch_size: int, n_head: int, head_dim: int, *, device=None, dtype: torch.dtype = torch.float32
    ) -> LinearAttentionState:
        """The state before the first token."""
        shapes = state_shapes(batch_size, n_head, head_dim)
        return cls(*(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes))

    def without_normaliser(self) -> LinearAttentionState:
        """The state with zeros for z and n."""
        return self._replace(z=torch.zeros_like(self.z), n=torch.zeros_like(self.n))

    @classmethod
    def empty(
        cls, batch_size: int, n_head: int, head_dim: int, *, device=None, dtype: torch.dtype = torch.float32
    ) -> LinearAttentionState:
        """An uninitialised state."""
        shapes = state_shapes(batch_size, n_head, head_dim)
        return cls(*(torch.empty(shape, device=device, dtype=dtype) for shape in shapes))


torch.serialization.add_safe_globals([LinearAttentionState])  # torch.load's default is weights_only
name_for_export(LinearAttentionState, "lingpt.LinearAttentionState")


def state_shapes(B: int, H: int, D: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of S, z, c and n."""
    return (B, H, D, D), (B, H, D), (B, H, D), (B, H)
