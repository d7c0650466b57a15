"""What tests of attention compare with: definitions written out, kernels' accuracy, and random inputs.

Written apart from the product's code wherever an error in it would otherwise agree with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.kernels import gated_linear_attention as gated
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    interface,
    linear_attention,
    linear_attention_with_state,
)
from lingpt.kernels.numerics import B_SHRINK, reciprocal_norm, true_fp32

# The backends that run on any device.
FORMS = tuple(name for name in interface.BACKENDS if name not in ("auto", "cuda"))
GATED_FORMS = tuple(name for name in gated.BACKENDS if name not in ("auto", "cuda", "fla"))


# Inputs


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Normal numbers, drawn in fp32 (float64) and rounded to the dtype."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=drawn, device=device).to(dtype)


def inputs(
    B: int, N: int, H: int, D: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> list[Tensor]:
    """q, k, v and the gradient of o: [B, N, H, D] each."""
    return [randn(B, N, H, D, seed=4 * seed + i, dtype=dtype, device=device) for i in range(4)]


def some_state(
    B: int, H: int, D: int, dtype: torch.dtype = torch.float32, seed: int = 99, device: str = "cpu", **options
) -> LinearAttentionState:
    """What 50 tokens leave; `options` go to `linear_attention`."""
    q, k, v, _ = (x.to(dtype) for x in inputs(B, 50, H, D, torch.bfloat16, seed, device))
    if options.get("normalize_qk") is False:
        k = 0.05 * k
    state = linear_attention_with_state(q, k, v, backend="reference", **options)[1]
    return LinearAttentionState(*(x.contiguous() for x in state))


def token_decays(B: int, N: int, H: int, device: str = "cpu") -> Tensor:
    """log σ(x + 4); some flat, some steep, and resets: two in a row, a chunk's first and last, at once."""
    gates = torch.nn.functional.logsigmoid(randn(B, N, H, seed=20, device=device) + 4)
    gates[:, 5::17], gates[:, 9::37] = 0.0, -20.0
    for reset in (30, 31, 64, 127, 190):
        gates[:, reset : reset + 1] = float("-inf")
    gates[:, :1, 1:] = float("-inf")  # before the first token of every head but one
    return gates


# Definitions


def by_definition(q: Tensor, k: Tensor, v: Tensor, b: Tensor | float, gamma: Tensor) -> Tensor:
    """o_i = Σ_j w_ij v_j / Σ_j w_ij over j ≤ i, w_ij = (1 + b q̂_i·k̂_j) γ_{j+1} ⋯ γ_i, token by token.

    q, k, v and o: [B, N, H, D]; b: [H] or a number; γ: [H] or [B, N, H]. b is shrunk by 2⁻⁶, which keeps
    every weight positive.
    """
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gamma, now = gamma.expand(q.shape[:3]), torch.ones_like(q[:, :1, :, 0])
    fade, rows = now[:, :0], []  # [B, j, H]
    for i in range(q.shape[1]):
        fade = torch.cat((fade * gamma[:, i : i + 1], now), 1)
        w = fade * (1 + b * (1 - 2**-6) * (q[:, i : i + 1] * k[:, : i + 1]).sum(-1))
        rows.append((w[..., None] * v[:, : i + 1]).sum(1) / w.sum(1)[..., None])
    return torch.stack(rows, 1)


def gated_by_definition(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: float) -> Tensor:
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t: Yang et al. (2024), eq. 3, token by token.

    q, k, gate: [B, N, H, Dk]; v and o: [B, N, H, Dv].
    """
    B, N, H, Dk = q.shape
    S, rows = q.new_zeros(B, H, Dk, v.shape[-1]), []
    for t in range(N):
        S = gate[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(rows, 1)


# What linear attention is without its normaliser, with a = 0 and b = 1, under each one's own name.
# q, k, v and o: [B, N, H, D]; γ: [H]; α: [B, N, H].


def retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """(Q Kᵀ ⊙ D) V, D_nm = γ^(n−m) for n ≥ m: RetNet (arXiv 2307.08621), eq. 5, in parallel."""
    n = torch.arange(q.shape[1], dtype=q.dtype)
    D = (gamma[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()
    return torch.einsum("bnhd,bmhd,hnm,bmhe->bnhe", q, k, D, v)


def lightning_attention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """kv_t = λ kv_{t−1} + k_t v_tᵀ, o_t = q_tᵀ kv_t: Lightning Attention-2 (arXiv 2401.04658), eq. 2."""
    kv, rows = torch.zeros_like(q[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        kv = gamma[:, None, None] * kv + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((q[:, t, :, :, None] * kv).sum(-2))
    return torch.stack(rows, 1)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """GLA whose gate is one number a head: FLA's simple GLA."""
    return gated_by_definition(q, k, v, alpha[..., None].expand_as(k), scale=1.0)


