"""CUDA source → cubin → launchable kernel, on the user's machine, from pip packages alone.

NVRTC (through NVIDIA's `cuda-core`) compiles in a second or so and needs no GPU, so that CI checks every
architecture. What it makes is a *cubin*, never PTX: a driver runs the cubins of every compiler of its own
CUDA major version, also of a newer minor one. The cubin, the names of its kernels and the report of `ptxas`
are cached in one file per (source and all that it includes, architecture, options, compiler version).

    module = compile_kernels("forward.cu", "sm_90a", {"HEAD_DIM": 128}, ["forward<128, true>"])
    module.resources["forward<128, true>"].spills            # bytes; 0 is what we want
    kernel = module.load({"forward<128, true>": "PPPPif"})["forward<128, true>"]
    kernel((blocks, 1, 1), (256, 1, 1), shared_bytes, stream, q.data_ptr(), ..., n, scale)

A launch goes through `cuLaunchKernel` directly: its arguments are packed by one `struct` call into a buffer
made once. `cuda.core.launch` builds a config and an argument holder a call.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import functools
import hashlib
import json
import re
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.files import cache_dir, write_bytes
from lingpt.common.install import install_command

SOURCE_FOLDER = Path(__file__).parent
# A100; A6000 and A10; L40 and RTX 4090; H100 and H200; B200; RTX 5090 and RTX PRO 6000
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
# At its default of 5, the ptxas of CUDA 13.5 spills 16 bytes of dk's scan.
PTXAS_OPTIONS = {arch: ("--register-usage-level=3",) for arch in ("sm_100", "sm_103")}
DEFAULT_SHARED_LIMIT = 48 * 1024  # bytes a block gets without asking (CUDA C++ Programming Guide, 20.7)


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One translation unit: what `compile_kernels` takes, as data for `lingpt kernels` and the tests."""

    source: str
    names: tuple[str, ...]
    defines: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    architectures: tuple[str, ...] = ARCHITECTURES

    def compile(self, arch: str) -> CompiledModule:
        return compile_kernels(self.source, arch, self.defines, self.names, **self.options)

    def is_cached(self, arch: str) -> bool:
        return _Request(self.source, arch, self.defines, self.names, self.options).cache_file().is_file()


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes, says `ptxas`: registers, stack and spills (bytes) a thread; shared a block."""

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
    """A cubin and what is known of it. `symbols` maps each asked-for name to the mangled one in the cubin."""

    arch: str
    cubin: bytes
    symbols: dict[str, str]
    log: str
    seconds: float  # the compile time; 0 when it came from the cache
    path: Path | None  # the cache file, None if it could not be written

    @property
    def resources(self) -> dict[str, Resources]:
        report = parse_ptxas_report(self.log)
        return {name: report[symbol] for name, symbol in self.symbols.items() if symbol in report}

    @property
    def remarks(self) -> list[str]:
        """Lines of the compiler worth reading: warnings, and wgmma that `ptxas` had to serialise."""
        return [line for line in self.log.splitlines() if re.search(r"warning|Performance Loss", line)]

    def load(self, signatures: Mapping[str, str]) -> dict[str, Kernel]:
        """The kernels, for every device of this architecture. `signatures`: each kernel's parameters in
        `struct` codes (`P` pointer, `i` int32, `q` int64, `f` float, `128s` a tensor map …)."""
        driver = _driver_for(_nvrtc_version())
        library = _check(driver.cuLibraryLoadData(self.cubin, [], [], 0, [], [], 0))
        handles = {
            n: _check(driver.cuLibraryGetKernel(library, self.symbols[n].encode())) for n in signatures
        }
        return {name: Kernel(handles[name], name, signature) for name, signature in signatures.items()}


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
            handle = _check(self._driver.cuCtxGetDevice())
            _check(self._driver.cuKernelSetAttribute(attribute, shared, self._kernel, handle))
            self._shared_limits[device] = shared


_this_thread = threading.local()


def _bind_context(driver: Any) -> None:
    """Gives this thread a current context, if CUDA's runtime has not done so yet.

    In a thread of autograd's, and on device 0, our launch may be the first that asks for one.
    """
    if not int(_check(driver.cuCtxGetCurrent())):
        device = _check(driver.cuDeviceGet(torch.cuda.current_device()))
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device))))
    _this_thread.has_context = True


class PackedArguments(threading.local):
    """A kernel's arguments in memory as `cuLaunchKernel` wants them: an array of pointers to the values.

    One buffer a thread: autograd launches backward kernels from threads of its own.
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


