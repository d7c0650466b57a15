"""The CUDA kernels themselves, on the emulator: no GPU, and every access and race watched.

First small probes of the emulator, right and wrong (emulator/probes.cu), then forward and backward of
lingpt.kernels.linear_attention.cuda.launch on CPU tensors, against float64 and the bar of test_linear_cuda.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from test_linear_cuda import exactly, quantised, relative

from lingpt.kernels import emulator
from lingpt.kernels.emulator import DeadlockError, MemcheckError, Memory, ProxyError, RaceError
from lingpt.kernels.linear_attention import LinearAttentionState
from lingpt.kernels.linear_attention.cuda import compile as nvrtc
from lingpt.kernels.linear_attention.cuda import launch
from lingpt.kernels.linear_attention.rope import rotate, rotate_backward

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    pytest.importorskip("cuda.core", reason="the CUDA compiler is not installed (extras cuda12, cuda13)")


# The emulator itself

PROBES = Path(emulator.__file__).with_name("probes.cu")


@pytest.fixture(scope="module")
def probes() -> emulator.Module:
    return emulator.Module(PROBES, "sm_90a", {})


def start(probes: emulator.Module, name: str, *arguments, threads: int = 128, shared: int = 0) -> None:
    """One block; tensors become pointers to registered memory."""
    signature = "".join("P" if isinstance(x, torch.Tensor) else "i" for x in arguments)
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    with Memory(arguments):
        probes.kernel(name, signature)((1, 1, 1), (threads, 1, 1), shared, 0, *values)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def test_integers(probes) -> None:
    """Guards: division to zero, products' high halves, shifts beyond the width, lanes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-(2**31), 2**31, (2, 64))
    x[:20], y[:20] = rng.integers(-100, 100, (2, 20))
    y[y == 0] = 7
    out = ints(16, 64)
    start(probes, "integers", *(torch.from_numpy(v.astype(np.int32)) for v in (x, y)), out, threads=64)
    for thread in range(64):
        want = _integers(thread, x.tolist(), y.tolist())
        assert [v & MASK for v in out[:, thread].tolist()] == [v & MASK for v in want], thread


MASK = 0xFFFFFFFF


def _integers(i: int, xs: list[int], ys: list[int]) -> list[int]:
    """What the probe computes, in Python's integers."""
    x, y, warp = xs[i], ys[i], i - i % 32
    ux, uy = x & MASK, y & MASK
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return [
        quotient, x - y * quotient, ux // uy, ux % uy, x * y >> 32, ux * uy >> 32, x * y >> 20,
        (uy << 32 | ux) << (ux & 31) >> 32, x >> min(uy & 63, 31), ux << (y & 31), min(x, y), max(ux, uy),
        xs[i ^ 5], xs[i if i % 8 > 5 else i + 2], xs[warp + i * 7 % 32], (x & y) | (~x ^ (y | 5)),
    ]  # fmt: skip