def ssd(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """M X, M_ji = C_jᵀ A_j ⋯ A_{i+1} B_i: Mamba-2's SSD (arXiv 2405.21060), eq. 3, 6; C, B, X = q, k, v."""
    B, N, H, _ = q.shape
    M = q.new_zeros(B, H, N, N)
    for j in range(N):
        for i in range(j + 1):
            M[:, :, j, i] = (q[:, j] * k[:, i]).sum(-1) * alpha[:, i + 1 : j + 1].prod(1)
    return torch.einsum("bhji,bihd->bjhd", M, v)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The leading dimensions of x [B, N, H, D] rotated by LitGPT; cos, sin: [N, R]."""
    from litgpt.model import apply_rope

    R = cos.shape[-1]
    turned = apply_rope(x[..., :R].transpose(1, 2), cos[None], sin[None]).transpose(1, 2)
    return torch.cat((turned, x[..., R:]), -1)


# Both passes of linear attention, by name: o, the final state S, z, c, n, the gradients dq, dk, dv, db, dS …


def forward_backward(
    q, k, v, do, dstate=None, b=1.0, initial=None, backend="auto", return_state=True, **options
) -> dict[str, Tensor]:
    """By the public operator. `dstate`: the gradient of the final state; da and db are of tensors a and b,
    dlog_decay of decays of tokens' own."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    names = ["dq", "dk", "dv"]
    if isinstance(b, Tensor):
        b = b.detach().requires_grad_()
        leaves.append(b)
        names.append("db")
    if isinstance(options.get("a"), Tensor):
        options["a"] = options["a"].detach().requires_grad_()
        leaves.append(options["a"])
        names.append("da")
    if options.get("log_decay") is not None and options["log_decay"].ndim == 3:
        options["log_decay"] = options["log_decay"].detach().requires_grad_()
        leaves.append(options["log_decay"])
        names.append("dlog_decay")
    if initial is not None:
        initial = LinearAttentionState(*(x.detach().requires_grad_() for x in initial))
        leaves += initial
        names += ["dS", "dz", "dc", "dn"]
    options |= dict(initial_state=initial, backend=backend)
    if return_state:
        o, state = linear_attention_with_state(*leaves[:3], b, **options)
    else:
        o, state = linear_attention(*leaves[:3], b, **options), ()
    results, cotangents = [o], [do]
    if dstate is not None:
        results += state
        cotangents += dstate
    found = [(x, dx) for x, dx in zip(results, cotangents, strict=True) if x.requires_grad]  # z and n may not
    outputs, cotangents = zip(*found, strict=True)
    gradients = torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)
    parts = ("S", "z", "c", "n") if return_state else ()
    return dict(zip(("o", *parts, *names), (o, *state, *gradients), strict=True))


