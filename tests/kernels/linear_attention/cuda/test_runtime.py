"""The CUDA kernel at work on a GPU: bits, streams, threads, graphs, memory, and what it does not take."""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.library import opcheck

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention import linear_attention, linear_attention_qkv, operator
from lingpt.kernels.linear_attention.call import Call
from lingpt.tests.kernels.linear_attention.cuda.on_gpu import BF16, decays, inputs, randn, run, some_state
from lingpt.tests.oracles import relative

pytestmark = pytest.mark.usefixtures("compiled_builds")
gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_inputs_give_the_same_bits(D: int) -> None:
    """Guards: no atomics, no race: forward and backward, whole sequences and segments."""
    for B, N, H in ((8, 600, 64), (1, 4100, 2)):
        x = inputs(B, N, H, D, BF16)
        options = dict(b=torch.ones(H, device="cuda"), initial=some_state(B, H, D), log_decay=decays(H))
        first = run(*x, **options)
        for _ in range(3):
            again = run(*x, **options)
            assert all(torch.equal(first[name], again[name]) for name in first)


@gpu
def test_another_stream() -> None:
    """Guards: the launch goes to the current stream: it waits for what that stream computes."""
    x = inputs(1, 4100, 2, 64, BF16)
    expected = run(*x)
    late = [torch.zeros_like(y) for y in x]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: a launch elsewhere would see zeros
        for y, source in zip(late, x, strict=True):
            y.copy_(source)
        found = run(*late)
    stream.synchronize()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@gpu
def test_a_thread_that_has_not_used_cuda_yet() -> None:
    """Such are autograd's, where the backward pass may be the first to launch: there is no context yet."""
    q, k, v, _ = inputs(1, 100, 1, 128, BF16)
    here = linear_attention(q, k, v, backend="cuda")
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(linear_attention, q, k, v, backend="cuda").result()
    assert torch.equal(here, there)


@gpu
def test_a_cuda_graph_replays_it() -> None:
    """Guards: forward and backward are captured, and replay computes with what the inputs hold by then."""
    x, fresh = inputs(1, 4100, 2, 64, BF16), inputs(1, 4100, 2, 64, BF16, seed=1)
    options = dict(b=torch.ones(2, device="cuda"), initial=some_state(1, 2, 64), log_decay=decays(2))
    expected = run(*fresh, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*x, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*x, **options)
    for y, source in zip(x, fresh, strict=True):
        y.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@gpu
