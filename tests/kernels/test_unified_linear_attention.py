"""One function for forward and backward, with any decay, against its recurrence in float64."""

import functools
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lingpt.common.errors import UserError
from lingpt.kernels import channel_decay_operator
from lingpt.kernels.linear_attention import LinearAttentionState
from lingpt.kernels.linear_attention.cuda import recurrence
from lingpt.kernels.unified_linear_attention import (
    by_kernels,
    choose,
    reference,
    unified_linear_attention,
    unified_linear_attention_with_state,
)

B, N, H, DK, DV = 2, 75, 3, 8, 12
KINDS = ("none", "head", "token", "channel")


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def decay(kind: str, D: int, seed: int) -> torch.Tensor | None:
    """Log decays; those per token and channel have steep ones and resets."""
    shape = {"none": (), "head": (H,), "token": (B, N, H), "channel": (B, N, H, D)}[kind]
    if not shape:
        return None
    g = F.logsigmoid(3 + 2 * randn(*shape, seed=seed))
    if kind in ("token", "channel"):
        g[:, 11] = -40.0
        g[:, 30] = float("-inf")
    return g.requires_grad_()


def inputs(left: str = "channel", right: str = "none") -> tuple:
    q, k = (randn(B, N, H, DK, seed=i).requires_grad_() for i in (1, 2))
    v, state = randn(B, N, H, DV, seed=3).requires_grad_(), randn(B, H, DK, DV, seed=4).requires_grad_()
    return q, k, v, decay(left, DK, 5), decay(right, DV, 6), state


