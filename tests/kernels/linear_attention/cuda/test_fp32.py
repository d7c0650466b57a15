"""What tensor cores do not take, fp32 and every head_dim, on the emulator and on a GPU; who takes a call."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import chunkwise, linear_attention, linear_attention_qkv, operator
from lingpt.kernels.linear_attention.call import Call, LinearAttentionState, OutputGradients
from lingpt.kernels.linear_attention.cuda import (
    adapted_backend,
    backend,
    fp32_backend,
    recurrence,
    tf32,
    tf32_passes,
    wide_backend,
)
from lingpt.kernels.linear_attention.cuda import compile as nvrtc
from lingpt.kernels.numerics import allows_tf32, matmul_precision
from lingpt.tests import oracles
from lingpt.tests.kernels.linear_attention.cuda import on_gpu
from lingpt.tests.kernels.linear_attention.cuda.test_channel_emulated import Compiled, watched
from lingpt.tests.oracles import forward_backward, in_float64, randn, relative

BF16, FP32 = torch.bfloat16, torch.float32


# On the emulator


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch):
    """backend="cuda" is the one in fp32, on CPU tensors, in segments of eight tokens."""
    monkeypatch.setattr(nvrtc.KernelSpec, "compile", lambda *args: Compiled(*args))
    monkeypatch.setattr(tf32, "card", lambda device: ("sm_80", 108))
    monkeypatch.setattr(tf32, "raw_stream", lambda device: 0)
    monkeypatch.setattr(tf32, "segmentation", lambda N, *_: (-(-N // 8), 8))
    tf32.build_for.cache_clear(), tf32_passes.clear_plans()
    monkeypatch.setattr(fp32_backend, "current_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(recurrence, "unsupported_reason", lambda q, Dv: None)
    for name in ("forward", "backward"):
        monkeypatch.setattr(tf32_passes, name, watched(getattr(tf32_passes, name)))
    monkeypatch.setattr(operator, "cuda_backends", lambda: (fp32_backend,))
    yield
    monkeypatch.undo()
    tf32.build_for.cache_clear(), tf32_passes.clear_plans()


def options_of(kind: str, B: int, N: int, H: int, D: int, device: str = "cpu") -> dict:
    """A decay per head or token, or none; b, and without the normaliser a, per head; states in and out."""
    shapes = (B, H, D, D), (B, H, D), (B, H, D), (B, H)
    found = dict(
        b=torch.linspace(-0.5, 1, H, device=device),
        initial=oracles.some_state(B, H, D, device=device),
        dstate=[0.02 * randn(*shape, seed=10 + i, device=device) for i, shape in enumerate(shapes)],
    )
    if "raw" in kind:
        found |= dict(normalize=False, normalize_qk=False, a=0.5)
    if "free" in kind:
        found |= dict(normalize=False, a=torch.linspace(1.5, -0.5, H, device=device))
    if "head" in kind:
        found["log_decay"] = torch.linspace(-0.1, 0, H, device=device)
    if "token" in kind:
        found["log_decay"] = oracles.token_decays(B, N, H, device)
        found["log_decay"][:, N // 2] = float("-inf")
    return found


def worst(found: dict, exact: dict) -> tuple[float, str]:
    off = {name: relative(found[name], x) for name, x in exact.items() if x.any()}
    assert all(not found[name].any() for name in exact.keys() - off.keys())  # z and n without the normaliser
    print({name: f"{x:.1e}" for name, x in off.items()})
    return max((x, name) for name, x in off.items())


CASES = [  # N, D, what else
    (21, 32, "token"),
    (37, 40, "head, free"),
    (11, 20, "head, free"),  # padded to 24
    pytest.param((11, 20, "token"), marks=pytest.mark.slow),
    pytest.param((37, 72, "token, raw"), marks=pytest.mark.slow),
    pytest.param((21, 32, "token, free"), marks=pytest.mark.slow),
    pytest.param((19, 64, ""), marks=pytest.mark.slow),
    pytest.param((19, 128, "head"), marks=pytest.mark.slow),
    pytest.param((11, 256, "token"), marks=pytest.mark.slow),
    pytest.param((11, 281, "free"), marks=pytest.mark.slow),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_result_is_that_of_fp32(case: tuple, emulated) -> None:
    """Guards: o, states, and the gradients of every input, of each number of lanes that share a column."""
    N, D, kind = case
    x, options = oracles.inputs(1, N, 2, D, FP32), options_of(kind, 1, N, 2, D)
    found = forward_backward(*x, backend="cuda", **options)
    off, name = worst(found, in_float64(*x, **options))
    assert off < 3e-6, name


TF32_CASES = [
    (21, 32, "token"),
    (19, 64, "head, free"),
    pytest.param((37, 64, "token"), marks=pytest.mark.slow),
    pytest.param((19, 128, "head"), marks=pytest.mark.slow),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", TF32_CASES, ids=str)
def test_one_product_where_tf32_is_allowed(case: tuple, emulated) -> None:
    """Guards: a pass that does not read the switch, or that always has it on; a bias of what is cut off."""
    N, D, kind = case
    x, options = oracles.inputs(1, N, 2, D, FP32), options_of(kind, 1, N, 2, D)
    exact, off = in_float64(*x, **options), {}
    for precision in ("ieee", "tf32"):
        with matmul_precision("cuda", precision):
            found = forward_backward(*x, backend="cuda", **options)
        off[precision], name = worst(found, exact)
    assert off["ieee"] < 3e-6 and off["tf32"] < 1.5e-3, name
    assert min(relative(found[name], exact[name]) for name in ("o", "dq", "dk", "dv")) > 1e-4
    for state in ("S", "dS"):  # sums of what is cut off
        bias = ((found[state] - exact[state]) * exact[state]).sum() / exact[state].square().sum()
        assert abs(bias) < 6e-5, state


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("D", "kind"), [(256, "token"), (136, "head, free")])
def test_a_block_alone_on_its_multiprocessor(D: int, kind: str, emulated, monkeypatch) -> None:
    """Guards: nine warps, two slices of a wide head, y beside c, both halves of 32 tokens, one token more."""
    monkeypatch.setattr(tf32, "card", lambda device: ("sm_90a", 132))
    monkeypatch.setattr(tf32, "segmentation", lambda N, *_: (2, 32))
    # Of one head, the gradients of a, b and n would be single numbers: sums over tokens that may cancel.
    x, options = oracles.inputs(1, 33, 4, D, FP32), options_of(kind, 1, 33, 4, D)
    with matmul_precision("cuda", "tf32"):
        found = forward_backward(*x, backend="cuda", **options)
    off, name = worst(found, in_float64(*x, **options))
    assert off < 1.5e-3, name


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float16, 1e-3), pytest.param(BF16, 3e-3, marks=pytest.mark.slow)]
)
def test_16_bits_of_wide_heads(dtype: torch.dtype, limit: float, emulated) -> None:
    """Guards: one product is enough for them, without the switch."""
    x, options = oracles.inputs(1, 19, 1, 144, dtype), options_of("token", 1, 19, 1, 144)
    found, exact = forward_backward(*x, backend="cuda", **options), in_float64(*x, **options)
    off, name = worst(found, exact)
    assert off < limit, name
    assert relative(found["S"], exact["S"]) > 1e-4  # fp32


@pytest.mark.nvrtc
@pytest.mark.parametrize("D", [20, 24])
def test_pieces_of_sequences(D: int, emulated) -> None:
    """Guards: what is given for a piece's own state is where it goes on from, in both directions."""
    (q, k, v, do), options = oracles.inputs(1, 21, 2, D, FP32), options_of("token", 1, 21, 2, D)
    call = Call(q=q, k=k, v=v, token_log_decay=options["log_decay"], return_state=True)
    given, dstate = options["initial"], LinearAttentionState(*options["dstate"])
    after = call._replace(**given._asdict())
    own, results = [], []
    for piece in (True, False):
        out = tuple(torch.empty_like(x) for x in (q, k, v))
        exchanges = [lambda state, to=to: [own.append(state), to][1] for to in (given, dstate)]
        o = fp32_backend.forward(call, exchanges[0]) if piece else fp32_backend.forward(after)
        gradients = OutputGradients(do, None if piece else dstate), out
        fp32_backend.backward(after, o, *gradients, exchanges[1] if piece else None)
        results.append((o.o, *out))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    alone = fp32_backend.forward(call)
    last = fp32_backend.backward(after, o, OutputGradients(do), out).initial_state
    pairs = zip([*own[0], *own[1]], [*alone.state, *last], strict=True)
    assert all(torch.equal(*both) for both in pairs)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("D", "dtype"), [(20, BF16), (24, BF16), (24, FP32)])
