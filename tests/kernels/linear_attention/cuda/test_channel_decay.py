"""The kernels with a decay for each channel, on a GPU: as accurate as their dtype allows, in every shape."""

from __future__ import annotations

import functools
import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from lingpt.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_with_state
from lingpt.kernels.linear_attention import linear_attention
from lingpt.kernels.unified_linear_attention import (
    unified_linear_attention,
    unified_linear_attention_with_state,
)
from lingpt.tests.oracles import gated_quantised, randn, relative

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = "o", "final", "dq", "dk", "dv", "dgate", "dinitial"
BUILDS = [  # Dk, Dv, dtype, that of gates
    (64, 64, BF16, FP32),
    (64, 128, FP16, BF16),
    (128, 128, BF16, BF16),
    (96, 192, BF16, FP32),
    (128, 256, BF16, FP32),
    (256, 512, BF16, FP32),
]


@pytest.fixture(scope="session")
def compiled() -> None:
    """All builds at once: one after the other they take a minute and more."""
    from lingpt.kernels.linear_attention.cuda import channel_decay
    from lingpt.kernels.linear_attention.cuda.toolchain import native_arch

    arch, tags = native_arch(), channel_decay.TAGS
    builds = [channel_decay.Build(arch, tags[dtype], tags[gate], Dk, Dv) for Dk, Dv, dtype, gate in BUILDS]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda build: build.spec.compile(arch), builds))


def inputs(N: int, Dk: int, Dv: int, dtype: torch.dtype, gate_dtype: torch.dtype, gates: str = "weak"):
    """q, k, v, log gates, an initial state; the gradients of o and of the final state."""
    B, H = 2, 3
    q, k = (randn(B, N, H, Dk, seed=seed, dtype=dtype, device="cuda") for seed in (0, 1))
    v, do = (randn(B, N, H, Dv, seed=seed, dtype=dtype, device="cuda") for seed in (2, 3))
    x = randn(B, N, H, Dk, seed=4, device="cuda")
    gate = F.logsigmoid(x) / 16 if gates == "weak" else F.logsigmoid(4 * x)
    if gates == "mixed":
        gate[:, 5::17], gate[:, 3::11, :, ::3] = -80.0, 0.0
    state, dstate = (randn(B, H, Dk, Dv, seed=seed, device="cuda") for seed in (5, 6))
    return (q, k, v, gate.to(gate_dtype), state), do, 0.1 * dstate


def forward_backward(leaves, do, dstate, backend: str, **options) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    o, final = gated_linear_attention_with_state(
        *leaves[:4], initial_state=leaves[4], backend=backend, **options
    )
    gradients = torch.autograd.grad((o, final), leaves, (do, dstate))
    return {name: x.detach() for name, x in zip(NAMES, (o, final, *gradients), strict=True)}


def in_float64(leaves, do, dstate, **options) -> dict[str, torch.Tensor]:
    doubles = [x.double() for x in leaves]
    return forward_backward(doubles, do.double(), dstate.double(), "chunkwise", **options)


@pytest.mark.parametrize("gates", ["weak", "mixed"])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_as_accurate_as_the_quantised_form(build, gates: str, compiled) -> None:
    """Guards: every result's error, the gates' gradient's among them: at most twice that of rounding."""
    x, do, dstate = inputs(330, *build, gates)
    found, exact = forward_backward(x, do, dstate, "cuda", scale=0.2), in_float64(x, do, dstate, scale=0.2)
    limit = gated_quantised(*x, do, dstate, scale=0.2)
    off = {name: (relative(found[name], exact[name]), relative(limit[name], exact[name])) for name in NAMES}
    print(build, gates, {name: f"{a:.1e}/{b:.1e}" for name, (a, b) in off.items()})
    assert not {name: errors for name, errors in off.items() if errors[0] > 2 * errors[1] + 2.0**-16}


@pytest.mark.parametrize("N", [1, 15, 17, 33, 1024, 1025, 5000])
def test_every_length(N: int, compiled) -> None:
    x, do, dstate = inputs(N, 64, 64, BF16, FP32)
    found, exact = forward_backward(x, do, dstate, "cuda"), in_float64(x, do, dstate)
    off = {name: relative(found[name], exact[name]) for name in NAMES}
    print(N, {name: f"{a:.1e}" for name, a in off.items()})
    assert max(off.values()) < 8e-3, off


def test_views_of_a_projection_and_packed_sequences(compiled) -> None:
    """Guards: strides, and that nothing passes a border: each sequence alone gives the same."""
    N, H, D = 700, 2, 64
    qkv = randn(1, N, 3 * H * D, seed=1, dtype=BF16, device="cuda").requires_grad_()
    gate = F.logsigmoid(randn(1, N, H, D, seed=2, device="cuda")).requires_grad_()
    borders = [0, 1, 130, 130, 450, N]

    def attend(x: torch.Tensor, g: torch.Tensor, **options) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (H, D)) for t in x.split(H * D, -1))
        return gated_linear_attention(q, k, v, g, **options)

    packed = attend(qkv, gate, cu_seqlens=torch.tensor(borders, device="cuda"), backend="cuda")
    x, g = (t.detach().double().requires_grad_() for t in (qkv, gate))
    pieces = [slice(a, b) for a, b in itertools.pairwise(borders) if b > a]
    alone = torch.cat([attend(x[:, piece], g[:, piece], backend="chunkwise") for piece in pieces], 1)
    assert relative(packed, alone) < 4e-3
    do = randn(*packed.shape, seed=3, dtype=BF16, device="cuda")
    found = torch.autograd.grad(packed, (qkv, gate), do)
    exact = torch.autograd.grad(alone, (x, g), do.double())
    assert relative(found[0], exact[0]) < 4e-3 and relative(found[1], exact[1]) < 1e-2


