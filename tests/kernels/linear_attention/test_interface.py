"""The operator as PyTorch and users meet it: library, compiler, FLOPs, precision, dispatch, errors."""

import itertools
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    chunkwise,
    interface,
    linear_attention,
    linear_attention_flops,
    linear_attention_qkv,
    linear_attention_qkv_with_state,
    linear_attention_with_state,
    operator,
)
from lingpt.kernels.linear_attention.call import Call
from lingpt.kernels.linear_attention.cuda import backend
from lingpt.tests.oracles import FORMS, by_definition

B, N, H, D = 2, 70, 2, 8


def tensors(requires_grad=False, dtype=torch.float32, shape=(B, N, H, D)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad) for _ in range(3)]


def state(requires_grad=False):
    q, k, v = tensors()
    parts = linear_attention_with_state(q, k, v)[1]
    return LinearAttentionState(*(x.detach().clone().requires_grad_(requires_grad) for x in parts))


def all_options(causal=True):
    """Every optional field of a Call, as tensors that get gradients where they can."""
    log_decay = torch.full((H,), -0.1) if causal else None
    parts = dict(zip("Szcn", state(True), strict=True))
    b = torch.full((H,), 0.5, requires_grad=True)
    return {"b": b, "head_log_decay": log_decay, "return_state": True, **parts}


def with_gates(q, k, v, P=H):
    """[B, N, 3·H·D + P]"""
    return torch.cat((*(x.flatten(2) for x in (q, k, v)), q.flatten(2)[..., :P]), 2)


def rope(R=4):
    angle = torch.arange(N)[:, None] * torch.ones(R)
    return angle.cos(), angle.sin()


def test_numbers_of_other_packages_are_numbers():
    q, k, v = tensors()
    numpy = torch.tensor([0.5, -0.25]).numpy()  # its items are np.float32
    found = linear_attention(q, k, v, numpy[0], log_decay=[numpy[1]] * H)
    assert torch.equal(found, linear_attention(q, k, v, 0.5, log_decay=[-0.25] * H))


# torch.library and torch.compile


@pytest.mark.parametrize("full", [True, False], ids=["all arguments", "none optional"])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(full, causal):
    optional = all_options(causal) if full else {"b_value": 0.5}
    q, k, v = tensors(True)
    opcheck(torch.ops.lingpt.linear_attention_fwd, Call(q=q, k=k, v=v, causal=causal, **optional))
    if causal:
        qkv = torch.stack((q, k, v), 2).detach().requires_grad_()
        cos, sin = rope()
        opcheck(torch.ops.lingpt.linear_attention_fwd, Call(qkv=qkv, cos=cos, sin=sin, **optional))


def test_opcheck_with_a_decay_of_each_token_s_own():
    q, k, v = tensors(True)
    gate = torch.full((B, N, H), -0.2, requires_grad=True)
    options, (cos, sin) = all_options() | {"head_log_decay": None}, rope()
    opcheck(torch.ops.lingpt.linear_attention_fwd, Call(q=q, k=k, v=v, **options, token_log_decay=gate))
    projected = with_gates(q, k, v).detach().requires_grad_()
    bias = torch.ones(H, requires_grad=True)
    opcheck(
        torch.ops.lingpt.linear_attention_fwd,
        Call(projected=projected, gate_bias=bias, head_size=D, cos=cos, sin=sin, **options),
    )


