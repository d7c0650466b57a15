"""An implementation's forward and backward on one set of inputs, timed and checked against float64."""

from __future__ import annotations

import math
import statistics
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lingpt.bench.clock import Clock
from lingpt.bench.kernels import oracles
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS, Implementation
from lingpt.bench.kernels.shapes import LONG, REFERENCE, Shape
from lingpt.kernels.numerics import matmul_precision

TAIL = 256  # rows of a softmax that its oracle computes: the last ones, which alone determine their keys' dk
ONE_SLICE = 65536  # tokens from which the oracle takes one (batch, head) slice instead of four


class BenchCall:
    """The inputs, and the output and gradients of the last run."""

    def __init__(
        self, implementation: Implementation, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.implementation = implementation
        self.shape = shape
        self.inputs = implementation.inputs(shape, dtype, device)
        self.backward_unsupported_reason = implementation.backward_unsupported_reason(shape, dtype, device)
        self.leaves = {name: x for name, x in self.inputs.items() if x.requires_grad}
        generator = torch.Generator(device).manual_seed(21)
        self.do = torch.randn(shape.tensor("o"), generator=generator, device=device, dtype=dtype)
        self.o: Tensor | None = None
        self.grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.clear()  # otherwise two outputs would be in memory
        with self._precision():
            self.o = self.implementation.call(self.inputs)

    def backward(self) -> None:
        assert self.o is not None, "backward follows forward"
        self.grads = ()
        if self.backward_unsupported_reason:
            return
        with self._precision():
            self.grads = torch.autograd.grad(self.o, list(self.leaves.values()), self.do)

    def both(self) -> None:
        self.forward()
        self.backward()

    def clear(self) -> None:
        self.o, self.grads = None, ()

    def _precision(self) -> AbstractContextManager[None]:
        return matmul_precision("cuda", "tf32") if self.implementation.tf32 else nullcontext()


class Graphs(NamedTuple):
    """CUDA graphs of a call's forward and, captured after it, of its backward: replays have no host time."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph

    def times(self, clock: Clock, repeats: int) -> tuple[float, float]:
        """Median milliseconds of a replay of forward and of backward."""
        return (
            clock.median(self.forward.replay, repeats=repeats),
            clock.median(self.backward.replay, self.forward.replay, repeats),
        )


def capture(call: BenchCall, device: torch.device) -> Graphs:
    """The graphs of a call, which first runs on their stream, to compile and to tune."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call.both()
    torch.cuda.current_stream(device).wait_stream(stream)
    graphs = Graphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs.forward, stream=stream):
        call.forward()
    with torch.cuda.graph(graphs.backward, stream=stream, pool=graphs.forward.pool()):
        call.backward()
    return graphs


def base_of(implementation: Implementation, shape: Shape) -> tuple[Implementation, Shape] | None:
    """The cell to compare with by interleaved replays: the base of a variant, REFERENCE for ours on long
    sequences; None for others."""
    if implementation.variant_of is not None:
        return IMPLEMENTATIONS[implementation.variant_of], shape
    return (implementation, REFERENCE) if implementation.ours and shape in LONG else None


def interleaved_ratios(graphs: Graphs, base: Graphs, clock: Clock, turns: int) -> list[float]:
    """The times of forward and of backward over those of `base`, in `turns` alternations of a few replays
    each: between two rows, clocks drift by more than the few per cent to be measured."""
    ratios: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        for ratio, ms, base_ms in zip(ratios, graphs.times(clock, 5), base.times(clock, 5), strict=True):
            ratio.append(ms / base_ms)
    return [statistics.median(ratio) for ratio in ratios]


def relative_errors(call: BenchCall) -> dict[str, float]:
    """Relative RMS errors of o ("o") and of the gradients ("dq" …), on the up to four outermost (batch, head)
    slices: a wrong offset shows in the last."""
    B, N, H = call.shape[:3]
    batches, heads = ([-1], [-1]) if N >= ONE_SLICE else (sorted({0, B - 1}), sorted({0, H - 1}))
    only_tail = call.implementation.oracle is oracles.softmax

    def take(x: Tensor) -> Tensor:
        return _slice(x.detach(), batches, heads)

    def tail(x: Tensor) -> Tensor:
        return x[:, -TAIL:] if only_tail else x

    assert call.o is not None, "the errors are those of a call that ran"
    exact = {name: take(x).double().requires_grad_(x.requires_grad) for name, x in call.inputs.items()}
    expected = call.implementation.oracle(exact | {"q": tail(exact["q"])} if only_tail else exact)
    errors = {"o": _relative_rms(tail(take(call.o)), expected.detach())}
    if call.backward_unsupported_reason:
        return errors
    leaves = [exact[name] for name in call.leaves]
    gradients = torch.autograd.grad(expected, leaves, tail(take(call.do).double()))
    for name, grad, gradient in zip(call.leaves, call.grads, gradients, strict=True):
        errors[f"d{name}"] = _relative_rms(tail(take(grad)), tail(gradient))
    return errors


def nan_first(error: float) -> tuple[bool, float]:
    """The key by which NaN is the largest error: alone, `max` returns NaN only if it comes first."""
    return math.isnan(error), error


def _slice(x: Tensor, batches: list[int], heads: list[int]) -> Tensor:
    """The chosen batches and heads of [B, N, H, D], [B, N, 3, H, D], [B, N, H] or [H]; [N, R] unchanged."""
    if x.ndim == 2:
        return x
    if x.ndim in (1, 3):
        return (x[batches] if x.ndim == 3 else x)[..., heads]
    return x[batches][..., heads, :]


def _relative_rms(x: Tensor, exact: Tensor) -> float:
    return (torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact)).item()
