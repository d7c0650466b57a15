"""One call of the operator is one object, which the schema, autograd and every backend take."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.numerics import B_SHRINK
from lingpt.kernels.linear_attention.state import LinearAttentionState
from lingpt.kernels.precision import state_dtype

T = TypeVar("T", float, Tensor, float | Tensor)


class Call(NamedTuple):
    """The arguments of `linear_attention` or of `linear_attention_qkv`, checked; interface.py makes it.

    The operator's schema is made of these fields (kernels/custom_op.py): tensors first.
    """

    projected: Tensor | None = None  # [B, N, 3·H·D + P], q, k, v and the gates; then qkv is None
    qkv: Tensor | None = None  # [B, N, 3, H, D], the fused projection; then q, k and v are None
    q: Tensor | None = None  # [B, N, H, D], as k and v
    k: Tensor | None = None
    v: Tensor | None = None
    cos: Tensor | None = None  # [N, R]; None: q and k are not rotated
    sin: Tensor | None = None
    a: Tensor | None = None  # [H], as b; a number is in a_value
    b: Tensor | None = None
    head_log_decay: Tensor | None = None  # [H] in fp32 (float64), a constant per head; None: no such decay
    token_log_decay: Tensor | None = None  # [B, N, H], likewise, each token's own
    gate_bias: Tensor | None = None  # [H] in fp32 (float64), with `projected`
    S: Tensor | None = None  # the initial state; None: zeros
    z: Tensor | None = None
    c: Tensor | None = None
    n: Tensor | None = None
    a_value: float = 1.0
    b_value: float = 1.0
    head_size: int = 0  # D, with `projected`
    normalize: bool = True
    normalize_qk: bool = True
    causal: bool = True
    return_state: bool = False
    backend: str = "auto"

    def unpacked(self) -> Call:
        """`projected` replaced by qkv, a view of it, and token_log_decay: the form that all other properties
        and backends take."""
        if self.projected is None or self.gate_bias is None:
            return self
        qkv, gate, _ = split_projection(self.projected, self.gate_bias.shape[0], self.head_size)
        return self._replace(
            projected=None, gate_bias=None, qkv=qkv, token_log_decay=logarithm_of_gate(gate, self.gate_bias)
        )

    def tokens(self, part: slice) -> Call:
        """An unpacked call of a stretch of its tokens; the initial state stays what it is."""
        found: dict[str, Any] = {
            name: x[:, part]
            for name in ("qkv", "q", "k", "v", "token_log_decay")
            if (x := getattr(self, name)) is not None
        }
        found |= {name: x[part] for name in ("cos", "sin") if (x := getattr(self, name)) is not None}
        return self._replace(**found)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """q, k and v, or qkv alone."""
        return (self.q, self.k, self.v) if self.qkv is None else (self.qkv,)  # type: ignore[return-value]

    @property
    def views(self) -> tuple[Tensor, ...]:
        """q, k and v, [B, N, H, D] each; of a fused projection, strided views."""
        return self.inputs if self.qkv is None else self.qkv.unbind(2)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, N, H, D."""
        shape = self.inputs[0].shape
        return shape[0], shape[1], shape[-2], shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def constant(self) -> float | Tensor:
        """a, a number or [H]; 1 under the normaliser, where only b/a counts."""
        return self.a_value if self.a is None else self.a

    @property
    def coefficient(self) -> float | Tensor:
        """b, a number or [H], as it is used: shrunk where every weight must be positive."""
        return self.shrink_b(self.b_value if self.b is None else self.b)

    def shrink_b(self, b: T) -> T:
        """The b that is used, from the caller's; likewise the gradient of the caller's b, from that of the b
        used."""
        return b * B_SHRINK if self.normalize and self.normalize_qk else b

    @property
    def initial_state(self) -> LinearAttentionState | None:
        if self.S is None or self.z is None or self.c is None or self.n is None:
            return None
        return LinearAttentionState(self.S, self.z, self.c, self.n)


def logarithm_of_gate(z: Tensor, bias: Tensor) -> Tensor:
    """logsigmoid(z + bias), in fp32 (float64) from the sum on: γ is within 2⁻¹³ of 1.

    z: [B, N, H], bias: [H], of any floating-point dtype. Returns [B, N, H] in fp32 (float64).
    """
    return F.logsigmoid(z.to(state_dtype(z.dtype)) + bias)


def split_projection(projected: Tensor, H: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, N, 3, H, D], the gates before their bias [B, N, H] and what is left of each row, views."""
    width = projected.shape[2]
    qkv, gate, rest = projected.split_with_sizes((3 * H * D, H, width - (3 * D + 1) * H), 2)
    return qkv.unflatten(2, (3, H, D)), gate, rest


class OptionGradients(NamedTuple):
    """What a backward pass returns next to dq, dk and dv; None where the call has no such tensor."""

    a: Tensor | None = None  # [H]
    b: Tensor | None = None  # [H]
    token_log_decay: Tensor | None = None  # [B, N, H]
    initial_state: LinearAttentionState | None = None
