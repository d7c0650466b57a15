"""Gated linear attention: definition, chunkwise form, recurrence and fla-core's kernel are one function."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from lingpt.common.errors import UserError
from lingpt.kernels import channel_decay_operator
from lingpt.kernels.channel_decay_operator import gated_linear_attention_flops
from lingpt.kernels.gated_linear_attention import (
    CHUNK,
    HAS_FLA,
    choose,
    fla_attention,
    gated_linear_attention,
    gated_linear_attention_with_state,
)
from lingpt.kernels.linear_attention.cuda import channel_decay, toolchain
from lingpt.kernels.unified_linear_attention import BLOCK
from lingpt.tests.oracles import GATED_FORMS, gated_by_definition, randn, relative

AROUND_CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


def inputs(N, B=2, H=3, Dk=5, Dv=7, strength=1.0, dtype=torch.float64):
    """q, k, v, ln of gates of about σ(·)^strength, and a state."""
    q, k, gate = (randn(B, N, H, Dk, seed=seed, dtype=torch.float64) for seed in range(3))
    v, state = (
        randn(B, N, H, Dv, seed=3, dtype=torch.float64),
        randn(B, H, Dk, Dv, seed=4, dtype=torch.float64),
    )
    log_gate = strength * torch.nn.functional.logsigmoid(gate)
    return *(x.to(dtype) for x in (q, k, v, log_gate)), state.to(torch.promote_types(dtype, torch.float32))


def test_the_reference_is_the_definition():
    q, k, v, log_gate, _ = inputs(9)
    o = gated_linear_attention(q, k, v, log_gate, backend="reference")
    torch.testing.assert_close(o, gated_by_definition(q, k, v, log_gate.exp(), scale=5**-0.5))


@pytest.mark.parametrize("backend", [form for form in GATED_FORMS if form != "reference"])
@pytest.mark.parametrize("N", AROUND_CHUNKS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("strength", [1 / 16, 30.0])
def test_every_form_equals_the_reference_in_float64(backend, N, with_state, strength):
    *tensors, state = inputs(N, strength=strength)
    options = dict(initial_state=state if with_state else None, scale=Fraction(7, 10))
    expected = gated_linear_attention_with_state(*tensors, backend="reference", **options)
    result = gated_linear_attention_with_state(*tensors, backend=backend, **options)
    for x, y in zip(result, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("N", [3, BLOCK + 1, CHUNK + 2])
@pytest.mark.parametrize("strength", [1 / 16, 3.0])
def test_gradcheck_of_everything_at_once(N, strength):
    *tensors, state = inputs(N, B=1, H=2, Dk=2, Dv=3, strength=strength)

    def f(q, k, v, log_gate, state):
        return gated_linear_attention_with_state(q, k, v, log_gate, initial_state=state, backend="chunkwise")

    assert gradcheck(f, [x.requires_grad_() for x in (*tensors, state)], fast_mode=N > 3)


def test_gates_that_shut_do_not_overflow():
    """exp(−G) of a chunk would be e^3200 here; fp32 ends at e^88, and rounds G itself to some 1e-4."""
    *tensors, _ = inputs(200, dtype=torch.float32)
    tensors[3] = tensors[3] - 100.0
    tensors[3][:, ::2] = -1e-3
    leaves = [x.requires_grad_() for x in tensors]
    o = gated_linear_attention(*leaves, backend="chunkwise")
    exact = gated_linear_attention(*(x.detach().double() for x in tensors), backend="reference")
    torch.testing.assert_close(o.double(), exact, rtol=3e-3, atol=3e-3)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.parametrize("backend", GATED_FORMS)
def test_pieces_with_the_state_carried_equal_the_whole(backend):
    *tensors, _ = inputs(100)
    whole, end = gated_linear_attention_with_state(*tensors, backend=backend)
    state, outputs = None, []
    for piece in (slice(0, 1), slice(1, 67), slice(67, 67), slice(67, 100)):
        parts = (x[:, piece] for x in tensors)
        o, state = gated_linear_attention_with_state(*parts, initial_state=state, backend=backend)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, end)


def test_one_token_takes_the_form_that_decodes():
    """Guards: fla's kernels compiled and tuned for one token, with which text without a prompt begins."""
    assert [choose("auto", torch.empty(1, n, 1, 1), 1) for n in (1, 2)] == ["recurrent", "chunkwise"]


@pytest.fixture
def fla(monkeypatch):
    """A stand-in for fla-core on the CPU; `fla.sizes` has the batch size and length of each call."""
    busy, sizes = threading.Lock(), []

    def chunk_gla(q, k, v, log_gate, *, scale, initial_state, output_final_state):
        assert output_final_state and busy.acquire(blocking=False), "entered by two threads at once"
        time.sleep(0.01)
        busy.release()
        sizes.append(tuple(q.shape[:2]))
        options = dict(scale=scale, initial_state=initial_state, backend="chunkwise")
        return gated_linear_attention_with_state(q, k, v, log_gate, **options)

    module = SimpleNamespace(chunk_gla=chunk_gla, sizes=sizes)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.gla", module)
    return module