@pytest.mark.parametrize(
    ("compiler", "backend", "with_state"),
    [
        *itertools.product(["aot_eager"], ["auto", "chunkwise"], [False, True]),
        pytest.param("inductor", "auto", True, marks=pytest.mark.slow),
    ],
)
def test_compiles_into_one_graph_with_equal_results(compiler, backend, with_state):
    def block(qkv, cos, sin, b, *parts):
        initial = LinearAttentionState(*parts) if parts else None
        options = dict(initial_state=initial, log_decay=(-0.1, -0.2), backend=backend)
        o, end = linear_attention_qkv_with_state(2 * qkv, cos, sin, b, **options)
        o, end = linear_attention_with_state(o, o, o, b, initial_state=end, backend=backend)
        return (o * end.z.sum()).sum()

    parts = state(True) if with_state else ()
    inputs = torch.stack(tensors(), 2).requires_grad_(), *rope(), torch.ones(H, requires_grad=True), *parts
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    wanted = [x for x in inputs if x.requires_grad]
    compiled = torch.compile(block, fullgraph=True, backend=compiler)
    eager, graph = block(*inputs), compiled(*inputs)
    torch.testing.assert_close(graph, eager)
    gradients = torch.autograd.grad(graph, wanted), torch.autograd.grad(eager, wanted)
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_meta_tensors_have_shapes():
    q = torch.empty(B, N, H, D, device="meta", dtype=torch.bfloat16)
    o, end = linear_attention_with_state(q, q, q)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert end.S.shape == (B, H, D, D) and end.S.dtype == torch.float32


# The way past the dispatcher: nobody who could see the operator notices it


def dispatched(q, k, v):
    """linear_attention(q, k, v), by the operator."""
    return torch.ops.lingpt.linear_attention_fwd.default(*Call(q=q, k=k, v=v))[0]


@pytest.mark.parametrize("full", [True, False], ids=["all arguments", "none optional"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_direct_way_gives_the_operator_s_bits(full, packed):
    x, options = tensors(True), all_options() if full else {"b_value": 0.5}
    cos, sin = rope()
    inputs = (
        {"qkv": torch.stack(x, 2), "cos": cos, "sin": sin} if packed else dict(zip("qkv", x, strict=True))
    )
    call = Call(**inputs, **options)

    direct = operator.attend(call)
    whole = torch.ops.lingpt.linear_attention_fwd.default(*call)
    if not full:
        assert direct[2:] == (None,) * 4 and all(x.numel() == 0 for x in whole[2:])
    wanted = [*x, *(y for y in options.values() if isinstance(y, torch.Tensor) and y.requires_grad)]
    found = []
    for o, stats, *end in (direct, whole):
        loss = o.square().sum() + (sum(x.square().sum() for x in end) if full else 0)
        found.append((o, stats, *end[: 4 * full], *torch.autograd.grad(loss, wanted)))
        assert o.requires_grad and not stats.requires_grad
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_modes_tracers_and_the_profiler_see_the_operator():
    q, k, v = tensors(True)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode, passes in ((Functions, ["fwd"]), (Operators, ["fwd", "bwd"])):
        seen = []
        with mode():
            linear_attention(q, k, v).sum().backward()
        assert [x for x in seen if "lingpt" in x] == [f"lingpt.linear_attention_{x}.default" for x in passes]

    with torch.profiler.profile() as profile:
        linear_attention(q, k, v)
    assert [x.count for x in profile.key_averages() if x.key == "lingpt::linear_attention_fwd"] == [1]

    def call(q, k, v):
        return linear_attention(q, k, v)

    for pre_dispatch in (False, True):
        graph = make_fx(call, pre_dispatch=pre_dispatch)(*tensors()).graph
        assert "lingpt.linear_attention_fwd.default" in [str(node.target) for node in graph.nodes]
    graph = torch.jit.trace(call, tensors()).graph
    assert "lingpt::linear_attention_fwd" in [node.kind() for node in graph.nodes()]


def test_transforms_do_to_it_what_they_do_to_the_operator():
    def outcome(transform, attention):
        try:
            return transform(attention)
        except RuntimeError as error:
            return str(error)

    q, k, v = tensors()
    batches = [torch.stack((x, -x, 2 * x)) for x in (q, k, v)]
    for transform in (
        lambda attention: torch.func.grad(lambda q: attention(q, k, v).sum())(q),
        lambda attention: torch.func.vjp(lambda q: attention(q, k, v), q)[0],
        lambda attention: torch.vmap(attention)(*batches),
        lambda attention: torch.vmap(lambda q: attention(q, k, v))(batches[0]),
        lambda attention: torch.vmap(torch.func.grad(lambda q: attention(q, k, v).sum()))(batches[0]),
        lambda attention: torch.func.functionalize(attention)(q, k, v),
    ):
        ours, expected = outcome(transform, linear_attention), outcome(transform, dispatched)
        assert type(ours) is type(expected)
        assert torch.equal(ours, expected) if isinstance(ours, torch.Tensor) else ours == expected


def test_a_backward_may_be_mapped():
    q, k, v = tensors(True)
    o = linear_attention(q, k, v)
    do = torch.stack((o, o.square())).detach()
    mapped = torch.vmap(lambda do: torch.autograd.grad(o, q, do, retain_graph=True)[0])(do)
    expected = [torch.autograd.grad(o, q, x, retain_graph=True)[0] for x in do]
    assert torch.equal(mapped, torch.stack(expected))


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "b"])
def test_a_subclass_of_tensor_is_heeded_wherever_it_comes(place):
    class Ours(torch.Tensor):
        pass

    x = [*tensors(), torch.ones(H)]
    x[place] = x[place].as_subclass(Ours)
    assert type(linear_attention(*x)) is Ours


