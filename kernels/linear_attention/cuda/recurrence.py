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
THREADS, MOST_LANES, KEYS_OF_LANE = 128, 8, 36
# Channels of q and k, and of v, which takes their place in the backward pass.
MOST_CHANNELS = MOST_LANES * KEYS_OF_LANE
HEAD_DIMS = (32, 64, 128, 256)  # to compile ahead
BLOCKS_PER_SM = 8  # which hide each other's latency
SHORTEST_SEGMENT = 64  # tokens

_OPERANDS = ("q", "k", "v", "left", "right")
_FIELDS = {x: (f"{x}_x", f"{x}_batch", f"{x}_token", f"{x}_head", f"{x}_channel") for x in _OPERANDS}
PARAMS = Fields(
    {field: "P" if field.endswith("_x") else "q" for fields in _FIELDS.values() for field in fields}
    | dict.fromkeys(("states", "y"), "P")
    | dict.fromkeys(("N", "H", "Dk", "Dv", "segment_len", "y_token"), "i")
)


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of recurrence.cu."""

    arch: str
    lanes: int  # threads that share a column of the state
    keys: int  # that each of them has
    shared: bool  # whether all channels have one decay

    @property
    def names(self) -> dict[str, str]:
        """A scan of tokens, and one for the state alone."""
        options = f"{self.lanes}, {self.keys}, {str(self.shared).lower()}"
        return {"scan": f"recurrence<{options}, true>", "states": f"recurrence<{options}, false>"}

    @property
    def spec(self) -> KernelSpec:
        defines = {"RECURRENCE_PARAMS_BYTES": PARAMS.size, "THREADS": THREADS}
        return KernelSpec(SOURCE, tuple(self.names.values()), defines, (self.arch,))

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        return self.spec.load(self.arch, self.names)


@functools.cache
def build_for(arch: str, Dk: int, shared: bool) -> Build:
    """The build for so many channels of q and k: lanes of at most 36, in fours."""
    lanes = next(n for n in (1, 2, 4, MOST_LANES) if Dk <= n * KEYS_OF_LANE)
    return Build(arch, lanes, 4 * -(-Dk // (4 * lanes)), shared)


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead: decays per channel, and shared ones."""
    return [
        build_for(arch, D, shared).spec
        for arch in supported_architectures()
        for D in HEAD_DIMS
        for shared in (False, True)
    ]


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


def segmentation(N: int, blocks: int, processors: int) -> tuple[int, int]:
    """(segments, tokens of each but the last) that sequences of so many blocks are cut into."""
    length = -(-N // max(1, min(BLOCKS_PER_SM * processors // blocks, N // SHORTEST_SEGMENT)))
    return -(-N // length), length


def forward(
    q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """y [B, N, H, Dv] and the final state [B, H, Dk, Dv]; all in fp32.

    left, right: log decays, [B, N, H, 1 or Dk] and [B, N, H, 1 or Dv].
    """
    (B, N, H, Dk), Dv, (arch, processors) = q.shape, v.shape[-1], card(q.device)
    build = build_for(arch, Dk, left.shape[-1] == right.shape[-1] == 1)
    slices = -(-Dv * build.lanes // THREADS)
    segments, segment_len = segmentation(N, slices * B * H, processors)
    y, states = q.new_empty(B, N, H, Dv), initial.new_empty(segments, *initial.shape)
    values: dict[str, float] = dict(N=N, H=H, Dk=Dk, Dv=Dv, segment_len=segment_len)
    values |= dict(y=y.data_ptr(), y_token=y.stride(1))
    for name, x in zip(_OPERANDS, (q, k, v, left, right), strict=True):
        *strides, channel = x.stride()
        fields = x.data_ptr(), *strides, channel if x.shape[-1] > 1 else 0
        values |= zip(_FIELDS[name], fields, strict=True)

    def launch(kernel: str, states: Tensor) -> None:
        with current_device(q.device):
            grid, params = (slices, B * H, len(states)), PARAMS.pack(values | {"states": states.data_ptr()})
            build.kernels[kernel](grid, THREADS, 0, raw_stream(q.device.index), params)

    states[0] = initial
    if segments > 1:
        launch("states", states[1:])  # what each segment but the last adds
        decays = _segment_decays(left, right, segments - 1, segment_len)
        for before, after, decay in zip(states[:-1], states[1:], decays, strict=True):
            after.addcmul_(decay, before)
    launch("scan", states)
    return y, states[-1].clone()


def _segment_decays(left: Tensor, right: Tensor, count: int, segment_len: int) -> Tensor:
    """By how much each of the first segments decays what was before it, [count, B, H, 1 or Dk, 1 or Dv]."""
    # Logs are added in float64: a constant one is always rounded one way.
    L, R = (
        x[:, : count * segment_len].unflatten(1, (count, segment_len)).sum(2, dtype=torch.float64).float()
        for x in (left, right)
    )
    return (L.unsqueeze(-1) + R.unsqueeze(-2)).exp().transpose(0, 1)
