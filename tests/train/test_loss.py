"""The loss in chunks is the plain cross-entropy, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F

from lingpt.models import GPT, ModelArgs
from lingpt.train.loss import (
    CHUNK_ELEMENTS,
    NextTokenLoss,
    cross_entropy_sum,
    loss_and_gradient,
    rows_per_chunk,
)


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=generator, dtype=dtype)
    weight = torch.randn(29, 16, generator=generator, dtype=dtype)
    targets = torch.randint(29, (3, 7), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("rows", [1, 4, 20, 21, 100, None])
def test_equals_plain_cross_entropy_whatever_the_chunks(rows):
    """A chunk boundary anywhere, the last chunk short, one chunk for all: loss and both gradients agree."""
    hidden, weight, targets = tensors()
    expected = plain(hidden, weight, targets)
    expected_grads = torch.autograd.grad(expected * 0.37, (hidden, weight))
    loss = cross_entropy_sum(hidden, weight, targets, rows)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))  # an upstream gradient that is not 1
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_without_gradients_it_is_the_same_number():
    """Validation takes another path: it must not drift from the training loss."""
    hidden, weight, targets = tensors(torch.float32)
    with torch.no_grad():
        loss = cross_entropy_sum(hidden, weight, targets, 4)
    torch.testing.assert_close(loss, cross_entropy_sum(hidden, weight, targets, 4).detach())


def test_under_autocast_products_are_bf16_and_the_softmax_fp32():
    """The error is that of rounding operands to bf16, no more: twice the plain form's under autocast."""
    hidden, weight, targets = tensors(torch.float32)
    exact = plain(hidden, weight, targets)
    exact_grads = torch.autograd.grad(exact, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        low = plain(hidden, weight, targets)
        ours = cross_entropy_sum(hidden, weight, targets, 4)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs() <= 2 * (low - exact).abs() + 1e-3
    low_grads = torch.autograd.grad(low, (hidden, weight))
    ours_grads = torch.autograd.grad(ours, (hidden, weight))
    for ours_grad, low_grad, exact_grad in zip(ours_grads, low_grads, exact_grads, strict=True):
        assert ours_grad.dtype == torch.float32
        assert (ours_grad - exact_grad).abs().max() <= 2 * (low_grad - exact_grad).abs().max() + 1e-3
        assert not torch.equal(ours_grad, exact_grad), "autocast had no effect"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_z_loss_is_trained_on_and_not_shown(compiled, monkeypatch):
    """Guards: a z-loss that the model's weights do not get; losses that cannot be compared."""
    monkeypatch.setattr("lingpt.train.loss.compile_options", lambda: {"backend": "eager"})
    gpt = GPT.create(ModelArgs(name="tiny", n_layer=1, n_head=2, n_embd=32, vocab_size=50).config(), seed=0)
    batch = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    weights = list(gpt.parameters())
    logits = gpt(batch[:, :-1]).flatten(0, 1)
    expected = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum")
    z = logits.logsumexp(-1).square().sum()
    expected_grads = torch.autograd.grad(expected + 0.1 * z, weights)
    loss = NextTokenLoss(gpt, compiled, z_loss=0.1)(batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, weights), expected_grads, rtol=1e-4, atol=1e-5)


def test_never_holds_all_logits():
    """The largest tensor of the forward pass is a chunk's logits, not the sequence's."""
    hidden, weight, targets = tensors()
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Largest():
        cross_entropy_sum(hidden, weight, targets, rows=2).backward()
    assert largest == weight.numel() < targets.numel() * weight.shape[0]


@pytest.mark.parametrize("n_embd", [1024, 1025])
@pytest.mark.parametrize("vocab_size", [2048, 50304, 2**24])
def test_a_chunk_is_the_largest_power_of_two_that_fits(vocab_size, n_embd):
    """Twice as large for small models. Guards: logits beyond the memory planned for them, or small chunks."""
    rows, most = rows_per_chunk(vocab_size, n_embd), CHUNK_ELEMENTS * (2 if n_embd == 1024 else 1)
    assert rows.bit_count() == 1
    assert rows * vocab_size <= most < 2 * rows * vocab_size


def test_a_chunk_compiles_to_one_graph():
    """A graph break would bring the fp32 softmax to memory; and what it computes is the definition."""
    logits = torch.tensor([[9.0, -9.0, 0.0], [0.0, 1.0, 2.0]])
    targets = torch.tensor([0, 1])
    compiled = torch.compile(loss_and_gradient, backend="eager", fullgraph=True)
    loss, gradient = compiled(logits, targets)
    p = logits.double().softmax(-1)
    torch.testing.assert_close(loss.double(), -p[[0, 1], targets].log().sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), p - F.one_hot(targets, 3), rtol=1e-5, atol=1e-6)


def test_chunks_of_a_16_bit_weight_add_up_in_fp32():
    """Guards: a sum of bf16 gradients, rounded at every chunk: here 2.6 times the error of one rounding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2048, 64, generator=generator).bfloat16()
    weight = torch.randn(16, 64, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(16, (1, 2048), generator=generator)
    exact, one_chunk, chunks = (
        torch.autograd.grad(cross_entropy_sum(x, w, targets, rows=rows), w)[0].double()
        for x, w, rows in (
            (hidden.double(), weight.detach().double().requires_grad_(), 2048),
            (hidden, weight, 2048),
            (hidden, weight, 64),
        )
    )
    assert (chunks - exact).norm() < 1.5 * (one_chunk - exact).norm()


@pytest.mark.gpu
def test_chunks_add_up_in_fp32():
    """Guards: each chunk's part of the weight's gradient rounded to bf16 before it is added: 1e-3 here."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, 2048, 64, generator=generator, device="cuda")
    weight = torch.randn(999, 64, generator=generator, device="cuda").requires_grad_()
    targets = torch.randint(999, (1, 2048), generator=generator, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        (found,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets, rows=32), weight)
    exact = torch.zeros_like(weight, dtype=torch.float64)
    for x, target in zip(hidden[0].bfloat16().split(32), targets[0].split(32), strict=True):
        d_logits = loss_and_gradient(x @ weight.detach().bfloat16().T, target)[1]
        exact += d_logits.double().T @ x.double()
    assert torch.linalg.vector_norm(found - exact) <= 1e-5 * torch.linalg.vector_norm(exact)