def test_floats(probes) -> None:
    """Guards: one rounding, in the right direction; NaN; conversions, to 16 bits as PyTorch makes them."""
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 10
    x[0], y[1], x[2] = float("nan"), float("nan"), 70000.0
    out = torch.zeros(12, 64)
    start(probes, "floats", x, y, out, threads=64)
    exact = x.double() * y.double() + np.float32(1 / 3)
    assert torch.equal(out[0], exact.float()) or torch.allclose(out[0], exact.float(), 0, 0, equal_nan=True)
    down = out[1].double() <= exact
    assert (down | exact.isnan()).all() and ((exact - out[1]) < exact.abs() * 2.0**-23).logical_or(
        exact.isnan()
    ).all()
    whole = torch.nan_to_num(x)
    comparisons = {
        2: x / y, 3: torch.fmin(x, y), 4: whole.round(), 5: whole.floor(), 6: torch.exp2(y.double()).float(),
        7: 1 / x.abs(), 8: torch.where(x < y, x, -y),
    }  # fmt: skip
    for n, want in comparisons.items():
        torch.testing.assert_close(out[n], want, rtol=2e-7, atol=0, equal_nan=True)
    for n, dtype in ((9, BF16), (11, FP16)):
        pairs = out[n].view(dtype).view(64, 2)
        for column, want in ((0, y), (1, x)):
            torch.testing.assert_close(pairs[:, column], want.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_threads_part_and_meet(probes) -> None:
    """Guards: loops of different lengths, `continue` and `break`, before a shuffle of the warp."""
    out = ints(64)
    start(probes, "branches", out, threads=64)
    x = []
    for i in range(64):
        value = 0
        for k in range(i % 7):
            if k % 2:
                value += k
            elif i % 3 == 0:
                continue
            else:
                value -= 1
            if value > 5:
                break
        x.append(value)
    assert out.tolist() == [x[i] + 1000 * x[i ^ 1] for i in range(64)]


def test_an_access_out_of_bounds_is_found(probes) -> None:
    """Guards: memcheck names kernel, line, thread and address; the last element is still fine."""
    a, out = torch.arange(128, dtype=torch.int32), ints(128)
    start(probes, "past_the_end", a, out, 0)
    assert torch.equal(a, out)
    with pytest.raises(MemcheckError, match=r"past_the_end.*probes.cu:\d+.*thread 127: 4 bytes .* byte 512"):
        start(probes, "past_the_end", a, out, 1)
    with pytest.raises(MemcheckError, match=r"thread 9: .* not a multiple of 4"):
        start(probes, "crooked", torch.arange(129, dtype=torch.int32), out)
    with pytest.raises(MemcheckError, match="thread 0"), Memory(a):
        dead = torch.zeros(128, dtype=torch.int32).data_ptr()
        probes.kernel("past_the_end", "PPi")((1, 1, 1), (128, 1, 1), 0, 0, a.data_ptr(), dead, 0)


def test_a_missing_barrier_is_a_race(probes) -> None:
    """Guards: a read behind a write, and a write behind a read, both between warps, without a barrier."""
    a, out = torch.arange(128, dtype=torch.int32), ints(128)
    for name, verb in (
        ("turn_round", r"reads .* a write of warp"),
        ("overwrite", r"writes .* a read of warp"),
    ):
        start(probes, name, a, out, 1)
        assert torch.equal(out, a.flip(0))
        with pytest.raises(RaceError, match=rf"(?s)probes.cu:\d+.*{verb} \d.*probes.cu:\d+"):
            start(probes, name, a, out, 0)


def test_what_nobody_wrote_is_nan(probes) -> None:
    """Guards: a read of shared memory before any write shows in the result."""
    out = torch.zeros(32)
    start(probes, "unwritten", out, threads=32)
    assert out[:16].eq(1).all() and out[16:].isnan().all()


def test_a_copy_is_there_for_those_who_wait(probes) -> None:
    """Guards: what cp.async brings may not be read before the wait, by the thread that ordered it either;
    an mbarrier passes a copy on only where the copy itself arrives at it.
    """
    a, out = torch.arange(128, dtype=torch.int32), ints(32)
    start(probes, "impatient", a, out, 1, threads=32)
    assert torch.equal(out, a[::4])
    with pytest.raises(RaceError, match="still in flight"):
        start(probes, "impatient", a, out, 0, threads=32)
    out = ints(128)
    start(probes, "delivered", a, out, 0, threads=64)
    assert torch.equal(out, a)
    with pytest.raises(RaceError, match="still in flight"):
        start(probes, "delivered", a, out, 1, threads=64)


def test_a_deadlock_says_who_waits_where(probes) -> None:
    """Guards: a barrier that some threads never reach; an mbarrier with an arrival too few."""
    a, out = torch.arange(32, dtype=torch.int32), ints(96)
    start(probes, "stuck", ints(128), 0)
    with pytest.raises(DeadlockError, match=r"(?s)warps 1 2 3 wait at a barrier.*warps 0 have returned"):
        start(probes, "stuck", ints(128), 32)
    start(probes, "hand_over", a, out, 32)
    assert torch.equal(out, a.repeat(3))
    with pytest.raises(
        DeadlockError, match=r"(?s)warps 1 2 3 wait for an mbarrier.* 33 arrivals 1 are to come"
    ):
        start(probes, "hand_over", a, out, 33)


def matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]


