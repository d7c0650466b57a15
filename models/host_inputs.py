"""Activation checkpointing whose blocks' inputs wait in the host's memory for the backward pass.

At a long context they are most of what a step keeps: in fp32 4·C bytes per token and layer.
"""

import functools

import torch
from torch.autograd.graph import saved_tensors_hooks


class HostInputs(saved_tensors_hooks):
    """Where `checkpoint` is called in it, a block's input `[B, N, C]` is kept in host memory, pinned if it
    comes from a GPU. One object serves the blocks of one forward pass.

    Copies have a stream of their own: out while the block computes, and back while the block after it has its
    turn in the backward pass.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._last: _HostInput | None = None

    def _pack(self, x: torch.Tensor) -> "torch.Tensor | _HostInput":
        if x.ndim < 3:  # the rotary tables, which all blocks share
            return x
        self._last = _HostInput(x.detach(), self._last)
        return self._last

    def _unpack(self, saved: "torch.Tensor | _HostInput") -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        x = saved.take()
        if saved.before:
            saved.before.fetch()
        return x


class _HostInput:
    """A tensor in host memory. before: that of the block before."""

    def __init__(self, x: torch.Tensor, before: "_HostInput | None") -> None:
        self.device, self.before = x.device, before
        self._host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        self._back: torch.Tensor | None = None
        if not x.is_cuda:
            self._host.copy_(x)
            return
        stream = _copy_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        x.record_stream(stream)

    def fetch(self) -> torch.Tensor:
        """Begins to copy the tensor back to its device."""
        if self._back is None and self.device.type == "cuda":
            with torch.cuda.stream(_copy_stream(self.device)):
                self._back = self._host.to(self.device, non_blocking=True)
        return self._host if self._back is None else self._back

    def take(self) -> torch.Tensor:
        """The tensor on its device."""
        x, self._back = self.fetch(), None
        if x.is_cuda:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(_copy_stream(self.device))
            x.record_stream(stream)
        return x


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
