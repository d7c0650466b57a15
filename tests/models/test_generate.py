"""Generation: the same text as without a state, reproducible, and each limit is an error of one line."""

import math

import pytest
import torch
import torch.nn.functional as F

from lingpt.common.errors import UserError
from lingpt.models import GPT, ModelArgs, generate
from lingpt.models.generate import sample, stable_topk
from lingpt.models.gpt import tensors_in


@torch.no_grad()
def test_greedy_text_is_that_of_the_full_forward(small, tokens, attention):
    """The state is an optimisation: recomputing everything for each token gives the same tokens."""
    model = small(attention)
    expected = tokens[:, :10]
    for _ in range(8):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(generate(model, tokens[:, :10], 8, temperature=0), expected)


@torch.no_grad()
def test_softmax_decodes_without_cudnn(small, tokens, monkeypatch):
    """Guards: a plan that cuDNN makes for each number of keys, for every token one."""
    model, allowed, sdpa = small("softmax"), [], F.scaled_dot_product_attention

    def noted(*args, **options):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model(tokens[:, :10])
    assert all(allowed)
    allowed.clear()
    generate(model, tokens[:, :10], 3)
    assert len(allowed) == 3 * model.config.n_layer and not any(allowed)


def test_the_seed_decides_the_text(small, tokens):
    """Samples in a run's folder can be made again, whatever torch's global generator has done."""
    model, prompt = small(), tokens[:, :5]
    first = generate(model, prompt, 20, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, generate(model, prompt, 20, seed=5))
    assert not torch.equal(first, generate(model, prompt, 20, seed=6))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}, {"top_k": None}], ids=str)
def test_no_id_is_drawn_that_the_tokenizer_does_not_have(small, tokens, options):
    """Guards: the embedding's rows of padding, and those beyond a smaller tokenizer, whose ids decode to
    nothing. Here these rows are the likeliest."""
    model, prompt = small(vocab_size=100, padding_multiple=64), tokens[:, :5] % 50
    with torch.no_grad():
        weight = model.lm_head.weight
        for start, stop, scale in ((50, 100, 100.0), (100, 128, 1e4)):
            half = (stop - start) // 2  # of two rows with opposite signs one has a large logit
            weight[start:stop] = torch.cat([scale * weight[:half], -scale * weight[:half]])
    assert generate(model, prompt, 20, **options).max() < 100
    assert generate(model, prompt, 20, **options, vocab_size=50).max() < 50


def test_top_k_draws_from_the_k_likeliest(small, tokens):
    """k = 1 is greedy, however hot; a larger k stays among its likeliest."""
    model, prompt = small(), tokens[:, :5]
    greedy = generate(model, prompt, 10, temperature=0)
    assert torch.equal(generate(model, prompt, 10, temperature=9.0, top_k=1), greedy)
    likeliest = model(prompt)[:, -1].topk(3).indices
    drawn = torch.cat(
        [generate(model, prompt, 1, temperature=9.0, top_k=3, seed=s)[:, -1:] for s in range(40)], 1
    )
    for row in range(2):
        assert set(drawn[row].tolist()) == set(likeliest[row].tolist())


@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_likeliest_are_the_same_whichever_of_equal_ones_a_device_picks(k, monkeypatch):
    """Guards: text that differs between devices: equal logits, which bf16 has, `topk` orders as it likes."""
    logits = torch.randint(0, 3, (5, 9), generator=torch.Generator().manual_seed(2)).float()
    found, ids = stable_topk(logits, k)
    for row, values, tokens in zip(logits, found, ids, strict=True):
        expected = (row >= row.sort().values[-k]).nonzero()[:, 0]
        n = len(expected)
        assert torch.equal(tokens[:n], expected) and torch.equal(values[:n], row[expected])
        assert (values[n:] == -torch.inf).all(), "what fills the row is never drawn"

    def draws() -> torch.Tensor:
        return sample(logits, 1.0, k, torch.Generator().manual_seed(0))

    topk, first = torch.Tensor.topk, draws()

    def backwards(x: torch.Tensor, k: int, dim: int) -> torch.return_types.topk:
        values, ids = topk(x.flip(dim), k, dim)
        return torch.return_types.topk((values, x.shape[dim] - 1 - ids))

    monkeypatch.setattr(torch.Tensor, "topk", backwards)
    assert torch.equal(draws(), first)


