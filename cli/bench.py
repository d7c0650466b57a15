"""`lingpt bench`: measures the kernels against the baselines; writes JSON, a table and plots."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lingpt.common.options import Option

if TYPE_CHECKING:
    from lingpt.bench.kernels.results import Results
    from lingpt.bench.results import BenchResults


BUDGET = Option("time limit in seconds; what does not fit is recorded as skipped", least=0)
OUT = Option("folder of the JSON file, the table and the plots")


@dataclass(kw_only=True)
class RowOptions:
    """Options of each benchmark that has rows."""

    # fmt: off
    budget: Annotated[float, BUDGET]
    out: Annotated[str, OUT]
    append: Annotated[bool, Option(
        "keep the rows in --out and measure those that are missing; ratios are within a session")] = False
    redraw: Annotated[bool, Option("measure nothing: table and plots from the JSON file in --out")] = False
    # fmt: on


@dataclass(kw_only=True)
class Options(RowOptions):
    """Measure linear attention against the baselines: time, memory, correctness, plots."""

    # fmt: off
    only: Annotated[tuple[str, ...], Option(
        "training, sweep-n, sweep-d, table-1, batch-32, gla-layer, fla-shapes (default: all)")] = ()
    implementations: Annotated[tuple[str, ...], Option(
        "implementations to measure, ours and the baselines (default: all; an unknown name lists them)")] = ()
    quick: Annotated[bool, Option("measure fewer shapes")] = False
    max_round_seconds: Annotated[float, Option(
        "time limit in seconds for a round of one implementation at one shape", above=0)] = 6.0
    warm: Annotated[Literal["first", "only", "skip"], Option(
        "compile Triton kernels in parallel: first, only (then stop) or skip")] = "first"
    ncu: Annotated[bool, Option(
        "count the bytes moved with NVIDIA's profiler, which must be installed")] = False
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Option(
        "of the inputs; on a CPU it is float32")] = "bfloat16"
    device: Annotated[str, Option("cuda, cuda:1 … or cpu (tiny shapes, implementations in PyTorch)")] = "cuda"
    budget: Annotated[float, BUDGET] = 1200.0
    out: Annotated[str, OUT] = "runs/bench/kernels"
    # fmt: on


def measure_or_redraw(
    options: RowOptions, kind: "type[BenchResults]", bench: "Callable[..., BenchResults]"
) -> None:
    """Calls `bench` with the options, or with --redraw reads its results; writes table and plots."""
    import matplotlib  # noqa: F401  (needed by the plots at the end: fails now if missing)

    out = Path(options.out)
    path = out / f"{kind.NAME}.json"
    given = {name: value for name, value in vars(options).items() if name not in ("out", "redraw")}
    results = kind.load(path) if options.redraw else bench(**given, save_to=path)
    results.report(out)


def run(options: Options) -> None:
    from lingpt.bench.kernels.results import Results

    if options.redraw or options.warm != "only":
        measure_or_redraw(options, Results, lambda save_to, **_: _measure(options, save_to))
    elif options.device != "cpu":
        _warm(options)


def _warm(options: Options) -> None:
    from lingpt.bench.kernels.shapes import QUICK, SWEEPS
    from lingpt.bench.kernels.warm import warm_up

    sweeps = QUICK if options.quick else SWEEPS
    for cell, error in warm_up(options.implementations, options.only, options.dtype, sweeps).items():
        print(f"not compiled: {cell}: {error}")


def _measure(options: Options, save_to: Path) -> "Results":
    import torch

    from lingpt.bench.kernels.implementations import KERNELS
    from lingpt.bench.kernels.runner import run_bench
    from lingpt.bench.kernels.shapes import TINY
    from lingpt.bench.kernels.traffic import count_bytes

    cpu = options.device == "cpu"
    if options.warm == "first" and not cpu:
        _warm(options)
    # First, as `ncu` may be missing or not permitted.
    counted = count_bytes(options.implementations, options.dtype) if options.ncu else {}
    results = run_bench(
        options.only,
        options.implementations or (KERNELS if cpu else ()),
        quick=options.quick,
        budget=options.budget,
        limit=options.max_round_seconds,
        device=options.device,
        dtype=torch.float32 if cpu else getattr(torch, options.dtype),
        save_to=save_to,
        append=options.append,
        sweeps=TINY if cpu else None,
    )
    if counted:
        results.bytes_moved |= counted
        results.save(save_to)
    return results
