"""Gated linear attention (Yang et al., 2024), a baseline for the linear kernel.

    S_t = diag(α_t) S_{t−1} + k_t v_tᵀ,    o_t = scale · S_tᵀ q_t                                     (eq. 3)

with a gate α_t ∈ (0, 1] for every key dimension. Five implementations: the definition and the recurrence of
unified_linear_attention.py, with ln α as its left decay; a chunkwise form in plain PyTorch (any device,
analytical backward); our CUDA kernels (linear_attention/cuda/channel_decay.cu); fla-core's Triton kernels.
"""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lingpt.common.errors import UserError, unknown
from lingpt.common.install import install_command
from lingpt.common.local_rank import local_rank
from lingpt.kernels import unified_linear_attention as unified
from lingpt.kernels.channel_decay_operator import CHUNK, backward_flops, forward_flops
from lingpt.kernels.checks import NUMBERS, refuse_forward_mode, shown
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.numerics import (
    LOG_ZERO,
    first_tokens,
    pad_to_chunks,
    reverse_running_sum,
    state_dtype,
    to_tokens,
    true_fp32,
)

BACKENDS = (*unified.BACKENDS, "fla")
HAS_FLA = importlib.util.find_spec("fla") is not None
_TRITON_LOCK = threading.Lock()  # evaluation has a thread per GPU; Triton's autotuners serve one at a time


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal linear attention whose state decays at a data-dependent rate per key dimension.

    Args:
        q, k: [B, N, H, Dk]; v: [B, N, H, Dv], all of one dtype and device.
        log_gate: ln α, [B, N, H, Dk], finite and ≤ 0 (values are not checked); any floating-point dtype.
        scale: factor on q; None means Dk^−0.5.
        initial_state: [B, H, Dk, Dv], fp32 (float64 for float64 inputs): the state of an earlier part.
        cu_seqlens: int32 or int64 [sequences + 1]: borders of sequences packed into the B·N tokens, row after
            row, as in `linear_attention`. The gates of first tokens are replaced by zeros, which let nothing
            through: this needs none of FLA's own lists of chunks, which it makes on the host.
        context: the tokens are this process's piece of sequences whose pieces are on several processes, all
            of one length (kernels/context_parallel.py); there is no initial_state then. The operator runs
            twice in each pass, once for the piece's own state.
        backend: one of
            "reference"  the definition, quadratic, float64 inside; also for forward mode;
            "chunkwise"  plain PyTorch on any device, with an analytical backward;
            "recurrent"  token by token, for decoding;
            "cuda"       our kernels: on tensor cores bf16 and fp16, Dk ≤ 256 and Dv ≤ 512 (padded to
                         multiples of 32); else in fp32, token by token, Dk and Dv ≤ 288;
            "fla"        fla-core's chunk_gla, CUDA only (under torch.compile it breaks the graph);
            "auto"       recurrent for one token; cuda where it can run; else chunkwise, with a warning on
                         CUDA devices.

    Returns:
        o [B, N, H, Dv] in q's dtype. Every tensor argument gets a gradient.

    Raises:
        UserError: for wrong shapes, dtypes or devices, or a backend that cannot run here, before any work.
    """
    return gated_linear_attention_with_state(
        q, k, v, log_gate,
        scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, context=context, backend=backend,
    )[0]  # fmt: skip


def gated_linear_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`gated_linear_attention` and the state after the last token: (o, state)."""
    _check(q, k, v, log_gate, initial_state, cu_seqlens)
    if scale is not None and not isinstance(scale, NUMBERS):
        raise UserError(f"scale must be a number; got {shown(scale)}")
    if context is not None and initial_state is not None:
        raise UserError("context needs no initial_state: the pieces before this one make it")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if cu_seqlens is not None:
        first = first_tokens(cu_seqlens, *q.shape[:2])
        log_gate = log_gate.masked_fill(first[..., None, None], LOG_ZERO[state_dtype(q.dtype)])
    backend = choose(backend, q, v.shape[-1])
    forms: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "chunkwise": _chunkwise,
        "cuda": _of_unified(unified.by_kernels),
        "reference": _of_unified(unified.reference),
        "recurrent": _of_unified(unified.recurrent),
        "fla": fla_attention,
    }
    attend = forms[backend]
    if backend == "chunkwise":
        message = "gated_linear_attention has no forward mode here; backend='reference' has"
        refuse_forward_mode(message, q, k, v, log_gate, initial_state)
    if backend == "fla":  # its kernels are autotuned at the first call, which a graph cannot contain
        attend = torch.compiler.disable(attend)
    if context is not None:
        _, own = attend(q, k, v, log_gate, None, scale)
        initial_state = context.state_before(own, log_gate.to(own.dtype).sum(1).exp())
    return attend(q, k, v, log_gate, initial_state, scale)


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    unified.check_inputs(q, k, v, state, cu_seqlens, log_gate=log_gate)
    if log_gate.shape != q.shape or not log_gate.is_floating_point():
        got = f"{log_gate.dtype} {list(log_gate.shape)}"
        raise UserError(f"log_gate must be floating point {list(q.shape)}, as q and k; got {got}")