def test_fragments_make_a_matrix_product(probes) -> None:
    """Guards: ldmatrix (.trans), mma and stmatrix (.trans) against a plain product."""
    a, b = matrices((16, 16), (16, 8))
    c, back = torch.zeros(16, 8), torch.zeros(8, 8, dtype=BF16)
    start(probes, "multiply", a, b, c, back, threads=32)
    torch.testing.assert_close(c, a.float() @ b.float())
    assert torch.equal(back, a[:8, :8].T)


def test_a_warpgroups_product(probes) -> None:
    """Guards: descriptors with the 128-byte swizzle, both ways round; results only behind the wait."""
    (a, b), c = matrices((64, 64), (64, 64)), torch.zeros(64, 64)
    start(probes, "group_multiply", a, b, c, 0, shared=16384)
    torch.testing.assert_close(c, a.float() @ b.float().T)
    start(probes, "group_multiply_transposed", a, b, c, 0, shared=16384)
    torch.testing.assert_close(c, a.float().T @ b.float())
    with pytest.raises(ProxyError, match=r"no fence\.proxy\.async"):
        start(probes, "group_multiply", a, b, c, 1, shared=16384)
    with pytest.raises(RaceError, match=r"writes .* still in flight"):
        start(probes, "group_multiply", a, b, c, 3, shared=16384)
    start(probes, "group_multiply", a, b, c, 2, shared=16384)
    first = torch.zeros(64, 64, dtype=torch.bool)  # each thread's first accumulator
    first.view(4, 2, 8, 64)[:, 0, :, :8:2] = True
    assert torch.equal(c.isnan(), first)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("form", range(3), ids=["registers", "rows", "columns"])
def test_a_narrow_product(probes, form: int, dtype: torch.dtype) -> None:
    """Guards: eight columns, a in registers, K-contiguous or transposed; of shared memory, the operands are
    watched, and nothing else.
    """
    a, b = (x.to(dtype) for x in matrices((64, 128), (8, 128)))
    c, given = torch.zeros(64, 8), a.T.contiguous() if form == 2 else a
    size = 9216 if form else 1024  # numbers of 16 bits: b, a behind it

    def narrow(first: int, end: int, fence: int = 1, poked=slice(0)) -> None:
        places = torch.zeros(size, dtype=torch.int16)
        places[poked] = 1
        name = f"narrow<{form}, {str(dtype is FP16).lower()}>"
        start(probes, name, given, b, c, first, end, fence, places, shared=2 * size)

    def exact(first: int, end: int) -> torch.Tensor:
        k = slice(16 * first, 16 * end)
        return (a[:, k].double() @ b[:, k].double().T).float()

    narrow(0, 8)
    torch.testing.assert_close(c, exact(0, 8))
    with pytest.raises(ProxyError, match=r"no fence\.proxy\.async"):
        narrow(0, 8, fence=0)
    with pytest.raises(MemcheckError, match=r"probes\.cu.*2 bytes at shared address .* outside"):
        narrow(8, 9)
    for step in (2, 7):
        operands = [_tile(8, 128)[:, 16 * step : 16 * step + 16]]
        if form:
            left = _tile(64, 128) if form == 1 else _tile(128, 64).T
            operands.append(1024 + left[:, 16 * step : 16 * step + 16])
        others = torch.ones(size, dtype=torch.bool)
        for x in operands:
            others[x] = False
        narrow(step, step + 1, poked=others)
        torch.testing.assert_close(c, exact(step, step + 1))
        for place in (int(x[i, k]) for x in operands for i in (0, -1) for k in (0, -1)):
            with pytest.raises(RaceError, match=r"writes .* still in flight"):
                narrow(step, step + 1, poked=place)


def _tile(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns]: where the numbers of a tile lie, panels of 64 columns with the 128-byte swizzle."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return column // 64 * rows * 64 + row * 64 + (column % 64 ^ row % 8 * 8)


# The kernels


@dataclasses.dataclass(frozen=True)
class Build:
    arch: str
    D: int
    dtype: torch.dtype = BF16
    decay: bool = False
    rope: int = 0

    def __str__(self) -> str:
        options = ["decay"] * self.decay + [f"rope{self.rope}"] * bool(self.rope)
        return "-".join([self.arch, launch.TAGS[self.dtype], str(self.D), *options])