def test_no_call_waits_for_the_gpu() -> None:
    """Guards: once warm, neither pass synchronises, whatever the options."""
    x = inputs(1, 4100, 2, 64, BF16)
    options = dict(b=torch.ones(2, device="cuda"), initial=some_state(1, 2, 64), log_decay=decays(2))
    run(*x, **options)
    run(*x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*x, **options)
        run(*x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_torch_compile_makes_one_graph() -> None:
    """Guards: no graph break around the operator, and compiled code that computes the same."""
    from litgpt.model import build_rope_cache

    qkv, do = randn(2, 300, 3, 4, 64, seed=0, dtype=BF16), randn(2, 300, 4, 64, seed=1, dtype=BF16)
    cos, sin = (x.cuda() for x in build_rope_cache(300, 16))
    log_decay = decays(4)

    def block(qkv):
        return 2 * linear_attention_qkv(0.5 * qkv, cos, sin, log_decay=log_decay, backend="cuda")

    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        leaf = qkv.clone().requires_grad_()
        o = function(leaf)
        results.append((o, *torch.autograd.grad(o, leaf, do)))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("full", [True, False], ids=["all arguments", "none optional"])
def test_opcheck(full: bool, normalize: bool) -> None:
    """Guards: schema, fake results and autograd of both passes, separate and packed, on the kernel."""
    B, N, H, D = 2, 70, 2, 64
    q, k, v, do = inputs(B, N, H, D, BF16)
    angle = torch.arange(N, device="cuda")[:, None] * torch.ones(16 if full else D, device="cuda")
    options = {"backend": "cuda", "b_value": 0.5, "normalize": normalize, "a_value": float(normalize)}
    if full:
        b, state = torch.ones(H, device="cuda", requires_grad=True), some_state(B, H, D)
        parts = {name: x.requires_grad_() for name, x in zip("Szcn", state, strict=True)}
        options |= {"b": b, "head_log_decay": decays(H), "return_state": True, **parts}
        options |= {} if normalize else {"a": torch.ones(H, device="cuda", requires_grad=True)}
    forward, backward = (getattr(torch.ops.lingpt, f"linear_attention_{x}").default for x in ("fwd", "bwd"))
    packed = {"qkv": torch.stack((q, k, v), 2), "cos": angle.cos(), "sin": angle.sin()}
    for tensors in ({"q": q, "k": k, "v": v}, packed):
        call = Call(**tensors, **options)
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
        o, stats, *end = forward(*plain)
        opcheck(backward, (*plain, o, stats, *end, do, *(end if full else (None,) * 4)))
        first, x = next(iter(tensors.items()))
        opcheck(forward, call._replace(**{first: x.clone().requires_grad_()}))


@pytest.mark.multigpu
def test_a_second_device() -> None:
    """Guards: tensors of cuda:1 are computed there while cuda:0 is current, to the same bits."""
    x = inputs(1, 4100, 2, 64, BF16)
    expected, found = run(*x), run(*(y.to("cuda:1") for y in x))
    for name, y in found.items():
        assert y.device.index == 1 and torch.equal(y.cpu(), expected[name].cpu()), name


@gpu
def test_memory() -> None:
    """Guards: nothing in memory but results and O(N): beyond inputs and do, in tensors U of [B, N, H, D]."""
    q, k, v, do = inputs(4, 8192, 16, 128, BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(linear_attention(*leaves, backend="cuda"), leaves, do)
    torch.cuda.reset_peak_memory_stats()
    before, U = torch.cuda.memory_allocated(), do.nbytes
    o = linear_attention(*leaves, backend="cuda")
    forward = (torch.cuda.max_memory_allocated() - before) / U
    gradients = torch.autograd.grad(o, leaves, do)
    both = (torch.cuda.max_memory_allocated() - before) / U
    assert forward <= 1.15 and both <= 4.5 and len(gradients) == 3


@gpu
def test_the_first_call_and_the_next_start(tmp_path, monkeypatch) -> None:
    """Guards: under 30 s on a cold cache for everything that pythia-1.4b needs, under 1 s on a warm one."""
    from lingpt.kernels.linear_attention.cuda import toolchain, variants

    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path))
    arch, seconds = toolchain.native_arch(), []
    build = variants.variant_for(arch, BF16, 128, "NO_DECAY", 32)
    for _ in range(2):
        start = time.perf_counter()
        variants.Variant.load.__wrapped__(build, arch)
        seconds.append(time.perf_counter() - start)
    assert seconds[0] < 30 and seconds[1] < 1


# What it does not take


def packed(R: int):
    q, k, v, _ = inputs(1, 20, 2, 64, BF16)
    angle = torch.ones(20, R, device="cuda")
    return torch.stack((q, k, v), 2), angle.cos(), angle.sin()


NO_KERNEL = {
    "head_dim 289": (
        lambda **o: linear_attention(*inputs(1, 20, 2, 289, BF16)[:3], **o),
        "head_dim up to 288, not 289",
    ),
    "no causal mask": (
        lambda **o: linear_attention(*inputs(1, 20, 2, 64, BF16)[:3], causal=False, **o),
        "causal only",
    ),
    "65536 heads": (lambda **o: linear_attention(*inputs(2**15, 1, 2, 64, BF16)[:3], **o), "above 65,535"),
}


