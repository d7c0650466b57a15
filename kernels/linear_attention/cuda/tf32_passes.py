"""The passes of linear attention on the sums of tf32.py; fp32_backend.py says which calls they serve.

The rows of chunkwise.py are never stored: the kernels read q, k, v and do, with a factor per token, and the
additional column as a number per token. The three sums of the backward pass share two passes for states,
Σ k'v'ᵀ from the first token on and Σ q'h'ᵀ from the last.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lingpt.kernels.linear_attention.call import (
    Call,
    InputGradients,
    LinearAttentionState,
    OutputGradients,
    Outputs,
)
from lingpt.kernels.linear_attention.chunkwise import pack, unpack
from lingpt.kernels.linear_attention.cuda.tf32 import (
    ONE,
    ZERO,
    Array,
    Operand,
    PerToken,
    Plan,
    Sums,
    fits,
    fitting,
)
from lingpt.kernels.numerics import (
    LOG_ZERO,
    allows_tf32,
    decay_gradient,
    per_head,
    rotate,
    rotate_backward,
)


class _Layout(NamedTuple):
    """What calls that share their plans have in common."""

    device: torch.device
    shape: tuple[int, int, int, int]
    products: int  # as in Build
    rows_in_tf32: bool  # as in Plan
    strides: tuple[tuple[str, tuple[int, int, int]], ...]  # of the tensors, by name
    a: float | None  # None: a tensor, like b
    b: float | None
    normalize: bool
    normalize_qk: bool
    starts: bool  # whether there is an initial state
    ends: bool  # whether the final one is returned, or has a gradient
    recomputes: bool = False  # whether backward's o is another than was rounded


class _Tensors(dict[str, Tensor]):
    """The tensors of a call in fp32, rows as the kernels read them, by the names of _Layout."""

    @classmethod
    def of(cls, call: Call) -> _Tensors:
        q, k, v = call.views
        if call.cos is not None and call.sin is not None:
            q, k = (rotate(x.float(), call.cos, call.sin) for x in (q, k))
        found = cls(q=fitting(q), k=fitting(k), v=fitting(v))
        decay = call.head_log_decay if call.token_log_decay is None else call.token_log_decay
        if decay is not None:
            found["log_decay"] = decay
        if isinstance(call.constant, Tensor):
            found["a"] = call.constant.float()
        if isinstance(call.coefficient, Tensor):
            found["b"] = call.coefficient.float()
        return found

    def layout(self, call: Call, ends: bool, recomputes: bool = False) -> _Layout:
        a, b = call.constant, call.coefficient
        return _Layout(
            call.device,
            call.shape,
            _products(call),
            call.dtype != torch.float32 and call.cos is None,
            tuple([(name, _token_strides(x)) for name, x in self.items()]),
            a=None if isinstance(a, Tensor) else a,
            b=None if isinstance(b, Tensor) else b,
            normalize=call.normalize,
            normalize_qk=call.normalize_qk,
            starts=call.S is not None,
            ends=ends,
            recomputes=recomputes,
        )

    def addresses(self) -> dict[str, int]:
        return {name: x.data_ptr() for name, x in self.items()}


def _products(call: Call) -> int:
    """One of 16-bit inputs, which TF32 holds and to which o is rounded, or where the user allows it."""
    return 1 if call.dtype != torch.float32 or allows_tf32() else 3


def _token_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batches, tokens and heads of [B, N, H, …], or [H]."""
    batch, token, head, *_ = (0, 0, *x.stride()) if x.ndim == 1 else x.stride()
    return batch, token, head


