"""The model as a whole: it is LitGPT's where it should be, and every attention trains, decodes and casts."""

import copy
import itertools

import litgpt
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from lingpt.common.errors import UserError
from lingpt.models import ATTENTIONS, GPT, Config

from .conftest import litgpt_config


def litgpt_twin(model: GPT) -> litgpt.GPT:
    twin = litgpt.GPT(litgpt_config(model.config))
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize(
    "overrides", [{}, {"parallel_residual": False}, {"rotary_percentage": 1.0}, {"bias": False}]
)
def test_softmax_is_litgpt_bit_for_bit(small, tokens, overrides):
    """The baseline of every comparison is the reference implementation: equal logits, and its gradients."""
    model = small("softmax", **overrides)
    twin = litgpt_twin(model)
    logits, expected = model(tokens), twin(tokens)
    assert torch.equal(logits, expected)
    for x in (logits, expected):
        F.cross_entropy(x.flatten(0, 1), tokens.flatten()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("attention_name", ["softmax", "ours", "ours-decay"])
def test_pythia_1_4b_has_its_parameters(attention_name: str):
    """The paper's model, to the last parameter, under LitGPT's keys, so that Pythia's checkpoints load."""
    with torch.device("meta"):
        model = GPT(Config.from_name("pythia-1.4b", attention=attention_name))
        twin = litgpt.GPT(litgpt.Config.from_name("pythia-1.4b"))
    assert model.num_parameters() == 1_414_647_808
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in twin.state_dict().items()
    }


def test_swapping_the_attention_changes_the_logits(small, tokens):
    """Same keys, same weights, another function: an evaluation of the wrong attention would show."""
    weights = small("softmax").state_dict()
    logits = {}
    for name in ATTENTIONS:
        model = small(name, seed=1)
        if model.state_dict().keys() == weights.keys():
            model.load_state_dict(weights)
            logits[name] = model(tokens)
    assert logits.keys() >= {"softmax", "ours", "ours-decay"}
    for one, other in itertools.combinations(logits, 2):
        assert (logits[one] - logits[other]).abs().max() > 1e-2, (one, other)


def test_no_attention_sees_the_future(small, tokens, variant):
    """A causal model's logits depend on no later token."""
    model = small(**variant)
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 120
    torch.testing.assert_close(model(tokens)[:, :40], model(changed)[:, :40], rtol=1e-5, atol=1e-5)
    assert (model(tokens)[:, 40:] - model(changed)[:, 40:]).abs().max() > 1e-2


@torch.no_grad()
def test_decoding_gives_the_logits_of_the_full_forward(small, tokens, variant):
    """A prompt, more pieces, then single tokens: a state that forgets or miscounts would show here."""
    model = small(**variant)
    state = model.new_state(2, max_seq_len=70)
    pieces = list(tokens[:, :50].split((30, 15, 1, 2, 2), dim=1))
    pieces += tokens[:, 50:].split(1, dim=1)
    logits = torch.cat([model.step(piece, state) for piece in pieces], dim=1)
    assert state.position == 70
    torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_copied_state_branches(small, tokens, attention):
    """Two continuations of one prompt, from copies of its state, do not touch each other."""
    model = small(attention)
    state = model.new_state(2)
    model.step(tokens[:, :20], state)
    branch = copy.deepcopy(state)
    model.step(tokens[:, 50:60], state)
    torch.testing.assert_close(
        model.step(tokens[:, 20:30], branch), model(tokens[:, :30])[:, 20:], rtol=1e-4, atol=2e-5
    )


def test_every_parameter_learns(small, tokens, variant):
    """A parameter without a gradient is one that the forward pass forgot."""
    model = small(**variant)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_longer_than_the_block_size_is_an_error(small, tokens, attention):
    """One line with both lengths, in training and in decoding."""
    model = small(attention, block_size=64)
    with pytest.raises(UserError, match="70 tokens, but the model's block size is 64"):
        model(tokens)
    state = model.new_state(2)
    model.step(tokens[:, :60], state)
    with pytest.raises(UserError, match="70 tokens"):
        model.step(tokens[:, 60:], state)


