"""Finds what compiling and loading needs on the machine: NVRTC, CUDA's headers, the driver, an architecture.

A missing part raises a UserError that says how to install or update it.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.install import install_command

# A100; A6000 and A10; L40 and RTX 4090; H100 and H200; B200; RTX 5090 and RTX PRO 6000
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")

_importing = threading.Lock()  # its import is not safe from two threads at once


@functools.cache
def card(device: torch.device) -> tuple[str, int]:
    """The card's architecture and number of multiprocessors."""
    return native_arch(device), torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def compiler_version() -> tuple[int, int]:
    """(major, minor) of NVRTC; UserError that says how to install it if it is missing."""
    try:
        with _importing:
            from cuda.bindings import nvrtc

        return check_status(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # RuntimeError: cuda-pathfinder's, of a missing library
        hint = _install_hint()
        raise UserError(
            f"the CUDA kernels need a compiler that is not installed: {hint} ({error})"
        ) from error


def check_usable(arch: str) -> None:
    """Raises UserError, with the fix, if kernels for `arch` cannot be compiled and loaded: there is no
    compiler that knows it, no headers, or no driver that is new enough."""
    check_arch(arch)
    header_folder()
    driver_for(compiler_version())


def unusable_reason(device: torch.device) -> str | None:
    """Why no kernels run on this card; None if they do."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere card (compute capability 8.0) or a newer one"
    try:
        check_usable(native_arch(device))
    except UserError as error:
        return str(error)
    return None


def native_arch(device: int | torch.device | None = None) -> str:
    """The architecture of a CUDA device, with the suffix that unlocks wgmma and TMA on Hopper: "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def supported_architectures() -> tuple[str, ...]:
    """The ARCHITECTURES that the installed compiler knows."""
    known = _known_architectures()
    return tuple(arch for arch in ARCHITECTURES if arch.rstrip("af") in known)


def check_arch(arch: str) -> None:
    """Raises UserError if the compiler does not know `arch`."""
    if arch.rstrip("af") not in (known := _known_architectures()):
        version = ".".join(map(str, compiler_version()))
        raise UserError(
            f"the CUDA {version} compiler does not know {arch}, only {', '.join(known)}: {_install_hint()} -U"
        )


def _known_architectures() -> list[str]:
    compiler_version()
    from cuda.bindings import nvrtc

    return [f"sm_{number}" for number in check_status(nvrtc.nvrtcGetSupportedArchs())]


def compiler_identity() -> list:
    """Versions and file sizes, which change when the compiler or its headers are updated."""
    version = compiler_version()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    files = [Path(load_nvidia_dynamic_lib("nvrtc").abs_path), header_folder() / "cuda_bf16.hpp"]
    return [*version, *(file.stat().st_size for file in files)]


def header_folder() -> Path:
    """The folder of `cuda_bf16.h`: in the wheel of CUDA's runtime (torch's CUDA builds bring it) or a
    toolkit; UserError if it is missing."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None or not (Path(folder) / "cuda_bf16.h").is_file():
        raise UserError(
            f"the CUDA kernels need CUDA's headers (cuda_bf16.h), not installed: {_install_hint()}"
        )
    return Path(folder)


def driver_for(compiler: tuple[int, ...]) -> Any:
    """`cuda.bindings.driver`; UserError if the driver cannot run the compiler's output."""
    from cuda.bindings import driver

    version = check_status(driver.cuDriverGetVersion())
    if version // 1000 < compiler[0]:
        runs = f"{version // 1000}.{version % 1000 // 10}"
        raise UserError(
            f"the NVIDIA driver runs CUDA up to {runs}, the compiler here is CUDA {compiler[0]}: "
            f"update the driver, or {install_command(f'cuda{version // 1000}')} with such a build of torch"
        )
    return driver


def _install_hint() -> str:
    major = (torch.version.cuda or "13").split(".")[0]
    return install_command(f"cuda{major}")


def check_status(result: tuple) -> Any:
    """The results of a `cuda.bindings` call; RuntimeError if its status is an error."""
    status, *values = result
    if status:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