def test_without_gradients_and_with_parameters():
    q, k, v = tensors()
    expected = linear_attention(q, k, v)
    p = torch.nn.Parameter(q)
    o = linear_attention(p, k, v)
    assert torch.equal(o, expected) and o.requires_grad
    assert operator.attend(Call(q=p, k=k, v=v))[2:] == (None,) * 4  # past the dispatcher
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, end = linear_attention_with_state(p, k, v)
        assert torch.equal(o, expected) and not o.requires_grad and not end.S.requires_grad
    assert not expected.requires_grad


# FLOPs


def test_flops_count_causal_products_once_and_the_backward_twice():
    # By hand, per token and head: k̂vᵀ and q̂S of 2·D² each; q̂k̂ᵀ and wv over (64 + 0)/2 tokens of 2·D each.
    assert linear_attention_flops(1, 128, 1, 32) == 128 * (4 * 32**2 + 2 * 2 * 32 * 32)
    assert linear_attention_flops(1, 128, 1, 32, causal=False) == 128 * 4 * 32**2
    assert linear_attention_flops(3, 128, 5, 32) == 15 * linear_attention_flops(1, 128, 1, 32)

    q, k, v = tensors(True)
    qkv = torch.stack((q, k, v), 2).detach().requires_grad_()
    calls = (
        (lambda: linear_attention(q, k, v), True),
        (lambda: linear_attention(q, k, v, causal=False), False),
        (lambda: linear_attention_qkv(qkv, *rope()), True),
    )
    for call, causal in calls:
        with FlopCounterMode(display=False) as counter:
            o = call()
            forward = counter.get_total_flops()
            o.sum().backward()
        assert forward == linear_attention_flops(B, N, H, D, causal)
        assert counter.get_total_flops() == 3 * forward


# Precision


def test_autocast_does_not_lower_what_is_inside():
    q, k, v = tensors(True)
    exact = linear_attention(*(x.detach().double() for x in (q, k, v)))
    for form in FORMS:
        with torch.autocast("cpu", torch.bfloat16):
            o = linear_attention(q, k, v, backend=form)
            (dq,) = torch.autograd.grad(o.sum(), q)
        torch.testing.assert_close(o.double(), exact, rtol=1e-5, atol=1e-5)
        assert dq.dtype == torch.float32


@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
def test_the_user_s_matmul_precision_is_left_as_it_was(asked):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(asked)
        q, k, v = tensors()
        o = linear_attention(q, k, v)
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(
        o.double(), linear_attention(*(x.double() for x in (q, k, v))), rtol=1e-5, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "limit"), [("highest", 1e-5), ("high", 1e-2)])
def test_fp32_on_a_gpu_has_the_precision_that_is_asked(asked, limit):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 500, 4, 64, generator=generator).cuda() for _ in range(3))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(asked)
        o = linear_attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = linear_attention(*(x.double() for x in (q, k, v)), backend="reference")
    assert limit / 1e3 < (o.double() - exact).abs().max() < limit


