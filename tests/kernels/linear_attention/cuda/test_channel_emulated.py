"""The kernels with a decay for each channel on the emulator: every access and race watched, and no GPU.

Forward and backward are held to float64, with gates that hardly fade and gates that shut.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F

from lingpt import ptx_emulator as emulator
from lingpt.kernels import channel_decay_operator
from lingpt.kernels.gated_linear_attention import gated_linear_attention_with_state
from lingpt.kernels.linear_attention.cuda import channel_decay, recurrence
from lingpt.kernels.linear_attention.cuda import compile as nvrtc
from lingpt.kernels.unified_linear_attention import unified_linear_attention_with_state
from lingpt.ptx_emulator import Memory
from lingpt.tests.oracles import gated_quantised, randn, relative

pytestmark = pytest.mark.nvrtc

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch):
    """The kernels on CPU tensors, in segments of so many tokens, and parts and runs of so many segments."""

    def pretend(segment_len: int, part: int = 9, run_len: int = 1, arch: str = "sm_90a") -> None:
        monkeypatch.setattr(nvrtc.KernelSpec, "compile", lambda *args: Compiled(*args))
        for kernels in (channel_decay, recurrence):
            monkeypatch.setattr(kernels, "card", lambda device: (arch, 132))
            monkeypatch.setattr(kernels, "raw_stream", lambda device: 0)
            monkeypatch.setattr(kernels, "current_device", lambda device: contextlib.nullcontext())
            kernels.build_for.cache_clear()
        monkeypatch.setattr(
            channel_decay, "segmentation", lambda q, Dv: (-(-q.shape[1] // segment_len), segment_len)
        )
        monkeypatch.setattr(channel_decay, "part_length", lambda *_: part)
        monkeypatch.setattr(channel_decay, "run_length", lambda *_: run_len)
        monkeypatch.setattr(recurrence, "segmentation", lambda N, *_: (-(-N // segment_len), segment_len))

    yield pretend
    monkeypatch.undo()
    channel_decay.build_for.cache_clear()
    recurrence.build_for.cache_clear()


class Compiled:
    """A `CompiledModule` whose kernels the emulator runs."""

    def __init__(self, spec: nvrtc.KernelSpec, arch: str) -> None:
        self.module = module(spec.source, arch, tuple(spec.defines.items()))

    def load(self, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        return {name: functools.partial(self.launch, name) for name in names}

    def launch(self, name: str, grid: tuple, threads: int, shared: int, stream: int, *params: bytes) -> None:
        kernel = self.module.kernel(name, "".join(f"{len(x)}s" for x in params))
        kernel(grid, (threads, 1, 1), shared, stream, *params)


@functools.lru_cache(maxsize=2)
def module(source: str, arch: str, defines: tuple) -> emulator.Module:
    return emulator.Module(functools.partial(nvrtc.compile_ptx, source, arch, dict(defines)), arch)


def inputs(N: int, Dk: int, Dv: int, dtype: torch.dtype, gates: str = "mixed", H: int = 1):
    """q, k, v, the log gates, do; an initial state and the final one's gradient."""
    q, k = (randn(1, N, H, Dk, seed=seed, dtype=dtype) for seed in (0, 1))
    v, do = (randn(1, N, H, Dv, seed=seed, dtype=dtype) for seed in (2, 3))
    x = randn(1, N, H, Dk, seed=4)
    gate = {"weak": F.logsigmoid(x) / 16, "mixed": F.logsigmoid(4 * x), "strong": x - 30}[gates]
    if gates == "mixed":
        gate[:, 5::17] = float("-inf")
        gate[:, 3::11, :, ::3] = 0.0
    state, dstate = (randn(1, H, Dk, Dv, seed=seed) for seed in (5, 6))
    return (q, k, v, gate.clamp(max=0.0), do), state, 0.1 * dstate


def in_float64(x, state, dstate, scale: float) -> dict[str, torch.Tensor]:
    *leaves, do = (t.double() for t in x)
    leaves[3] = leaves[3].clamp(min=-1000.0)
    leaves.append(state.double())
    leaves = [t.requires_grad_() for t in leaves]
    found = gated_linear_attention_with_state(
        *leaves[:4], initial_state=leaves[4], scale=scale, backend="chunkwise"
    )
    gradients = torch.autograd.grad(found, leaves, (do, dstate.double()))
    return named((*found, *gradients))


