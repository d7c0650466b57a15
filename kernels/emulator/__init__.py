"""Emulates PTX in numpy: runs the project's own CUDA kernels without a GPU.

    spec = kernel_build("sm_90a", torch.bfloat16, 64, decay="NO_DECAY", rope=0).spec("sm_90a")
    module = Module(spec.source, "sm_90a", spec.defines)
    kernel = module.kernel("prefix<64, false, false>", PARAMS_CODE)
    with Memory(q, k, v):                       # and every tensor that PyTorch creates inside
        kernel((blocks, 1, 1), (128, 1, 1), shared_bytes, 0, *arguments)

NVRTC compiles the source. Global memory is the host's: pointers are `data_ptr()`s of CPU tensors, and an
access outside of the tensors in `Memory` is an error. Shared memory is checked for races, for reads of data
still in flight, and for ordinary writes that reach wgmma without fence.proxy.async. Asynchronous copies and
products complete at the latest legal moment. faults.py lists the errors.

It is stricter than the hardware: a thread that has returned does not count at a barrier; wgmma needs
wgmma.fence after every wait that leaves nothing in flight.

It implements what the project's kernels use, and little more; the rest raises UnknownInstruction. It does not
detect races between lanes of one warp, nor between blocks.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.kernels.emulator import access, control, copies, mbarrier, scalar, tensor  # noqa: F401  (registers instructions)
from lingpt.kernels.emulator.faults import (
    DeadlockError,
    EmulatorError,
    LaunchError,
    MemcheckError,
    ProxyError,
    RaceError,
    UnknownInstruction,
)
from lingpt.kernels.emulator.machine import Machine
from lingpt.kernels.emulator.memory import GlobalMemory, Memory
from lingpt.kernels.emulator.ptx import Kernel, Ptx
from lingpt.kernels.linear_attention.cuda.compile import compile_ptx

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

# KB of shared memory per block (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
MOST_SHARED = dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227) | {"sm_80": 163}
MOST_SHARED |= dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99)


class Module:
    """A source file for one architecture. Each kernel is compiled when it is first launched."""

    def __init__(self, source: str | Path, arch: str, defines: Mapping[str, Any]) -> None:
        self.source, self.arch, self.defines = str(source), arch, dict(defines)
        self._kernels: dict[tuple, EmulatedKernel] = {}
        self._c_kernels: Ptx | None = None

    def kernel(self, name: str, signature: str) -> EmulatedKernel:
        """A kernel, to be called like kernel.Kernel, inside a `with Memory(…)`."""
        key = name, signature
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(self, name, signature)
        return self._kernels[key]

    def load(self, signatures: Mapping[str, str]) -> dict[str, EmulatedKernel]:
        """The kernels of these names, like CompiledModule.load."""
        return {name: self.kernel(name, signature) for name, signature in signatures.items()}

    def parsed(self, name: str) -> Kernel:
        """The parsed kernel. A template instance is compiled alone, `extern "C"` kernels all at once."""
        if "<" in name:
            text, symbols = compile_ptx(self.source, self.arch, self.defines, [name])
            return Ptx(text).kernel(symbols[name])
        if self._c_kernels is None:
            text, _ = compile_ptx(self.source, self.arch, self.defines, [])
            self._c_kernels = Ptx(text)
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