def in_float64(
    q, k, v, do, dstate=None, b=1.0, initial=None, backend="reference", log_decay=None, **options
) -> dict[str, Tensor]:
    """The exact results."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    dstate, initial = (None if s is None else [x.double() for x in s] for s in (dstate, initial))
    b = b.double() if isinstance(b, Tensor) else b
    options |= {"a": options["a"].double()} if isinstance(options.get("a"), Tensor) else {}
    log_decay = None if log_decay is None else log_decay.double()
    return forward_backward(q, k, v, do, dstate, b, initial, backend, log_decay=log_decay, **options)


def quantised(
    q, k, v, do, dstate=None, *, b, initial=None, log_decay=None, a=1.0, normalize=True, return_state=True
) -> dict[str, Tensor]:
    """What the dtype of q allows: the quadratic form, with the gradients of docs/kernel.md written out.

    Rounded: q̂, k̂, h = do/g and the matrices S that enter a product, and each result once. In fp32: sums,
    weights, normaliser, norms. e = do·o/g is of the rounded o, which is what a backward pass is given.
    Without the normaliser g = 1 and e = 0; do·o is in the gradient of gates then. The state comes anyway.
    """
    (B, _, H, D), dtype = q.shape, q.dtype
    zeros = LinearAttentionState.zeros(B, H, D, device=q.device)
    initial, dstate = (zeros if x is None else LinearAttentionState(*x) for x in (initial, dstate))
    if not normalize:
        initial, dstate = initial.without_normaliser(), dstate.without_normaliser()

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    with torch.no_grad(), true_fp32(q.device):
        q, k, v, do = (x.float().transpose(1, 2) for x in (q, k, v, do))  # [B, H, N, D]
        rq, rk = reciprocal_norm(q), reciprocal_norm(k)
        shrink = B_SHRINK if normalize else 1.0
        constant = a.view(-1, 1, 1) if isinstance(a, Tensor) else a
        Q, K, coefficient = rounded(q * rq), rounded(k * rk), (b * shrink).view(-1, 1, 1)
        fade = _fade(torch.zeros_like(b) if log_decay is None else log_decay, q.shape[2])
        o, g, end = _quantised_forward(Q, K, v, constant, coefficient, fade, initial, rounded, normalize)
        h, e = rounded(do / g), (do * o).sum(-1, True) / g if normalize else torch.zeros_like(g)
        along, dK, dV, d_initial = _quantised_backward(
            Q, K, v, constant, coefficient, fade, initial, rounded, h, e, dstate
        )
        dq, dk = (
            rounded(r * (d - x * r * ((x * r) * d).sum(-1, keepdim=True)))
            for x, r, d in ((q, rq, coefficient * along), (k, rk, dK))
        )
        db = shrink * (q * rq * along).sum((0, 2, 3))
        more, row = {}, 0.0  # with the normaliser the row of G's gradient is 0
        if not normalize:
            more["da"] = (do * (fade.within @ v + fade.since * initial.c[:, :, None])).sum((0, 2, 3))
            row = (do * o).sum(-1)
        if log_decay is not None and log_decay.ndim == 3:
            more["dlog_decay"] = _quantised_gate_gradient(
                log_decay, K, v, constant * h, e, row, dK, fade, end, dstate
            )
        tokens = [x.transpose(1, 2) for x in (o, dq, dk, rounded(dV))]
    names = "S", "z", "c", "n", "o", "dq", "dk", "dv", "db", "dS", "dz", "dc", "dn"
    return dict(zip(names, (*end, *tokens, db, *d_initial), strict=True)) | more


def gated_quantised(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, initial: Tensor, do: Tensor, dfinal: Tensor, scale: float
) -> dict[str, Tensor]:
    """What the dtype of q allows of gated linear attention and its gradients, in the quadratic form.

    Rounded: every factor of a product (decayed q and k, scores and their gradients, states), and each result
    once. Sums are in float64, and the gates' gradient is of gradients that are not rounded.
    """
    causal = torch.ones(q.shape[1], q.shape[1], device=q.device).tril().bool()[..., None]

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).double()

    results = []
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(q.shape[2])):
        Q, K, V, dO, g = (x[b, :, h].double() for x in (q, k, v, do, gate))
        S, dS, G = initial[b, h].double(), dfinal[b, h].double(), g.cumsum(0)
        fade = (G[:, None] - G).masked_fill(~causal, float("-inf")).exp()  # [i, j, Dk]
        QF, KF = rounded(Q[:, None] * fade), rounded(K * fade)
        since, whole, left = rounded(Q * G.exp()), G[-1].exp()[:, None], rounded(K * (G[-1] - G).exp())
        A, dA = rounded((Q[:, None] * KF).sum(-1)), rounded((dO @ V.mT).tril())
        o, final = scale * (A @ V + since @ rounded(S)), whole * S + left.mT @ V
        dQ = scale * (torch.einsum("ij,ijd->id", dA, KF) + G.exp() * (dO @ rounded(S).mT))
        dK = scale * torch.einsum("ij,ijd->jd", dA, QF) + (G[-1] - G).exp() * (V @ rounded(dS).mT)
        dV, dinitial = scale * A.mT @ dO + left @ rounded(dS), whole * dS + scale * since.mT @ dO
        dG = Q * dQ - K * dK
        dG[-1] += (dS * final).sum(-1)
        dgate = dG.flip(0).cumsum(0).flip(0).to(gate.dtype)
        results.append((rounded(o), final, *map(rounded, (dQ, dK, dV)), dgate, dinitial))
    names = "o", "final", "dq", "dk", "dv", "dgate", "dinitial"
    return {  # [B·H, ·, ·] → [B, N, H, ·], or states [B, H, Dk, Dv]
        name: torch.stack(x)
        .unflatten(0, (q.shape[0], -1))
        .transpose(1, 1 if name in ("final", "dinitial") else 2)
        for name, x in zip(names, zip(*results, strict=True), strict=True)
    }


class Fade(NamedTuple):
    """What is left of a weight, by its age: of token j in row i, of the state before, at the end."""

    within: Tensor  # [H, N, N], zeros above the diagonal; of decays of tokens' own [B, H, N, N], and so on
    since: Tensor  # [H, N, 1], of the initial state in row i
    left: Tensor  # [H, N, 1], of token j at the end
    whole: Tensor  # [H], of the initial state at the end

    def of_state(self, x: Tensor) -> Tensor:
        """A part of the initial state, [B, H, …], at the end."""
        return self.whole.view(*self.whole.shape, *[1] * (x.ndim - 2)) * x


def _fade(log_decay: Tensor, N: int) -> Fade:
    """Of [H] or [B, N, H]."""
    if log_decay.ndim == 3:
        G = log_decay.double().clamp(min=-200).cumsum(1).transpose(1, 2)[..., None]  # [B, H, N, 1]
        last, causal = G[..., -1:, :], torch.ones(N, N, dtype=torch.bool, device=G.device).tril()
        within = (G - G.mT).masked_fill(~causal, float("-inf"))
        return Fade(*(x.exp().float() for x in (within, G, last - G, last.flatten(1))))
    i, rate = torch.arange(N, device=log_decay.device), log_decay[:, None]
    age = i[:, None] - i
    within = torch.exp(rate[..., None] * age.clamp(min=0)) * (age >= 0)
    since, left = (torch.exp(rate * t)[..., None] for t in (i + 1, N - 1 - i))
    return Fade(within, since, left, torch.exp(log_decay * N))


def _quantised_gate_gradient(
    log_decay: Tensor, K: Tensor, v: Tensor, h: Tensor, e: Tensor, row: Tensor | float, dK: Tensor,
    fade: Fade, end, dstate,
) -> Tensor:  # fmt: skip
    """[B, N, H]; zero at resets."""
    _, _, dc, dn = map(_as_rows, dstate)
    M, E = fade.within.mT @ h + fade.left * dc, fade.within.mT @ e - fade.left * dn[..., None, None]
    dG = row + (E - (v * M + K * dK).sum(-1, True))[..., 0]  # [B, H, N]
    of_end = [(x * dx).flatten(2).sum(-1) for x, dx in zip(end[:3], dstate[:3], strict=True)]
    dG[..., -1] += sum(of_end) + end[3] * dn
    gradient = dG.flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    return gradient.masked_fill(log_decay.isinf(), 0.0)


def _as_rows(x: Tensor) -> Tensor:
    """z and c as [B, H, 1, D]."""
    return x[:, :, None] if x.ndim == 3 else x


def _quantised_forward(
    Q: Tensor, K: Tensor, v: Tensor, constant: Tensor | float, coefficient: Tensor, fade: Fade, initial,
    rounded: Callable, normalize: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, g and the final state; [B, H, N, D]."""
    S, z, c, n = map(_as_rows, initial)
    w = (constant + coefficient * (Q @ K.mT)) * fade.within
    g = w.sum(-1, keepdim=True) + fade.since * (n[..., None, None] + coefficient * (Q @ z.mT))
    g = g if normalize else torch.ones_like(g)
    o = rounded((w @ v + fade.since * (constant * c + coefficient * (Q @ rounded(S)))) / g)
    left = fade.left
    sums = (left * K).mT @ v, (left * K).sum(2), (left * v).sum(2), left.sum((-2, -1)).expand(Q.shape[:2])
    counted = (True, normalize, True, normalize)
    sums = (x * used for x, used in zip(sums, counted, strict=True))
    return o, g, [x + fade.of_state(old) for x, old in zip(sums, initial, strict=True)]


