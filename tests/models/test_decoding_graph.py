"""Static steps and CUDA graphs of them: the tokens of eager decoding, from addresses that stay.

Without a GPU a capture is simulated: a recording of the operators that a step calls, on which tensors. Its
replay calls them again, on the same tensors, and runs no Python of the step: what a graph would freeze, it
freezes.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lingpt.common.errors import UserError
from lingpt.kernels.sdpa import sdpa_with_logsumexp
from lingpt.models import ATTENTIONS, GPT, ModelArgs, decoding_graph, generate
from lingpt.models.attention import softmax
from lingpt.models.attention.softmax import KVCache, StaticPosition, split_kv_attention
from lingpt.models.decoding_graph import DecodingGraph
from lingpt.models.gpt import DecodingState, tensors_in

EAGER = "decoding is eager, as no CUDA graph could be captured"


class Recording(TorchDispatchMode):
    """Operators as they are called, which `replay` repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            for x, y in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr():  # neither view nor in place
                    x.copy_(y)


def record(step, device, pool) -> tuple[Recording, torch.Tensor]:
    """In place of `decoding_graph.capture`: warm-up, then a step that leaves no trace, as a capture leaves
    none."""
    state = step.func.__self__.state
    step(keep=False)
    before = [x.clone() for x in tensors_in(state.layers)]
    with Recording() as recording:
        logits_BV = step(keep=True)
    for x, y in zip(tensors_in(state.layers), before, strict=True):
        x.copy_(y)
    logits_BV.fill_(torch.nan)  # until it is replayed
    return recording, logits_BV


@pytest.fixture
def small_buckets(monkeypatch) -> None:
    """Buckets of 16 keys, of 32 in two splits, and so on: short texts cross their boundaries."""
    monkeypatch.setattr(decoding_graph, "LEAST_BUCKET", 16)
    monkeypatch.setattr(softmax, "KV_SPLIT", 16)


@pytest.fixture
def recorded(monkeypatch, small_buckets) -> Iterator[list[DecodingGraph]]:
    """Every DecodingGraph records and replays; the list has those that were made."""
    made, construct = [], DecodingGraph.__init__

    def init(self: DecodingGraph, model: GPT, state: DecodingState) -> None:
        construct(self, model, state)
        self.captures = True
        made.append(self)

    monkeypatch.setattr(decoding_graph, "capture", record)
    monkeypatch.setattr(DecodingGraph, "__init__", init)
    yield made


def prompted(model: GPT, prompt_BN: torch.Tensor, room: int) -> DecodingState:
    """A state that has seen the prompt. Places behind it hold what would show if it were attended to."""
    state = model.new_state(len(prompt_BN), room)
    for layer in state.layers:
        if isinstance(layer, KVCache):
            layer.k.normal_()
            layer.v.normal_().mul_(30)
    model.step(prompt_BN, state)
    return state


def addresses(state: DecodingState) -> list[int]:
    return [x.data_ptr() for x in tensors_in(state.layers)]


def has_softmax(model: GPT) -> bool:
    return "softmax" in model.config.attention_per_layer