class _Planned(Plan):
    """A plan with the rows q' = [b q̂, a], k' = [k̂, 1] and v' = [v, 1], without the normaliser v' = v.

    Its bases are the names of _Tensors, to which a call adds more. `norms`: where those of q and k go, which
    the first pass computes.
    """

    def __init__(self, layout: _Layout, *, first: bool) -> None:
        super().__init__(layout.device, layout.shape, layout.products, layout.rows_in_tf32)
        B, N, H, _ = layout.shape
        self.arrays = {name: Array(name, strides) for name, strides in layout.strides}
        self.stats = [Array("stats", (H * N, 1, N), 4 * i * B * H * N) for i in range(3)]  # as in Outputs
        _, q_r, k_r = self.stats
        self.norms = (q_r, k_r) if layout.normalize_qk and first else None
        q_x, k_x = (q_r, k_r) if layout.normalize_qk and not first else (None, None)
        if layout.b is None:
            q_x = self.arrays["b"] if first else Array("bq_r", (H * N, 1, N))
        q_factor = PerToken(q_x, 1.0 if layout.b is None else layout.b)
        a = PerToken(self.arrays["a"]) if layout.a is None else PerToken(value=layout.a)
        self.q = Operand(self.arrays["q"], q_factor, a)
        self.k = Operand(self.arrays["k"], PerToken(k_x), ONE)
        self.v = Operand(self.arrays["v"], ONE, ONE if layout.normalize else ZERO)
        self.sums = Sums(self, self.arrays.get("log_decay"))
        self.initial = Array("initial", (0, 0, 0)) if layout.starts else None

    def states(self, layout: _Layout) -> Array:
        """Σ k'v'ᵀ."""
        norms = self.norms is not None
        return self.sums.states(self.k, self.v, layout.normalize, self.initial, norms=norms)

    def outputs(self, layout: _Layout, states: Array, o: Array, g: Array, final: Array | None) -> None:
        y_last = g if layout.normalize else None
        self.sums.scan(
            *(self.q, self.k, self.v, states, o),
            y_last=y_last, norms=self.norms, initial=self.initial, final=final, divide=layout.normalize,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _forward_plan(layout: _Layout) -> Plan:
    plan = _Planned(layout, first=True)
    _, N, H, D = layout.shape
    o, final = Array("o", (N * H * D, H * D, D)), Array("final", (0, 0, 0)) if layout.ends else None
    plan.outputs(layout, plan.states(layout), o, plan.stats[0], final)
    return plan


def forward(call: Call) -> Outputs:
    """As in `operator.Backend`."""
    with torch.no_grad():
        (B, N, H, D), device = call.shape, call.device
        tensors = _Tensors.of(call)
        layout = tensors.layout(call, call.return_state)
        filled = call.normalize and call.normalize_qk
        stats = tensors["stats"] = (torch.empty if filled else torch.ones)((3, B, H, N), device=device)
        o = tensors["o"] = torch.empty((B, N, H, D), device=device)
        if layout.ends:
            tensors["final"] = torch.empty((B, H, D + 1, D + 1), device=device)
        if call.S is not None:
            tensors["initial"] = _pack(call, call.initial_state)
        _forward_plan(layout).run(tensors.addresses())
        state = _unpack(call, tensors["final"]) if layout.ends else None
        return Outputs(o.to(call.dtype), stats, state)


class _Backward(_Planned):
    """The three sums, and the gradients of q and k from those of q' and k'; others follow from its arrays."""

    def __init__(self, layout: _Layout) -> None:
        super().__init__(layout, first=False)
        self.along_q, self.along_k = self.empty_numbers(), self.empty_numbers()
        decays = "log_decay" in self.arrays
        self.q_last = self.empty_numbers() if decays or layout.a is None else None
        self.k_last = self.empty_numbers() if decays else None
        self.dq, self.dk, self.dv = (self.arrays.get(x) or self.empty_rows() for x in ("dq", "dk", "dv"))
        states, o, g, q, k = self.states(layout), self.arrays["o"], self.stats[0], self.q, self.k
        if layout.recomputes:
            o = self.empty_rows()
            self.outputs(layout, states, o, self.empty_numbers(), None)
        h = self._output_gradient(layout, o, g)
        v, sums = self.v, self.sums
        sums.scan(h, v, k, states, self.dq, y_last=self.q_last, initial=self.initial, transposed=True)
        # for the initial state's gradient alone
        v_last = self.empty_numbers() if layout.starts and layout.normalize else None
        start = Array("to_start", (0, 0, 0)) if layout.starts else None
        end = Array("dstate", (0, 0, 0)) if layout.ends else None
        sums = Sums(self, sums.log_decay, reverse=True)
        states = sums.states(q, h, layout.normalize, end)
        sums.scan(v, h, q, states, self.dk, y_last=self.k_last, initial=end, transposed=True)
        sums.scan(k, q, h, states, self.dv, y_last=v_last, initial=end, final=start)

        (_, q_r, k_r), normed = self.stats, layout.normalize_qk
        self.rows(
            "input_gradient",
            dict(x=q.x, y=self.dq, norm=q_r if normed else None, factor=q.factor.x, dot=self.along_q),
            dict(x=k.x, y=self.dk, norm=k_r if normed else None, factor=k.factor.x, dot=self.along_k),
            factors=(q.factor.value, 1.0),
        )

    def _output_gradient(self, layout: _Layout, o: Array, g: Array) -> Operand:
        """The rows h' = [do/g, −(do·o)/g], without the normaliser do."""
        do = self.arrays["do"]
        if not layout.normalize:
            return Operand(do)
        inverse, last = self.empty_numbers(), self.empty_numbers()
        self.rows("dots", dict(x=do, y=o, g=g, inverse_g=inverse, dot=last))
        return Operand(do, PerToken(inverse), PerToken(last))


_backward_plan = functools.lru_cache(maxsize=1024)(_Backward)


def backward(
    call: Call, saved: Outputs, gradients: OutputGradients, out: tuple[Tensor, ...]
) -> InputGradients:
    """As in `operator.Backend`."""
    (o, stats, final), (do, dstate) = saved, gradients
    with torch.no_grad():
        (B, _, H, D), rotates = call.shape, call.cos is not None
        tensors = _Tensors.of(call)
        tensors["do"], tensors["o"] = fitting(do), fitting(o)
        for name, x in zip(("dq", "dk", "dv"), out, strict=True):
            if fits(x) and (name == "dv" or not rotates):
                tensors[name] = x
        recomputes = call.normalize and o.dtype != torch.float32  # as in the chunkwise form
        layout = tensors.layout(call, dstate is not None, recomputes=recomputes)
        plan = _backward_plan(layout)
        tensors["stats"] = stats.contiguous()
        if dstate is not None:
            tensors["dstate"] = _pack(call, dstate)
        if call.S is not None:
            tensors["initial"] = _pack(call, call.initial_state)
            tensors["to_start"] = torch.empty((B, H, D + 1, D + 1), device=call.device)
        if isinstance(call.coefficient, Tensor):
            tensors["bq_r"] = tensors["stats"][1] * per_head(call.coefficient, 3, 1, torch.float32)
        scratch = plan.run(tensors.addresses())
        for name, x, d in zip(("dq", "dk", "dv"), out, (plan.dq, plan.dk, plan.dv), strict=True):
            if name not in tensors:
                dx = plan.rows_of(scratch, d)
                rotated = rotates and name != "dv"
                x.copy_(rotate_backward(dx, call.cos, call.sin) if rotated else dx)  # type: ignore[arg-type]
        return _other_gradients(call, plan, scratch, tensors, final, dstate)


def clear_plans() -> None:
    """Plans keep the kernels that they launch; tests replace them."""
    for plans in (_forward_plan, _backward_plan):
        plans.cache_clear()


def _other_gradients(
    call: Call,
    plan: _Backward,
    scratch: Tensor,
    tensors: Mapping[str, Tensor],
    final: LinearAttentionState | None,
    dstate: LinearAttentionState | None,
) -> InputGradients:
    """The gradients besides those of q, k and v, from what the plan has left."""
    da = db = d_token_log_decay = None
    if call.a is not None and plan.q_last is not None:
        da = plan.numbers_of(scratch, plan.q_last).sum((0, 2))
    if call.b is not None:
        db = call.shrink_b(plan.numbers_of(scratch, plan.along_q).sum((0, 2)))
    if call.token_log_decay is not None and plan.q_last is not None and plan.k_last is not None:
        arrays = plan.along_q, plan.q_last, plan.along_k, plan.k_last
        along_q, q_last, along_k, k_last = (plan.numbers_of(scratch, x) for x in arrays)
        a, b = (per_head(x, 3, 1, torch.float32) for x in (call.constant, call.coefficient))
        dG = along_q * b + a * q_last - along_k - k_last
        at_end = None if dstate is None else (_pack(call, final) * tensors["dstate"]).sum((-2, -1))
        d_token_log_decay = decay_gradient(dG.mT, at_end, call.token_log_decay)
        d_token_log_decay.masked_fill_(call.token_log_decay <= LOG_ZERO[torch.float32], 0.0)
    if call.S is None:
        return InputGradients(da, db, d_token_log_decay)
    to_start, decay = tensors["to_start"], tensors.get("log_decay")
    if decay is not None:
        first = decay if decay.ndim == 1 else decay[:, 0]
        to_start *= first.clamp(min=LOG_ZERO[torch.float32]).exp()[..., None, None]
    return InputGradients(da, db, d_token_log_decay, _unpack(call, to_start))


def _pack(call: Call, state: LinearAttentionState | None) -> Tensor:
    """[B, H, D + 1, D + 1], also without the normaliser."""
    packed = pack(state, call)
    return packed if call.normalize else F.pad(packed, (0, 1))


def _unpack(call: Call, state: Tensor) -> LinearAttentionState:
    return unpack(state if call.normalize else state[..., :-1])
