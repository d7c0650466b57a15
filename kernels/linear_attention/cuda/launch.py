"""Launches kernels: struct Params packed by the names of its fields, and `cuLaunchKernel` called directly.

What runs at each call is short: a call for few tokens takes mostly host time.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
import threading
from collections.abc import Mapping
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

from lingpt.kernels.linear_attention.cuda.toolchain import check_status

DEFAULT_SHARED_LIMIT = 48 * 1024  # bytes a block gets without asking (CUDA C++ Programming Guide, 20.7)

MAX_BATCH_HEADS = 65535  # CUDA's limit on the grid's second dimension

# PyTorch's current stream as a raw handle, as in Inductor: a Stream object takes ten times as long.
raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def current_device(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which the device is current."""
    is_current = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


# The tensors that are a mode's operands (modes.cuh has the table; params.cuh's enum Operand), or those of a
# kernel without modes.
OPERANDS = {
    "FWD": dict(A="q", B="k", C="v", Y="o"),
    "DQ": dict(A="do", B="v", C="k", QK="q", Y="dq", O="o"),
    "DK": dict(A="v", B="do", C="q", QK="k", Y="dk"),
    "DV": dict(A="k", B="q", C="do", Y="dv"),
    "row_products": dict(A="do", Y="o"),
}


class Fields:
    """Consecutive fields of struct Params, packed by name."""

    def __init__(self, codes: dict[str, str]) -> None:
        self.names = tuple(codes)
        # As long as in C: a multiple of eight bytes.
        self._struct = struct.Struct("@" + "".join(codes.values()) + "0q")
        self.size = self._struct.size
        self._zeros, self._in_order = dict.fromkeys(codes, 0), itemgetter(*codes)

    def pack(self, values: Mapping[str, float]) -> bytes:
        """The fields' bytes; those without a value are 0 (null)."""
        whole = self._zeros | values  # type: ignore[operator]
        if len(whole) > len(self.names):
            raise KeyError(f"struct Params has no {', '.join(whole.keys() - set(self.names))}")
        return self._struct.pack(*self._in_order(whole))


# struct Params of params.cuh: pointers, different in each call; then the layout, which all calls of a plan
# share. The compiler checks the sizes (`Variant.defines`), a test the names.
_OPERAND_NAMES = ("A", "B", "C", "QK", "Y", "O")
POINTERS = Fields(
    dict.fromkeys(
        (
            *_OPERAND_NAMES,
            *("g", "rq", "rk", "e", "coefficient", "constant", "log_decay", "cos", "sin"),
            *("initial_S", "initial_k", "initial_v", "final_S", "final_k", "final_v"),
            *("scratch", "n_initial", "db", "da"),
            *("decay_cumsum", "to_end", "count", "chunks", "count_out", "dG", "boundaries"),
            *("dG_columns", "span_sums", "d_log_decay"),
        ),
        "P",
    )
)
LAYOUT = Fields(
    {f"{name}_{dim}": "q" for name in _OPERAND_NAMES for dim in ("batch", "head", "token")}
    | dict.fromkeys(
        ("N", "H", "segments", "segment_len", "sub_segments", "normalize", "divide", "columns"), "i"
    )
    | dict.fromkeys(("a_value", "b_value", "range", "inverse_range"), "f")
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and the operands and layout of each struct Params (two for `scan_pair`)."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared: int
    params: tuple[tuple[dict[str, str], bytes], ...]

    def __call__(self, stream: int, tensors: Mapping[str, int], addresses: dict[str, int]) -> None:
        """`tensors`: addresses of q, k, v, o, …; `addresses`: of the other fields in POINTERS."""
        arguments = [
            POINTERS.pack(addresses | {field: tensors[name] for field, name in operands.items()}) + layout
            for operands, layout in self.params
        ]
        self.kernel(self.grid, self.threads, self.shared, stream, *arguments)


def addresses_of(start: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The addresses of named parts of memory, one after the other; `sizes` in fp32 numbers."""
    begins = accumulate((4 * size for size in sizes.values()), initial=start)
    return dict(zip(sizes, begins, strict=False))


class Kernel:
    """A loaded kernel: `kernel(grid, threads, shared, stream, *arguments)`, on the current context, from any
    thread.

    `shared`: dynamic shared memory in bytes; `stream`: a raw handle (`raw_stream`); arguments: the bytes of
    each (`struct.pack`).
    """

    def __init__(self, handle: Any, name: str) -> None:
        from cuda.bindings import driver

        self.name = name
        self._driver = driver
        self._kernel = handle
        self._function = driver.CUfunction(int(handle))  # cuLaunchKernel takes a CUkernel so cast
        self._shared_limits: dict[int, int] = {}  # device → bytes allowed so far

    def __call__(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, *arguments: bytes
    ) -> None:
        if not hasattr(_this_thread, "has_context"):
            _bind_context(self._driver)
        if shared > DEFAULT_SHARED_LIMIT:
            self._allow_shared(shared)
        pointers = (ctypes.c_char_p * len(arguments))(*arguments)  # to the values: the driver copies them
        block, address = (threads, 1, 1), ctypes.addressof(pointers)
        (status,) = self._driver.cuLaunchKernel(self._function, *grid, *block, shared, stream, address, 0)
        if status:
            raise RuntimeError(f"{self.name}: grid {grid}, {threads} threads, {shared} B shared: {status!r}")

    def _allow_shared(self, shared: int) -> None:
        device = torch.cuda.current_device()
        if self._shared_limits.get(device, 0) < shared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = check_status(self._driver.cuCtxGetDevice())
            check_status(self._driver.cuKernelSetAttribute(attribute, shared, self._kernel, handle))
            self._shared_limits[device] = shared


_this_thread = threading.local()


def _bind_context(driver: Any) -> None:
    """Gives this thread a current context, if CUDA's runtime has not done so yet.

    In an autograd thread, and on device 0, our launch may be the first CUDA call that needs one.
    """
    if not int(check_status(driver.cuCtxGetCurrent())):
        device = check_status(driver.cuDeviceGet(torch.cuda.current_device()))
        check_status(driver.cuCtxSetCurrent(check_status(driver.cuDevicePrimaryCtxRetain(device))))
    _this_thread.has_context = True