def choose(backend: str, q: Tensor, Dv: int) -> str:
    """The backend to use, for `auto` by what the machine has. UserError if it cannot run here."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "fla":
        if not HAS_FLA:
            raise UserError(f"backend='fla' needs fla-core: {install_command('bench')}")
        if q.device.type != "cuda":
            raise UserError(f"backend='fla' needs CUDA tensors; these are on {q.device}")
        return backend
    return unified.choose(backend, q, Dv)


def _of_unified(form: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A form of unified_linear_attention.py without its right decay."""
    return lambda q, k, v, log_gate, state, scale: form(q, k, v, log_gate, None, state, scale)


def fla_attention(q, k, v, log_gate, initial_state, scale):
    """fla-core's `chunk_gla`: (o, state)."""
    _announce_tuning()
    attend = _chunk_gla if torch.is_grad_enabled() else _chunk_gla_padded
    return attend(q, k, v, log_gate, initial_state, scale)


@functools.cache
def _announce_tuning() -> None:
    if local_rank() == 0:
        print(
            "gla: FLA's kernels are compiled and tuned at their first call on this GPU with these sizes, for "
            "minutes; Triton's cache remembers them",
            file=sys.stderr,
        )


def _chunk_gla_padded(q, k, v, log_gate, initial_state, scale):
    """`_chunk_gla` for inference, whose batches have hundreds of sizes.

    FLA's kernels are compiled and autotuned anew for each batch size and, below 64 tokens, for other chunk
    sizes. So the batch is padded to a power of two and the sequence to a chunk, with zeros, which change
    neither o nor the state.
    """
    B, N = q.shape[:2]
    rows, tokens = (1 << max(0, B - 1).bit_length()) - B, max(0, CHUNK - N)
    if rows or tokens:
        q, k, v, log_gate = (F.pad(x, (0, 0, 0, 0, 0, tokens, 0, rows)) for x in (q, k, v, log_gate))
        if initial_state is not None:
            initial_state = F.pad(initial_state, (0, 0, 0, 0, 0, 0, 0, rows))
    with _TRITON_LOCK:
        o, state = _chunk_gla(q, k, v, log_gate, initial_state, scale)
    return o[:B, :N], state[:B]


def _chunk_gla(q, k, v, log_gate, initial_state, scale):
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, log_gate, scale=scale, initial_state=initial_state, output_final_state=True)


# The chunkwise form. With G the cumulative sum of log_gate within a chunk, token j has weight exp(G_i − G_j)
# in row i, per key dimension. As a product of a row's and a column's factor it would overflow in fp32
# (exp(−G_j)). So every exponent below is a difference that is ≤ 0 (section 4.3 of the paper, "secondary-level
# chunking"):
#   across chunks       exp(G_i) from the chunk's start, exp(G_C − G_j) to its end;
#   across sub-chunks   exp(G_i − R) · exp(R − G_j), R being G at the first token of the row's sub-chunk;
#   within a sub-chunk  exp(G_i − G_j) itself, one column at a time, so that memory stays O(N·Dk).


@torch.library.custom_op("lingpt::gated_linear_attention_fwd", mutates_args=())
def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), true_fp32(q.device):
        Q, K, V, G = _chunks(q, k, v, log_gate, scale)
        before, final = _states(K, V, G, state)
        o = unified.scores(Q, K, G) @ V + (Q * _fade(G, Q)) @ before
        return to_tokens(o, q.shape[1]).to(q.dtype).contiguous(), final