def named(results) -> dict[str, torch.Tensor]:
    names = "o", "final", "dq", "dk", "dv", "dgate", "dinitial"
    return dict(zip(names, (x.detach() for x in results), strict=True))


def run(x, state, dstate, scale: float) -> dict[str, torch.Tensor]:
    q, k, v, gate, do = x
    with Memory(q, k, v, gate, do, state, dstate):
        o, final, states = channel_decay.forward(q, k, v, gate, state, scale)
        gradients = channel_decay.backward(q, k, v, gate, state, final, states, scale, do, dstate)
    return named((o, final, *gradients))


CASES = [  # N, tokens of a segment, segments of a part, of a run, Dk, Dv, dtype, that of gates, how they fade
    (70, 96, 9, 1, 32, 64, BF16, FP32, "weak"),
    (70, 32, 9, 1, 32, 64, FP16, BF16, "mixed"),
    (120, 32, 9, 3, 32, 64, BF16, FP32, "weak"),
    (120, 32, 9, 2, 32, 160, BF16, FP32, "mixed"),  # prepared
    (170, 32, 3, 2, 32, 160, BF16, BF16, "weak"),  # in two parts, each of two runs
]
SLOW = [
    (100, 32, 9, 1, 64, 32, BF16, BF16, "mixed"),
    (70, 32, 9, 1, 64, 128, BF16, FP32, "weak"),
    (100, 64, 9, 1, 128, 128, FP16, FP32, "mixed"),
    (40, 32, 9, 1, 32, 288, BF16, FP32, "mixed"),  # prepared; three groups of warps share a state's row
    (100, 64, 9, 1, 96, 256, BF16, FP32, "mixed"),  # two groups, which have roles
    (70, 64, 9, 1, 64, 288, BF16, BF16, "weak"),  # three; prepared
    (100, 32, 9, 2, 256, 512, BF16, FP32, "mixed"),  # four; prepared
    (150, 32, 2, 1, 32, 160, FP16, FP32, "mixed"),  # prepared; the last part is shorter
    (90, 32, 1, 1, 64, 288, BF16, BF16, "mixed"),  # a part for each segment
]
SLOW_SM80 = [
    (70, 32, 9, 2, 32, 160, BF16, BF16, "mixed"),  # prepared
    (70, 32, 9, 2, 256, 256, BF16, FP32, "mixed"),  # prepared, as two slices do not fit otherwise
    (40, 32, 9, 1, 64, 512, BF16, FP32, "weak"),  # four groups without roles
    (70, 64, 9, 1, 96, 256, FP16, BF16, "mixed"),  # two groups with roles
]