def compile_kernels(
    source: str | Path, arch: str, defines: Mapping[str, Any], names: Iterable[str], **options: Any
) -> CompiledModule:
    """Compiles `source` (a file of this folder, or a path) for `arch` ("sm_90a"), or finds it in the cache.

    `names` are C++ name expressions (`kernel<64, true>`) or names of extern "C" kernels; `options` go to
    `cuda.core.ProgramOptions` (`use_fast_math=True`, `max_register_count=168` …; `ptxas_options` is taken).
    Raises UserError where the compiler is missing or does not know `arch`, RuntimeError with the compiler's
    log where the source does not compile.
    """
    request = _Request(source, arch, defines, tuple(names), options)
    path = request.cache_file()
    module = _read_cached(path, arch)
    if module is None:
        module = request.compile()
        module = dataclasses.replace(module, path=_write_cached(path, module))
    return module


def compile_ptx(
    source: str | Path, arch: str, defines: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """The PTX of `source` with its line numbers, and the mangled name of each of `names`: for the emulator.

    Cached, and raises, as `compile_kernels`. Kernels that are extern "C" are there without being asked for.
    """
    request = _Request(source, arch, defines, tuple(names), {"lineinfo": True})
    path = request.cache_file().with_suffix(".ptx")
    module = _read_cached(path, arch)
    if module is None:
        module = request.compile_ptx()
        _write_cached(path, module)
    return module.cubin.decode(), module.symbols


def native_arch(device: int | torch.device | None = None) -> str:
    """The architecture of a CUDA device, with the suffix that unlocks wgmma and TMA on Hopper: "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def cache_folder() -> Path:
    """`$LINGPT_CACHE/kernels`, or `~/.cache/lingpt/kernels`."""
    return cache_dir() / "kernels"


def source_hash(folder: Path = SOURCE_FOLDER) -> str:
    """A hash of the CUDA source, of the Python that compiles and launches it and of the constants that it is
    compiled with, without comments, docstrings and blank space, so that only a change of substance makes a
    record of GPU tests stale."""
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*"), *folder.parent.glob("numerics.py")]):
        if path.suffix in (".cu", ".cuh", ".h"):
            text = strip_cuda(path.read_text())
        elif path.suffix == ".py":
            text = strip_python(path.read_text())
        else:
            continue
        digest.update(f"{path.relative_to(folder.parent).as_posix()}\0{text}\0".encode())
    return digest.hexdigest()[:16]


def strip_cuda(text: str) -> str:
    """C++ source as a row of tokens: no comments, no blank space (strings are kept whole)."""
    string_or_comment = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    bare = string_or_comment.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    return " ".join(re.findall(r'"(?:\\.|[^"\\])*"|\w+|\S', bare))


def strip_python(text: str) -> str:
    """Python source without docstrings, lines that are only a comment, and blank lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            end = first.end_lineno or first.lineno
            lines[first.lineno - 1 : end] = [""] * (end - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def parse_ptxas_report(log: str) -> dict[str, Resources]:
    """The figures of `ptxas -v`, by mangled name. Functions that were not inlined count for their kernel."""
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
    """All that decides what the compiler makes."""

    source: str | Path
    arch: str
    defines: Mapping[str, Any]
    names: tuple[str, ...]
    options: Mapping[str, Any]

    def files(self) -> dict[Path, bytes]:
        """The source and all that it includes in quotes, from the includer's folder or the source's own."""
        start = SOURCE_FOLDER / self.source  # an absolute path stays as it is
        found: dict[Path, bytes] = {}
        queue = [start]
        while queue:
            path = queue.pop()
            if path in found or (path != start and not path.is_file()):
                continue
            found[path] = path.read_bytes()
            includes = re.findall(r'#\s*include\s*"([^"]+)"', found[path].decode())
            queue += [folder / name for name in includes for folder in (path.parent, start.parent)]
        return found

    def cache_file(self) -> Path:
        digest = hashlib.sha256()
        for path, content in sorted(self.files().items()):
            digest.update(path.name.encode() + b"\0" + content + b"\0")
        defines, options = sorted(self.defines.items()), sorted(self.options.items())
        settings = [self.arch, PTXAS_OPTIONS.get(self.arch), defines, self.names, options]
        digest.update(json.dumps([*settings, *_compiler_identity()], default=str).encode())
        return cache_folder() / f"{Path(self.source).stem}-{self.arch}-{digest.hexdigest()[:24]}.cubin"

    def compile(self) -> CompiledModule:
        _check_arch(self.arch)
        from cuda.core import Program, ProgramOptions

        path = SOURCE_FOLDER / self.source
        options = ProgramOptions(
            name=path.name,
            arch=self.arch,
            std="c++17",
            include_path=[str(path.parent), str(_header_folder())],
            define_macro=[(name, str(value)) for name, value in self.defines.items()] or None,
            # -v: the report that `resources` reads
            ptxas_options=["-v", *PTXAS_OPTIONS.get(self.arch, ())],
            **self.options,
        )
        log = StringIO()
        start = time.perf_counter()
        try:
            program = Program(path.read_text(), "c++", options)
            built = program.compile("cubin", name_expressions=self.names, logs=log)
        except Exception as error:
            raise RuntimeError(f"{path.name} does not compile for {self.arch}: {error}") from error
        symbols = {name: built.symbol_mapping.get(name, name) for name in self.names}
        symbols = {name: s.decode() if isinstance(s, bytes) else s for name, s in symbols.items()}
        text, seconds = log.getvalue().replace("\0", ""), time.perf_counter() - start
        return CompiledModule(self.arch, bytes(built.code), symbols, text, seconds, None)

    def compile_ptx(self) -> CompiledModule:
        """PTX in the cubin's place. By NVRTC itself: cuda.core asks the driver, and there may be none."""
        _check_arch(self.arch)
        from cuda.bindings import nvrtc

        path = SOURCE_FOLDER / self.source
        flags = [f"--gpu-architecture={self.arch}", "--std=c++17", "-lineinfo"]
        flags += [f"-I{path.parent}", f"-I{_header_folder()}"]
        flags += [f"-D{name}={value}" for name, value in self.defines.items()]
        start = time.perf_counter()
        program = _check(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
        for name in self.names:
            _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode().replace("\0", "")
        if status:
            raise RuntimeError(f"{path.name} does not compile for {self.arch}: {text}")
        symbols = {
            name: _check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in self.names
        }
        ptx = b" " * _check(nvrtc.nvrtcGetPTXSize(program))
        _check(nvrtc.nvrtcGetPTX(program, ptx))
        _check(nvrtc.nvrtcDestroyProgram(program))
        seconds = time.perf_counter() - start
        return CompiledModule(self.arch, ptx.rstrip(b"\0"), symbols, text, seconds, None)


def _write_cached(path: Path, module: CompiledModule) -> Path | None:
    """The file, or None with a warning where it cannot be written."""
    body = json.dumps({"symbols": module.symbols, "log": module.log}).encode() + b"\n" + module.cubin
    try:
        write_bytes(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    except OSError as error:
        reason = f"{path.parent}: {error.strerror}"
        warnings.warn(f"kernels are compiled again at every start: {reason}", stacklevel=2)
        return None
    return path


def _read_cached(path: Path, arch: str) -> CompiledModule | None:
    """None where there is no file, or its checksum is not that of its content."""
    try:
        checksum, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    header, _, cubin = body.partition(b"\n")
    return CompiledModule(arch=arch, cubin=cubin, seconds=0.0, path=path, **json.loads(header))


def _install_hint() -> str:
    major = (torch.version.cuda or "13").split(".")[0]
    return install_command(f"cuda{major}")


_importing = threading.Lock()  # cuda.core's own import is not safe from two threads at once


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the compiler, or the error that says how to get one."""
    try:
        with _importing:
            import cuda.core  # noqa: F401
            from cuda.bindings import nvrtc

        return _check(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # RuntimeError: cuda-pathfinder's, of a missing library
        hint = _install_hint()
        raise UserError(
            f"the CUDA kernels need a compiler that is not installed: {hint} ({error})"
        ) from error


def compiler_version() -> tuple[int, int]:
    """(major, minor) of NVRTC; UserError with the way to install it where there is none."""
    return _nvrtc_version()


def check_usable(arch: str) -> None:
    """UserError, with the way to mend it, where kernels for `arch` cannot be compiled and loaded: a compiler
    that knows it, its headers or a driver that is new enough is missing."""
    _check_arch(arch)
    _header_folder()
    _driver_for(_nvrtc_version())


def _compiler_identity() -> list:
    """What changes when the compiler or its headers are updated: versions and file sizes."""
    version = _nvrtc_version()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    files = [Path(load_nvidia_dynamic_lib("nvrtc").abs_path), _header_folder() / "cuda_bf16.hpp"]
    return [*version, *(file.stat().st_size for file in files)]


def _header_folder() -> Path:
    """Where `cuda_bf16.h` is: in the wheel of CUDA's runtime (torch's CUDA builds bring it), or a toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None or not (Path(folder) / "cuda_bf16.h").is_file():
        raise UserError(
            f"the CUDA kernels need CUDA's headers (cuda_bf16.h), not installed: {_install_hint()}"
        )
    return Path(folder)


def supported_architectures() -> tuple[str, ...]:
    """Those of ARCHITECTURES that the installed compiler knows."""
    known = _known_numbers()
    return tuple(arch for arch in ARCHITECTURES if _number(arch) in known)


def _known_numbers() -> list[int]:
    _nvrtc_version()
    from cuda.bindings import nvrtc

    return _check(nvrtc.nvrtcGetSupportedArchs())


def _number(arch: str) -> int:
    """90 of sm_90a."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise UserError(f"{arch} is no CUDA architecture: write for example sm_80 or sm_90a")
    return int(match[1])


def _check_arch(arch: str) -> None:
    known = _known_numbers()
    if _number(arch) not in known:
        version, names = ".".join(map(str, _nvrtc_version())), ", ".join(f"sm_{n}" for n in known)
        raise UserError(
            f"the CUDA {version} compiler does not know {arch}, only {names}: {_install_hint()} -U"
        )


def _driver_for(compiler: tuple[int, ...]) -> Any:
    """`cuda.bindings.driver`, once the driver is known to run what the compiler makes."""
    from cuda.bindings import driver

    version = _check(driver.cuDriverGetVersion())
    if version // 1000 < compiler[0]:
        runs = f"{version // 1000}.{version % 1000 // 10}"
        raise UserError(
            f"the NVIDIA driver runs CUDA up to {runs}, the compiler here is CUDA {compiler[0]}: "
            f"update the driver, or {install_command(f'cuda{version // 1000}')} with such a build of torch"
        )
    return driver


def _check(result: tuple) -> Any:
    status, *values = result
    if status:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