def test_tf32_packed_rotated_and_in_sequences(D: int, dtype: torch.dtype, emulated) -> None:
    """Guards: RoPE and its transpose, borders of sequences, o's rounding in backward, gates' bias."""
    assert off_packed(24, D, dtype, "cpu") < (1e-3 if dtype == FP32 else 4e-3)


def off_packed(N: int, D: int, dtype: torch.dtype, device: str) -> float:
    """The largest error of a fused projection's results, with gates in it, RoPE and borders of sequences."""
    H = 2
    angle = torch.arange(N, device=device)[:, None] * torch.ones(6, device=device)
    projected = randn(1, N, 3 * H * D + H, seed=0, dtype=dtype, device=device)
    bias, do = torch.tensor([2.0, 4.0], device=device), randn(1, N, H, D, seed=1, dtype=dtype, device=device)
    results = []
    for name, change in (("cuda", lambda x: x), ("chunkwise", torch.Tensor.double)):
        leaves = [change(y).requires_grad_() for y in (projected, bias)]
        with matmul_precision("cuda", "tf32"):
            o = linear_attention_qkv(
                leaves[0], change(angle.cos()), change(angle.sin()), gate_bias=leaves[1], head_size=D,
                cu_seqlens=torch.tensor([0, 7, 7, N], device=device), backend=name,
            )  # fmt: skip
            results.append((o, *torch.autograd.grad(o, leaves, change(do))))
    off = [relative(*both) for both in zip(*results, strict=True)]
    off[2] /= 5  # of the bias: two numbers, of rounding errors that hardly average out
    return max(off)


