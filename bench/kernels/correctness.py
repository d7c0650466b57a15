"""Whether a call computed its implementation's function: errors against its oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.shapes import Shape

# Rows of a softmax that its oracle computes: the last ones, which alone determine the gradients of their
# keys.
TAIL = 256
ONE_SLICE = 65536  # tokens from which the oracle takes one slice instead of four


def relative_errors(call: BenchCall) -> dict[str, float]:
    """Relative RMS errors of o ("o") and of the gradients ("dq" …), on the up to four outermost (batch, head)
    slices: a wrong offset shows in the last."""
    batches, heads = _outermost(call.shape)
    quadratic = call.implementation.quadratic

    def take(x: Tensor) -> Tensor:
        return _slice(x.detach(), batches, heads)

    def tail(x: Tensor) -> Tensor:
        return x[:, -TAIL:] if quadratic else x

    assert call.o is not None, "the errors are those of a call that ran"
    exact = {name: take(x).double().requires_grad_(x.requires_grad) for name, x in call.inputs.items()}
    expected = call.implementation.oracle(exact | {"q": tail(exact["q"])} if quadratic else exact)
    errors = {"o": _relative_rms(tail(take(call.o)), expected.detach())}
    if call.backward_unsupported_reason:
        return errors
    leaves = [exact[name] for name in call.leaves]
    gradients = torch.autograd.grad(expected, leaves, tail(take(call.do).double()))
    for name, grad, gradient in zip(call.leaves, call.grads, gradients, strict=True):
        errors[f"d{name}"] = _relative_rms(tail(take(grad)), tail(gradient))
    return errors


def _outermost(shape: Shape) -> tuple[list[int], list[int]]:
    """The batches and heads that are checked."""
    if shape.N >= ONE_SLICE:
        return [-1], [-1]
    return sorted({0, shape.B - 1}), sorted({0, shape.H - 1})


def _slice(x: Tensor, batches: list[int], heads: list[int]) -> Tensor:
    """The chosen batches and heads of [B, N, H, D], [B, N, 3, H, D], [B, N, H] or [H]; [N, R] unchanged."""
    if x.ndim == 2:
        return x
    if x.ndim in (1, 3):
        return (x[batches] if x.ndim == 3 else x)[..., heads]
    return x[batches][..., heads, :]


def _relative_rms(x: Tensor, exact: Tensor) -> float:
    return (torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact)).item()