@gpu
@pytest.mark.parametrize("name", NO_KERNEL)
def test_without_a_kernel_auto_says_so_once_and_cuda_refuses(name, monkeypatch) -> None:
    """Guards: a fallback is right, and never silent; a refusal is a line, before any launch."""
    from lingpt.kernels.linear_attention.cuda.launch import Kernel

    call, reason = NO_KERNEL[name]
    expected = call(backend="chunkwise")
    monkeypatch.setattr(Kernel, "__call__", None)
    operator.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"chunkwise.*20 to 40 times slower.*{reason}"):
        assert torch.equal(call(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    with pytest.raises(UserError, match=reason) as error:
        call(backend="cuda")
    assert "\n" not in str(error.value)


NO_TENSOR_CORES = {
    "head_dim 264": (
        lambda **o: linear_attention(*inputs(1, 20, 2, 264, BF16)[:3], **o),
        "head_dim up to 256, not 264",
    ),
    "strided rows": (
        lambda **o: linear_attention(*(x.mT.contiguous().mT for x in inputs(1, 20, 2, 64, BF16)[:3]), **o),
        "last dimension",
    ),
}


@gpu
@pytest.mark.parametrize("name", NO_TENSOR_CORES)
def test_without_tensor_cores_it_is_fp32_and_says_so_once(name) -> None:
    """Guards: a fallback that is silent, or through PyTorch."""
    call, reason = NO_TENSOR_CORES[name]
    exact = call(backend="chunkwise").double()
    operator.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"in fp32, several times slower.*{reason}"):
        assert relative(call(), exact) < 4e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        call(backend="cuda")


ADAPTED = {
    "head_dim 24": lambda **o: linear_attention(*inputs(1, 20, 2, 24, BF16)[:3], **o),
    "8 rotated dimensions": lambda **o: linear_attention_qkv(*packed(8), **o),
}


@gpu
@pytest.mark.parametrize("name", ADAPTED)
def test_what_tensor_cores_take_with_a_change_needs_no_warning(name) -> None:
    """Guards: small Pythia models, whose heads are narrow, in fp32."""
    exact = ADAPTED[name](backend="chunkwise").double()
    operator.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(ADAPTED[name](), exact) < 8e-3


@gpu
def test_fp32_is_no_fallback_but_under_autocast() -> None:
    """Guards: fp32 on 16-bit tensor cores, and a warning where nobody expects them."""
    x = [y.float() for y in inputs(1, 20, 2, 64, BF16)[:3]]
    operator.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o = linear_attention(*x)
        linear_attention(*(y.double() for y in x))
    assert relative(o, linear_attention(*(y.double() for y in x))) < 2e-6
    with torch.autocast("cuda", BF16), pytest.warns(UserWarning, match="bf16 and fp16, not torch.float32"):
        assert torch.equal(linear_attention(*x), o)


MISTAKES = {
    "heads": (lambda q, k, v: linear_attention(q, k[:, :, :1], v, backend="cuda"), "one shape"),
    "dtypes": (lambda q, k, v: linear_attention(q, k.half(), v, backend="cuda"), "dtype"),
    "devices": (lambda q, k, v: linear_attention(q, k.cpu(), v, backend="cuda"), "one device"),
    "b": (lambda q, k, v: linear_attention(q, k, v, 1.01, backend="cuda"), "at most 1"),
    "b elsewhere": (lambda q, k, v: linear_attention(q, k, v, torch.ones(2), backend="cuda"), "b must be"),
    "growth": (lambda q, k, v: linear_attention(q, k, v, log_decay=[0.1, 0.0], backend="cuda"), "at most 0"),
}


@gpu
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_any_launch(name, monkeypatch) -> None:
    """Guards: the same checks hold in front of the kernel."""
    from lingpt.kernels.linear_attention.cuda.launch import Kernel

    q, k, v, _ = inputs(1, 20, 2, 64, BF16)
    monkeypatch.setattr(Kernel, "__call__", None)
    call, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        call(q, k, v)
