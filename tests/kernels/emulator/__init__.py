"""Runs PTX on numpy: the project's own CUDA kernels, where there is no GPU.

    module = compile_ptx("scan.cu", "sm_90a", {"HOPPER_BUILD": 1}, ["prefix<64, false, false>"])
    kernel = module.kernel("prefix<64, false, false>", "328s")
    with Memory(q, k, v):                       # and every tensor that PyTorch makes in here
        kernel((blocks, 1, 1), (128, 1, 1), shared_bytes, 0, *arguments)

NVRTC compiles, with the project's options. Global memory is the host's: pointers are `data_ptr()`s of CPU
tensors, and an access outside of what `Memory` knows is an error. Shared memory is watched for races, for
reads of what is still in flight, and for ordinary writes that reach wgmma or a bulk copy without
fence.proxy.async.
Whatever is asynchronous happens at the latest moment that is legal. faults.py lists the errors.

It is stricter than the hardware: a thread that has returned does not count at a barrier; wgmma needs
wgmma.fence behind every wait that leaves nothing in flight.

Not here: local memory (a stack), calls, clusters of more than a block, wgmma without the 128-byte swizzle,
races between lanes of one warp and between blocks, 16-bit atomics.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import access, bulk, scalar, tensor  # noqa: F401  (they register their instructions)
from .bulk import TensorMap
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
from .ptx import Kernel, Text

__all__ = [
    "DeadlockError",
    "EmulatedKernel",
    "EmulatorError",
    "LaunchError",
    "MemcheckError",
    "Memory",
    "Module",
    "ProxyError",
    "RaceError",
    "TensorMap",
    "UnknownInstruction",
    "compile_ptx",
]

MOST_SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_120": 99}  # KB a block


class Module:
    """Parsed PTX. `symbols` maps names as asked for to those in the PTX."""

    def __init__(self, text: str, symbols: Mapping[str, str], arch: str) -> None:
        self.text, self.symbols, self.arch = text, dict(symbols), arch
        self._parsed = Text(text)
        self._kernels: dict[tuple, EmulatedKernel] = {}

    def kernel(
        self, name: str, signature: str, *, memory: Memory | None = None, racecheck: bool = True
    ) -> EmulatedKernel:
        """To be called as compile.Kernel is. `memory`: what it may touch, else that of the `with`."""
        key = name, signature, memory, racecheck
        if key not in self._kernels:
            kernel = self._parsed.kernel(self.symbols.get(name, name))
            self._kernels[key] = EmulatedKernel(kernel, name, signature, self.arch, memory, racecheck)
        return self._kernels[key]

    def load(self, signatures: Mapping[str, str]) -> dict[str, EmulatedKernel]:
        """As CompiledModule.load."""
        return {name: self.kernel(name, signature) for name, signature in signatures.items()}


class EmulatedKernel:
    """`kernel(grid, block, shared, stream, *arguments)` runs all blocks, one after the other."""

    def __init__(
        self, kernel: Kernel, name: str, signature: str, arch: str, memory: Memory | None, racecheck: bool
    ) -> None:
        self.name, self.kernel, self.memory, self.racecheck = name, kernel, memory, racecheck
        self.codes = re.findall(r"\d*s|[a-zA-Z]", signature)
        self.most_shared = 1024 * MOST_SHARED.get(arch.rstrip("af"), 227)
        self._machines: dict[tuple, Machine] = {}

    def __call__(self, grid: tuple, block: tuple, shared: int, stream: int, *arguments: Any) -> None:
        threads = int(np.prod(block))
        if not 1 <= threads <= self.kernel.max_threads or min(grid) < 1:
            raise LaunchError(f"{self.name}: grid {grid}, {threads} of {self.kernel.max_threads} threads")
        memory = self.memory or (Memory.active[-1] if Memory.active else None)
        if memory is None:
            raise LaunchError(f"{self.name}: no Memory says what it may touch")
        machine = self._machine(tuple(block), shared)
        if machine.shared_size > self.most_shared:
            size = f"{machine.shared_size} bytes of shared memory"
            raise LaunchError(f"{self.name}: {size}; there are {self.most_shared}")
        self._fill_parameters(machine, arguments)
        constants = [(data.ctypes.data, data.nbytes) for data in machine.global_data]
        machine.memory = GlobalMemory(memory.ranges() + constants)
        for z, y, x in np.ndindex(*reversed(grid)):
            machine.run((x, y, z), tuple(grid))

    def _machine(self, block: tuple, shared: int) -> Machine:
        if (block, shared) not in self._machines:
            self._machines[block, shared] = Machine(self.kernel, block, shared, self.racecheck)
        return self._machines[block, shared]

    def _fill_parameters(self, machine: Machine, arguments: tuple) -> None:
        places = list(self.kernel.parameters.values())
        sizes = [struct.calcsize(code) for code in self.codes]
        if sizes != [size for _, size in places] or len(arguments) != len(places):
            found = [size for _, size in places]
            raise LaunchError(
                f"{self.name}: {len(arguments)} arguments of {sizes} bytes for parameters of {found}"
            )
        for (offset, size), code, value in zip(places, self.codes, arguments, strict=True):
            start = machine.parameter_start + offset
            machine.parameters[start : start + size] = np.frombuffer(struct.pack(code, value), np.uint8)


def compile_ptx(
    source: str | Path, arch: str, defines: Mapping[str, Any], names: Iterable[str], **options: Any
) -> Module:
    """As compile_kernels: a file of the kernels' folder or a path, and C++ names of kernels.

    `options`: those of `cuda.core.ProgramOptions` that are flags with a value. The text is kept in the folder
    of compiled kernels.
    """
    definitions = tuple(sorted(defines.items()))
    return Module(*_compiled(str(source), arch, definitions, tuple(names), tuple(options.items())), arch)


@functools.lru_cache(maxsize=64)
def _compiled(source: str, arch: str, defines: tuple, names: tuple, options: tuple) -> tuple[str, dict]:
    from lingpt.kernels.linear.cuda import compile as nvrtc

    request = nvrtc._Request(source, arch, dict(defines), names, dict(options))
    path = request.cache_file().with_suffix(".ptx")
    marker = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    path = path.with_name(f"{path.stem}-{marker}.ptx")
    if path.is_file():
        text = path.read_text()
    else:
        text = _run_nvrtc(request)
        _keep(path, text)
    return text, dict(line.split("\t") for line in re.findall(r"^//symbol (.*)$", text, re.MULTILINE))


def _keep(path: Path, text: str) -> None:
    """Written aside and renamed; a folder that cannot be written costs the next run a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(aside, path)
    except OSError:
        pass


def _run_nvrtc(request: Any) -> str:
    """PTX, in front of it the names. NVRTC itself is called: cuda.core asks the driver about PTX."""
    from cuda.bindings import nvrtc

    from lingpt.kernels.linear.cuda.compile import SOURCE_FOLDER, _check, _header_folder

    path = SOURCE_FOLDER / request.source
    options = [f"--gpu-architecture={request.arch}", "--std=c++17", "-lineinfo"]
    options += [f"-I{path.parent}", f"-I{_header_folder()}"]
    options += [f"-D{name}={value}" for name, value in request.defines.items()]
    options += [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in request.options.items()]
    program = _check(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
    for name in request.names:
        _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if status:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{path.name} does not compile for {request.arch}: {log.decode()}")
    text = b" " * _check(nvrtc.nvrtcGetPTXSize(program))
    _check((*nvrtc.nvrtcGetPTX(program, text), None))
    lowered = [_check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in request.names]
    symbols = "".join(f"//symbol {n}\t{s}\n" for n, s in zip(request.names, lowered, strict=True))
    return symbols + text.decode().rstrip("\0")