# Dispatch: a stand-in for the CUDA kernel, which the dispatch must call on what it supports


class Kernel:
    """Computes with the chunkwise form, and counts."""

    FALLBACK = ""

    def __init__(self, reason=None):
        self.reason, self.forwards, self.backwards = reason, 0, 0

    def unsupported_reason(self, call):
        return self.reason or backend.unsupported_reason(call)

    def forward(self, call, *args):
        self.forwards += 1
        return chunkwise.forward(call, *args)

    def backward(self, call, *args):
        self.backwards += 1
        return chunkwise.backward(call, *args)


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in in the CUDA kernel's place, told that CPU tensors are its own."""
    kernel = Kernel()
    monkeypatch.setattr(operator, "cuda_backends", lambda: (kernel,))
    monkeypatch.setattr(backend, "device_unsupported_reason", lambda dtype, head_dim, device: None)
    return kernel


def test_the_kernel_runs_forward_and_backward_where_it_can(kernel):
    q, k, v = tensors(True, torch.bfloat16)
    b = torch.ones(H, requires_grad=True)
    o, end = linear_attention_with_state(q, k, v, b, backend="cuda")
    (o.sum() + end.S.sum()).backward()  # gradients expanded from one number
    qkv = torch.stack(tensors(dtype=torch.bfloat16, shape=(B, N, H, 16)), 2).requires_grad_()
    linear_attention_qkv(qkv, *rope(16), log_decay=[-0.1] * H, backend="cuda").sum().backward()
    assert (kernel.forwards, kernel.backwards) == (2, 2)
    initial = dict(initial_state=state(), backend="cuda")
    linear_attention(q, k, v, **initial).sum().backward()
    assert (kernel.forwards, kernel.backwards) == (3, 3)
    linear_attention(q, k, v, backend="chunkwise")
    assert kernel.forwards == 3


def test_what_the_kernel_cannot_run_is_refused_by_cuda(kernel):
    q, k, v = tensors()
    with pytest.raises(UserError, match="causal only"):
        linear_attention(q, k, v, causal=False, backend="cuda")
    with pytest.raises(UserError, match="last dimension"):
        linear_attention(q.mT.contiguous().mT, k, v, backend="cuda")
    with pytest.raises(UserError, match="multiple of 16 dimensions, not 4"):
        linear_attention_qkv(torch.stack((q, k, v), 2), *rope(), backend="cuda")
    kernel.reason = "no kernel for head_dim 17"
    with pytest.raises(UserError, match="head_dim 17"):
        linear_attention(q, k, v, backend="cuda")
    assert kernel.forwards == 0


def test_cuda_is_refused_on_a_cpu_and_auto_says_nothing():
    q, k, v = tensors(dtype=torch.bfloat16)
    with pytest.raises(UserError, match="tensors are on cpu"):
        linear_attention(q, k, v, backend="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(q, k, v)


@pytest.mark.gpu
def test_auto_falls_back_with_one_warning_and_cuda_raises():
    q, k, v = (x.cuda() for x in tensors(dtype=torch.bfloat16, shape=(1, 5, 2, 289)))
    operator.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="chunkwise"):
        linear_attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(q, k, v)
    with pytest.raises(UserError):
        linear_attention(q, k, v, backend="cuda")


# Errors: one line each, before any work


def changed(**parts):
    return state()._replace(**parts)


def sequences():
    return torch.tensor([0, 5], dtype=torch.int32)


