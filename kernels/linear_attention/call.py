"""A call of the operator as one object: what the schema, autograd and every backend take and return."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.numerics import B_SHRINK, first_tokens, rotate, state_dtype

T = TypeVar("T", float, Tensor, float | Tensor)


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


torch.serialization.add_safe_globals([LinearAttentionState])  # torch.load's default is weights_only
# `torch.export.save` keeps programs that take or return it; the public registration is for other classes.
if register := getattr(torch.utils._pytree, "_register_namedtuple", None):
    register(LinearAttentionState, serialized_type_name="lingpt.LinearAttentionState")


def state_shapes(B: int, H: int, D: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of S, z, c and n."""
    return (B, H, D, D), (B, H, D), (B, H, D), (B, H)


class Call(NamedTuple):
    """The checked arguments of `linear_attention` or `linear_attention_qkv`; interface.py creates it.

    These fields are the operator's schema (kernels/custom_op.py): tensors first.
    """

    projected: Tensor | None = None  # [B, N, 3·H·D + P]: q, k, v and the gates; qkv is then None
    qkv: Tensor | None = None  # [B, N, 3, H, D]: the fused projection; q, k and v are then None
    q: Tensor | None = None  # [B, N, H, D], like k and v
    k: Tensor | None = None
    v: Tensor | None = None
    cos: Tensor | None = None  # [N, R]; None: q and k are not rotated
    sin: Tensor | None = None
    a: Tensor | None = None  # [H], like b; None if it is a number, a_value
    b: Tensor | None = None
    head_log_decay: Tensor | None = None  # [H] in fp32 (float64), constant per head; None: no such decay
    token_log_decay: Tensor | None = None  # [B, N, H] in fp32 (float64), one per token
    gate_bias: Tensor | None = None  # [H] in fp32 (float64), with `projected`
    cu_seqlens: Tensor | None = None  # borders of packed sequences in the B·N tokens, int32 or int64
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
        """The call with `projected` replaced by qkv, a view of it, and token_log_decay, and with `cu_seqlens`
        replaced by resets in token_log_decay: the form that all other properties and backends take."""
        call = self
        if call.projected is not None and call.gate_bias is not None:
            qkv, gate, _ = split_projection(call.projected, call.gate_bias.shape[0], call.head_size)
            decay = logarithm_of_gate(gate, call.gate_bias)
            call = call._replace(projected=None, gate_bias=None, qkv=qkv, token_log_decay=decay)
        if call.cu_seqlens is not None:
            (B, N, H, _), given = call.shape, call.inputs[0]
            own = call.head_log_decay if call.token_log_decay is None else call.token_log_decay
            decay = given.new_zeros(H, dtype=state_dtype(given.dtype)) if own is None else own
            resets = first_tokens(call.cu_seqlens, B, N)[..., None]
            decay = decay.expand(B, N, H).masked_fill(resets, -math.inf)
            call = call._replace(cu_seqlens=None, head_log_decay=None, token_log_decay=decay)
        return call

    def tokens(self, part: slice) -> Call:
        """The unpacked call for a slice of its tokens, with the same initial state."""
        found: dict[str, Any] = {
            name: x[:, part]
            for name in ("qkv", "q", "k", "v", "token_log_decay")
            if (x := getattr(self, name)) is not None
        }
        found |= {name: x[part] for name in ("cos", "sin") if (x := getattr(self, name)) is not None}
        return self._replace(**found)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """q, k and v, or only qkv."""
        return (self.q, self.k, self.v) if self.qkv is None else (self.qkv,)  # type: ignore[return-value]

    @property
    def views(self) -> tuple[Tensor, ...]:
        """q, k and v, [B, N, H, D] each; strided views if the projection is fused."""
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

    def rotated(self, x: Tensor) -> Tensor:
        """x [B, N, H, D] in fp32 (float64), rotated if the call has RoPE."""
        x = x.to(state_dtype(x.dtype))
        return x if self.cos is None or self.sin is None else rotate(x, self.cos, self.sin)

    @property
    def constant(self) -> float | Tensor:
        """a, a number or [H]; 1 with the normaliser, where only b/a matters."""
        return self.a_value if self.a is None else self.a

    @property
    def coefficient(self) -> float | Tensor:
        """The effective b, a number or [H]: shrunk if every weight must be positive."""
        return self.shrink_b(self.b_value if self.b is None else self.b)

    def shrink_b(self, b: T) -> T:
        """The effective b from the caller's b; likewise the gradient of the caller's b from that of the
        effective b."""
        return b * B_SHRINK if self.normalize and self.normalize_qk else b

    @property
    def initial_state(self) -> LinearAttentionState | None:
        if self.S is None or self.z is None or self.c is None or self.n is None:
            return None
        return LinearAttentionState(self.S, self.z, self.c, self.n)


def logarithm_of_gate(z: Tensor, bias: Tensor) -> Tensor:
    """logsigmoid(z + bias), in fp32 (float64) including the sum, as γ may be within 2⁻¹³ of 1.

    z: [B, N, H], bias: [H], of any floating-point dtype. Returns [B, N, H] in fp32 (float64).
    """
    return F.logsigmoid(z.to(state_dtype(z.dtype)) + bias)


def split_projection(projected: Tensor, H: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of qkv [B, N, 3, H, D], of the gates before their bias [B, N, H] and of the rest of each row."""
    width = projected.shape[2]
    qkv, gate, rest = projected.split_with_sizes((3 * H * D, H, width - (3 * D + 1) * H), 2)
    return qkv.unflatten(2, (3, H, D)), gate, rest


class Outputs(NamedTuple):
    """The results of a forward pass: all that the backward pass needs besides the call.

    Any backend's backward pass can follow the forward pass of another.
    """

    o: Tensor  # [B, N, H, D] in the inputs' dtype
    # [3, B, H, N], fp32 (float64): the normaliser g = Σ w, 1/‖q‖ and 1/‖k‖ (g is meaningless without
    # `normalize`, the norms are without `normalize_qk`)
    stats: Tensor
    state: LinearAttentionState | None  # the final state if `call.return_state`


# What a piece of a sequence gets for its own state, from processes with the others (context_parallel.py): the
# state before it. Backward: for the gradient of that state by its own outputs, that of the state after it.
Exchange = Callable[[LinearAttentionState], LinearAttentionState]


class OutputGradients(NamedTuple):
    """The gradients of the outputs."""

    o: Tensor
    state: LinearAttentionState | None = None  # None if it has no gradient


class InputGradients(NamedTuple):
    """The gradients of the inputs besides q, k and v; None if the call has no such tensor."""

    a: Tensor | None = None  # [H]
    b: Tensor | None = None  # [H]
    token_log_decay: Tensor | None = None  # [B, N, H]
    initial_state: LinearAttentionState | None = None
