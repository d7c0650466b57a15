"""The project's own CUDA kernels on the emulator: no GPU, and every access and race watched.

Forward and backward of the CUDA backend on CPU tensors, held to the GPU tests' target: against float64, at
most twice the error of the quantised form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch

from lingpt import ptx_emulator as emulator
from lingpt.kernels.linear_attention import LinearAttentionState, linear_attention
from lingpt.kernels.linear_attention.call import Call, OutputGradients
from lingpt.kernels.linear_attention.cuda import (
    adapted_backend,
    backend,
    launch,
    plan,
    variants,
    wide_backend,
    wide_rows,
)
from lingpt.kernels.linear_attention.cuda import compile as nvrtc
from lingpt.kernels.numerics import rotate, rotate_backward
from lingpt.ptx_emulator import Memory
from lingpt.tests import oracles
from lingpt.tests.house import files_passed
from lingpt.tests.oracles import (
    above_twice,
    check_q_opposite_to_k,
    check_rows_as_they_are,
    check_rows_of_zeros,
    errors,
    in_float64,
    quantised,
    randn,
    relative,
)

pytestmark = pytest.mark.nvrtc

BF16, FP16 = torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Build:
    """A card's architecture, and what picks a build of the kernels."""

    arch: str
    D: int
    dtype: torch.dtype = BF16
    decay: str = ""  # "head": a constant of each; "token": each one's own
    rope: int = 0
    weights: str = "NORMALISED"

    def __str__(self) -> str:
        options = [f"{self.decay}-decay"] * bool(self.decay) + [f"rope{self.rope}"] * bool(self.rope)
        options += [] if self.weights == "NORMALISED" else [self.weights.lower()]
        return "-".join([self.arch, variants.TAGS[self.dtype], str(self.D), *options])


ARCHS = ("sm_80", "sm_90a")  # the two sources: a scan of mma, and Hopper's of wgmma
PLAIN = [Build(arch, 64) for arch in ARCHS]
ROTATED = [Build(arch, 64, BF16, decay="head", rope=16) for arch in ARCHS]
WIDE = [Build(arch, 128, FP16, decay="head", rope=32) for arch in ARCHS]
GATED = [Build(arch, 64, BF16, decay="token", rope=16) for arch in ARCHS]
GATED_WIDE = [Build(arch, 128, FP16, decay="token", rope=32) for arch in ARCHS]
# weights without a normaliser
AFFINE = [Build(arch, 64, BF16, decay="token", rope=16, weights="AFFINE") for arch in ARCHS]
AFFINE_WIDE = [Build(arch, 128, FP16, weights="AFFINE") for arch in ARCHS]
PRODUCTS = [Build(arch, 64, BF16, decay="token", weights="PRODUCTS") for arch in ARCHS]
PRODUCTS_WIDE = [Build("sm_90a", 128, FP16, decay="head", rope=32, weights="PRODUCTS")]
# chunks of 32 tokens, where shared memory is small; on Hopper sm_80's scan, where much is rotated
SMALL = [
    Build("sm_86", 128, BF16, decay="head", rope=32),
    Build("sm_86", 128, BF16, decay="token", rope=32, weights="AFFINE"),
]
EVERY = [*SMALL, Build("sm_90a", 128), Build("sm_90a", 128, BF16, decay="token", rope=128)]
EVERY += [*PLAIN, *ROTATED, *WIDE, *GATED, *GATED_WIDE, *AFFINE, *AFFINE_WIDE, *PRODUCTS]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch):
    """The CUDA backend on CPU tensors: `emulated(build)` makes the machine the build's."""

    def pretend(build: Build) -> None:
        monkeypatch.setattr(plan, "card", lambda device: (build.arch, 132))
        monkeypatch.setattr(nvrtc.KernelSpec, "compile", lambda *args: Compiled(*args))
        monkeypatch.setattr(wide_rows, "card", lambda device: (build.arch, 132))
        for module in (backend, wide_rows):
            monkeypatch.setattr(module, "raw_stream", lambda device: 0)
        for module in (backend, wide_backend):
            monkeypatch.setattr(module, "current_device", lambda device: contextlib.nullcontext())
        clear_caches()

    yield pretend
    monkeypatch.undo()
    clear_caches()