WRONG = {
    "no tensor": (lambda q, k, v: linear_attention(q, None, v), "k must be a tensor; got None"),
    "arrays": (lambda q, k, v: linear_attention(q.numpy(), k.numpy(), v.numpy()), "q must be a tensor"),
    "qkv as a list": (lambda q, k, v: linear_attention_qkv([q, k, v], *rope()), "qkv must be a tensor"),
    "no angles": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), None, None),
        "cos must be a tensor",
    ),
    "a gated projection as an array": (
        lambda q, k, v: linear_attention_qkv(
            with_gates(q, k, v).numpy(), *rope(), gate_bias=torch.ones(H), head_size=D
        ),
        "qkv must be a tensor",
    ),
    "decay as an array": (
        lambda q, k, v: linear_attention(q, k, v, log_decay=-q[..., 0].abs().numpy()),
        "log_decay must be a tensor",
    ),
    "state of numbers": (
        lambda q, k, v: linear_attention(q, k, v, initial_state=(1, 2, 3, 4)),
        "initial_state.S must be a tensor; got 1",
    ),
    "rank": (lambda q, k, v: linear_attention(q[0], k[0], v[0]), "shape"),
    "shapes": (lambda q, k, v: linear_attention(q, k[:, 1:], v), "shape"),
    "heads": (lambda q, k, v: linear_attention(q, k[:, :, :1], v[:, :, :1]), "shape"),
    "value width": (lambda q, k, v: linear_attention(q, k, v[..., :4]), "shape"),
    "dtypes": (lambda q, k, v: linear_attention(q, k.double(), v), "dtype"),
    "integers": (lambda q, k, v: linear_attention(q.int(), k.int(), v.int()), "dtype"),
    "devices": (lambda q, k, v: linear_attention(q, k.to("meta"), v), "device"),
    "b too large": (lambda q, k, v: linear_attention(q, k, v, 1.5), "at most 1"),
    "b no number": (lambda q, k, v: linear_attention(q, k, v, float("nan")), "b must be finite; got nan"),
    "a no number": (
        lambda q, k, v: linear_attention(q, k, v, a=float("inf"), normalize=False),
        "a must be finite; got inf",
    ),
    "b of two lines": (
        lambda q, k, v: linear_attention(q, k, v, q[0, :2, 0].numpy()),
        "b must be a number or a tensor",
    ),
    "a flag that is none": (
        lambda q, k, v: linear_attention(q, k, v, normalize=None),
        "normalize must be True or False; got None",
    ),
    "eight bits": (
        lambda q, k, v: linear_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v))),
        "one dtype, bf16, fp16, fp32 or float64; got torch.float8_e4m3fn",
    ),
    "angles as integers": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), *(x.int() for x in rope())),
        "cos and sin must be floating point",
    ),
    "b's shape": (lambda q, k, v: linear_attention(q, k, v, torch.ones(H + 1)), "b must be"),
    "b's dtype": (lambda q, k, v: linear_attention(q, k, v, torch.ones(H).int()), "b must be"),
    "b's device": (lambda q, k, v: linear_attention(q, k, v, torch.ones(H, device="meta")), "b must be"),
    "growth": (lambda q, k, v: linear_attention(q, k, v, log_decay=[0.1] * H), "log_decay"),
    "no memory at all": (
        lambda q, k, v: linear_attention(q, k, v, log_decay=[float("-inf")] * H),
        "a finite number of at most 0",
    ),
    "decay as a number": (lambda q, k, v: linear_attention(q, k, v, log_decay=-0.1), "for each head"),
    "decay as a word": (lambda q, k, v: linear_attention(q, k, v, log_decay="fast"), "for each head"),
    "decay's shape": (lambda q, k, v: linear_attention(q, k, v, log_decay=torch.zeros(H, 1)), "log_decay"),
    "decay's length": (lambda q, k, v: linear_attention(q, k, v, log_decay=[-0.1]), "log_decay"),
    "sequences as a list": (
        lambda q, k, v: linear_attention(q[:1], k[:1], v[:1], cu_seqlens=[0, 5]),
        "cu_seqlens must be a tensor",
    ),
    "sequences' dtype": (
        lambda q, k, v: linear_attention(q[:1], k[:1], v[:1], cu_seqlens=torch.zeros(2)),
        "cu_seqlens must be int32 or int64 \\[sequences \\+ 1\\]; got torch.float32",
    ),
    "no sequences": (
        lambda q, k, v: linear_attention(q[:1], k[:1], v[:1], cu_seqlens=sequences()[:0]),
        r"cu_seqlens must be int32 or int64 \[sequences \+ 1\]; got torch.int32 \[0\]",
    ),
    "sequences' device": (
        lambda q, k, v: linear_attention(q[:1], k[:1], v[:1], cu_seqlens=sequences().to("meta")),
        "cu_seqlens must be on cpu; got meta",
    ),
    "sequences, not causal": (
        lambda q, k, v: linear_attention(q[:1], k[:1], v[:1], cu_seqlens=sequences(), causal=False),
        "cu_seqlens needs causal=True",
    ),
    "decay, not causal": (
        lambda q, k, v: linear_attention(q, k, v, log_decay=[-0.1] * H, causal=False),
        "causal",
    ),
    "recurrent, not causal": (
        lambda q, k, v: linear_attention(q, k, v, causal=False, backend="recurrent"),
        "causal",
    ),
    "backend": (lambda q, k, v: linear_attention(q, k, v, backend="triton"), "unknown backend 'triton'"),
    "state's shape": (
        lambda q, k, v: linear_attention(q, k, v, initial_state=changed(z=torch.ones(B, H))),
        r"\.z",
    ),
    "state's dtype": (
        lambda q, k, v: linear_attention(q, k, v, initial_state=changed(n=torch.ones(B, H).bfloat16())),
        r"\.n",
    ),
    "state's length": (lambda q, k, v: linear_attention(q, k, v, initial_state=state()[:3]), "initial_state"),
    "state and context": (
        lambda q, k, v: linear_attention(q, k, v, initial_state=state(), context=object()),
        "context needs",
    ),
    "not causal, with a context": (
        lambda q, k, v: linear_attention(q, k, v, causal=False, context=object()),
        "context needs",
    ),
    "state that is none": (lambda q, k, v: linear_attention(q, k, v, initial_state=5), "initial_state"),
    "qkv's shape": (lambda q, k, v: linear_attention_qkv(q, *rope()), "qkv must be"),
    "no room for gates": (
        lambda q, k, v: linear_attention_qkv(
            with_gates(q, k, v, H - 1), *rope(), gate_bias=torch.ones(H), head_size=D
        ),
        "P ≥ H",
    ),
    "gates without a head's size": (
        lambda q, k, v: linear_attention_qkv(with_gates(q, k, v), *rope(), gate_bias=torch.ones(H)),
        "needs head_size",
    ),
    "a head's size that is none": (
        lambda q, k, v: linear_attention_qkv(
            with_gates(q, k, v), *rope(), gate_bias=torch.ones(H), head_size=float(D)
        ),
        "needs head_size",
    ),
    "a head's size without gates": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), *rope(), head_size=D),
        "gate_bias, too",
    ),
    "gate_bias as a list": (
        lambda q, k, v: linear_attention_qkv(with_gates(q, k, v), *rope(), gate_bias=[0.0] * H, head_size=D),
        "a tensor",
    ),
    "a projection of integers": (
        lambda q, k, v: linear_attention_qkv(
            with_gates(q, k, v).int(), *rope(), gate_bias=torch.ones(H), head_size=D
        ),
        r"floating point .*torch.int32 \[2, 70, 50\]",
    ),
    "gates twice": (
        lambda q, k, v: linear_attention_qkv(
            with_gates(q, k, v), *rope(), gate_bias=torch.ones(H), log_decay=[-0.1] * H
        ),
        "leave log_decay",
    ),
    "gate_bias's shape": (
        lambda q, k, v: linear_attention_qkv(with_gates(q, k, v), *rope(), gate_bias=torch.ones(1, H)),
        "gate_bias must be",
    ),
    "cos's length": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), *(x[1:] for x in rope())),
        "cos and sin",
    ),
    "odd rotation": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), *rope(3)),
        "cos and sin",
    ),
    "wide rotation": (
        lambda q, k, v: linear_attention_qkv(torch.stack((q, k, v), 2), *rope(10)),
        "cos and sin",
    ),
    "context and state": (
        lambda q, k, v: linear_attention(q, k, v, initial_state=state(), context=object()),
        "context needs causal=True, no initial_state",
    ),
    "context of the reference": (
        lambda q, k, v: linear_attention(q, k, v, backend="reference", context=object()),
        "context needs .* backend 'chunkwise' or 'cuda'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_gets_one_line(name, monkeypatch):
    call, message = WRONG[name]
    given = tensors()
    initial = state()
    monkeypatch.setattr(operator, "choose", None)  # no work may begin
    monkeypatch.setitem(globals(), "state", lambda: initial)
    with pytest.raises(UserError, match=message) as error:
        call(*given)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_grouped_heads_and_other_head_sizes_are_told_a_way_that_is_right():
    q, k, v = tensors()
    for D in (5, 11):  # v's heads smaller, and larger
        few_k, few_v = k[:, :, :1], torch.randn(B, N, 1, D)
        with pytest.raises(UserError, match="repeat_interleave k and v along dim 2, pad the smaller heads"):
            linear_attention(q, few_k, few_v)
        k, v = (x.repeat_interleave(H, 2) for x in (few_k, few_v))
        size = max(D, q.shape[-1])
        padded = (torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
        expected = by_definition(q, few_k.expand_as(q), few_v.expand(B, N, H, D), 1.0, torch.ones(H))
        torch.testing.assert_close(linear_attention(*padded)[..., :D], expected)
    with pytest.raises(UserError, match=r"\[2, 69, 2, 8\], \[2, 70, 2, 11\]$"):
        linear_attention(q, k[:, 1:], v)


def test_a_large_number_b_is_the_caller_s_risk_without_norms():
    q, k, v = tensors()
    o = linear_attention(0.1 * q, 0.1 * k, v, 3.0, normalize_qk=False)
    torch.testing.assert_close(o, linear_attention(0.1 * q, 0.3 * k, v, 1.0, normalize_qk=False))


@pytest.mark.slow
def test_the_import_is_light():
    """Importing the operators pulls in neither the CUDA compiler nor a model library, beside torch's own."""
    import subprocess
    import sys

    heavy = "['cuda.bindings', 'litgpt', 'lightning', 'transformers', 'triton', 'fla']"
    program = f"""
import sys, torch.utils.flop_counter
before = set(sys.modules)
import lingpt.kernels.linear_attention, lingpt.kernels.gated_linear_attention
print([m for m in {heavy} if m in sys.modules and m not in before])"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_what_is_per_head_reaches_the_kernels_side_by_side(monkeypatch):
    """Guards: the CUDA kernels read a, b and log_decay [H] with a stride of 1. One decay expanded to all
    heads was read beyond its end, and columns of one parameter as each other."""
    calls, attend = [], interface.attend
    monkeypatch.setattr(interface, "attend", lambda call: calls.append(call) or attend(call))
    coefficients = torch.ones(H, 2, requires_grad=True)
    a, b, decay = coefficients[:, 0], coefficients[:, 1], torch.tensor([-0.1]).expand(H)
    linear_attention(
        *tensors(), b, a=a, log_decay=decay, normalize=False, backend="chunkwise"
    ).sum().backward()
    (call,) = calls
    assert all(x.stride() == (1,) for x in (call.a, call.b, call.head_log_decay))
    assert coefficients.grad.ne(0).all()


@pytest.mark.parametrize("which", ["cos", "sin"])
def test_a_rotation_that_would_never_learn_is_refused(which):
    """As a decay [H]; the forms that autograd differentiates have its gradient."""
    qkv = torch.randn(1, 6, 3, 2, 8)
    tables = {"cos": torch.randn(6, 4), "sin": torch.randn(6, 4)}
    tables[which].requires_grad_()
    with pytest.raises(UserError, match="cos and sin get no gradient here: detach them, or"):
        linear_attention_qkv(qkv, **tables)
    linear_attention_qkv(qkv, **tables, backend="reference").sum().backward()
    assert tables[which].grad is not None
    with torch.no_grad():
        linear_attention_qkv(qkv, **tables)