def _quantised_backward(
    Q: Tensor, K: Tensor, v: Tensor, constant: Tensor | float, coefficient: Tensor, fade: Fade, initial,
    rounded: Callable, h: Tensor, e: Tensor, dstate,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """dq̂ / b, dk̂, dv and the gradient of the initial state."""
    (S, z, _, _), (dS, dz, dc, _) = map(_as_rows, initial), map(_as_rows, dstate)
    w = (constant + coefficient * (Q @ K.mT)) * fade.within
    dw = (h @ v.mT - e) * fade.within
    along = dw @ K + fade.since * (h @ rounded(S).mT - e * z)
    dK = coefficient * (dw.mT @ Q) + fade.left * (v @ rounded(dS).mT + dz)
    dV = w.mT @ h + fade.left * (K @ rounded(dS) + dc)
    d_initial = [
        coefficient * ((fade.since * Q).mT @ h),
        -(coefficient * fade.since * e * Q).sum(2),
        (constant * fade.since * h).sum(2),
        -(fade.since * e).sum((2, 3)),
    ]
    return along, dK, dV, [x + fade.of_state(d) for x, d in zip(d_initial, dstate, strict=True)]


# Errors


def relative(x: Tensor, exact: Tensor) -> float:
    """The RMS error over the RMS."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def assert_same(result: tuple, expected: tuple, **tolerance: float) -> None:
    """Two (o, final state)."""
    (o, state), (o_expected, state_expected) = result, expected
    for x, y in zip((o, *state), (o_expected, *state_expected), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def errors(x: Tensor, exact: Tensor) -> Tensor:
    """Of every number, relative to the RMS of the exact ones, if that is not 0."""
    rms = exact.square().mean().sqrt()
    return ((x.double() - exact) / torch.where(rms > 0, rms, 1.0)).flatten()


def above_twice(ours: Tensor, quantised: Tensor, floor: float = 2.0**-16) -> dict[str, float]:
    """Where our errors (RMS, maximum) are above twice those of the quantised form, and how many times them.

    `floor` is always allowed. Where operands need no rounding (c; n is no product at all), the two differ in
    the order of summation alone.
    """
    found = {}
    for kind, size in (("RMS", lambda x: x.square().mean().sqrt()), ("max", lambda x: x.abs().max())):
        ratio = size(ours).item() / max(size(quantised).item(), floor / 2)
        if not ratio <= 2:
            found[kind] = round(ratio, 2)
    return found


# Edges that a kernel must get right, wherever it runs. `run` is the kernel's forward_backward; N ≥ 80


def check_rows_of_zeros(run: Callable, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """No direction means weight 1 for everything; other rows' gradients do not change by it."""
    N = q.shape[1]
    for x, start in ((q, 10), (k, 15)):
        x[:, start : start + 10] = 0
    q[:, N // 2 :], k[:, 3 * N // 4 :] = 0, 0
    ours, exact = (form(q, k, v, do) for form in (run, in_float64))
    assert all(x.isfinite().all() for x in ours.values())
    for name, rows in (("o", None), ("dv", None), ("dq", q), ("dk", k)):
        some = slice(None) if rows is None else rows.abs().sum(-1) > 0
        assert relative(ours[name][some], exact[name][some]) < 8e-3, name
    means = v.double().cumsum(1)[:, 10:15] / torch.arange(11, 16, device=v.device).view(-1, 1, 1)
    torch.testing.assert_close(ours["o"][:, 10:15].double(), means, rtol=1e-2, atol=1e-2)


def check_q_opposite_to_k(run: Callable, k: Tensor, v: Tensor, do: Tensor) -> None:
    """Weights of almost nothing, g near zero at the first token: finite, exact, still an average."""
    ours, exact = (form(-k, k, v, do) for form in (run, in_float64))
    assert all(x.isfinite().all() for x in ours.values())
    assert ours["o"].abs().max() <= v.abs().max() * (1 + torch.finfo(v.dtype).eps)
    assert relative(ours["o"], exact["o"]) < 5e-3 and relative(ours["dv"], exact["dv"]) < 1e-2
    for name in ("dq", "dk"):
        assert relative(ours[name], exact[name]) < 2e-2, name


def check_rows_as_they_are(run: Callable, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options) -> None:
    """normalize_qk=False: norms, and b's shrinking, are out of the way."""
    options |= dict(normalize_qk=False, b=torch.full(q.shape[2:3], 0.5, device=q.device))
    ours, exact = (form(q / 4, k / 4, v, do, **options) for form in (run, in_float64))
    for name in {"o", "S", "z", "c", "dq", "dk", "dv", "da", "db"} & exact.keys():
        if not exact[name].any():
            assert not ours[name].any(), name
            continue
        assert relative(ours[name], exact[name]) < 1e-2, name
