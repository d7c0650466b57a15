"""The running state of linear attention: what it remembers of the tokens that it has seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LinearAttentionState(NamedTuple):
    """All that linear attention remembers of the tokens it has seen; fp32 (float64 for float64 inputs).

    It adds up: the state of a sequence is the sum of the states of its pieces, each decayed to the end.
    With a decay γ, token j of N counts γ^(N−1−j) in each of the sums. z and n serve the normaliser: without
    it (`normalize=False`) they are zeros and are not read.
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
        """With zeros for z and n."""
        return self._replace(z=torch.zeros_like(self.z), n=torch.zeros_like(self.n))

    @classmethod
    def empty(
        cls, batch_size: int, n_head: int, head_dim: int, *, device=None, dtype: torch.dtype = torch.float32
    ) -> LinearAttentionState:
        """A state to be written."""
        shapes = state_shapes(batch_size, n_head, head_dim)
        return cls(*(torch.empty(shape, device=device, dtype=dtype) for shape in shapes))


torch.serialization.add_safe_globals(
    [LinearAttentionState]
)  # for torch.load, with weights_only as by default


def state_shapes(B: int, H: int, D: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of S, z, c and n."""
    return (B, H, D, D), (B, H, D), (B, H, D), (B, H)