def test_logits_that_are_no_numbers_are_an_error():
    """Guards: text out of a model that has diverged, as if nothing were wrong."""
    logits = torch.tensor([[0.0, torch.nan, 1.0, 2.0]])
    for top_k in (2, None):
        for temperature in (0, 1.0):
            with pytest.raises(UserError, match="not finite"):
                sample(logits, temperature, top_k, torch.Generator())


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-38])
def test_the_least_temperature_is_greedy(temperature):
    """Guards: an error of `multinomial`, as a temperature that is 0 in fp32 gave 0 / 0."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.999]])
    for top_k in (3, None):
        assert sample(logits, temperature, top_k, torch.Generator()).item() == 1


def test_the_greatest_temperature_draws_from_all_likeliest():
    """Guards: an error of `multinomial`, as rows of more equal logits pad the others with −inf."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    for temperature in (1e39, math.inf):
        draws = (sample(logits, temperature, 2, torch.Generator().manual_seed(seed)) for seed in range(30))
        assert {ids_B1[1].item() for ids_B1 in draws} == {0, 1}


def test_temperature_flattens(small, tokens):
    """Cold draws are the likeliest token, hot ones are many."""
    model, prompt = small(), tokens[:1, :5].expand(200, -1)
    cold, hot = (generate(model, prompt, 1, temperature=t)[:, -1].unique().numel() for t in (1e-3, 10.0))
    assert cold == 1
    assert hot > 50


def test_ends_at_the_end_of_text(small, tokens):
    """A row that has ended stays ended while the others go on; all ended is the end."""
    model, prompt = small(), tokens[:, :5]
    free = generate(model, prompt, 10, temperature=0)
    eos_id = free[0, 6].item()  # the second new token of the first row
    ended = generate(model, prompt, 10, temperature=0, eos_id=eos_id)
    assert torch.equal(ended[0, :7], free[0, :7])
    assert (ended[0, 6:] == eos_id).all()
    if eos_id not in free[1, 5:]:
        assert torch.equal(ended[1], free[1])
    assert generate(model, prompt[:1], 10, temperature=0, eos_id=eos_id).shape[1] == 7


def test_limits_are_one_line(small, tokens):
    """Text beyond the block size is refused before the first token, an empty prompt too."""
    with pytest.raises(UserError, match="70 tokens and 27 new ones exceed block size 96"):
        generate(small(), tokens, 27)
    assert generate(small(), tokens, 26).shape == (2, 96)
    with pytest.raises(UserError, match="at least one token"):
        generate(small(), tokens[:, :0], 3)
    model = small()
    model.step(tokens, state := model.new_state(2))
    with pytest.raises(UserError, match="at least one token"):
        generate(model, tokens[:, :0], 3, state=state)


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"temperature": -1.0}, {"max_new_tokens": -2}])
def test_numbers_out_of_range_are_one_line(small, tokens, wrong):
    """Guards: errors about sizes, the unlikeliest token, the prompt alone."""
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is .*it must be at least"):
        generate(small(), tokens, **{"max_new_tokens": 3, **wrong})


@torch.no_grad()
def test_a_step_that_is_refused_changes_no_state(small, tokens):
    """Guards: linear layers that had seen the token before the first softmax layer refused it, and a row that
    was broadcast over a batch of others."""
    model = small(["ours", "softmax", "ours"])
    state = model.new_state(2, 9)
    model.next_logits(tokens[:, :8], state)
    before = [x.clone() for x in tensors_in(state.layers)]
    for idx, line in ((tokens[:, 8:10], "raise max_seq_len"), (tokens[:1, 8:9], "1 rows .* state of 2")):
        with pytest.raises(UserError, match=line):
            model.next_logits(idx, state)
    assert state.position == 8
    assert all(map(torch.equal, tensors_in(state.layers), before))


ON_GPU = ("softmax", "softmax+softmax_conv+softmax_gate", "ours", "ours-gated+output_gate+short_conv", "gla")


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("form", [*ON_GPU, "hybrid+softmax_every=3"])
def test_decoding_on_a_gpu_is_the_whole_forward(form):
    """Guards: what `lingpt generate` and `lingpt bench decode` run there, in bf16: a prompt by the training
    kernels, then token by token; and a draw that is the same each time."""
    sizes = {"n_layer": 3, "n_embd": 128, "n_head": 2, "vocab_size": 1000}
    model = GPT(ModelArgs("small", form, block_size=128, **sizes).config())
    model.init_weights(0)
    model = model.to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(0, 1000, (2, 70), generator=torch.Generator().manual_seed(1)).cuda()
    state = model.new_state(2, 70)
    parts = [model.step(part, state) for part in tokens.split((50, *[1] * 20), dim=1)]
    whole, found = model(tokens).float(), torch.cat(parts, 1).float()
    assert (found - whole).norm() < 0.03 * whole.norm()
    texts = [generate(model, tokens[:, :9], 20, temperature=0.8, top_k=50, seed=3) for _ in range(2)]
    assert torch.equal(*texts) and texts[0].device.type == "cuda"
