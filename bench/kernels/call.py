"""An implementation's forward and backward on one set of inputs, which are both timed and checked."""

from __future__ import annotations

import torch
from torch import Tensor

from lingpt.bench.kernels.implementations import Implementation
from lingpt.bench.kernels.shapes import Shape


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
        self.do = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self.o: Tensor | None = None
        self.grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.clear()  # otherwise two outputs would be in memory
        self.o = self.implementation.call(self.inputs)

    def backward(self) -> None:
        assert self.o is not None, "backward follows forward"
        self.grads = ()
        if self.backward_unsupported_reason:
            return
        self.grads = torch.autograd.grad(self.o, list(self.leaves.values()), self.do)

    def both(self) -> None:
        self.forward()
        self.backward()

    def clear(self) -> None:
        self.o, self.grads = None, ()