def test_other_head_dimensions_are_padded(compiled) -> None:
    x, do, dstate = inputs(100, 40, 50, BF16, FP32)
    found, exact = forward_backward(x, do, dstate, "auto"), in_float64(x, do, dstate)
    assert max(relative(found[name], exact[name]) for name in NAMES) < 8e-3


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("left", ["channel", "token", "none"])
def test_unified_linear_attention(left: str, reverse: bool, compiled) -> None:
    """Guards: a decay per token or head given to all channels, its gradient; reversed; v of any width."""
    (q, k, v, gate, state), dy, dstate = inputs(330, 64, 64, BF16, FP32)
    v, dy, state, dstate = v[..., :50], dy[..., :50], state[..., :50], dstate[..., :50]
    gate[:, 90] = float("-inf")
    decays = {"channel": gate, "token": gate[..., 0], "none": None}[left], gate[:, :, :, 1]
    results = []
    for dtype, backend in ((BF16, "cuda"), (torch.float64, "chunkwise")):
        wide = torch.promote_types(dtype, FP32)
        rows = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        l, r = (None if x is None else x.to(wide).requires_grad_() for x in decays)
        start = state.to(wide).requires_grad_()
        found = unified_linear_attention_with_state(
            *rows, l, r, reverse=reverse, initial_state=start, backend=backend
        )
        leaves = [x for x in (*rows, l, r, start) if x is not None]
        results.append((*found, *torch.autograd.grad(found, leaves, (dy.to(dtype), dstate.to(wide)))))
    off = [relative(x, exact) for x, exact in zip(*results, strict=True)]
    print(left, reverse, [f"{x:.1e}" for x in off])
    assert max(off[:5]) < 8e-3 and max(off) < 2e-2, off  # the decays' gradients are sums of differences


def test_linear_attention_by_channel_is_unified_linear_attention(compiled) -> None:
    """Guards: other bits than the function that it is a name of; kernels that `auto` does not take."""
    (q, k, v, gate, _), do, _ = inputs(330, 64, 64, BF16, FP32)
    results = []
    for attend in (
        lambda *x: linear_attention(*x[:3], a=0, log_decay=x[3], normalize=False, normalize_qk=False),
        lambda *x: unified_linear_attention(*x, backend="cuda"),
        torch.compile(unified_linear_attention, fullgraph=True),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
        o = attend(*leaves)
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    for x, y, z in zip(*results, strict=True):
        assert torch.equal(x, y) and torch.equal(y, z)


@pytest.mark.parametrize(
    ("D", "dtype", "right"), [(32, FP32, False), (128, FP32, True), (256, FP32, False), (64, BF16, True)]
)
def test_the_recurrence_in_fp32(D: int, dtype: torch.dtype, right: bool) -> None:
    """Guards: all that tensor cores do not compute, forward and backward, and under torch.compile."""
    (q, k, v, gate, state), dy, dstate = inputs(150, D, D, dtype, FP32)
    tensors = [q, k, v, gate, *([gate / 2] if right else [])]
    results = []
    for attend, change in (
        (unified_linear_attention_with_state, lambda x: x),
        (torch.compile(unified_linear_attention_with_state, fullgraph=True), lambda x: x),
        (functools.partial(unified_linear_attention_with_state, backend="chunkwise"), torch.Tensor.double),
    ):
        leaves = [change(x.detach()).requires_grad_() for x in (*tensors, state)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*chunkwise backend")  # a fallback to PyTorch
            found = attend(*leaves[:-1], initial_state=leaves[-1])
        results.append((*found, *torch.autograd.grad(found, leaves, (change(dy), change(dstate)))))
    eager, compiled, exact = results
    off = [relative(x, y) for x, y in zip(eager, exact, strict=True)]
    print(D, dtype, right, [f"{x:.1e}" for x in off])
    assert max(off) < (1e-5 if dtype == FP32 else 8e-3), off
    assert all(relative(x, y.double()) < 1e-6 for x, y in zip(compiled, eager, strict=True))


def test_a_fallback_to_pytorch_is_said() -> None:
    (q, k, v, gate, _), *_ = inputs(70, 64, 64, BF16, FP32)
    with pytest.warns(UserWarning, match="107 times slower than on tensor cores: it takes no float64"):
        unified_linear_attention(q.double(), k.double(), v.double(), gate.double())


def test_opcheck(compiled) -> None:
    leaves, _, _ = inputs(70, 64, 64, BF16, FP32)
    leaves = [x.requires_grad_() for x in leaves]
    opcheck(torch.ops.lingpt.gated_linear_attention_cuda_fwd, (*leaves, 0.5))
    opcheck(torch.ops.lingpt.gated_linear_attention_cuda_fwd, (*leaves[:4], None, 0.5))


def test_compiled(compiled) -> None:
    """Guards: one graph, and bits that are equal."""
    (*leaves, _), do, _ = inputs(300, 64, 64, BF16, FP32)
    leaves = [x.detach().requires_grad_() for x in leaves]
    results = []
    for attend in (gated_linear_attention, torch.compile(gated_linear_attention, fullgraph=True)):
        o = attend(*leaves)
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_in_a_cuda_graph(compiled) -> None:
    """Guards: replays that read new inputs, and equal bits."""
    (*leaves, _), do, _ = inputs(2100, 64, 64, BF16, FP32)
    leaves = [x.detach().requires_grad_() for x in leaves]

    def step() -> tuple[torch.Tensor, ...]:
        o = gated_linear_attention(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        replayed = step()
    with torch.no_grad():
        leaves[0].mul_(-2)
    graph.replay()
    for x, y in zip(replayed, step(), strict=True):
        assert torch.equal(x, y)