def by_recurrence(q, k, v, left, right, state, reverse=False):
    """The definition token by token; in reverse a token's decay is applied on the way to the one before."""

    def full(g, D):
        g = torch.zeros(H, dtype=q.dtype) if g is None else g
        g = g.expand(B, N, H) if g.ndim == 1 else g
        g = g.unsqueeze(-1) if g.ndim == 3 else g
        return g.expand(B, N, H, D).clamp(min=-1000.0)

    left, right, rows = full(left, DK), full(right, DV), []
    for i in reversed(range(N)) if reverse else range(N):
        decay = left[:, i].exp()[..., None] * right[:, i].exp()[..., None, :]
        own = k[:, i, ..., None] * v[:, i, ..., None, :]
        seen = state + own if reverse else decay * state + own
        rows.append((q[:, i, ..., None] * seen).sum(-2))
        state = decay * seen if reverse else seen
    return torch.stack(rows[::-1] if reverse else rows, 1), state


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("left", "right"), itertools.product(KINDS, KINDS))
def test_the_function_is_its_recurrence_and_so_are_its_gradients(left, right, reverse):
    q, k, v, l, r, state = inputs(left, right)
    dy, dstate = randn(B, N, H, DV, seed=7), randn(B, H, DK, DV, seed=8)
    wanted = [x for x in (q, k, v, l, r, state) if x is not None]
    found = []
    for call in (
        lambda: unified_linear_attention_with_state(q, k, v, l, r, reverse=reverse, initial_state=state),
        lambda: by_recurrence(q, k, v, l, r, state, reverse),
    ):
        y, final = call()
        gradients = torch.autograd.grad((y * dy).sum() + (final * dstate).sum(), wanted)
        found.append((y, final, *(g.nan_to_num() for g in gradients)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "recurrent"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("left", "right"), [("channel", "none"), ("token", "channel"), ("none", "head")])
def test_every_form_is_the_chunkwise_one_and_so_are_its_gradients(left, right, reverse, backend):
    q, k, v, l, r, state = inputs(left, right)
    wanted = [x for x in (q, k, v, l, r, state) if x is not None]
    found = []
    for form in ("chunkwise", backend):
        y, final = unified_linear_attention_with_state(
            q, k, v, l, r, reverse=reverse, initial_state=state, backend=form
        )
        loss = (y * randn(B, N, H, DV, seed=7)).sum() + final.square().sum()
        found.append((y, final, *torch.autograd.grad(loss, wanted)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_kernel_is_chosen_by_what_it_can(monkeypatch):
    """Guards: kernels on tensor cores that get a right decay per channel, or a left one that is not."""
    calls = []

    def attend(q, k, v, log_decay, state, scale):
        assert log_decay.shape == k.shape
        calls.append("tensor cores")
        return chunkwise(scale * q, k, v, log_decay, initial_state=state)

    def forward(q, k, v, l, r, state):
        assert {x.dtype for x in (q, k, v, l, r, state)} == {torch.float32}
        calls.append("recurrence")
        return chunkwise(q, k, v, l, r, initial_state=state)

    chunkwise = functools.partial(unified_linear_attention_with_state, backend="chunkwise")
    monkeypatch.setattr(channel_decay_operator, "unsupported_reason", lambda q, Dv: None)
    monkeypatch.setattr(channel_decay_operator, "attend", attend)
    monkeypatch.setattr(recurrence, "unsupported_reason", lambda q, Dv: None)
    monkeypatch.setattr(recurrence, "forward", forward)
    for left, right, reverse in itertools.product(KINDS, KINDS, (False, True)):
        calls.clear()
        q, k, v, l, r, state = (None if x is None else x.detach().float() for x in inputs(left, right))
        options = dict(initial_state=state, reverse=reverse)
        found = unified_linear_attention_with_state(q, k, v, l, r, **options)
        for ours, theirs in zip(found, chunkwise(q, k, v, l, r, **options), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert calls == ["recurrence" if right == "channel" else "tensor cores"]
    for right in (None, r.clamp(min=-1000)):  # of each channel; and a scale, as `gated_linear_attention` has
        args = q, k, v, l.clamp(min=-1000), right, state, 0.5
        for ours, theirs in zip(by_kernels(*args), reference(*args), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_right_decay_per_channel_is_no_call_of_tensor_cores(monkeypatch):
    """Guards: `auto` gives such a call with v of 512 channels, which tensor cores have and the recurrence has
    not, to the recurrence."""
    monkeypatch.setattr(channel_decay_operator, "unsupported_reason", lambda q, Dv: None)
    monkeypatch.setattr(recurrence, "unsupported_reason", lambda q, Dv: "it takes Dk and Dv up to 256")
    q, v = torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 512)
    call = functools.partial(unified_linear_attention, q, q, v)
    right = torch.full_like(v, -0.1)
    torch.testing.assert_close(call(right=right), call(right=right, backend="chunkwise"))
    with pytest.raises(UserError, match="backend='cuda' cannot run this: it takes Dk and Dv up to 256"):
        call(right=right, backend="cuda")


def test_the_backward_pass_is_the_function_with_its_arguments_permuted():
    """Qin et al., eq. 8, as a user would write it."""
    q, k, v, l, r, _ = inputs("channel", "channel")
    y = unified_linear_attention(q, k, v, l, r)
    dy = randn(B, N, H, DV, seed=7)
    dq, dk, dv, dl = torch.autograd.grad(y, (q, k, v, l), dy)
    with torch.no_grad():
        again = (
            unified_linear_attention(dy, v, k, r, l),
            unified_linear_attention(v, dy, q, r, l, reverse=True),
            unified_linear_attention(k, q, dy, l, r, reverse=True),
        )
    for ours, theirs in zip((dq, dk, dv), again, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradient = (q * dq - k * dk).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(dl, gradient.masked_fill(l <= -1000.0, 0.0))


@pytest.mark.slow
def test_second_derivatives():
    q, k, v, l, r, _ = inputs("channel", "token")
    few = [x[:, :20].detach().requires_grad_() for x in (q, k, v, l.clamp(min=-5), r.clamp(min=-5))]
    assert torch.autograd.gradgradcheck(unified_linear_attention, few, fast_mode=True)


def test_transforms_of_torch_func():
    """Guards: an autograd function that refuses them, in words about its own code."""
    q, k, v, l, r, _ = (None if x is None else x.detach() for x in inputs("channel", "head"))

    def loss(q, k, v, l):
        return unified_linear_attention(q, k, v, l, r).square().sum()

    two = [torch.stack((x, 0.5 * x)) for x in (q, k, v, l)]
    found = torch.func.vmap(torch.func.grad(loss))(*two)
    for i in range(2):
        q = two[0][i].requires_grad_()
        (dq,) = torch.autograd.grad(loss(q, *(x[i] for x in two[1:])), q)
        torch.testing.assert_close(found[i], dq)


@pytest.mark.parametrize("batched", range(5))
def test_vmap_over_one_argument(batched):
    """Guards: sums written into a tensor that vmap does not batch, as it was made of another argument."""
    args = [x[:, :20].detach() for x in inputs("channel", "channel")[:5]]
    two = torch.stack((args[batched], 0.5 * args[batched]))

    def loss(x):
        return unified_linear_attention(*args[:batched], x, *args[batched + 1 :]).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(two)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(x) for x in two]))


@pytest.mark.parametrize("left", ["token", "channel"])
def test_fp32_is_near_float64_over_long_and_steep_sequences(left):
    """Guards: exponents above 0, which overflow where decays are steep."""
    shape = (1, 2000, 2) if left == "token" else (1, 2000, 2, DK)
    q, k, v = (randn(1, 2000, 2, DK, seed=i) for i in range(3))
    g = F.logsigmoid(6 * randn(*shape, seed=4))
    exact = unified_linear_attention(q, k, v, g)
    ours = unified_linear_attention(q.float(), k.float(), v.float(), g.float())
    assert (ours - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("right", ["head", "token", "channel"])
def test_the_decays_gradients_in_16_bits_are_near_float64(right):
    """Guards: the right decay's, a difference of sums with y, from a y that is rounded."""
    rows = [x.detach().bfloat16() for x in inputs()[:3]]
    decays = [decay(kind, D, 5).detach().clamp(min=-5).float() for kind, D in (("token", DK), (right, DV))]
    dy = randn(B, N, H, DV, seed=7).bfloat16()

    def gradients(*tensors):
        *given, dy, left, right = tensors
        wanted = [x.requires_grad_() for x in (left, right)]
        return torch.autograd.grad(unified_linear_attention(*given, *wanted), wanted, dy)

    exact = gradients(*(x.double() for x in (*rows, dy, *decays)))
    for ours, theirs in zip(gradients(*rows, dy, *decays), exact, strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_the_chunk_size_changes_nothing_but_rounding(chunk_size):
    q, k, v, l, r, _ = inputs("channel", "channel")
    one, other = (unified_linear_attention(q, k, v, l, r, chunk_size=size) for size in (64, chunk_size))
    torch.testing.assert_close(one, other)


def test_packed_sequences_are_single_ones():
    """Guards: a token that reads the sequence before its own, in either direction, in any row."""
    q, k, v = (randn(2, 60, H, D, seed=i) for i, D in enumerate((DK, DK, DV)))
    l = F.logsigmoid(randn(2, 60, H, DK, seed=5))
    bounds = [0, 17, 17, 44, 60, 63, 120]
    for reverse in (False, True):
        packed = unified_linear_attention(q, k, v, l, cu_seqlens=torch.tensor(bounds), reverse=reverse)
        for a, b in itertools.pairwise(bounds):
            alone = ((x.flatten(0, 1)[None, a:b]) for x in (q, k, v, l))
            single = unified_linear_attention(*alone, reverse=reverse)
            torch.testing.assert_close(packed.flatten(0, 1)[None, a:b], single)


def test_a_sequence_in_two_parts():
    q, k, v, l, r, _ = inputs("channel", "channel")
    whole, end = unified_linear_attention_with_state(q, k, v, l, r)
    parts, state = [], None
    for part in (slice(0, 33), slice(33, N)):
        given = (x[:, part] for x in (q, k, v, l, r))
        y, state = unified_linear_attention_with_state(*given, initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


def test_no_tokens_and_one():
    for n in (0, 1):
        q, k, v = (randn(B, n, H, DK, seed=i).requires_grad_() for i in range(3))
        y, state = unified_linear_attention_with_state(q, k, v, -0.1)
        (y.sum() + state.sum()).backward()
        assert choose("auto", q, DK) == ("recurrent" if n else "chunkwise")
        assert y.shape == q.shape and q.grad.shape == q.shape and state.shape == (B, H, DK, DK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": 0.1}, "left=0.1 must be a log decay, at most 0"),
        (
            {"right": torch.zeros(B, N, H, DK)},
            r"right must be a number, \[H\], \[B, N, H\] or \[B, N, H, 12\]",
        ),
        ({"v": torch.zeros(B, N, H)}, r"q and k must be \[B, N, H, Dk\] and v \[B, N, H, Dv\]"),
        ({"k": torch.zeros(B, N, H, DK)}, "one floating-point dtype"),
        ({"initial_state": torch.zeros(B, H, DV, DK)}, "initial_state must be torch.float64"),
        ({"chunk_size": 24}, "chunk_size=24 must be a multiple of 16"),
        ({"left": [-0.1] * H}, "left must be a number or a tensor, not of type list"),
        ({"left": torch.zeros(H, device="meta")}, "left must be on q's device, cpu; it is on meta"),
        ({"v": torch.zeros(B, N, H, DV, dtype=torch.float64, device="meta")}, "v must be on q's device, cpu"),
        ({"k": [0.0]}, r"k must be a tensor; got \[0.0\]"),
        ({"initial_state": LinearAttentionState.zeros(B, H, DK)}, "initial_state must be a tensor"),
        ({"reverse": 1}, "reverse must be True or False"),
        ({"chunk_size": 0}, "chunk_size=0 must be a multiple of 16"),
        ({"chunk_size": 64.0}, "chunk_size=64.0 must be a multiple of 16"),
        ({"cu_seqlens": torch.tensor([0.0, N])}, r"cu_seqlens must be int32 or int64 \[sequences \+ 1\]"),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
        ({"backend": "cuda"}, "^backend='cuda' cannot run this: the tensors are on cpu$"),
    ],
)
def test_a_mistake_is_a_line(change, message):
    """Guards: on a GPU, a tensor of the host whose address a kernel gets."""
    q, k, v, *_ = inputs()
    for backend in ("auto", "reference", "chunkwise", "recurrent", "cuda"):
        with pytest.raises(UserError, match=message) as error:
            unified_linear_attention(**({"q": q, "k": k, "v": v, "backend": backend} | change))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "on_tensor_cores", "kernel", "backend", "said"),
    [
        (torch.bfloat16, None, None, "cuda", None),
        (torch.bfloat16, "too wide", None, "cuda", "in fp32, 4 to 23 times slower .*: too wide"),
        (torch.float32, "no fp32", None, "cuda", None),
        (torch.bfloat16, "too wide", "far too wide", "chunkwise", "on the chunkwise backend.*: far too wide"),
    ],
)
def test_a_slower_path_on_a_gpu_is_said(dtype, on_tensor_cores, kernel, backend, said, monkeypatch) -> None:
    """Guards: 16-bit inputs that silently run in fp32, token by token, or in PyTorch."""
    monkeypatch.setattr(channel_decay_operator, "unsupported_reason", lambda q, Dv: on_tensor_cores)
    monkeypatch.setattr(recurrence, "unsupported_reason", lambda q, Dv: kernel)
    q: Any = SimpleNamespace(shape=(1, 64, 2, 64), dtype=dtype, device=torch.device("cuda"))
    with pytest.warns(UserWarning, match=said) if said else warnings.catch_warnings(action="error"):
        assert choose("auto", q, 64) == backend


def test_compiled_for_any_length() -> None:
    """Guards: at a second length some sizes are not numbers while torch.compile traces."""
    compiled = torch.compile(unified_linear_attention, fullgraph=True, backend="eager")
    for N, both in ((16, False), (32, True)):
        q, k, v = (torch.randn(2, N, 3, 16) for _ in range(3))
        decays = [-torch.rand(2, N, 3, 16) for _ in range(1 + both)]
        assert torch.equal(compiled(q, k, v, *decays), unified_linear_attention(q, k, v, *decays))
