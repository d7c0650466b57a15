"""A compiled kernel as a callable that calls `cuLaunchKernel` directly, to save host time.

Its arguments are packed by one `struct` call into a buffer allocated once; `cuda.core.launch` would build a
config and an argument holder per call.

    kernel = Kernel(handle, "forward<128, true>", "PPPPif")
    kernel((blocks, 1, 1), (256, 1, 1), shared_bytes, stream, q.data_ptr(), ..., n, scale)
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from typing import Any

import torch

from lingpt.kernels.linear_attention.cuda.toolchain import check_status

DEFAULT_SHARED_LIMIT = 48 * 1024  # bytes a block gets without asking (CUDA C++ Programming Guide, 20.7)


class Kernel:
    """A loaded kernel: `kernel(grid, block, shared, stream, *arguments)`, on the current context, any thread.

    `grid`, `block`: three ints each; `shared`: dynamic shared memory in bytes; `stream`: a raw handle
    (`torch.cuda.current_stream().cuda_stream`); pointers are ints (`tensor.data_ptr()`, 0 for none).
    """

    def __init__(self, handle: Any, name: str, signature: str) -> None:
        from cuda.bindings import driver

        self.name = name
        self._driver = driver
        self._kernel = handle
        self._function = driver.CUfunction(int(handle))  # cuLaunchKernel takes a CUkernel so cast
        self._arguments = PackedArguments(signature)
        self._shared_limits: dict[int, int] = {}  # device → bytes allowed so far

    def __call__(self, grid: tuple, block: tuple, shared: int, stream: int, *arguments: Any) -> None:
        if not hasattr(_this_thread, "has_context"):
            _bind_context(self._driver)
        if shared > DEFAULT_SHARED_LIMIT:
            self._allow_shared(shared)
        address = self._arguments.pack(*arguments)
        (status,) = self._driver.cuLaunchKernel(self._function, *grid, *block, shared, stream, address, 0)
        if status:
            raise RuntimeError(f"{self.name}: grid {grid}, block {block}, {shared} B shared: {status!r}")

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


class PackedArguments(threading.local):
    """A kernel's arguments in memory in the form of `cuLaunchKernel`: an array of pointers to the values.

    One buffer per thread: autograd launches backward kernels from its own threads.
    """

    def __init__(self, signature: str) -> None:
        self._struct = struct.Struct("@" + signature)
        codes = re.findall(r"\d*s|[a-zA-Z]", signature)
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        offsets = [end - struct.calcsize("@" + code) for code, end in zip(codes, ends, strict=True)]
        self._buffer = ctypes.create_string_buffer(max(self._struct.size, 1))
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * max(len(codes), 1))(*[base + offset for offset in offsets])
        self._address = ctypes.addressof(self._pointers)

    def pack(self, *arguments: Any) -> int:
        """Writes the values and returns the address of the array of pointers."""
        self._struct.pack_into(self._buffer, 0, *arguments)
        return self._address