@torch.library.custom_op("lingpt::gated_linear_attention_bwd", mutates_args=())
def _chunkwise_backward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor | None, scale: float,
    do: Tensor | None, dfinal: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_gate and, if there is one, of the initial state."""
    with torch.no_grad(), true_fp32(q.device):
        N, (Q, K, V, G) = q.shape[1], _chunks(q, k, v, log_gate, scale)
        dO = torch.zeros_like(V) if do is None else pad_to_chunks(do.to(Q.dtype), Q.shape[3])
        before, final = _states(K, V, G, state)
        after, dinitial = _adjoints(Q, dO, G, dfinal)

        from_start, to_end = _fade(G, Q), _fade(G[..., -1:, :] - G, Q)
        dQ, dK = _scores_backward((dO @ V.mT).tril_(), Q, K, G)
        dQ += from_start * (dO @ before.mT)
        dK += to_end * (V @ after.mT)
        dV = unified.scores(Q, K, G).mT @ dO + (K * to_end) @ after

        # G_i enters as a factor of q_i, −G_j as one of k_j. A gate's gradient sums over later tokens; for
        # later chunks it is that of the state at the chunk's end, so that little rounding accumulates.
        ends = torch.cat((before[:, :, 1:], final[:, :, None]), 2)
        dG = reverse_running_sum(Q * dQ - K * dK, 3) + (ends * after).sum(-1).unsqueeze(-2)

        found = (to_tokens(d, N) for d in (scale * dQ, dK, dV, dG))
        own = [d.to(x.dtype).contiguous() for d, x in zip(found, (q, k, v, log_gate), strict=True)]
        return own if state is None else [*own, dinitial]


@_chunkwise.register_fake
def _(q, k, v, log_gate, state, scale):
    B, _, H, Dk = q.shape
    return v.new_empty(v.shape), v.new_empty(B, H, Dk, v.shape[-1], dtype=state_dtype(q.dtype))


@_chunkwise_backward.register_fake
def _(q, k, v, log_gate, state, scale, do, dfinal):
    return [x.new_empty(x.shape) for x in (q, k, v, log_gate, state) if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _chunkwise_backward(*ctx.saved_tensors, ctx.scale, do, dfinal)
    return *gradients, *[None] * (6 - len(gradients))


_chunkwise.register_autograd(_differentiate, setup_context=_save)


register_flop_formula(torch.ops.lingpt.gated_linear_attention_fwd)(forward_flops)
register_flop_formula(torch.ops.lingpt.gated_linear_attention_bwd)(backward_flops)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scale·q, k and v in chunks, and G. The last chunk is padded with zeros (and gates of 1)."""
    dtype, N = state_dtype(q.dtype), q.shape[1]
    C = min(CHUNK, unified.BLOCK * max(1, -(-N // unified.BLOCK)))
    Q, K, V, gates = (pad_to_chunks(x.to(dtype), C) for x in (q, k, v, log_gate))
    return Q * scale, K, V, gates.double().cumsum(3)


def _fade(log: Tensor, like: Tensor) -> Tensor:
    """exp, in the dtype of `like`, of a sum of gates or of a difference of sums, which are in float64."""
    return log.to(like.dtype).exp()


def _states(K: Tensor, V: Tensor, G: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, H, chunks, Dk, Dv], and after the last."""
    last = G[..., -1:, :]
    sums, whole = (K * _fade(last - G, K)).mT @ V, _fade(last, K).mT  # [.., Dk, Dv], [.., Dk, 1]
    return _carry(sums, whole, initial, range(sums.shape[2]))


def _adjoints(Q: Tensor, dO: Tensor, G: Tensor, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of the state after each chunk, and that of the initial state."""
    sums, whole = (Q * _fade(G, Q)).mT @ dO, _fade(G[..., -1:, :], Q).mT
    return _carry(sums, whole, dfinal, reversed(range(sums.shape[2])))


def _carry(sums: Tensor, whole: Tensor, state: Tensor | None, chunks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The scan over `chunks`, in this order: the state before each, in place of its sum; the last state."""
    state = torch.zeros_like(sums[:, :, :1].sum(2)) if state is None else state.clone()
    for chunk in chunks:
        own = sums[:, :, chunk].clone()
        sums[:, :, chunk] = state
        state = own + whole[:, :, chunk] * state
    return sums, state


def _scores_backward(dA: Tensor, Q: Tensor, K: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of Q and K, given that of `unified.scores` (dA, zero above the diagonal)."""
    C, c = Q.shape[-2], unified.BLOCK
    dQ, dK = torch.zeros_like(Q), torch.zeros_like(K)
    for start in range(0, C, c):
        rows = slice(start, start + c)
        q, k, g, dq, dk = (x[..., rows, :] for x in (Q, K, G, dQ, dK))
        if start:
            R, da = g[..., :1, :], dA[..., rows, :start]
            row_fade, column_fade = _fade(g - R, q), _fade(R - G[..., :start, :], q)
            dq += row_fade * (da @ (K[..., :start, :] * column_fade))
            dK[..., :start, :] += column_fade * (da.mT @ (q * row_fade))
        for j in range(c):
            fade = _fade(g[..., j:, :] - g[..., j : j + 1, :], q)
            weighted = dA[..., start + j : start + c, start + j, None] * fade
            dq[..., j:, :] += weighted * k[..., j : j + 1, :]
            dk[..., j, :] += (weighted * q[..., j:, :]).sum(-2)
    return dQ, dK