@torch.no_grad()
def test_each_token_is_the_eager_one(small, tokens, variant, recorded):
    """Every mechanism with every option: the static step as it is and as a graph replays it, from before a
    bucket's end to beyond the next one, up to a cache's last place. The states keep their tensors."""
    model = small(**variant)
    eager = prompted(model, tokens[:, :10], room=40)
    states = [copy.deepcopy(eager) for _ in range(2)]
    steps, fixed = [DecodingGraph(model, state) for state in states], [addresses(state) for state in states]
    steps[0].captures = False
    for n in range(10, 40):
        expected = model.next_logits(tokens[:, n : n + 1], eager)
        for step in steps:
            torch.testing.assert_close(step(tokens[:, n : n + 1]), expected, rtol=1e-4, atol=1e-5)
    assert [step.buckets for step in steps] == [[], [16, 32, 48] if has_softmax(model) else [0]]
    lengths = [getattr(layer, "length", None) for layer in eager.layers]
    for state, places in zip(states, fixed, strict=True):
        assert addresses(state) == places and state.position == eager.position == 40
        for x, y in zip(tensors_in(state.layers), tensors_in(eager.layers), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert [getattr(layer, "length", None) for layer in state.layers] == lengths


@pytest.mark.slow
@torch.no_grad()
def test_text_is_the_eager_one_of_any_batch_size(small, tokens, attention, recorded):
    """Through `generate`, twice: the second batch is another one."""
    model = small(attention)
    for prompts in (tokens[:, :12], tokens[:1, 20:25], tokens[:1, :5].T):
        eager = generate(model, prompts, 24, temperature=0)
        assert torch.equal(generate(model, prompts, 24, temperature=0, graph=True), eager)
        assert torch.equal(generate(model, prompts, 24, graph=True), generate(model, prompts, 24))
    assert len(recorded) == 2 * 3 and all(graph.buckets for graph in recorded)


@torch.no_grad()
def test_a_piece_in_between_is_eager(small, tokens, attention, recorded):
    """Several tokens at once put new tensors into the states: the graphs of the old ones are gone."""
    model = small(attention)
    eager = prompted(model, tokens[:, :10], room=70)
    state = copy.deepcopy(eager)
    step = DecodingGraph(model, state)
    for piece in tokens[:, 10:40].split((1, 1, 4, 1, 1, 20, 1, 1), dim=1):
        expected = model.next_logits(piece, eager)
        torch.testing.assert_close(step(piece), expected, rtol=1e-4, atol=1e-5)
    assert state.position == 40


@torch.no_grad()
def test_rows_padded_on_the_left_do_not_see_their_padding(small, tokens, attention, recorded):
    """Guards: softmax in a graph that attended to the padding of the shorter rows."""
    model = small(attention).eval()
    N, cu_seqlens = 8, torch.tensor([0, 8, 14, 16], dtype=torch.int32)  # the second row is of two tokens
    state, alone = model.new_state(2, 32), model.new_state(1, 32)
    model.hidden(tokens[:2, :N], state, cu_seqlens)
    model.step(tokens[1:2, N - 2 : N], alone)
    graph = DecodingGraph(model, state)
    for i in range(N, N + 4):
        logits_BV = graph(tokens[:2, i : i + 1])
        expected = model.next_logits(tokens[1:2, i : i + 1], alone)
        torch.testing.assert_close(logits_BV[1:], expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_graphs_can_be_captured_before_they_are_needed(small, tokens, recorded):
    """So that a benchmark times none of it; and what was seen is not changed by it."""
    model = small("softmax")
    state = prompted(model, tokens[:, :10], room=60)
    eager, step = copy.deepcopy(state), DecodingGraph(model, state)
    step.prepare(33)
    assert step.buckets == [16, 32, 64] and state.position == 10
    step.prepare(60)
    assert step.buckets == [16, 32, 64]
    expected = model.next_logits(tokens[:, 10:11], eager)
    torch.testing.assert_close(step(tokens[:, 10:11]), expected, rtol=1e-4, atol=1e-5)
    linear = small("ours")
    (step := DecodingGraph(linear, prompted(linear, tokens[:, :10], 60))).prepare(60)
    assert step.buckets == [0]


def test_buckets_are_powers_of_two(small):
    """A token never reads more than twice the keys that it needs, beyond the least bucket."""
    model = small("softmax", block_size=5000)
    bucket = DecodingGraph(model, model.new_state(1))._bucket
    lengths = (1, 256, 257, 512, 513, 4096, 4097, 5000)
    assert [bucket(n) for n in lengths] == [256, 256, 512, 512, 1024, 4096, 5120, 5120]
    with pytest.raises(UserError, match="5001 tokens, but the model's block size is 5000"):
        bucket(5001)


@torch.no_grad()
def test_no_more_tokens_than_there_is_room_for(small, tokens, attention, recorded):
    """Guards: positions beyond a table or a cache, which a GPU would read and write all the same."""
    model = small(attention, block_size=14)
    step = DecodingGraph(model, prompted(model, tokens[:, :13], room=14))
    step(tokens[:, 13:14])
    with pytest.raises(UserError, match="15 tokens, but the model's block size is 14"):
        step(tokens[:, 14:15])
    model = small("softmax")
    step = DecodingGraph(model, prompted(model, tokens[:, :13], room=13))
    with pytest.raises(UserError, match="14 tokens with a cache of 13: raise max_seq_len"):
        step(tokens[:, 13:14])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seen", [0, 14, 15, 16, 40, 63])
def test_splits_are_put_together(dtype, seen, monkeypatch):
    """Guards: a part without a token, one with one alone, scores of all sizes, and a copy of the cache."""
    monkeypatch.setattr(softmax, "KV_SPLIT", 16)
    shapes = (2, 3, 1, 8), (2, 3, 100, 8), (2, 3, 100, 8)
    q, k, v = (torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes))
    q, k, v = (8 * q).to(dtype), k.to(dtype), v.to(dtype)
    static, given = StaticPosition.of(torch.tensor([seen]), 64, dtype), []

    def noted(*args):
        given.append(args)
        return sdpa_with_logsumexp(*args)

    monkeypatch.setattr(softmax, "sdpa_with_logsumexp", noted)
    found = split_kv_attention(q, k[:, :, :64], v[:, :, :64], static.mask, 0.5)
    weights = (0.5 * q.double() @ k[:, :, : seen + 1].double().mT).softmax(-1)
    expected = weights @ v[:, :, : seen + 1].double()
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    (_, keys, values, *_), *others = given
    assert not others and keys.shape == (6, 4, 16, 8)
    assert (keys.data_ptr(), values.data_ptr()) == (k.data_ptr(), v.data_ptr())
    assert found.dtype == dtype and (found - expected).abs().max() < bound
    monkeypatch.setattr(softmax, "sdpa_with_logsumexp", lambda *_: None)  # a PyTorch without it
    whole = split_kv_attention(q, k[:, :, :64], v[:, :, :64], static.mask, 0.5)
    assert (whole - expected).abs().max() < bound


@torch.no_grad()
def test_the_graph_casts_the_weights_itself(small, tokens, recorded):
    """Guards: a graph that reads autocast's cached casts, which are freed with autocast's context."""
    model = small("ours")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = DecodingGraph(model, prompted(model, tokens[:, :10], room=60))
        assert step(tokens[:, 10:11]).dtype == torch.bfloat16
        assert step(tokens[:, 11:12]).abs().max() > 0
        model.lm_head.weight.zero_()
        assert step(tokens[:, 12:13]).abs().max() == 0


@torch.no_grad()
def test_what_cannot_be_captured_is_eager_with_one_warning(small, tokens, attention, recorded, monkeypatch):
    """A step that waits for the device, by whichever layer, in a later bucket or the first one; the text is
    that of eager decoding. Asked for before, it is an error."""
    model = small(attention)
    expected = generate(model, tokens[:, :10], 20, temperature=0)
    captures, block = [], model.blocks[-1].forward

    def waiting(*args):
        return block(*args) * (1.0 if len(captures) < 2 else torch.ones(()).item())

    def counted(*args):
        captures.append(args)
        return record(*args)

    monkeypatch.setattr(decoding_graph, "capture", counted)
    monkeypatch.setattr(model.blocks[-1], "forward", waiting)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert torch.equal(generate(model, tokens[:, :10], 20, temperature=0, graph=True), expected)
        assert torch.equal(generate(model, tokens[:, :10], 20, temperature=0, graph=True), expected)
    failed = [str(w.message) for w in seen if str(w.message).startswith(EAGER)]
    assert failed == [f"{EAGER}: operation not permitted when stream is capturing"] * len(failed)
    assert len(failed) == (2 if has_softmax(model) else 1), "one for each text that could not have its graph"
    with pytest.raises(RuntimeError, match="not permitted"):
        DecodingGraph(model, prompted(model, tokens[:, :10], room=60)).prepare(20)


@torch.no_grad()
def test_a_state_that_grows_is_eager(small, tokens, recorded, monkeypatch):
    """Guards: the wrong text of an attention that promises a static step and has none."""
    model = small("ours")
    expected = generate(model, tokens[:, :10], 20, temperature=0)
    attn = model.blocks[1].attn
    forward = attn.forward

    def growing(x_BNC, cos_NR, sin_NR, state=None, cu_seqlens=None, values_BNV=None):
        seen = getattr(state, "seen", x_BNC[:, :0])
        state.seen = torch.cat((seen, x_BNC), dim=1)
        return forward(x_BNC, cos_NR, sin_NR, state)

    monkeypatch.setattr(attn, "forward", growing)
    with pytest.warns(UserWarning, match=f"{EAGER}: a decoding state changes its tensors' shapes"):
        assert torch.equal(generate(model, tokens[:, :10], 20, temperature=0, graph=True), expected)


@torch.no_grad()
def test_an_attention_without_a_static_step_is_eager(small, tokens, recorded, monkeypatch):
    """No warning: nothing is wrong with it."""
    model = small(["ours", "gla", "softmax"])
    expected = generate(model, tokens[:, :10], 20, temperature=0)
    monkeypatch.setattr(ATTENTIONS["gla"], "static_step", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generate(model, tokens[:, :10], 20, temperature=0, graph=True), expected)
    assert not recorded
    with pytest.raises(UserError, match="no static step"):
        DecodingGraph(model, model.new_state(2))


@torch.no_grad()
def test_a_graph_goes_with_its_text(small, tokens, recorded):
    """Guards: the memory of a cache and of a graph's pool that a cycle keeps until Python looks for it."""
    model = small("softmax")
    state = prompted(model, tokens[:, :10], room=60)
    step, gone = DecodingGraph(model, state), weakref.ref(state)
    recorded.clear()
    step(tokens[:, 10:11])
    assert step.buckets == [16] and gone() is not None
    del step, state
    assert gone() is None


# On a GPU.

FORMS = (
    "softmax",
    "softmax+softmax_conv+softmax_gate",
    "softmax+softmax_window=20",
    "ours",
    "ours+learnable_b",
    "ours-decay",
    "ours-gated",
    "ours-gated+output_gate+short_conv+conv_silu+learnable_b",
    "ours-gated+output_gate+constant=false",
    "ours-gated+output_gate+short_conv+input_gate",
    "gla",
    "gla+short_conv+gate_activation=sigmoid+input_gate",
    "hybrid+softmax_every=3",
    "hybrid+softmax_every=3+value_residual",
)
PRECISIONS = {  # the weights' dtype, and autocast's
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, None),
}


