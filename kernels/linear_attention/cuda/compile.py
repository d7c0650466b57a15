"""Compiles CUDA source to cubins and loads their kernels, on the user's machine, from pip packages alone.

NVRTC compiles in about a second and needs no GPU, so CI checks every architecture. The result is a *cubin*,
not PTX: a driver runs the cubins of every compiler of its own CUDA major version, also of a newer minor one.
The cubin, the names of its kernels and the report of `ptxas` are cached in one file per (sources in its
folder, architecture, options, compiler version).

    module = compile_kernels("forward.cu", "sm_90a", {"HEAD_DIM": 128}, ["forward<128, true>"])
    module.resources["forward<128, true>"].spills            # bytes; 0 is what we want
    kernel = module.load(["forward<128, true>"])["forward<128, true>"]
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lingpt.common.files import cache_dir, others_can_write, write_bytes
from lingpt.kernels.linear_attention.cuda.launch import Kernel
from lingpt.kernels.linear_attention.cuda.toolchain import (
    ARCHITECTURES,
    check_arch,
    check_status,
    compiler_identity,
    compiler_version,
    driver_for,
    header_folder,
)

K = TypeVar("K")

SOURCE_FOLDER = Path(__file__).parent
# At its default of 5, the ptxas of CUDA 13.5 spills 16 bytes of dk's scan.
PTXAS_OPTIONS = {arch: ("--register-usage-level=3",) for arch in ("sm_100", "sm_103")}


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One translation unit: arguments of `compile_kernels`, as data for `lingpt kernels` and the tests."""

    source: str
    names: tuple[str, ...]
    defines: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    architectures: tuple[str, ...] = ARCHITECTURES
    title: str | None = None  # in lists, if the first kernel's name does not tell the build

    def compile(self, arch: str) -> CompiledModule:
        return compile_kernels(self.source, arch, self.defines, self.names)

    def load(self, arch: str, names: Mapping[K, str]) -> dict[K, Kernel]:
        """The kernels of `names`, compiled and loaded, by its keys."""
        kernels = self.compile(arch).load(names.values())
        return {key: kernels[name] for key, name in names.items()}

    def is_cached(self, arch: str) -> bool:
        return _Request(self.source, arch, self.defines, self.names).cache_file().is_file()


@dataclasses.dataclass(frozen=True)
class Resources:
    """A kernel's resources, as `ptxas` reports them: registers, stack and spills (bytes) per thread; static
    shared memory (bytes) per block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # static only

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


@dataclasses.dataclass(frozen=True)
class CompiledModule:
    """A cubin (or PTX) and facts about it. `symbols` maps each requested name to the mangled one in it."""

    arch: str
    code: bytes
    symbols: dict[str, str]
    log: str
    seconds: float = 0.0  # the compile time; 0 when it came from the cache
    path: Path | None = None  # the cache file, None if it could not be written

    @property
    def resources(self) -> dict[str, Resources]:
        report = parse_ptxas_report(self.log)
        return {name: report[symbol] for name, symbol in self.symbols.items() if symbol in report}

    @property
    def remarks(self) -> list[str]:
        """Lines of the compiler's log to show: warnings, and wgmma that `ptxas` had to serialise."""
        return [line for line in self.log.splitlines() if re.search(r"warning|Performance Loss", line)]

    def load(self, names: Iterable[str]) -> dict[str, Kernel]:
        """The kernels of these names, for every device of this architecture."""
        driver = driver_for(compiler_version())
        library = check_status(driver.cuLibraryLoadData(self.code, [], [], 0, [], [], 0))
        symbols = {name: self.symbols[name].encode() for name in names}
        return {
            name: Kernel(check_status(driver.cuLibraryGetKernel(library, symbol)), name)
            for name, symbol in symbols.items()
        }


def compile_kernels(
    source: str | Path, arch: str, defines: Mapping[str, Any], names: Iterable[str]
) -> CompiledModule:
    """Compiles `source` (a file of this folder, or a path) for `arch` ("sm_90a"), or finds it in the cache.

    `names` are C++ name expressions (`kernel<64, true>`) or names of extern "C" kernels. Raises UserError if
    the compiler is missing or does not know `arch`, RuntimeError with the compiler's log if the source does
    not compile.
    """
    return _Request(source, arch, defines, tuple(names)).module()