@pytest.mark.parametrize("with_state", [False, True])
def test_inference_gives_fla_few_shapes(fla, with_state):
    """Guards: kernels autotuned anew for each of evaluation's batches, which took five times as long."""
    for N in (2, CHUNK, CHUNK + 5):
        for B in (1, 2, 3, 5, 8):
            *tensors, state = inputs(N, B=B, dtype=torch.float32)
            state = state if with_state else None
            expected = gated_linear_attention_with_state(
                *tensors, scale=0.7, initial_state=state, backend="chunkwise"
            )
            with torch.inference_mode():
                result = fla_attention(*tensors, state, 0.7)
            for x, y in zip(result, expected, strict=True):
                torch.testing.assert_close(x, y)
    assert {B for B, _ in fla.sizes} == {1, 2, 4, 8} and {N for _, N in fla.sizes} == {CHUNK, CHUNK + 5}


def test_training_gives_fla_its_shapes(fla):
    """A batch of a run has one shape: nothing is copied to pad it."""
    *tensors, _ = inputs(3, B=3, dtype=torch.float32)
    fla_attention(*tensors, None, 1.0)
    assert fla.sizes == [(3, 3)]


def test_threads_take_turns_in_fla(fla):
    """Guards: "NoneType is not a mapping": two GPUs' threads of an evaluation in one Triton autotuner."""
    *tensors, _ = inputs(2, B=1, dtype=torch.float32)

    def attend(_: int) -> None:
        with torch.inference_mode():  # a thread's own setting
            fla_attention(*tensors, None, 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(attend, range(8)))
    assert len(fla.sizes) == 8


@pytest.mark.parametrize("backend", GATED_FORMS)
def test_low_precision_keeps_its_state_in_fp32(backend):
    *tensors, state = inputs(100, dtype=torch.bfloat16)
    o, end = gated_linear_attention_with_state(*tensors, initial_state=state, backend=backend)
    doubles = [x.double() for x in (*tensors, state)]
    exact, exact_end = gated_linear_attention_with_state(*doubles[:4], initial_state=doubles[4])
    assert o.dtype == torch.bfloat16 and end.dtype == torch.float32
    assert relative(o, exact) < 4e-3  # bf16 rounds to 2⁻⁹
    torch.testing.assert_close(end.double(), exact_end, rtol=1e-4, atol=1e-4)


def test_sums_of_gates_are_exact_and_gradients_sum_no_further_than_a_chunk():
    """Guards: G summed in fp32, an error in every exponent; and a gate's gradient summed over all later
    tokens, whose rounding grows with the length: five times what is left."""
    N = 2048
    q, k, v, do = (randn(1, N, 2, 32, seed=seed) for seed in range(4))
    gate = torch.nn.functional.logsigmoid(randn(1, N, 2, 32, seed=4))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, gate)]
        o = gated_linear_attention(*leaves, backend="chunkwise")
        results.append((o, *torch.autograd.grad(o, leaves, do.to(dtype))))
    errors = [relative(x, exact) for x, exact in zip(*results, strict=True)]
    assert max(errors[:4]) < 3e-7 and errors[4] < 2e-6


def test_forward_mode_is_refused_and_not_zero():
    """Guards: tangents that PyTorch drops without a word where an operator has a backward pass alone."""
    q, k, v, g = (torch.randn(1, 5, 2, 4, dtype=torch.float64) for _ in "qkvg")

    def tangent(backend):
        return torch.func.jvp(
            lambda v: gated_linear_attention(q, k, v, -g.abs(), backend=backend), (v,), (v,)
        )

    with pytest.raises(RuntimeError, match="no forward mode here; backend='reference' has"):
        tangent("chunkwise")
    torch.testing.assert_close(*tangent("reference"))  # linear in v


def test_opcheck():
    *tensors, state = inputs(70, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (*tensors, state)]
    opcheck(torch.ops.lingpt.gated_linear_attention_fwd, (*leaves, 0.5))
    opcheck(torch.ops.lingpt.gated_linear_attention_fwd, (*leaves[:4], None, 0.5))