def on_gpu(form: str, dtype: torch.dtype) -> tuple[GPT, torch.Tensor]:
    """A model of three layers that attends sharply, and tokens `[3, 90]`."""
    sizes = {"n_layer": 3, "n_embd": 128, "n_head": 2, "vocab_size": 1000}
    model = GPT(ModelArgs("small", form, block_size=128, **sizes).config())
    model.init_weights(0)
    with torch.no_grad():
        for block in model.blocks:
            for layer in block.attn.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.mul_(4)
    tokens = torch.randint(0, 1000, (3, 90), generator=torch.Generator().manual_seed(1))
    return model.to("cuda", dtype).eval(), tokens.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_splits_are_put_together_on_a_gpu(dtype, D):
    """Guards: another kernel than the CPU's, with sums of its own; splits of the size that decoding has."""
    q = torch.randn(2, 3, 1, D, generator=torch.Generator().manual_seed(0)).cuda()
    k, v = (torch.randn(2, 3, 4608, D, generator=torch.Generator().manual_seed(i)).cuda() for i in (1, 2))
    q, k, v = (4 * q).to(dtype), k.to(dtype), v.to(dtype)
    for seen in (0, 511, 512, 3000, 4095):
        static = StaticPosition.of(torch.tensor([seen], device="cuda"), 4096, dtype)
        found = split_kv_attention(q, k[:, :, :4096], v[:, :, :4096], static.mask, D**-0.5)
        weights = (D**-0.5 * q.double() @ k[:, :, : seen + 1].double().mT).softmax(-1)
        expected = weights @ v[:, :, : seen + 1].double()
        assert (found - expected).norm() < (5e-3 if dtype.itemsize == 2 else 1e-3) * expected.norm(), seen


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_on_a_gpu_is_the_eager_step(form, precision, small_buckets):
    """Captured and replayed for each token, behind a prompt, over two buckets' ends, of a batch of three and
    then of two; nothing falls back to eager."""
    dtype, autocast = PRECISIONS[precision]
    model, tokens = on_gpu(form, dtype)
    for batch in (3, 2):
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            check_the_graph_of(model, tokens[:batch], exact=precision == "fp32")