def slow(cases: Iterable[tuple], *more: object) -> list:
    return [pytest.param(case, *more, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("case", "arch"),
    [*((case, "sm_90a") for case in CASES), *slow(SLOW, "sm_90a"), *slow(SLOW_SM80, "sm_80")],
    ids=str,
)
def test_everything_at_once(case: tuple, arch: str, emulated) -> None:
    """Guards: o, the final state and all gradients, with an initial state; at most twice rounding's error."""
    N, segment_len, part, run_len, Dk, Dv, dtype, gate_dtype, gates = case
    emulated(segment_len, part, run_len, arch)
    x, state, dstate = inputs(N, Dk, Dv, dtype, gates)
    x = (*x[:3], x[3].to(gate_dtype), x[4])
    found, exact = run(x, state, dstate, 0.3), in_float64(x, state, dstate, 0.3)
    q, k, v, gate, do = x
    limit = gated_quantised(q, k, v, gate.clamp(min=-80), state, do, dstate, 0.3)
    off = {name: (relative(found[name], exact[name]), relative(limit[name], exact[name])) for name in exact}
    assert not {name: errors for name, errors in off.items() if errors[0] > 2 * errors[1]}


@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("Dv", [32, pytest.param(160, marks=pytest.mark.slow)])
def test_without_an_initial_state(Dv: int, segments: int, emulated) -> None:
    """Guards: that states are 0 where there is none, with and without `prefix`."""
    emulated(32)
    x, state, dstate = inputs(32 * segments - 5, 32, Dv, BF16, "weak")
    q, k, v, gate, do = x
    with Memory(*x):
        o, final, states = channel_decay.forward(q, k, v, gate, None, 0.3)
        gradients = channel_decay.backward(q, k, v, gate, None, final, states, 0.3, do, None)
    found = dict(zip(("o", "final", "dq", "dk", "dv", "dgate"), (o, final, *gradients), strict=True))
    exact = in_float64(x, 0 * state, 0 * dstate, 0.3)
    limit = gated_quantised(q, k, v, gate, 0 * state, do, 0 * dstate, 0.3)
    off = {name: (relative(x, exact[name]), relative(limit[name], exact[name])) for name, x in found.items()}
    assert not {name: errors for name, errors in off.items() if errors[0] > 2 * errors[1]}


RUNS = [  # segments, blocks of one, slots; segments of a run
    ((8, 64, 132), 4),
    ((8, 16, 132), 1),
    ((9, 64, 132), 5),
    ((8, 130, 132), 8),
    ((8, 140, 132), 1),  # all in turn would be two waves, and the second nearly empty
]


@pytest.mark.parametrize(("card", "run_len"), RUNS)
def test_runs_fill_the_card(card: tuple[int, int, int], run_len: int) -> None:
    assert channel_decay.run_length(*card) == run_len


PARTS = [  # segments, blocks of one, slots of the scan and of `states`; segments of a part
    ((8, 64, (132, 132)), 4),
    ((8, 16, (132, 132)), 8),  # half of them would leave the card half empty
    ((8, 260, (132, 264)), 1),
    ((1, 64, (132, 132)), 1),
]


@pytest.mark.parametrize(("card", "part"), PARTS)
def test_parts_fill_the_card(card: tuple[int, int, tuple[int, int]], part: int) -> None:
    assert channel_decay.part_length(*card) == part


@pytest.mark.slow
def test_the_longest_segment(emulated) -> None:
    """Guards: the gates' gradient, whose rounding grows within a segment: at most twice that of rounding."""
    N = channel_decay.LONGEST_SEGMENT
    emulated(N)
    x, state, dstate = inputs(N, 32, 32, BF16, "weak")
    found, exact = run(x, state, dstate, 0.3), in_float64(x, state, dstate, 0.3)
    q, k, v, gate, do = x
    limit = gated_quantised(q, k, v, gate, state, do, dstate, 0.3)
    off = {name: (relative(found[name], exact[name]), relative(limit[name], exact[name])) for name in exact}
    assert not {name: errors for name, errors in off.items() if errors[0] > 2 * errors[1]}


def test_gates_that_shut(emulated) -> None:
    """Guards: what decays by e^−30 a token: nothing overflows, and each token sees itself alone."""
    emulated(32)
    x, state, dstate = inputs(40, 32, 32, BF16, "strong")
    found, exact = run(x, state, dstate, 0.3), in_float64(x, state, dstate, 0.3)
    gradient = exact["dq"] * x[0].double()  # whose sums the gates' gradient is a difference of
    for name, error in found.items():
        if name == "dgate":
            assert (error.double() - exact[name]).norm() < 1e-3 * gradient.norm()
        else:
            assert relative(error, exact[name]) < 4e-3, name


def watched(function: Callable) -> Callable:
    """The function, in whose tensors the emulator finds every access; an operator hides those it makes."""

    def call(*args, **options):
        with Memory(*args):
            return function(*args, **options)

    return call


@pytest.mark.parametrize("reverse", [False, True])
def test_any_decay_that_they_can_compute(reverse: bool, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a decay per token or head given to all channels, its gradient; reversed; v of any width."""
    emulated(32)
    monkeypatch.setattr(channel_decay_operator, "unsupported_reason", lambda q, Dv: None)
    for name in ("forward", "backward"):
        monkeypatch.setattr(channel_decay, name, watched(getattr(channel_decay, name)))
    (q, k, v, _, dy), state, dstate = inputs(70, 32, 40, BF16, H=2)
    left, right = F.logsigmoid(randn(1, 70, 2, seed=7)), F.logsigmoid(randn(2, seed=8) + 4)
    left[:, 5::17] = float("-inf")
    results = []
    for dtype, backend in ((BF16, "auto"), (torch.float64, "chunkwise")):
        wide = torch.promote_types(dtype, FP32)
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        leaves += [x.to(wide).requires_grad_() for x in (left, right, state)]
        found = unified_linear_attention_with_state(
            *leaves[:5], reverse=reverse, initial_state=leaves[5], backend=backend
        )
        gradients = torch.autograd.grad(found, leaves, (dy.to(dtype), dstate.to(wide)))
        results.append((*found, *gradients))
    names = "y", "final", "dq", "dk", "dv", "dleft", "dright", "dinitial"
    off = {name: relative(x, exact) for name, x, exact in zip(names, *results, strict=True)}
    assert max(off.values()) < 8e-3, off


RECURRENCES = [  # N, tokens of a segment, Dk, Dv, which decays are per channel, dtype
    (21, 21, 12, 40, "left right", FP32),
    (21, 9, 12, 40, "left right", FP32),
    pytest.param((19, 8, 256, 32, "", FP32), marks=pytest.mark.slow),  # eight lanes share a column
    pytest.param((17, 6, 70, 5, "right", BF16), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", RECURRENCES, ids=str)
def test_any_decay_in_fp32(case: tuple, reverse: bool, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the recurrence, and its gradients by the same kernel, at fp32's precision and every width."""
    N, segment_len, Dk, Dv, per_channel, dtype = case
    emulated(segment_len)
    monkeypatch.setattr(recurrence, "unsupported_reason", lambda q, Dv: None)
    monkeypatch.setattr(recurrence, "forward", watched(recurrence.forward))
    (q, k, v, l, dy), state, dstate = inputs(N, Dk, Dv, dtype, "weak", H=2)
    r = F.logsigmoid(randn(1, N, 2, Dv, seed=7))
    l[:, 9], r[:, 13] = float("-inf"), -80.0
    l, r = (x if name in per_channel else x[..., 0] for name, x in (("left", l), ("right", r)))
    results = []
    for backend in ("cuda", "chunkwise"):
        tensors = (q, k, v, l, r, state, dy, dstate)
        *leaves, dy, dstate = tensors if backend == "cuda" else (x.double() for x in tensors)
        leaves = [x.detach().requires_grad_() for x in leaves]
        found = unified_linear_attention_with_state(
            *leaves[:5], reverse=reverse, initial_state=leaves[5], backend=backend
        )
        results.append((*found, *torch.autograd.grad(found, leaves, (dy, dstate))))
    off = [relative(x, exact) for x, exact in zip(*results, strict=True)]
    assert max(off) < (2e-6 if dtype == FP32 else 4e-3), off


@pytest.mark.parametrize("per_channel", [False, True])
def test_segments_of_the_recurrence(per_channel: bool, emulated) -> None:
    """Guards: states between segments of any length, a last one of one token, resets of −inf at their borders
    and within, strided views."""
    emulated(9)
    (q, k, v, l, _), state, _ = inputs(28, 12, 40, FP32, "weak", H=2)
    r = F.logsigmoid(randn(1, 28, 2, 40, seed=7)) / 16
    l[:, [0, 9, 15, 26], 1] = r[:, [8, 18], 1] = float("-inf")  # the other head keeps what segments left
    q, k, v, l, r = (x.mT.contiguous().mT for x in (q, k, v, l, r))
    l, r = (x if per_channel else x[..., :1] for x in (l, r))
    found = watched(recurrence.forward)(q, k, v, l, r, state.mT.contiguous().mT)
    x = [x.double() for x in (q, k, v, l, r)]
    exact = unified_linear_attention_with_state(*x, initial_state=state.double(), backend="chunkwise")
    for name, ours, theirs in zip(("y", "final"), found, exact, strict=True):
        assert relative(ours, theirs) < 5e-7, name