ARCHS = ("sm_80", "sm_90a")
PLAIN = [Build(arch, 64) for arch in ARCHS]
ROTATED = [Build(arch, 64, BF16, decay=True, rope=16) for arch in ARCHS]
WIDE = [Build(arch, 128, FP16, decay=True, rope=32) for arch in ARCHS]
ONCE = [Build("sm_86", 128, BF16, decay=True, rope=32), Build("sm_90a", 128), WIDE[0]]
AGAIN = [*PLAIN, *ROTATED, WIDE[1]]  # in other tests, too


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch):
    """launch.py on CPU tensors: `emulated(build)` makes the machine the build's."""

    def pretend(build: Build) -> None:
        monkeypatch.setattr(launch, "_card", lambda device: (build.arch, 132))
        monkeypatch.setattr(nvrtc.KernelSpec, "compile", compiled)
        monkeypatch.setattr(launch, "_stream", lambda device: 0)
        monkeypatch.setattr(launch, "_on", lambda device: contextlib.nullcontext())
        forget()

    yield pretend
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What launch.py has cached of the machine."""
    for function in vars(launch).values():
        getattr(function, "cache_clear", lambda: None)()


def compiled(spec: nvrtc.KernelSpec, arch: str) -> emulator.Module:
    return module(spec.source, arch, tuple(spec.defines.items()), spec.names)


@functools.lru_cache(maxsize=len(AGAIN))  # a module's kernels hold some 10 MB each
def module(source: str, arch: str, defines: tuple, names: tuple) -> emulator.Module:
    """`names` tell builds apart."""
    return emulator.Module(source, arch, dict(defines))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(build: Build, B: int, N: int, H: int) -> list[torch.Tensor]:
    """q, k, v and do: signed and random, rounded to the dtype."""
    return [randn(B, N, H, build.D, seed=i, dtype=build.dtype) for i in range(4)]


def options(build: Build, B: int, N: int, H: int) -> dict:
    """b per head, a decay, rotations, an initial state, as of 50 tokens, and the final one's gradient."""
    D, shapes = build.D, [(B, H, build.D, build.D), (B, H, build.D), (B, H, build.D), (B, H)]
    S, z, c, dS, dz, dc, dn = (randn(*s, seed=10 + i) for i, s in enumerate(shapes[:3] + shapes))
    found = dict(
        b=torch.linspace(-0.5, 1, H),
        initial=LinearAttentionState(0.9 * S, 0.9 * z, 7 * c, torch.full((B, H), 50.0)),
        dstate=LinearAttentionState(*(0.02 * x for x in (dS, dz, dc, dn))),
    )
    if build.decay:
        found["log_decay"] = torch.tensor([-0.05, 0.0])[:H]
    if build.rope:
        angle = torch.arange(N)[:, None] / 100 ** (torch.arange(build.rope // 2) * 2 / D)
        found["cos"], found["sin"] = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
    return found


def run(
    q, k, v, do, dstate=None, b=1.0, initial=None, log_decay=None, cos=None, sin=None,
    normalize_qk=True, out=None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """launch.forward and launch.backward: everything that comes out, by name."""
    out = out or tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    with Memory(q, k, v, do, dstate, b, initial, log_decay, cos, sin, out):
        o, stats, final = launch.forward(q, k, v, b, log_decay, cos, sin, initial, normalize_qk, True)
        args = q, k, v, b, log_decay, cos, sin, o, stats, initial, do, dstate, normalize_qk, out
        db, d_initial = launch.backward(*args)
    found = dict(zip("Szcn", final, strict=True)) | dict(zip(("dq", "dk", "dv"), out, strict=True)) | {"o": o}
    found |= {"db": db} if db is not None else {}
    return found | (
        dict(zip(("dS", "dz", "dc", "dn"), d_initial, strict=True)) if d_initial is not None else {}
    )


def turned(form, build: Build, x, cos=None, sin=None, **options) -> dict[str, torch.Tensor]:
    """`exactly` or `quantised`, with RoPE in front and its transpose behind."""
    q, k, v, do = x
    if not build.rope:
        return form(q, k, v, do, **options)
    exact = form is exactly
    dtype = torch.float64 if exact else build.dtype
    wide = torch.float64 if exact else torch.float32
    q, k = (rotate(x.to(wide), cos, sin).to(dtype) for x in (q, k))
    found = form(q, k, v, do, **options)
    back = {name: rotate_backward(found[name].to(wide), cos, sin).to(dtype) for name in ("dq", "dk")}
    return found | back


def too_far(ours: dict, exact: dict, bar: dict) -> dict[str, float]:
    """Results whose error, RMS or maximum, is above twice the bar's, and by how much."""
    worst = {}
    for name, truth in exact.items():
        scale = truth.square().mean().sqrt()
        errors = [(y[name].double() - truth) / scale for y in (ours, bar)]
        few = truth.numel() < 16  # numbers per head: a ratio of their errors would mean nothing
        for kind, size in (("RMS", lambda e: e.square().mean().sqrt()), ("max", lambda e: e.abs().max())):
            own, limit = (size(e).item() for e in errors)
            worst[f"{name} {kind}"] = own / max(2 * limit, 2e-2 if few else 2.0**-16)
    return {name: round(2 * ratio, 2) for name, ratio in worst.items() if not ratio <= 1}


@pytest.mark.parametrize("build", [*ONCE, *AGAIN], ids=str)
def test_everything_at_once(build: Build, emulated) -> None:
    """Guards: each build, forward and backward, with all options: states and their gradients, b per head."""
    emulated(build)
    x, settings = inputs(build, 1, 130, 2), options(build, 1, 130, 2)
    ours = run(*x, **settings)
    settings.setdefault("log_decay", None)
    exact, bar = (turned(form, build, x, **settings) for form in (exactly, quantised))
    assert not too_far(ours, exact, bar)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("build", [*ROTATED, WIDE[1]], ids=str)
def test_segments(build: Build, parts: int, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the states before segments, by `states` (in parts) and `prefix`, in both directions."""
    emulated(build)
    B, N, H = 1, 60 + 120 * parts, 2
    x, settings = inputs(build, B, N, H), options(build, B, N, H)
    monkeypatch.setattr(
        launch, "split", lambda heads, length, chunk, slots: (-(-length // (parts * chunk)), parts * chunk)
    )
    monkeypatch.setattr(launch, "parts_of", lambda segments, chunks, slots: parts)
    ours = run(*x, **settings)
    exact, bar = (turned(form, build, x, **settings) for form in (exactly, quantised))
    assert not too_far(ours, exact, bar)


@pytest.mark.parametrize("build", [PLAIN[1], ROTATED[1], WIDE[1]], ids=str)
def test_stages_filled_again(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: on Hopper each place of the rings, filled again while others may read: segments of 6 chunks."""
    emulated(build)
    B, N, H = 1, 2 * 6 * 64 - 20, 1
    x, settings = inputs(build, B, N, H), options(build, B, N, H)
    monkeypatch.setattr(launch, "split", lambda heads, length, chunk, slots: (2, 6 * chunk))
    monkeypatch.setattr(launch, "parts_of", lambda segments, chunks, slots: 1)
    ours = run(*x, **settings)
    settings.setdefault("log_decay", None)
    exact, bar = (turned(form, build, x, **settings) for form in (exactly, quantised))
    assert not too_far(ours, exact, bar)


@pytest.mark.parametrize("build", [WIDE[1]], ids=str)
def test_uncut_sequences(build: Build, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the forward scan of 64 columns a block, which leaves the states before segments for dq's."""
    emulated(build)
    B, N, H = 1, 436, 2  # seven chunks: each of four stages is filled again
    x, settings = inputs(build, B, N, H), options(build, B, N, H)
    monkeypatch.setattr(launch, "_card", lambda device: (build.arch, 5))
    monkeypatch.setattr(launch, "split", lambda heads, length, chunk, slots: (-(-length // chunk), chunk))
    launched, whole = [], launch.Plan._whole
    monkeypatch.setattr(launch.Plan, "_whole", lambda plan: launched.append(plan) or whole(plan))
    ours = run(*x, **settings)
    exact, bar = (turned(form, build, x, **settings) for form in (exactly, quantised))
    assert launched and not too_far(ours, exact, bar)


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_segments_that_split_chooses(build: Build, emulated) -> None:
    """Guards: the launcher's own choice for a long sequence; the backward pass reuses the states."""
    emulated(build)
    x = inputs(build, 1, 520, 1)
    assert launch.split(1, 520, 64, 132)[0] > 1
    ours, exact = run(*x), exactly(*x)
    for name in ("o", "S", "z", "c", "dq", "dk", "dv"):
        assert relative(ours[name], exact[name]) < 8e-3, name


@pytest.mark.parametrize("N", [1, 63, 64, 65])
@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_lengths_around_a_chunk(build: Build, N: int, emulated) -> None:
    """Guards: rows beyond the end are neither read nor written, and count nothing."""
    emulated(build)
    x = inputs(build, 2, N, 1)
    ours, exact = run(*x), exactly(*x)
    for name in ("o", "S", "z", "c", "dv") if N == 1 else ("o", "S", "z", "c", "dq", "dk", "dv"):
        assert relative(ours[name], exact[name]) < 8e-3, name
    assert torch.equal(ours["n"], torch.full((2, 1), float(N)))
    if N == 1:
        assert torch.equal(ours["o"], x[2]) and max(ours["dq"].abs().max(), ours["dk"].abs().max()) < 1e-4


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_views_of_a_projection(build: Build, emulated) -> None:
    """Guards: strides; a row read or written beyond the fused q, k and v would be an error; the same bits."""
    emulated(build)
    *_, do = x = inputs(build, 1, 70, 2)
    qkv, dqkv = torch.stack(x[:3], 2), torch.zeros(1, 70, 3, 2, 64, dtype=BF16)
    base = run(*x)
    ours = run(*qkv.unbind(2), do, out=dqkv.unbind(2))
    assert all(torch.equal(ours[name], base[name]) for name in base)
    assert torch.equal(dqkv.unbind(2)[2], base["dv"])


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_default_dtype(build: Build, emulated) -> None:
    """Guards: Fabric's "bf16-true" changes the default dtype around a model's forward; sums stay fp32."""
    emulated(build)
    x, settings = inputs(build, 1, 520, 1), options(build, 1, 520, 1)
    base = run(*x, **settings)
    torch.set_default_dtype(BF16)
    try:
        ours = run(*x, **settings)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ours[name], base[name]) for name in base)


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_rows_of_zeros(build: Build, emulated) -> None:
    """Guards: no direction means weight 1 for everything; the others' gradients do not hear of it."""
    emulated(build)
    q, k, v, do = inputs(build, 1, 100, 1)
    q[:, 10:20], k[:, 15:30] = 0, 0
    q[:, 70:], k[:, 90:] = 0, 0
    ours, exact = (form(q, k, v, do) for form in (run, exactly))
    assert all(x.isfinite().all() for x in ours.values())
    for name, rows in (("o", None), ("dv", None), ("dq", q), ("dk", k)):
        some = slice(None) if rows is None else rows.abs().sum(-1) > 0
        assert relative(ours[name][some], exact[name][some]) < 8e-3, name


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_q_opposite_to_k(build: Build, emulated) -> None:
    """Guards: weights of almost nothing, g near zero at the first token: finite, exact, still an average."""
    emulated(build)
    _, k, v, do = inputs(build, 1, 100, 1)
    ours, exact = (form(-k, k, v, do) for form in (run, exactly))
    assert all(x.isfinite().all() for x in ours.values())
    assert ours["o"].abs().max() <= v.abs().max() * (1 + torch.finfo(BF16).eps)
    assert relative(ours["o"], exact["o"]) < 5e-3 and relative(ours["dv"], exact["dv"]) < 1e-2
    for name in ("dq", "dk"):
        assert relative(ours[name], exact[name]) < 2e-2, name


@pytest.mark.parametrize("build", PLAIN, ids=str)
def test_rows_as_they_are(build: Build, emulated) -> None:
    """Guards: normalize_qk=False, norms and b's shrinking out of the way."""
    emulated(build)
    q, k, v, do = inputs(build, 1, 100, 1)
    q, k, b = 0.25 * q, 0.25 * k, torch.full((1,), 0.5)
    ours, exact = (form(q, k, v, do, normalize_qk=False, b=b) for form in (run, exactly))
    for name in ("o", "S", "z", "c", "dq", "dk", "dv", "db"):
        assert relative(ours[name], exact[name]) < 1e-2, name