def check_the_graph_of(model: GPT, idx_BN: torch.Tensor, exact: bool) -> None:
    """Graph and eager steps give the same logits where sums are `exact`, in fp32. In 16 bits, where SDPA's
    kernel under a mask rounds otherwise than the one without, the graph is no further from fp32 than eager
    steps are."""
    eager = prompted(model, idx_BN[:, :10], room=90)
    state = copy.deepcopy(eager)
    step, fixed = DecodingGraph(model, state), addresses(state)
    in_fp32 = copy.deepcopy(model).float()
    errors: list[tuple[float, float]] = []
    with torch.autocast(idx_BN.device.type, enabled=False):
        truth = prompted(in_fp32, idx_BN[:, :10], room=90)
    for n in range(10, 90):
        token = idx_BN[:, n : n + 1]
        expected, found = model.next_logits(token, eager).float(), step(token).float()
        if exact:
            assert (found - expected).norm() < 1e-4 * expected.norm(), n
        else:
            with torch.autocast(idx_BN.device.type, enabled=False):
                right = in_fp32.next_logits(token, truth)
            errors.append(((found - right).norm().item(), (expected - right).norm().item()))
    assert not step.failed and addresses(state) == fixed
    assert step.buckets == ([16, 32, 64, 96] if has_softmax(model) else [0])
    if errors:
        graph, of_eager = torch.tensor(errors).unbind(1)
        assert graph.norm() < 1.25 * of_eager.norm() and graph.max() < 1.5 * of_eager.max()


