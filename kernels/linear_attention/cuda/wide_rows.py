"""The kernels of wide_rows.cu: their build and launches."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import Fields, Kernel, raw_stream
from lingpt.kernels.linear_attention.cuda.toolchain import card, supported_architectures
from lingpt.kernels.numerics import NORM_EPS

SOURCE = "wide_rows.cu"
THREADS = 256  # eight rows
WIDEST = 256  # head_dim: a multiple of 16

_POINTERS = ("x", "half0", "half1", "y0", "y1", "out", "r", "g0", "g1", "g", "cos", "sin")
_STRIDES = ("batch", "token", "head")
PARAMS = Fields(
    dict.fromkeys(_POINTERS, "P")
    | {f"{name}_{dim}": "q" for name in ("x", "out") for dim in _STRIDES}
    | dict.fromkeys(("rows", "N", "H", "D", "rope", "unused"), "I")
)
NAMES = {name: f"wide_{name}<bf16>" for name in ("unit_rows", "outputs", "input_gradient")}


def spec_for(arch: str) -> KernelSpec:
    defines = {"WIDE_ROW_PARAMS_BYTES": PARAMS.size, "NORM_EPS": f"{NORM_EPS}f"}
    return KernelSpec(SOURCE, tuple(NAMES.values()), defines, (arch,))


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead."""
    return [spec_for(arch) for arch in supported_architectures()]


@functools.cache
def kernels(arch: str) -> dict[str, Kernel]:
    return spec_for(arch).load(arch, NAMES)


def launch(kernel: str, shape: tuple[int, int, int, int], **tensors: Tensor | None) -> None:
    """A kernel on rows of this shape [B, N, H, D], with tensors by the names of struct WideRowParams."""
    B, N, H, D = shape
    given = {name: x for name, x in tensors.items() if x is not None}
    cos = given.get("cos")
    values = dict(rows=B * N * H, N=N, H=H, D=D, rope=0 if cos is None else cos.shape[1])
    for name, x in given.items():
        values[name] = x.data_ptr()
        if name in ("x", "out"):
            values |= {f"{name}_{dim}": n for dim, n in zip(_STRIDES, x.stride(), strict=False)}
    device: torch.device = next(iter(given.values())).device
    grid = -(-B * N * H // (THREADS // 32)), 1, 1
    kernels(card(device)[0])[kernel](grid, THREADS, 0, raw_stream(device.index), PARAMS.pack(values))
