"""Documents packed into rows: every attention keeps them apart."""

from itertools import pairwise

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.models import GPT, ModelArgs

ATTENTIONS = [
    "ours",
    "ours-decay+output_gate+short_conv+conv_silu",
    "ours-gated",
    "ours-gated+output_gate+short_conv",
    "ours-gated+input_gate+output_gate+short_conv",
    "ours+input_gate",
    "softmax",
    "softmax-best",
    "softmax-best+softmax_window=20",
    "gla",
    "gla+short_conv+gate_activation=sigmoid+input_gate+value_residual",
    "unified",
    "unified+form=mlstm+short_conv",
    "hybrid",
    "hybrid+value_residual",
]
BORDERS = [0, 1, 30, 65, 100, 103, 170, 200]  # of two rows of 100 tokens; a chunk has 64
CU_SEQLENS = torch.tensor([*BORDERS, 200, 200], dtype=torch.int32)


def model(attention: str) -> tuple[GPT, torch.Tensor]:
    """A model in fp32 whose convolutions and decays are not those it starts with, and tokens `[2, 100]`."""
    config = ModelArgs(
        name="tiny", attention=attention, n_layer=4, n_head=4, n_embd=64, block_size=100, vocab_size=64
    ).config()
    gpt = GPT.create(config, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if "attn." in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return gpt, torch.randint(64, (2, 100))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_documents_are_as_each_alone(attention):
    """Guards: a leak across a border, in either direction; a document that loses its own tokens.

    In float64 each number; in fp32 all of them as one vector, as the gradient of a decay's bias is a sum that
    nearly cancels, and a single output's rounding depends on the processor."""
    for dtype, bound in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        gpt, idx = model(attention)
        gpt = gpt.to(dtype)
        packed = gpt.hidden(idx, cu_seqlens=CU_SEQLENS).flatten(0, 1)
        alone = torch.cat([gpt.hidden(idx.flatten()[None, a:b])[0] for a, b in pairwise(BORDERS)])
        weights, dy = list(gpt.transformer.parameters()), torch.randn_like(packed)
        found, expected = (torch.autograd.grad(y, weights, dy) for y in (packed, alone))
        if dtype == torch.float64:
            torch.testing.assert_close(packed, alone, rtol=bound, atol=bound)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=bound, atol=bound * y.abs().max().item())
        whole, wanted = (torch.cat([x.flatten() for x in one]) for one in (found, expected))
        assert (packed - alone).norm() < bound * alone.norm()
        assert (whole - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_token_depends_on_another_document(attention):
    """Guards: what is only nearly zero across a border."""
    gpt, idx = model(attention)
    other = idx.clone()
    other[0, 30:65] = (idx[0, 30:65] + 1) % 64
    with torch.no_grad():
        before, after = (gpt.hidden(x, cu_seqlens=CU_SEQLENS) for x in (idx, other))
    same = (before == after).all(-1)
    assert not same[0, 30:65].any() and same[0, :30].all() and same[0, 65:].all() and same[1].all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prompts_of_different_lengths_start_one_batch(attention):
    """Packed with their padding, then two steps: as each with a state of its own; prompts shorter than the
    convolution among them."""
    (gpt, idx), lengths = model(attention), (1, 2, 30, 65)
    rows = torch.cat([idx.flatten()[70 * i : 70 * i + 67][None] for i in range(2)]).repeat(2, 1)
    prompts = rows[:, :65]
    borders = [border for row, n in enumerate(lengths) for border in (65 * row, 65 * row + 65 - n)]
    state = gpt.new_state(4)
    found = [gpt.hidden(prompts, state, torch.tensor([*borders, 4 * 65], dtype=torch.int32))[:, -1]]
    found += [gpt.hidden(token, state)[:, -1] for token in rows[:, 65:].split(1, dim=1)]
    for row, n in enumerate(lengths):
        alone = gpt.new_state(1)
        expected = [gpt.hidden(prompts[row : row + 1, 65 - n :], alone)[:, -1]]
        expected += [gpt.hidden(t, alone)[:, -1] for t in rows[row : row + 1, 65:].split(1, dim=1)]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[row], y[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="give a new state"):
        gpt.hidden(prompts[:, :1], state, torch.arange(5))