def compile_ptx(
    source: str | Path, arch: str, defines: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """The PTX of `source` with its line numbers, and the mangled name of each of `names`: for the emulator.

    Caches and raises like `compile_kernels`. Kernels that are extern "C" need not be in `names`.
    """
    module = _Request(source, arch, defines, tuple(names), ptx=True).module()
    return module.code.decode(), module.symbols


def cache_folder() -> Path:
    """The cache of compiled kernels: `$LINGPT_CACHE/kernels`, else `~/.cache/lingpt/kernels`."""
    return cache_dir() / "kernels"


def parse_ptxas_report(log: str) -> dict[str, Resources]:
    """The numbers of `ptxas -v`, by mangled name. Functions that were not inlined count for their kernel."""
    frame = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    report = {}
    for section in re.split(r"Compiling entry function ", log)[1:]:
        name = section.split("'")[1]
        stack, stores, loads = (sum(map(int, column)) for column in zip(*frame.findall(section), strict=True))
        registers = int(re.findall(r"Used (\d+) registers", section)[0])
        shared = sum(int(size) for size in re.findall(r"(\d+)(?:\+\d+)? bytes smem", section)[:1])
        report[name] = Resources(registers, stack, stores, loads, shared)
    return report


@dataclasses.dataclass(frozen=True)
class _Request:
    """Everything that determines the compiler's output."""

    source: str | Path
    arch: str
    defines: Mapping[str, Any]
    names: tuple[str, ...]
    ptx: bool = False  # instead of a cubin

    @property
    def path(self) -> Path:
        return SOURCE_FOLDER / self.source  # an absolute path stays as it is

    def module(self) -> CompiledModule:
        """From the cache, or compiled."""
        path = self.cache_file()
        module = _read_cached(path, self.arch)
        if module is None:
            module = self.compile()
            module = dataclasses.replace(module, path=_write_cached(path, module))
        return module

    def options(self) -> list[str]:
        """Those that do not depend on where files lie."""
        result = ["-lineinfo"] if self.ptx else ["-v", *PTXAS_OPTIONS.get(self.arch, ())]
        if not self.ptx:  # -v: the report that `resources` reads
            result = [f"--ptxas-options={option}" for option in result]
        result += [f"--gpu-architecture={self.arch}", "--std=c++17"]
        return result + [f"-D{name}={value}" for name, value in sorted(self.defines.items())]

    def cache_file(self) -> Path:
        digest = hashlib.sha256()
        folder = self.path.parent
        for path in sorted([*folder.rglob("*.cu"), *folder.rglob("*.cuh")]):  # all that it may include
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(json.dumps([self.options(), self.names, *compiler_identity()]).encode())
        name = f"{Path(self.source).stem}-{self.arch}-{digest.hexdigest()[:24]}"
        return cache_folder() / (name + (".ptx" if self.ptx else ".cubin"))

    def compile(self) -> CompiledModule:
        check_arch(self.arch)
        from cuda.bindings import nvrtc

        path, start = self.path, time.perf_counter()
        options = [*self.options(), f"-I{path.parent}", f"-I{header_folder()}"]
        program = check_status(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
        try:
            for name in self.names:
                check_status(nvrtc.nvrtcAddNameExpression(program, name.encode()))
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
            if status:
                raise RuntimeError(f"{path.name} does not compile for {self.arch}: {log}")
            if self.ptx:
                code = _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            else:
                code = _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            symbols = {
                name: check_status(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode()
                for name in self.names
            }
        finally:
            check_status(nvrtc.nvrtcDestroyProgram(program))
        return CompiledModule(self.arch, code, symbols, log, time.perf_counter() - start)


def _output(size: Any, get: Any, program: Any) -> bytes:
    """One of NVRTC's results, without the zero after a text."""
    # Not bytes: those of length one, an empty log, are shared by all of Python.
    buffer = bytearray(check_status(size(program)))
    check_status(get(program, buffer))
    return bytes(buffer if buffer.startswith(b"\x7fELF") else buffer.rstrip(b"\0"))


def _write_cached(path: Path, module: CompiledModule) -> Path | None:
    """Writes the cache file; returns its path, or None with a warning if it cannot be kept there."""
    body = json.dumps({"symbols": module.symbols, "log": module.log}).encode() + b"\n" + module.code
    reason = "others can write to it"
    try:
        write_bytes(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        if _is_trusted(path):
            return path
    except OSError as error:
        reason = str(error.strerror)
    warnings.warn(f"kernels are compiled again at every start: {path.parent}: {reason}", stacklevel=2)
    return None


def _read_cached(path: Path, arch: str) -> CompiledModule | None:
    """The cached module; None if there is no file, others could have written it, or it is damaged."""
    try:
        content = path.read_bytes() if _is_trusted(path) else b""
        checksum, _, body = content.partition(b"\n")
        header, _, code = body.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == checksum:
            return CompiledModule(arch, code, path=path, **json.loads(header))
    except (OSError, TypeError, ValueError):  # no file; a header that is none
        pass
    return None


def _is_trusted(path: Path) -> bool:
    """Whether only this user (and root) could have written the file: its code runs with the user's rights."""
    return path.is_file() and not any(map(others_can_write, (path.parent.parent, path.parent, path)))