@pytest.mark.gpu
@torch.no_grad()
def test_generating_on_a_gpu_takes_graphs_and_gives_their_memory_back(monkeypatch):
    """By default; the same text each time, and no memory kept of it."""
    model, tokens = on_gpu("hybrid+softmax_every=3", torch.bfloat16)
    captured, capture = [], decoding_graph.capture

    def counted(*args):
        captured.append(args[1])
        return capture(*args)

    monkeypatch.setattr(decoding_graph, "capture", counted)
    generate(model, tokens[:, :10], 40, graph=False)
    assert not captured
    options = {"temperature": 0.8, "top_k": 50, "seed": 3}
    first, allocated = generate(model, tokens[:, :10], 40, **options), []
    assert len(captured) == 1
    for _ in range(4):
        assert torch.equal(generate(model, tokens[:, :10], 40, **options), first)
        allocated.append(torch.cuda.memory_allocated())
    assert len(captured) == 5 and len(set(allocated)) == 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_that_waits_for_the_gpu_decodes_eagerly(monkeypatch):
    """Guards: a capture that fails and leaves the stream, the allocator or the states unusable."""
    model, tokens = on_gpu("hybrid+softmax_every=3", torch.bfloat16)
    expected = generate(model, tokens[:, :10], 20, temperature=0, graph=False)
    block = model.blocks[-1].forward

    def waiting(*args):
        return block(*args) * torch.ones((), device="cuda").item()

    monkeypatch.setattr(model.blocks[-1], "forward", waiting)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match=EAGER):
        assert torch.equal(generate(model, tokens[:, :10], 20, temperature=0, graph=True), expected)
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    graph = DecodingGraph(model, prompted(model, tokens[:, :10], room=30))
    graph.prepare(30)
    assert graph.buckets == [30]
