"""Documents of any length: read in pieces, kept in a file, asked more than once."""

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.models import generate, load_state, read, save_state
from lingpt.models import state_file as module
from lingpt.models.gpt import rope_tables

LINEAR = ["ours", "ours-gated+output_gate+short_conv", "gla+short_conv"]


@pytest.fixture
def build(small, monkeypatch):
    """`build(form, **overrides)`: `small` for the forms of this file, with pieces of 32 tokens."""
    from lingpt.models import GPT, parse_form

    monkeypatch.setattr(module, "PIECE", 32)

    def make(form: str, **overrides) -> GPT:
        attention, options = parse_form(form)
        model = small(attention, **options, **overrides)
        model.any_length = model.constant_state
        return model

    return make


@pytest.mark.parametrize("form", LINEAR)
def test_a_document_longer_than_the_block_size(build, tokens, form):
    """In pieces, at positions that the rotary tables do not have, the logits are those of a model that has
    them; the state does not grow."""
    short, long = build(form, block_size=40), build(form, block_size=96)
    with torch.no_grad():
        expected = long(tokens)[:, -1]
        state = short.new_state(2)
        read(short, tokens[:, :32], state)
        size = state.num_bytes()
        read(short, tokens[:, 32:-1], state)
        torch.testing.assert_close(short.next_logits(tokens[:, -1:], state), expected, rtol=1e-4, atol=1e-4)
    assert state.position == 70 and state.num_bytes() == size
    lengths: list[int] = []
    short.transformer["wte"].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    greedy = generate(short, tokens, 20, temperature=0)
    assert lengths == [32, 32, 5] + [1] * 20, "the memory of a piece"
    assert torch.equal(greedy, generate(long, tokens, 20, temperature=0))


def test_angles_of_late_positions_are_exact(small):
    """From any token on, its distance to the next ones. Guards: angles in fp32, off by 0.06 at a million."""
    (cos, sin), (near, _) = (
        rope_tables(small().config, torch.device("cpu"), positions)
        for positions in (range(10**6, 10**6 + 96), None)
    )
    torch.testing.assert_close(cos[0] * cos + sin[0] * sin, near, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", [*LINEAR, "softmax"])
def test_a_document_is_read_once_and_asked_twice(build, tokens, tmp_path, form):
    model, file = build(form), tmp_path / "document.state"
    document, question = tokens[:1, :60], tokens[:1, 60:]
    state = model.new_state(1, 60)
    read(model, document, state)
    save_state(file, model, state)
    expected = generate(model, tokens[:1], 8, temperature=0)[:, 60:]
    for _ in range(2):
        state = load_state(file, model, room=18)
        assert torch.equal(generate(model, question, 8, temperature=0, state=state), expected)


def test_states_of_other_models_are_refused(build, tokens, tmp_path):
    model, file = build("ours-gated"), tmp_path / "document.state"
    state = model.new_state(1)
    read(model, tokens[:1], state)
    save_state(file, model, state)
    other = build("ours-gated", rotary_percentage=0.5)
    with pytest.raises(UserError, match="of another model"):
        load_state(file, other, room=1)
    with torch.no_grad():
        model.blocks[0].mlp.fc.weight += 1e-3  # as if LoRA were merged, which leaves norms and biases
    with pytest.raises(UserError, match="of another model"):
        load_state(file, model, room=1)
    with pytest.raises(UserError, match="in float32, and the model is in bfloat16: give --dtype float32"):
        load_state(file, model.bfloat16(), room=1)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match="holds no state, or a damaged one"):
        load_state(file, model, room=1)


def test_a_document_beyond_the_block_size_is_refused_by_its_length(build, tokens):
    """With softmax layers, before a token is read. Guards: the length of its first piece in the message."""
    model = build("softmax", block_size=40)
    state = model.new_state(2, 40)
    with pytest.raises(UserError, match=f"a sequence of {tokens.shape[1]} tokens, .* block size is 40"):
        read(model, tokens, state)
    assert state.position == 0
