"""Emulates PTX in numpy: runs CUDA kernels without a GPU, and finds races, bad accesses and deadlocks.

    module = Module(functools.partial(compile_ptx, "forward.cu", "sm_90a", {"HEAD_DIM": 64}), "sm_90a")
    kernel = module.kernel("forward<64, true>", "PPPi")       # `struct` codes of its parameters
    with Memory(q, k, v):                                     # and all that PyTorch creates inside
        kernel((blocks, 1, 1), (128, 1, 1), shared_bytes, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), N)

README.md says what is checked, and what is not.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import access, control, copies, mbarrier, scalar, tensor  # noqa: F401  (registers instructions)
from .faults import (
    DeadlockError,
    EmulatorError,
    LaunchError,
    MemcheckError,
    ProxyError,
    RaceError,
    UnknownInstruction,
)
from .machine import Machine
from .memory import GlobalMemory, Memory
from .ptx import Kernel, Ptx

__all__ = [
    "MOST_SHARED",
    "DeadlockError",
    "EmulatedKernel",
    "EmulatorError",
    "LaunchError",
    "MemcheckError",
    "Memory",
    "Module",
    "ProxyError",
    "RaceError",
    "UnknownInstruction",
]

Compiler = Callable[[Sequence[str]], tuple[str, Mapping[str, str]]]

# KB of shared memory per block (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
MOST_SHARED = dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227) | {"sm_80": 163}
MOST_SHARED |= dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99)


class Module:
    """Kernels of one translation unit for one architecture.

    `compiler(names)` returns the PTX text and the symbol in it of each of `names`. A template instance
    (`kernel<64>`) is compiled alone, when it is first launched; `extern "C"` kernels all at once.
    """

    def __init__(self, compiler: Compiler, arch: str) -> None:
        self.compiler, self.arch = compiler, arch
        self._kernels: dict[tuple, EmulatedKernel] = {}
        self._c_kernels: Ptx | None = None

    def kernel(self, name: str, signature: str) -> EmulatedKernel:
        """A kernel whose parameters have these `struct` codes, to be called inside a `with Memory(…)`."""
        key = name, signature
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(self, name, signature)
        return self._kernels[key]

    def load(self, signatures: Mapping[str, str]) -> dict[str, EmulatedKernel]:
        """The kernels of these names."""
        return {name: self.kernel(name, signature) for name, signature in signatures.items()}

    def parsed(self, name: str) -> Kernel:
        """The parsed kernel."""
        if "<" in name:
            text, symbols = self.compiler([name])
            return Ptx(text).kernel(symbols[name])
        if self._c_kernels is None:
            self._c_kernels = Ptx(self.compiler([])[0])
        return self._c_kernels.kernel(name)


class EmulatedKernel:
    """A kernel: `kernel(grid, block, shared, stream, *arguments)` runs all blocks, one after another."""

    def __init__(self, module: Module, name: str, signature: str) -> None:
        self.module, self.name = module, name
        self.codes = re.findall(r"\d*s|[a-zA-Z]", signature)
        self.most_shared = 1024 * MOST_SHARED[module.arch.rstrip("a")]
        self._machines: dict[tuple, Machine] = {}

    @functools.cached_property
    def kernel(self) -> Kernel:
        return self.module.parsed(self.name)

    def __call__(self, grid: tuple, block: tuple, shared: int, stream: int, *arguments: Any) -> None:
        threads, *flat = block
        if not 1 <= threads <= self.kernel.max_threads or threads % 32 or flat != [1, 1] or min(grid) < 1:
            raise LaunchError(f"{self.name}: grid {grid}, block {block} of {self.kernel.max_threads} threads")
        if not Memory.active:
            raise LaunchError(f"{self.name}: launch it in a `with Memory(…)` of what it may touch")
        machine = self._machine(threads, shared)
        if machine.shared_size > self.most_shared:
            size = f"{machine.shared_size} bytes of shared memory"
            raise LaunchError(f"{self.name}: {size}; there are {self.most_shared}")
        self._fill_parameters(machine, arguments)
        machine.memory = GlobalMemory(Memory.active[-1].ranges())
        for z, y, x in np.ndindex(*reversed(grid)):
            machine.run((x, y, z), tuple(grid))

    def _machine(self, threads: int, shared: int) -> Machine:
        if (threads, shared) not in self._machines:
            self._machines[threads, shared] = Machine(self.kernel, threads, shared)
        return self._machines[threads, shared]

    def _fill_parameters(self, machine: Machine, arguments: tuple) -> None:
        places = list(self.kernel.parameters.values())
        sizes, found = [struct.calcsize(code) for code in self.codes], [size for _, size in places]
        if sizes != found or len(arguments) != len(places):
            given = f"{len(arguments)} arguments of {sizes} bytes"
            raise LaunchError(f"{self.name}: {given} for parameters of {found}")
        for (offset, size), code, value in zip(places, self.codes, arguments, strict=True):
            machine.parameters[offset : offset + size] = np.frombuffer(struct.pack(code, value), np.uint8)
