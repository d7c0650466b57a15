"""`lingpt kernels list|compile|test|release-check`: the CUDA kernels, here and for other cards."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object
from lingpt.common.options import Option

if TYPE_CHECKING:
    from lingpt.kernels.linear_attention.cuda.compile import CompiledModule, KernelSpec

RECORD = "docs/results/kernels/gpu-tests.json"
RUN_THEM = "run `make test-gpu` on a machine with a GPU"


@dataclass
class Options:
    """List, compile and test the CUDA kernels."""

    # fmt: off
    action: Annotated[Literal["list", "compile", "test", "release-check"], Option(
        "list (what there is, cached or not), compile (ahead of time; needs no GPU), test (against float64 "
        "on this GPU), release-check (is the record of the GPU tests that of this source?)", positional=True)]
    arch: Annotated[tuple[str, ...], Option(
        "architectures to list, or to compile for, such as sm_80 sm_90a (default: all; to compile for, this "
        "GPU's if there is one)")] = ()
    record: Annotated[str, Option("the record to compare with, for release-check")] = RECORD
    # fmt: on


def run(options: Options) -> None:
    actions = {"list": _list, "compile": _compile, "test": _test, "release-check": _release_check}
    actions[options.action](options)


def _specs() -> "list[tuple[KernelSpec, str]]":
    """(spec, architecture) of every kernel; UserError if no compiler is installed."""
    from lingpt.kernels.linear_attention.cuda import channel_decay, recurrence, tf32, variants, wide_rows
    from lingpt.kernels.linear_attention.cuda.toolchain import compiler_version

    compiler_version()
    kinds = variants, wide_rows, channel_decay, recurrence, tf32
    return [(spec, arch) for kind in kinds for spec in kind.specs() for arch in spec.architectures]


def _here() -> str | None:
    import torch

    from lingpt.kernels.linear_attention.cuda.toolchain import native_arch

    return native_arch() if torch.cuda.is_available() else None


def _list(options: Options) -> None:
    from lingpt.kernels.linear_attention.cuda.compile import cache_folder
    from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

    here, specs = _here(), _specs()
    listed = _of_archs(specs, options.arch)
    print(f"kernels {source_hash()}, cache {cache_folder()}, this machine: {here or 'no CUDA device'}")
    for spec, arch in listed:
        cached = "cached" if spec.is_cached(arch) else "not compiled"
        build = f"{spec.source} {spec.title or spec.names[0]}"
        print(f"{build:<76} {arch:<8} {cached:<13}{'← this GPU' if arch == here else ''}".rstrip())
    if here and here not in {arch for _, arch in specs}:
        print(f"{here}: {_unlisted()}")


def _of_archs(
    specs: "list[tuple[KernelSpec, str]]", wanted: tuple[str, ...]
) -> "list[tuple[KernelSpec, str]]":
    """Those of the architectures `wanted`, or all; UserError if one has no kernels."""
    known = sorted({arch for _, arch in specs})
    if unknown := [arch for arch in wanted if arch not in known]:
        names = ", ".join(known) or "none"
        raise UserError(f"no kernel for {', '.join(unknown)}: there are kernels for {names}")
    return [(spec, arch) for spec, arch in specs if arch in wanted or not wanted]


def _unlisted() -> str:
    """What happens on this GPU, for whose architecture kernels are not compiled ahead of time."""
    import torch

    from lingpt.kernels.linear_attention.cuda import device_unsupported_reason
    from lingpt.kernels.linear_attention.cuda.variants import HEAD_DIMS

    if reason := device_unsupported_reason(torch.bfloat16, HEAD_DIMS[0], torch.device("cuda")):
        return f"no kernel ({reason}); linear_attention runs its chunkwise PyTorch form here"
    return "its kernels are compiled when they are first called"


def _compile(options: Options) -> None:
    from tqdm import tqdm

    from lingpt.common.devices import available_cores

    specs = _specs()
    cells = _of_archs(specs, options.arch or tuple({arch for _, arch in specs} & {_here()}))
    with ThreadPoolExecutor(available_cores()) as pool:  # the compiler releases the GIL
        compiled = pool.map(lambda cell: cell[0].compile(cell[1]), cells)
        modules = list(tqdm(compiled, total=len(cells), desc="compile", disable=None))
    print(f"{'kernel':<58} {'arch':<8}{'regs':>5}{'stack':>7}{'spills':>8}{'shared':>8}  time")
    for module in modules:
        print("\n".join(_resources(module)))
    if any(used.spills for module in modules for used in module.resources.values()):
        print("registers spill to memory: slow, but correct")


def _resources(module: "CompiledModule") -> list[str]:
    """One line for each kernel of the module, then the compiler's remarks."""
    seconds = f"{module.seconds:.1f} s" if module.seconds else "cached"
    lines = []
    for name, used in module.resources.items():
        figures = f"{used.registers:>5}{used.stack:>7}{used.spills:>8}{used.shared:>8}"
        lines.append(f"{name:<58} {module.arch:<8}{figures}  {seconds}")
    return lines + [f"  {remark}" for remark in module.remarks]


def _test(options: Options) -> None:
    import torch

    from lingpt.bench.kernels.selftest import self_test

    if not torch.cuda.is_available():
        raise UserError(
            "there is no CUDA device here to test the kernels on; `lingpt kernels compile` needs none"
        )
    checks = self_test()
    for check in checks:
        dtype = str(check.dtype).removeprefix("torch.")
        result = check.reason or f"{check.worst:.1e} (limit {check.limit:.0e})"
        verdict = "ok  " if check.passed else "FAIL"
        print(f"{verdict} {check.name:<12} {check.shape!s:<24} {dtype:<9} {result}")
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} passed, {failed} failed on {torch.cuda.get_device_name()}")
    if failed:
        sys.exit(1)


def _release_check(options: Options) -> None:
    if reason := staleness(Path(options.record)):
        print(f"lingpt: {reason}", file=sys.stderr)
        sys.exit(1)
    record = read_json_object(Path(options.record))
    counts = ", ".join(f"{record.get(word, 0)} {word}" for word in ("passed", "skipped"))
    print(f"the record of the GPU tests is that of this source: {counts}")


def staleness(path: Path, current: str | None = None) -> str | None:
    """Why the record at `path` does not match the source with hash `current` (by default the tree's); None if
    it does."""
    from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

    current = current or source_hash()
    try:
        if not path.exists():
            return f"no GPU record at {path}: {RUN_THEM}"
        record = read_json_object(path)
        recorded, passed, failed = (record[key] for key in ("source_hash", "passed", "failed"))
        selected = record.get("selected")
    except (UserError, OSError, KeyError):
        return f"unreadable GPU record {path}: {RUN_THEM}"
    if recorded != current:
        return f"stale GPU record (kernels {recorded}, the tree has {current}): {RUN_THEM}"
    if failed or not passed:
        return f"the GPU record has {passed} tests passed and {failed} failed: fix them and {RUN_THEM}"
    if selected:
        return f"the GPU record is of some tests alone (-k '{selected}'): {RUN_THEM}"
    return None