def test_compiles_into_one_graph_under_autocast_with_equal_results():
    *tensors, _ = inputs(70, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in tensors]

    def f(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return gated_linear_attention(*leaves).square().sum()

    eager, graph = f(*leaves), torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(graph, eager)
    for x, y in zip(torch.autograd.grad(graph, leaves), torch.autograd.grad(eager, leaves), strict=True):
        torch.testing.assert_close(x, y)
    exact = gated_linear_attention(*(x.detach().double() for x in leaves)).square().sum()
    torch.testing.assert_close(eager.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_choice_of_the_cuda_kernels_breaks_no_graph(monkeypatch):
    """Guards: looking for a compiler, which cannot be traced, in each graph of `ATTN=gla` on a GPU."""
    graphs = []

    def compiler(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return lambda *args: (args[0].new_zeros(1),)

    widths = channel_decay.unsupported_reason
    monkeypatch.setattr(
        channel_decay_operator, "unsupported_reason", lambda q, Dv: widths(q, q.shape[-1], Dv)
    )
    monkeypatch.setattr(channel_decay, "card", lambda device: ("sm_90a", 132))
    monkeypatch.setattr(channel_decay, "native_arch", lambda device: "sm_90a")
    monkeypatch.setattr(toolchain, "check_usable", lambda arch: threading.Lock().acquire())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    *tensors, _ = inputs(70, Dk=64, Dv=128, dtype=torch.bfloat16)
    torch.compile(gated_linear_attention, fullgraph=True, backend=compiler)(*tensors)
    assert "gated_linear_attention_cuda_fwd" in graphs[0][0]
    channel_decay._no_kernels.cache_clear()


def test_flops():
    *tensors, _ = inputs(70, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        o = gated_linear_attention(*(x.requires_grad_() for x in tensors))
        assert counter.get_total_flops() == gated_linear_attention_flops(2, 70, 3, 5, 7)
        o.sum().backward()
    assert counter.get_total_flops() == 3 * gated_linear_attention_flops(2, 70, 3, 5, 7)
    # By hand, per token and head: kvᵀ and qS of 2·Dk·Dv each, qkᵀ and its product with v over 64/2 tokens.
    assert gated_linear_attention_flops(1, 128, 1, 16, 32) == 128 * (4 * 16 * 32 + 32 * 2 * 16 + 32 * 2 * 32)


WRONG = {
    "gate's shape": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g[..., :1]), "log_gate"),
    "gate's dtype": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g.int()), "be floating point"),
    "number": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, 0.1), "log_gate must be a tensor"),
    "scale": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, scale=s), "scale must be a number"),
    "borders": (
        lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, cu_seqlens=[0, 2]),
        "cu_seqlens must be a tensor",
    ),
    "length": (lambda q, k, v, g, s: gated_linear_attention(q, k, v[:, 1:], g), "must be"),
    "dtype": (lambda q, k, v, g, s: gated_linear_attention(q, k.float(), v, g), "dtype"),
    "device": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g.to("meta")), "device"),
    "state": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, initial_state=s.mT), "initial_state"),
    "state's dtype": (
        lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, initial_state=s.float()),
        "initial_state",
    ),
    "state and context": (
        lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, initial_state=s, context=object()),
        "context needs no initial_state",
    ),
    "backend": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, backend="gpu"), "unknown backend"),
    "cuda on a CPU": (lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, backend="cuda"), "on cpu"),
    "fla on a CPU": (
        lambda q, k, v, g, s: gated_linear_attention(q, k, v, g, backend="fla"),
        "needs CUDA tensors" if HAS_FLA else "needs fla-core",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_gets_one_line(name):
    call, message = WRONG[name]
    with pytest.raises(UserError, match=message) as error:
        call(*inputs(5))
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("strength", [1 / 16, 1.0])
def test_fla_s_kernel_equals_the_chunkwise_form(strength):
    pytest.importorskip("fla")
    *tensors, state = inputs(300, H=4, Dk=64, Dv=128, strength=strength, dtype=torch.bfloat16)
    leaves = [x.cuda().requires_grad_() for x in (*tensors, state)]
    results = {}
    for backend in ("fla", "chunkwise"):
        o, end = gated_linear_attention_with_state(*leaves[:4], initial_state=leaves[4], backend=backend)
        gradients = torch.autograd.grad(o.float().square().sum() + end.square().sum(), leaves)
        results[backend] = (o, end, *gradients)
    for name, x, y in zip(("o", "state", "dq", "dk", "dv", "dg", "dstate"), *results.values(), strict=True):
        assert relative(x, y.double()) < 2e-2, name
    with torch.inference_mode():  # padded: three rows, less than a chunk of tokens
        o, end = fla_attention(*(x.repeat(3, 1, 1, 1)[:3, :20] for x in leaves[:4]), None, 0.1)
        exact = gated_linear_attention_with_state(
            *(x[:1, :20] for x in leaves[:4]), scale=0.1, backend="chunkwise"
        )
    assert relative(o[2], exact[0][0].double()) < 2e-2 and relative(end[2], exact[1][0].double()) < 2e-2
