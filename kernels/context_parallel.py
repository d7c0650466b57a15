"""Context parallelism: each process holds a piece of every sequence, and the pieces are in the ranks' order.

A linear attention needs the state before its piece: all ranks gather the state of each piece from zero and
its decay, a few kilobytes per head whatever the length, and each scans those before its own (LASP-2,
arXiv 2502.07563). The gradient is the same scan in reverse. A short convolution needs the last tokens of the
piece before, and so does softmax attention with a window. Without one it needs all tokens: its heads are
divided over the ranks instead, by an exchange of all with all before it and one after it (DeepSpeed-Ulysses,
arXiv 2309.14509), so each has the same work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

# PyTorch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SENDS = "sends "  # begins the name of a collective in a profile; then what it sends


@dataclass(frozen=True)
class Context:
    """The processes that hold the pieces of the same sequences, and this one's place among them.

    All of them must make the same calls in the same order, forward and backward.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def gather(self, x: Tensor, what: str) -> Tensor:
        """Every rank's x, `[size, *x.shape]`; its gradient is the sum of all ranks' gradients. what: its name
        in a profile."""
        return torch.compiler.disable(_Gather.apply)(x, self, what)  # as a decorator it loads the compiler

    def previous(self, x: Tensor) -> Tensor:
        """x of the rank before, zeros on the first: for the last tokens of a piece."""
        everyone = self.gather(x, "last tokens")
        return everyone[self.rank - 1] if self.rank else 0 * everyone[0]

    def sequence_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q `[B, N, H, D]`, k and v `[B, N, G, D]` of this piece → all size·N tokens of this rank's share of
        the heads. If `size` does not divide G, each head of q gets k and v of its own; if it does not divide
        H either, heads of zeros are added."""
        (H, G), n = (q.shape[2], k.shape[2]), self.size
        if G % n:
            k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
            q, k, v = (F.pad(x, (0, 0, 0, -H % n)) for x in (q, k, v))
        shares = [x.unflatten(2, (n, -1)) for x in (q, k, v)]
        parts = self._exchange(torch.cat(shares, 3).movedim(2, 0))  # [size, B, N, heads of q, k and v, D]
        return parts.movedim(0, 1).flatten(1, 2).split([x.shape[3] for x in shares], 2)

    def heads_to_sequence(self, o: Tensor) -> Tensor:
        """All tokens of this rank's heads, `[B, size·N, h, D]` → those of this piece of all heads,
        `[B, N, size·h, D]`: the inverse of `sequence_to_heads`."""
        parts = self._exchange(o.unflatten(1, (self.size, -1)).movedim(1, 0))
        return parts.movedim(0, 2).flatten(2, 3)

    def _exchange(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r → what each rank has sent here, `[size, ...]`."""
        return torch.compiler.disable(_Exchange.apply)(x, self)

    def own_borders(self, cu_seqlens: Tensor, B: int, N: int, before: int = 0) -> Tensor:
        """The borders of documents that are in this piece, in its B·N tokens; B·N for all others. With
        `before` in B·(before + N) tokens: each row begins with so many of the piece before.

        cu_seqlens: `[documents + 1]`, the borders in B whole sequences of size·N tokens, row after row.
        """
        row, position = cu_seqlens // (self.size * N), cu_seqlens % (self.size * N) - self.rank * N + before
        inside = (position >= 0) & (position < before + N) & (row < B)
        return torch.where(inside, row * (before + N) + position, B * (before + N))

    def whole_borders(self, borders: Tensor, B: int, N: int) -> Tensor:
        """The inverse of `own_borders`, from those of all pieces."""
        everyone = self.gather(borders, "borders")
        rank = torch.arange(self.size, dtype=borders.dtype, device=borders.device).unsqueeze(-1)
        whole = (everyone // N * self.size + rank) * N + everyone % N
        return torch.where(everyone < B * N, whole, B * self.size * N).amin(0)

    def state_before(self, state: Tensor, decay: Tensor) -> Tensor:
        """The state before this piece, given that of the piece alone, `[..., E]`, and its decay `[...]`."""
        return self._scan(state, decay, range(self.rank))

    def adjoint_after(self, adjoint: Tensor, decay: Tensor) -> Tensor:
        """The gradient of the state after this piece, given that of the state before it from the piece's own
        outputs, `[..., E]`, and the piece's decay `[...]`."""
        return self._scan(adjoint, decay, reversed(range(self.rank + 1, self.size)))

    def _scan(self, own: Tensor, decay: Tensor, ranks: Iterable[int]) -> Tensor:
        """The sum of the `own` of these ranks, each decayed by those that follow it."""
        pieces = self.gather(torch.cat((own, decay.unsqueeze(-1)), -1), "states")
        total = 0 * pieces[0, ..., :-1]  # not a constant: every rank takes part in the backward pass
        for rank in ranks:
            total = pieces[rank, ..., :-1] + pieces[rank, ..., -1:] * total
        return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, what: str) -> Tensor:
        ctx.context, ctx.shape, ctx.what = context, x.shape, what
        everyone = x.new_empty(context.size, *x.shape)
        with record_function(SENDS + what):
            _all_gather(everyone.view(-1), x.contiguous().view(-1), group=context.group)
        return everyone

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient.new_empty(ctx.shape)
        with record_function(SENDS + ctx.what):
            _reduce_scatter(own.view(-1), gradient.contiguous().view(-1), group=ctx.context.group)
        return own, None, None


class _Exchange(torch.autograd.Function):
    """Its gradient is the same exchange: what was sent comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        with record_function(SENDS + "heads"):
            dist.all_to_all_single(parts, x.contiguous(), group=context.group)
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.context), None