@pytest.mark.nvrtc
def test_backward_follows_another_backends_forward(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: stats that mean something else."""
    x, options = oracles.inputs(1, 20, 1, 16, FP32), options_of("token", 1, 20, 1, 16)
    passes = SimpleNamespace(
        FALLBACK="",
        unsupported_reason=lambda call: None,
        forward=chunkwise.forward,
        backward=fp32_backend.backward,
    )
    monkeypatch.setattr(operator, "cuda_backends", lambda: (passes,))
    off, name = worst(forward_backward(*x, backend="cuda", **options), in_float64(*x, **options))
    assert off < 3e-6, name


def test_every_way_to_allow_tf32_counts() -> None:
    """Guards: a switch that is not seen, or raises as another was set before it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        assert allows_tf32()
        matmul.fp32_precision = "ieee"
        assert not allows_tf32()
        matmul.allow_tf32 = True
        assert allows_tf32()
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("normalize", [True, False])
def test_opcheck(emulated, normalize: bool) -> None:
    """Guards: results whose shapes or strides are not those that a compiler is told."""
    B, N, H, D = 1, 6, 2, 8
    *x, do = oracles.inputs(B, N, H, D, FP32)
    options = {"a": torch.ones(H), "normalize": False} if not normalize else {}
    call = Call(
        *(None, None, *x), b=torch.ones(H), token_log_decay=-torch.ones(B, N, H), return_state=True,
        **oracles.some_state(B, H, D)._asdict(), backend="cuda", **options,
    )  # fmt: skip
    forward, backward = (getattr(torch.ops.lingpt, f"linear_attention_{x}").default for x in ("fwd", "bwd"))
    o, stats, *end = forward(*call)
    opcheck(backward, (*call, o, stats, *end, do, *end))
    opcheck(forward, call._replace(q=call.q.clone().requires_grad_()))


@pytest.mark.parametrize("blocks", [1, 64, 2000])
@pytest.mark.parametrize("N", [1, 64, 127, 128, 1000, 4096, 4097, 100_000])
def test_segments_fill_the_card(N: int, blocks: int) -> None:
    """Guards: an empty segment, a token in none, short segments, more than the card has room for."""
    segments, length = recurrence.segmentation(N, blocks, 132)
    assert (segments - 1) * length < N <= segments * length
    assert segments == 1 or (length >= 64 and segments * blocks <= 8 * 132)
    assert N != 4096 or segments == {1: 64, 64: 16, 2000: 1}[blocks]


@pytest.mark.parametrize("slots", [1, 132, 396])
@pytest.mark.parametrize("blocks", [1, 64, 2000])
@pytest.mark.parametrize("N", [1, 64, 127, 1000, 4096, 100_000])
def test_segments_on_tensor_cores(N: int, blocks: int, slots: int) -> None:
    """Guards: the same where a card runs so many blocks at once; segments of whole chunks."""
    segments, length = tf32.segmentation(N, blocks, slots, 32)
    assert (segments - 1) * length < N <= segments * length and length % 32 == 0
    assert segments == 1 or (length >= 64 and segments * blocks <= slots)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("reverse", "sub_segments"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_a_sum_on_tensor_cores(reverse: bool, sub_segments: int, emulated, monkeypatch) -> None:
    """Guards: a decay near 1 over segments, resets at their borders and in their middle, strided rows,
    factors, last channels."""
    monkeypatch.setattr(tf32, "segmentation", lambda N, *_: (-(-N // 64), 64))
    monkeypatch.setattr(tf32, "choose_sub_segments", lambda *_: sub_segments)
    B, N, H, D = 1, 150, 2, 8
    decay = torch.full((B, N, H), -1e-6)
    decay[:, [0, 32, 63, 120], 1] = float("-inf")
    x, numbers = randn(B, N, 3, H, D, seed=0).unbind(2), randn(2, 3, B, H, N, seed=1).mT
    given: dict[str, torch.Tensor] = {"decay": decay}

    def array(name: str, y: torch.Tensor) -> tf32.Array:
        given[name] = y
        return tf32.Array(name, y.stride()[:3])

    operands = [
        tf32.Operand(
            array(f"x{i}", y),
            tf32.PerToken(array(f"factor{i}", factor), 0.5),
            tf32.PerToken(array(f"last{i}", last)),
        )
        for i, (y, factor, last) in enumerate(zip(x, *numbers, strict=True))
    ]
    plan = tf32.Plan(torch.device("cpu"), (B, N, H, D), products=3)
    sums = tf32.Sums(plan, tf32.Array("decay", decay.stride()), reverse)
    states = sums.states(*operands[1:], True, None)
    rows_of_y, y_last, end = plan.empty_rows(), plan.empty_numbers(), tf32.Array("end", (0, 0, 0))
    sums.scan(*operands, states, rows_of_y, y_last=y_last, final=end)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        final = torch.empty(B, H, D + 1, D + 1)
        scratch = plan.run({name: x.data_ptr() for name, x in {**given, "end": final}.items()})
        y, last = plan.rows_of(scratch, rows_of_y), plan.numbers_of(scratch, y_last)
        return torch.cat((y, last.mT.unsqueeze(-1)), -1), final

    y, final = watched(run)(*given.values())
    rows = [
        torch.cat((y * 0.5 * factor.unsqueeze(-1), last.unsqueeze(-1)), -1)
        for y, factor, last in zip(x, *numbers, strict=True)
    ]
    a, b, c = (z.double().flip(1) if reverse else z.double() for z in rows)
    steps = torch.nn.functional.pad(decay[:, 1:].flip(1), (0, 0, 1, 0)) if reverse else decay
    S, exact = torch.zeros(B, H, D + 1, D + 1, dtype=torch.float64), []
    for t in range(N):
        S = steps[:, t, :, None, None].double().exp() * S + b[:, t, :, :, None] * c[:, t, :, None]
        exact.append(torch.einsum("bhk,bhkv->bhv", a[:, t], S))
    assert relative(y.flip(1) if reverse else y, torch.stack(exact, 1)) < 1e-6
    assert relative(final, S) < 1e-6


# On a GPU

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("kind", ["", "token", "head, free"])
@pytest.mark.parametrize("D", [20, 32, 64, 72, 128, 256, 281])
def test_fp32_on_a_gpu(D: int, kind: str) -> None:
    """Guards: long sequences, several blocks of columns, all results."""
    x, options = on_gpu.inputs(2, 1000, 3, D, FP32), options_of(kind, 2, 1000, 3, D, "cuda")
    off, name = worst(on_gpu.run(*x, **options), in_float64(*x, **options))
    assert off < 2e-5, name


@gpu
@pytest.mark.parametrize("kind", ["", "token", "head, free"])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_tf32_on_a_gpu(D: int, kind: str) -> None:
    """Guards: the switch, in both positions."""
    x, options = on_gpu.inputs(2, 1000, 3, D, FP32), options_of(kind, 2, 1000, 3, D, "cuda")
    exact = in_float64(*x, **options)
    for precision, least, most in (("tf32", 1e-4, 5e-3), ("ieee", 0.0, 2e-5)):
        with matmul_precision("cuda", precision):
            off, name = worst(on_gpu.run(*x, **options), exact)
        assert least < off < most, name


@gpu
def test_a_compiled_graph_reads_the_switch_of_tf32_when_it_runs() -> None:
    """Guards: the precision of the first call, in later ones."""
    *x, do = on_gpu.inputs(1, 300, 2, 64, FP32)
    leaves = [y.requires_grad_() for y in x]
    compiled, results = torch.compile(linear_attention, fullgraph=True), []
    before = torch.get_float32_matmul_precision()
    try:
        for asked in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(asked)
            for attend in (linear_attention, compiled):
                o = attend(*leaves, backend="cuda")
                results.append((o, *torch.autograd.grad(o, leaves, do)))
            assert all(torch.equal(*both) for both in zip(*results[-2:], strict=True))
    finally:
        torch.set_float32_matmul_precision(before)
    for exact, off, again in zip(*results[::2], strict=True):
        assert torch.equal(exact, again) and not torch.equal(exact, off)


@gpu
@pytest.mark.parametrize("D", [32, 96, 256])
def test_16_bits_of_every_head_dim_on_a_gpu(D: int) -> None:
    """Guards: heads that are padded, and those that are too wide for tensor cores."""
    x, options = on_gpu.inputs(2, 1000, 3, D, BF16), options_of("head", 2, 1000, 3, D, "cuda")
    found, exact = on_gpu.run(*x, **options), in_float64(*x, **options)
    few = {name for name, y in exact.items() if y.numel() < 16}
    off, name = worst(found, {name: y for name, y in exact.items() if name not in few})
    assert off < 1e-2, name
    assert all(relative(found[name], exact[name]) < 5e-2 for name in few)


@gpu
@pytest.mark.parametrize("D", [96, 144, 256])
def test_16_bits_packed_rotated_and_in_sequences_on_a_gpu(D: int) -> None:
    """Guards: gradients written into a projection's, of heads that are padded or cut into halves."""
    assert off_packed(1000, D, BF16, "cuda") < 1e-2


@gpu
@pytest.mark.parametrize(("D", "dtype"), [(32, BF16), (256, BF16), (256, FP32)])
def test_under_torch_compile_and_in_a_cuda_graph(D: int, dtype: torch.dtype) -> None:
    """Guards: one graph, and replays that compute with what the inputs hold by then."""
    x, fresh = on_gpu.inputs(1, 300, 2, D, dtype), on_gpu.inputs(1, 300, 2, D, dtype, seed=1)
    options = options_of("token", 1, 300, 2, D, "cuda")
    expected = on_gpu.run(*fresh, **options)
    leaves, do = [y.detach().requires_grad_() for y in fresh[:3]], fresh[3]
    given = dict(log_decay=options["log_decay"], backend="cuda")
    o = torch.compile(linear_attention, fullgraph=True)(*leaves, **given)
    assert torch.equal(o, linear_attention(*leaves, **given))
    torch.autograd.grad(o, leaves, do)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_gpu.run(*x, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = on_gpu.run(*x, **options)
    for y, source in zip(x, fresh, strict=True):
        y.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(found[name], y) for name, y in expected.items())


# Which backend takes a call


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card that has kernels; the warnings, as they come."""
    told: list[str] = []
    monkeypatch.setattr(operator, "warn_once", lambda where, reason: told.append(f"{where}: {reason}"))
    monkeypatch.setattr(backend, "unusable_reason", lambda device: None)
    uncached = backend.device_unsupported_reason.__wrapped__
    monkeypatch.setattr(backend, "device_unsupported_reason", uncached)
    monkeypatch.setattr(recurrence, "_no_kernel", lambda device: None)
    return told


class OnACard(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def call(dtype: torch.dtype, D: int, **options) -> Call:
    q, k, v = (torch.empty(1, 8, 2, D, dtype=dtype).as_subclass(OnACard) for _ in range(3))
    return Call(q=q, k=k, v=v, **options)


TAKEN = [
    (BF16, 64, {}, backend, ""),
    (torch.float16, 128, {}, backend, ""),
    *((BF16, D, {}, adapted_backend, "") for D in (16, 32, 80, 96, 112)),
    *((BF16, D, {}, wide_backend, "") for D in (129, 144, 256)),
    (BF16, 264, {}, fp32_backend, "slower.*: tensor cores take a head_dim up to 256, not 264"),
    (torch.float16, 144, {}, fp32_backend, "slower.*: tensor cores take fp16 up to a head_dim of 128, not"),
    (BF16, 64, {"cos": torch.ones(8, 8), "sin": torch.ones(8, 8)}, adapted_backend, ""),
    *((FP32, D, {}, fp32_backend, "") for D in (16, 20, 64, 128, 288)),
    (FP32, 289, {}, chunkwise, "20 to 40 times slower.*: it takes a head_dim up to 288, not 289"),
    (FP32, 64, {"causal": False}, chunkwise, "20 to 40 times slower.*: it is causal only"),
    (torch.float64, 64, {}, chunkwise, ""),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "D", "options", "taken", "words"), TAKEN)
def test_who_takes_a_call_and_what_is_told(dtype, D, options, taken, words, on_a_card) -> None:
    """Guards: a fallback that is silent, or told where none is expected."""
    assert operator.choose(call(dtype, D, **options)) is taken
    assert len(on_a_card) == bool(words)
    for told in on_a_card:
        with pytest.warns(UserWarning, match=words):
            warnings.warn(told, stacklevel=1)
    given = call(dtype, D, **options, backend="cuda")
    if taken is not chunkwise:
        assert operator.choose(given) is taken
        return
    with pytest.raises(UserError, match=r"^backend='cuda' cannot run this: it "):
        operator.choose(given)


def test_autocast_promises_16_bits(on_a_card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    assert operator.choose(call(FP32, 64)) is fp32_backend
    assert "bf16 and fp16, not torch.float32" in on_a_card[0]