def clear_caches() -> None:
    """What is kept of the machine."""
    for function in (*vars(plan).values(), variants.Variant.load, wide_rows.kernels):
        getattr(function, "cache_clear", lambda: None)()


class Compiled:
    """A `CompiledModule` whose kernels the emulator runs."""

    def __init__(self, spec: nvrtc.KernelSpec, arch: str) -> None:
        self.module = module(spec.source, arch, tuple(spec.defines.items()), spec.names)

    def load(self, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        return {name: functools.partial(self.launch, name) for name in names}

    def launch(self, name: str, grid: tuple, threads: int, shared: int, stream: int, *params: bytes) -> None:
        kernel = self.module.kernel(name, "".join(f"{len(x)}s" for x in params))
        kernel(grid, (threads, 1, 1), shared, stream, *params)


@functools.lru_cache(maxsize=2)  # of a test; a module's kernels hold some 10 MB each
def module(source: str, arch: str, defines: tuple, names: tuple) -> emulator.Module:
    """`names` tell builds apart."""
    return emulator.Module(functools.partial(nvrtc.compile_ptx, source, arch, dict(defines)), arch)


def inputs(build: Build, B: int, N: int, H: int) -> list[torch.Tensor]:
    return oracles.inputs(B, N, H, build.D, build.dtype)


def all_options(build: Build, B: int, N: int, H: int) -> dict:
    """b per head, a decay, rotations, an initial state, as of 50 tokens, and the final one's gradient."""
    D, shapes = build.D, [(B, H, build.D, build.D), (B, H, build.D), (B, H, build.D), (B, H)]
    S, z, c, dS, dz, dc, dn = (randn(*s, seed=10 + i) for i, s in enumerate(shapes[:3] + shapes))
    options = dict(
        b=torch.linspace(-0.5, 1, H),
        initial=LinearAttentionState(0.9 * S, 0.9 * z, 7 * c, torch.full((B, H), 50.0)),
        dstate=LinearAttentionState(*(0.02 * x for x in (dS, dz, dc, dn))),
    )
    if build.weights != "NORMALISED":
        options |= dict(normalize=False, a=torch.tensor([1.24, -1.01])[:H])  # far from sums of two bf16
    if build.weights == "PRODUCTS":  # for what has no state
        options = dict(b=options["b"], normalize=False, a=0.0, return_state=False)
    if build.decay == "head":
        options["log_decay"] = torch.tensor([-0.05, 0.0])[:H]
    if build.decay == "token":
        options["log_decay"] = oracles.token_decays(B, N, H)
    if build.rope:
        angle = torch.arange(N)[:, None] / 100 ** (torch.arange(build.rope // 2) * 2 / D)
        options["cos"], options["sin"] = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
    return options


def run(
    q, k, v, do, dstate=None, b=1.0, initial=None, out=None, a=1.0, return_state=True, form=backend,
    own=None, **options
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A CUDA backend's forward and backward: everything that comes out, by name.

    own: initial and dstate are exchanged for the states that are put into this list.
    """
    out = out or tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    with Memory(q, k, v, do, dstate, b, a, initial, *options.values(), out):
        options |= {"b": b} if isinstance(b, torch.Tensor) else {"b_value": b}
        options |= {"a": a} if isinstance(a, torch.Tensor) else {"a_value": a}
        options |= {} if initial is None else initial._asdict()
        if (log_decay := options.pop("log_decay", None)) is not None:
            options["head_log_decay" if log_decay.ndim == 1 else "token_log_decay"] = log_decay
        call = Call(q=q, k=k, v=v, return_state=return_state, **options)
        if own is None:
            outputs = form.forward(call)
            gradients = form.backward(call, outputs, OutputGradients(do, dstate), out)
        else:
            alone = call._replace(S=None, z=None, c=None, n=None)
            outputs = form.forward(alone, lambda state: [own.append(state), initial][1])
            exchange = lambda state: [own.append(state), dstate][1]  # noqa: E731
            gradients = form.backward(call, outputs, OutputGradients(do), out, exchange)
    final = outputs.state
    results = {"o": outputs.o, **dict(zip(("dq", "dk", "dv"), out, strict=True))}
    results |= {} if final is None else final._asdict()
    if gradients.token_log_decay is not None:
        results["dlog_decay"] = gradients.token_log_decay
    results |= {f"d{name}": x for name, x in (("a", gradients.a), ("b", gradients.b)) if x is not None}
    if gradients.initial_state is not None:
        results |= {f"d{name}": x for name, x in gradients.initial_state._asdict().items()}
    return results


def with_rope(form, build: Build, x, cos=None, sin=None, **options) -> dict[str, torch.Tensor]:
    """`in_float64` or `quantised`, with RoPE in front and its transpose behind."""
    q, k, v, do = x
    if not build.rope:
        return form(q, k, v, do, **options)
    dtype, wide = (torch.float64,) * 2 if form is in_float64 else (build.dtype, torch.float32)
    q, k = (rotate(x.to(wide), cos, sin).to(dtype) for x in (q, k))
    results = form(q, k, v, do, **options)
    return results | {
        name: rotate_backward(results[name].to(wide), cos, sin).to(dtype) for name in ("dq", "dk")
    }


def too_inexact(ours: dict, build: Build, x: list[torch.Tensor], options: dict) -> dict[str, dict]:
    """Results whose error is above twice that of the quantised form.

    Numbers per head are too few for a ratio of errors to mean anything: 2 % of their RMS are allowed.
    """
    exact, limit = (with_rope(form, build, x, **options) for form in (in_float64, quantised))
    floors = {name: 2e-2 if truth.numel() < 16 else 2.0**-16 for name, truth in exact.items()}
    found = {
        name: above_twice(errors(ours[name], truth), errors(limit[name], truth), floors[name])
        for name, truth in exact.items()
    }
    return {name: worse for name, worse in found.items() if worse}


@pytest.mark.slow
@pytest.mark.parametrize("build", EVERY, ids=str)
def test_everything_at_once(build: Build, emulated) -> None:
    """Guards: each build, forward and backward, with all options: states and their gradients, b per head."""
    emulated(build)
    x, options = inputs(build, 1, 130, 2), all_options(build, 1, 130, 2)
    ours = run(*x, **options)
    assert not too_inexact(ours, build, x, options)


NARROW = [
    Build("sm_80", 20, BF16, decay="token", rope=16),
    Build("sm_90a", 96, FP16, decay="token", rope=32, weights="AFFINE"),
    Build("sm_90a", 32, decay="head", rope=8),
]


@pytest.mark.slow
@pytest.mark.parametrize("build", NARROW, ids=str)
def test_heads_padded_to_those_of_tensor_cores(build: Build, emulated) -> None:
    """Guards: columns that a head does not have, which are read or written; what comes of their zeros."""
    emulated(build)
    x, options = inputs(build, 1, 130, 2), all_options(build, 1, 130, 2)
    ours = run(*x, **options, form=adapted_backend)
    assert ours["o"].shape == x[0].shape and ours["S"].shape[2:] == (build.D, build.D)
    assert not too_inexact(ours, build, x, options)


WIDER = [
    Build("sm_90a", 256, decay="token", rope=64),
    Build("sm_80", 256, decay="head"),
    Build("sm_90a", 168, decay="token", rope=6, weights="AFFINE"),
    Build("sm_80", 130, decay="head", weights="PRODUCTS"),
]


@pytest.mark.slow
@pytest.mark.parametrize("build", WIDER, ids=str)
def test_heads_wider_than_those_of_tensor_cores(build: Build, emulated) -> None:
    """Guards: halves that are not added up, or twice; norms, rotations and states of whole heads; padding."""
    emulated(build)
    x, options = inputs(build, 1, 100, 2), all_options(build, 1, 100, 2)
    ours = run(*x, **options, form=wide_backend)
    assert ours["o"].shape == x[0].shape
    assert not too_inexact(ours, build, x, options)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [(1, 192), (3, 64)])
@pytest.mark.parametrize("build", [*ROTATED, *WIDE], ids=str)
def test_steep_constant_decays(
    build: Build, segments: tuple[int, int], emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: the final state's gradient where 1/γ is beyond fp32, or fp16: dk and dv were NaN."""
    emulated(build)
    monkeypatch.setattr(plan, "choose_segments", lambda *sizes: segments)
    x, options = inputs(build, 1, 130, 2), all_options(build, 1, 130, 2)
    options["log_decay"] = torch.tensor([-100.0, -14.0])
    ours, exact = run(*x, **options), with_rope(in_float64, build, x, **options)
    assert all(y.isfinite().all() for y in ours.values())
    for name in ("o", "S", "dk", "dv"):  # what is left of more than a token is small
        assert relative(ours[name], exact[name]) < 8e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("build", [*GATED, *GATED_WIDE], ids=str)
def test_resets_in_the_only_chunk(build: Build, emulated) -> None:
    """Guards: a sum's accuracy after a reset: the final state's c is summed up in fp32."""
    emulated(build)
    x, options = inputs(build, 1, 63, 2), all_options(build, 1, 63, 2)
    ours = run(*x, **options)
    assert not too_inexact(ours, build, x, options)


@pytest.mark.parametrize("build", [pytest.param(AFFINE[0], marks=pytest.mark.slow), AFFINE[1]], ids=str)
def test_the_gradient_of_a_states_c_is_that_of_fp32(build: Build, emulated) -> None:
    """Guards: decays in 16 bits: two such numbers of a gate were too few in bf16. c has no other rounding."""
    emulated(build)
    x, options = inputs(build, 1, 63, 1), all_options(build, 1, 63, 1)
    found = run(*x, **options)["dc"]
    assert relative(found, with_rope(in_float64, build, x, **options)["dc"]) < 3e-7


@pytest.mark.slow
@pytest.mark.parametrize("build", [*GATED_WIDE, *AFFINE], ids=str)
def test_a_reset_is_a_new_beginning_exactly(build: Build, emulated) -> None:
    """Guards: nothing finite before a −inf is in what comes after it, nor in the final state, nor do later
    outputs give it a gradient: the same bits."""
    emulated(build)
    N, reset = 130, 70
    *_, do = x = inputs(build, 1, N, 1)
    do[:, :reset] = 0
    options = all_options(build, 1, N, 1) | {"dstate": None}
    options["log_decay"][:, reset] = float("-inf")
    others = [y.clone() for y in x]
    for y in others[:3]:
        y[:, :reset] = 100.0
    ours, other = run(*x, **options), run(*others, **options)
    assert all(torch.equal(ours[name][:, reset:], other[name][:, reset:]) for name in ("o", "dq", "dk", "dv"))
    assert all(torch.equal(ours[name], other[name]) for name in ("S", "z", "c", "n"))
    assert all(other[name][:, :reset].eq(0).all() for name in ("dq", "dk", "dv"))
    assert other["dlog_decay"][:, reset].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("build", [*GATED_WIDE, *AFFINE], ids=str)
def test_a_gate_that_is_nan_is_no_reset(build: Build, emulated) -> None:
    """Guards: training that diverges is seen: a maximum with the least gate would make NaN a reset."""
    emulated(build)
    N, at = 130, 70
    x, options = inputs(build, 1, N, 1), all_options(build, 1, N, 1)
    options["log_decay"][:, at + 1 :] = -0.1
    options["log_decay"][:, at] = float("nan")
    ours = run(*x, **options)
    assert ours["o"][:, :at].isfinite().all() and ours["o"][:, at:].isnan().all()
    assert all(ours[name].isnan().any() for name in ("S", "dq", "dk", "dv", "dlog_decay"))


def unrotated(build: Build, N: int) -> dict[str, torch.Tensor]:
    """RoPE by angles of 0, for a build that has RoPE: its results are those without."""
    return {"cos": torch.ones(N, build.rope), "sin": torch.zeros(N, build.rope)} if build.rope else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "sign", "bias"),
    [
        *((build, 1, 5) for build in GATED),
        *((build, -1, 0) for build in (*GATED, *AFFINE, *PRODUCTS)),
        *((Build(arch, 128, decay="token"), -1, 0) for arch in ARCHS),
    ],
    ids=str,
)
def test_a_gates_gradient_as_in_trained_models(build: Build, sign: int, bias: int, emulated) -> None:
    """Guards: dq's and dk's scans round the same W. Gates are steep in trained models: a few large weights
    are all of it, and two roundings would be most of what sums over all later tokens leave, 15 %."""
    emulated(build)
    q, k, v, do = inputs(build, 1, 320, 1)
    x, gates = [q + 1.5, k + 1.5 * sign, v, do], randn(1, 320, 1, seed=9).float()
    options = {"log_decay": torch.nn.functional.logsigmoid(gates + bias), "b": torch.ones(1)}
    if build.weights != "NORMALISED":
        options |= dict(normalize=False, a=0.0 if build.weights == "PRODUCTS" else 1.0, return_state=False)
    options |= unrotated(build, 320)
    ours = run(*x, **options)["dlog_decay"]
    exact = with_rope(in_float64, build, x, **options)["dlog_decay"]
    assert relative(ours, exact) < (0.01 if build.weights == "NORMALISED" else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("build", GATED, ids=str)
def test_a_gates_gradient_where_values_have_a_mean(build: Build, emulated) -> None:
    """Guards: what is in it of the rounding of o, of which e is made: that is of the size of the mean."""
    emulated(build)
    q, k, v, do = inputs(build, 1, 320, 1)
    x, gates = [q + 1.5, k + 1.5, v + 3, do], randn(1, 320, 1, seed=9).float()
    options = {"log_decay": torch.nn.functional.logsigmoid(gates + 5), "b": torch.ones(1)}
    options |= unrotated(build, 320)
    ours = run(*x, **options)["dlog_decay"]
    exact, limit = (with_rope(form, build, x, **options)["dlog_decay"] for form in (in_float64, quantised))
    assert relative(ours, exact) < 2 * relative(limit, exact) and relative(ours, exact) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("N", [10 * 64, 8 * 64 + 63])
@pytest.mark.parametrize("build", [*GATED, *AFFINE, SMALL[1]], ids=str)
def test_boundaries(build: Build, N: int, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the gradient of gates from the boundaries; of b where it is 0."""
    emulated(build)
    monkeypatch.setattr(
        plan, "choose_segments", lambda heads, length, chunk, slots: (-(-length // (5 * chunk)), 5 * chunk)
    )
    x, options = inputs(build, 1, N, 2), all_options(build, 1, N, 2) | {"b": torch.tensor([0.0, -0.7])}
    ours = run(*x, **options)
    assert not too_inexact(ours, build, x, options)


@pytest.mark.slow
@pytest.mark.parametrize("N, bound", [(1536, 0.012), (1537, 0.008)])
@pytest.mark.parametrize("build", PRODUCTS, ids=str)
def test_no_sum_is_longer_than_a_window(build: Build, N: int, bound: float, emulated) -> None:
    """Guards: the accuracy of a gate's gradient in long sequences: without boundaries 1.8 % are rounding, or
    1.05 % of the second, whose chunks do not meet in both directions."""
    emulated(build)
    x, gates = inputs(build, 1, N, 1), randn(1, N, 1, seed=9).float()
    options = {"log_decay": torch.nn.functional.logsigmoid(gates), "b": torch.ones(1)}
    options |= dict(normalize=False, a=0.0, return_state=False)
    ours, exact = (form(*x, **options)["dlog_decay"] for form in (run, in_float64))
    assert relative(ours, exact) < bound


@pytest.mark.slow
@pytest.mark.parametrize("build", AFFINE[1:], ids=str)
def test_the_final_states_part_is_in_no_long_sum(build: Build, emulated) -> None:
    """Guards: what the final state's gradient adds to the last window's gates: from a sum over all tokens it
    would be off by 0.6 %."""
    emulated(build)
    N, D = 3072, build.D
    q, k, v, do = inputs(build, 1, N, 1)
    sizes = ((D, D), (D,), (D,), ())
    dstate = LinearAttentionState(*(randn(1, 1, *size, seed=31 + i).float() for i, size in enumerate(sizes)))
    gates = torch.nn.functional.logsigmoid(randn(1, N, 1, seed=9).float())
    options = dict(log_decay=gates, normalize=False, a=1.0, dstate=dstate._replace(n=torch.zeros(1, 1)))
    x = q + 1.5, k + 1.5, v, do
    options |= unrotated(build, N)
    ours = run(*x, **options)["dlog_decay"]
    exact = with_rope(in_float64, build, x, **options)["dlog_decay"]
    last = slice(N - variants.BOUNDARY_INTERVAL, None)
    assert relative(ours[:, last], exact[:, last]) < 0.0025


@pytest.mark.parametrize("build", GATED[1:], ids=str)
def test_copies_are_kept_until_the_launches(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: memory of a copy (here of every input; of `do`, say, where it is expanded) that is given away
    while kernels read it: results of one call in it, and gradients that are wrong now and then."""
    copies: list[weakref.ref] = []  # of a pass
    backward = backend.backward

    def next_pass(*args):
        copies.clear()
        return backward(*args)

    def copied(x: torch.Tensor) -> torch.Tensor:
        copies.append(weakref.ref(y := x.clone()))
        return y

    def launched(self: launch.Launch, stream: int, tensors: dict, addresses: dict) -> None:
        assert copies and all(copy() is not None for copy in copies)

    emulated(build)
    monkeypatch.setattr(backend, "backward", next_pass)
    monkeypatch.setattr(backend, "aligned", copied)
    monkeypatch.setattr(launch.Launch, "__call__", launched)
    run(*inputs(build, 1, 64, 1), **all_options(build, 1, 64, 1))


@pytest.mark.parametrize("build", [PLAIN[1], GATED[0]], ids=str)
def test_a_call_passes_seven_files(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a short way from the public function to a kernel's launch and back, with what is done once
    left out."""
    emulated(build)
    monkeypatch.setattr(backend, "unsupported_reason", lambda call: None)
    monkeypatch.setattr(Compiled, "launch", lambda *args: None)
    q, k, v, do = (x.requires_grad_() for x in inputs(build, 1, 130, 2))
    decay = torch.zeros(1, 130, 2, requires_grad=True) if build.decay else None

    def call() -> None:
        linear_attention(q, k, v, log_decay=decay, backend="cuda").backward(do)

    call()
    found = {path for path in files_passed(call) if not path.startswith("tests")}
    assert len(found) <= 7, found


@pytest.mark.slow
@pytest.mark.parametrize("sub_segments", [1, 2])
@pytest.mark.parametrize("build", [*ROTATED, *GATED, GATED_WIDE[1], *AFFINE], ids=str)
def test_segments(build: Build, sub_segments: int, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the states before segments, by `states` (in sub-segments) and `prefix`, in both directions."""

    def choose_segments(heads: int, length: int, chunk: int, slots: int) -> tuple[int, int]:
        return -(-length // (sub_segments * chunk)), sub_segments * chunk

    emulated(build)
    B, N, H = 1, 60 + 120 * sub_segments, 2
    x, options = inputs(build, B, N, H), all_options(build, B, N, H)
    monkeypatch.setattr(plan, "choose_segments", choose_segments)
    monkeypatch.setattr(plan, "choose_sub_segments", lambda segments, chunks, slots: sub_segments)
    ours = run(*x, **options)
    assert not too_inexact(ours, build, x, options)


PIECES = [PLAIN[1], *ROTATED, WIDE[1], GATED_WIDE[1], *AFFINE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "N", "H", "sub_segments"),
    [
        (GATED[1], 128, 2, 1),
        *((build, 180, 2, 2) for build in GATED),
        *((build, 180, 1, 2) for build in PIECES),
        *((build, 180, 1, 1) for build in NARROW),
        (WIDER[0], 100, 1, 1),
    ],
    ids=str,
)
def test_pieces_of_sequences(
    build: Build, N: int, H: int, sub_segments: int, emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a piece's own state, which comes with the states before segments, the last one short; the rest
    of a pass from what is given for it: all is what calls with and without that state give."""
    emulated(build)
    monkeypatch.setattr(
        plan, "choose_segments", lambda heads, length, chunk, slots: (-(-length // (2 * chunk)), 2 * chunk)
    )
    monkeypatch.setattr(plan, "choose_sub_segments", lambda segments, chunks, slots: sub_segments)
    forms = dict.fromkeys(NARROW, adapted_backend) | {WIDER[0]: wide_backend}
    check_piece(build, N, H, forms.get(build, backend))


@pytest.mark.slow
@pytest.mark.parametrize("build", GATED[1:], ids=str)
def test_a_piece_cut_in_two(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: pieces with a gate that are no whole chunks, whose backward pass runs twice."""
    emulated(build)
    monkeypatch.setattr(backend, "BOUNDARY_INTERVAL", 64)
    check_piece(build, 130, 1, backend)


def check_piece(build: Build, N: int, H: int, form) -> None:
    x, options = inputs(build, 1, N, H), all_options(build, 1, N, H) | {"form": form}
    own: list[LinearAttentionState] = []
    found, expected = run(*x, **options, own=own), run(*x, **options)
    alone, last = run(*x, **options | {"initial": None}), run(*x, **options | {"dstate": None})
    for name in LinearAttentionState._fields:
        found |= {f"own {name}": getattr(own[0], name), f"d{name}": getattr(own[1], name)}
        expected |= {f"own {name}": alone[name], f"d{name}": last[f"d{name}"]}
    for name, truth in expected.items():
        assert (found[name] - truth).norm() <= 1e-5 * truth.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("build", [ROTATED[1], WIDE[1], GATED[1], PRODUCTS[1]], ids=str)
def test_stages_filled_again(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: on Hopper every stage of the rings, filled again while others read: segments of 6 chunks."""
    emulated(build)
    B, N, H = 1, 2 * 6 * 64 - 20, 1
    x, options = inputs(build, B, N, H), all_options(build, B, N, H)
    monkeypatch.setattr(
        plan, "choose_segments", lambda heads, length, chunk, slots: (-(-length // (6 * chunk)), 6 * chunk)
    )
    monkeypatch.setattr(plan, "choose_sub_segments", lambda segments, chunks, slots: 1)
    ours = run(*x, **options)
    assert not too_inexact(ours, build, x, options)


@pytest.mark.slow
@pytest.mark.parametrize("build", [WIDE[1], GATED_WIDE[1], *PRODUCTS_WIDE, NARROW[1]], ids=str)
def test_unsegmented_sequences(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the forward scan of 64 columns a block, which leaves the states before segments for dq's."""
    emulated(build)
    B, N, H = 1, 436, 2  # seven chunks: each of four stages is filled again
    x, options = inputs(build, B, N, H), all_options(build, B, N, H)
    monkeypatch.setattr(plan, "card", lambda device: (build.arch, 5))
    monkeypatch.setattr(
        plan, "choose_segments", lambda heads, length, chunk, slots: (-(-length // chunk), chunk)
    )
    planned, unsegmented = [], plan.Plan._unsegmented
    monkeypatch.setattr(
        plan.Plan, "_unsegmented", lambda self, cut: planned.append(self) or unsegmented(self, cut)
    )
    ours = run(*x, **options, form=adapted_backend if build in NARROW else backend)
    assert planned and not too_inexact(ours, build, x, options)


@pytest.mark.slow
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_segments_that_the_launcher_chooses(build: Build, emulated) -> None:
    """Guards: the launcher's own choice for a long sequence; the backward pass reuses the states."""
    emulated(build)
    x = inputs(build, 1, 520, 1)
    assert plan.choose_segments(1, 520, 64, 132)[0] > 1
    ours, exact = run(*x), in_float64(*x)
    for name in ("o", "S", "z", "c", "dq", "dk", "dv"):
        assert relative(ours[name], exact[name]) < 8e-3, name


@pytest.mark.parametrize("N", [1, 63, 64, 65])
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_lengths_around_a_chunk(build: Build, N: int, emulated) -> None:
    """Guards: rows beyond the end are neither read nor written, and count nothing."""
    emulated(build)
    x = inputs(build, 2, N, 1)
    ours, exact = run(*x), in_float64(*x)
    for name in ("o", "S", "z", "c", "dv") if N == 1 else ("o", "S", "z", "c", "dq", "dk", "dv"):
        assert relative(ours[name], exact[name]) < 8e-3, name
    assert torch.equal(ours["n"], torch.full((2, 1), float(N)))
    if N == 1:
        assert torch.equal(ours["o"], x[2]) and max(ours["dq"].abs().max(), ours["dk"].abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_views_of_a_projection(build: Build, emulated) -> None:
    """Guards: strides; a row read or written beyond the fused q, k and v would be an error; the same bits.
    Rows of a gated projection end in what is the gates', and need not be of whole 16 bytes."""
    emulated(build)
    *_, do = x = inputs(build, 1, 70, 2)
    base = run(*x)
    for behind in (0, 8, 3):
        rows, d_rows = (torch.full((1, 70, 6 * 64 + behind), 7.0, dtype=BF16) for _ in range(2))
        qkv, dqkv = (y[..., : 6 * 64].unflatten(2, (3, 2, 64)) for y in (rows, d_rows))
        qkv.copy_(torch.stack(x[:3], 2))
        ours = run(*qkv.unbind(2), do, out=dqkv.unbind(2))
        assert all(torch.equal(ours[name], base[name]) for name in base)
        assert torch.equal(dqkv.unbind(2)[2], base["dv"]) and d_rows[..., 6 * 64 :].eq(7.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_default_dtype(build: Build, emulated) -> None:
    """Guards: Fabric's "bf16-true" changes the default dtype around a model's forward; sums stay fp32."""
    emulated(build)
    x, options = inputs(build, 1, 520, 1), all_options(build, 1, 520, 1)
    base = run(*x, **options)
    torch.set_default_dtype(BF16)
    try:
        ours = run(*x, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ours[name], base[name]) for name in base)


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_rows_of_zeros(build: Build, emulated) -> None:
    emulated(build)
    check_rows_of_zeros(run, *inputs(build, 1, 100, 1))


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_q_opposite_to_k(build: Build, emulated) -> None:
    emulated(build)
    _, *x = inputs(build, 1, 100, 1)
    check_q_opposite_to_k(run, *x)


@pytest.mark.slow
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_rows_as_they_are(build: Build, emulated) -> None:
    emulated(build)
    check_rows_as_they_are(run, *inputs(build, 1, 100, 1))