@torch.no_grad()
def test_a_cache_that_is_too_short_is_an_error(small, tokens):
    """Keys beyond the cache are refused, not dropped."""
    model = small("softmax")
    with pytest.raises(UserError, match="raise max_seq_len"):
        model.step(tokens, model.new_state(2, max_seq_len=50))


@torch.no_grad()
def test_bf16_and_autocast_stay_near_fp32(small, tokens, attention):
    """Both of Fabric's half precisions run every mechanism; the logits' error is that of the dtype."""
    model = small(attention)
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tokens)
        state = model.new_state(2)
        stepped = torch.cat([model.step(tokens[:, :69], state), model.step(tokens[:, 69:], state)], dim=1)
    true = model.bfloat16()(tokens)
    assert true.dtype == mixed.dtype == torch.bfloat16
    for low in (mixed, stepped, true):
        assert (low.float() - exact).std() < 0.03 * exact.std()


@torch.no_grad()
def test_the_cache_is_in_the_dtype_of_autocast(small, tokens):
    """Guards: a run's samples, for which the whole cache, in fp32, was converted at every token."""
    model = small("softmax")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = model.new_state(2)
        model.step(tokens[:, :9], state)
        new = torch.zeros(2, 4, 1, 16, dtype=torch.bfloat16)  # what autocast gives
        keys, _ = state.layers[0].append(new, new)
    assert keys.data_ptr() == state.layers[0].k.data_ptr(), "a view of the cache"
    assert model.new_state(2).layers[0].k.dtype == torch.float32


def test_constants_stay_in_fp32_and_survive_the_meta_device(small):
    """A model cast to bf16 or built on the meta device has the same tables; bf16's would be off by 0.4 %."""
    model = small("ours-decay")
    constants = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert len(constants) == 2 + 3  # cos and sin, and a decay per layer
    with torch.device("meta"):
        other = GPT(model.config)
    other = other.to_empty(device="cpu")
    for built in (model.bfloat16(), other):
        for name, buffer in built.named_buffers():
            assert torch.equal(buffer, constants[name]), name


@pytest.mark.slow
def test_a_block_compiles_as_one_graph(small, tokens, variant):
    """Training compiles per block: a graph break would be paid in every layer of every step."""
    torch._dynamo.reset()
    model = small(**variant)
    expected = model(tokens)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for block in model.transformer.h:
        block.compile(backend="aot_eager", fullgraph=True)
    logits = model(tokens)
    logits.sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4)
    assert list(model.state_dict()) == list(small(**variant).state_dict())


@pytest.mark.slow
def test_decoding_compiles_nothing(small, tokens, attention):
    """Samples at the end of a compiled run: a compilation per length would take longer than the run."""
    torch._dynamo.reset()  # its limit of compilations is one for all tests of the process
    model, compiled = small(attention), CompileCounter()
    for block in model.transformer.h:
        block.compile(backend=compiled)
    model.step(tokens[:, :20], state := model.new_state(2))
    model.step(tokens[:, 20:21], state)
    assert compiled.frame_count == 0
    model(tokens)
    assert compiled.frame_count > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gpu_gives_the_logits_of_the_cpu(small, tokens, name):
    """The same model on the card, in fp32 near the CPU's logits and in bf16 within its error."""
    model = small(name)
    exact = model(tokens).detach()
    model, on_card = model.cuda(), tokens.cuda()
    assert (model(on_card).cpu() - exact).std() < 5e-3 * exact.std()  # TF32 may be on
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (model(on_card).float().cpu() - exact).std() < 0.03 * exact.std()
    assert (model.bfloat16()(on_card).float().cpu() - exact).std() < 0.03 * exact.std()
