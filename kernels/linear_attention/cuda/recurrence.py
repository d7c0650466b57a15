"""Linear attention with any decay in fp32, on the kernel of recurrence.cu: its builds and its launch."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import (
    MAX_BATCH_HEADS,
    Fields,
    Kernel,
    current_device,
    raw_stream,
)
from lingpt.kernels.linear_attention.cuda.toolchain import card, supported_architectures, unusable_reason

SOURCE = "recurrence.cu"
THREADS, MOST_LANES, KEYS_OF_LANE = 128, 8, 32
# Channels of q and k, and of v, which takes their place in the backward pass.
MOST_CHANNELS = MOST_LANES * KEYS_OF_LANE
HEAD_DIMS = (32, 64, 128, 256)  # to compile ahead

_OPERANDS = ("q", "k", "v", "left", "right")
_FIELDS = {x: (f"{x}_x", f"{x}_batch", f"{x}_token", f"{x}_head", f"{x}_channel") for x in _OPERANDS}
PARAMS = Fields(
    {field: "P" if field.endswith("_x") else "q" for fields in _FIELDS.values() for field in fields}
    | dict.fromkeys(("initial", "y", "final"), "P")
    | dict.fromkeys(("N", "H", "Dk", "Dv"), "i")
)


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of recurrence.cu."""

    arch: str
    lanes: int  # threads that share a column of the state
    keys: int  # that each of them has

    @property
    def name(self) -> str:
        return f"recurrence<{self.lanes}, {self.keys}>"

    @property
    def spec(self) -> KernelSpec:
        defines = {"RECURRENCE_PARAMS_BYTES": PARAMS.size, "THREADS": THREADS}
        return KernelSpec(SOURCE, (self.name,), defines, (self.arch,))

    @functools.cached_property
    def kernel(self) -> Kernel:
        return self.spec.compile(self.arch).load([self.name])[self.name]


@functools.cache
def build_for(arch: str, Dk: int) -> Build:
    """The build for so many channels of q and k: lanes of at most 32, in fours."""
    lanes = next(n for n in (1, 2, 4, MOST_LANES) if Dk <= n * KEYS_OF_LANE)
    return Build(arch, lanes, 4 * -(-Dk // (4 * lanes)))


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead."""
    return [build_for(arch, Dk).spec for arch in supported_architectures() for Dk in HEAD_DIMS]


def unsupported_reason(q: Tensor, Dv: int) -> str | None:
    """Why the kernel cannot serve a call with such q and v [B, N, H, Dv]; None if it can."""
    B, _, H, Dk = q.shape
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}"
    if q.dtype == torch.float64:
        return "it takes no float64"
    if B * H > MAX_BATCH_HEADS:
        return "batch size × heads is above 65,535"
    if 0 in (*q.shape, Dv):
        return "it takes no empty tensors"
    if max(Dk, Dv) > MOST_CHANNELS:
        return f"it takes Dk and Dv up to {MOST_CHANNELS}, not {Dk} and {Dv}"
    return _no_kernel(q.device)


_unusable_reason = functools.cache(unusable_reason)


def _no_kernel(device: torch.device) -> str | None:
    """Why no kernel runs on this card; None if one does."""
    return _unusable_reason(device)


_no_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in channel_decay.py


def forward(
    q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """y [B, N, H, Dv] and the final state [B, H, Dk, Dv]; all in fp32.

    left, right: log decays, [B, N, H, 1 or Dk] and [B, N, H, 1 or Dv].
    """
    (B, N, H, Dk), Dv = q.shape, v.shape[-1]
    initial = initial.contiguous()
    y, final = q.new_empty(B, N, H, Dv), torch.empty_like(initial)
    values: dict[str, float] = dict(N=N, H=H, Dk=Dk, Dv=Dv)
    values |= dict(initial=initial.data_ptr(), y=y.data_ptr(), final=final.data_ptr())
    for name, x in zip(_OPERANDS, (q, k, v, left, right), strict=True):
        *strides, channel = x.stride()
        values |= zip(_FIELDS[name], (x.data_ptr(), *strides, channel if x.shape[-1] > 1 else 0), strict=True)
    build = build_for(card(q.device)[0], Dk)
    grid = -(-Dv * build.lanes // THREADS), B * H, 1
    with current_device(q.device):
        build.kernel(grid, THREADS, 0, raw_stream(q.device.index), PARAMS.pack(values))
    return y, final
