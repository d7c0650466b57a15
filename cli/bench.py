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
TINY = ((2, 128, 2, 32), (2, 512, 2, 32), (2, 512, 2, 64))  # small enough for a CPU


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
    import matplotlib  # noqa: F401  (needed by the plots at the end: fails now if missing)

    from lingpt.bench.kernels.results import Results

    out = Path(options.out)
    results = Results.load(out / "results.json") if options.redraw else _measure(options)
    if results is not None:
        results.report(out)


def _measure(options: Options) -> "Results | None":
    """The results; None if only compiling the kernels was requested."""
    import torch

    from lingpt.bench.kernels.implementations import DEFAULT_IMPLEMENTATIONS, KERNELS
    from lingpt.bench.kernels.runner import run_bench
    from lingpt.bench.kernels.shapes import QUICK, SWEEPS, Shape
    from lingpt.bench.kernels.traffic import count_bytes
    from lingpt.bench.kernels.warm import warm_up

    cpu, path = options.device == "cpu", Path(options.out) / "results.json"
    if not cpu and options.warm != "skip":
        sweeps = QUICK if options.quick else SWEEPS
        for cell, error in warm_up(options.implementations, options.only, options.dtype, sweeps).items():
            print(f"not compiled: {cell}: {error}")
    if options.warm == "only":
        return None
    results = run_bench(
        options.only,
        options.implementations or (KERNELS if cpu else DEFAULT_IMPLEMENTATIONS),
        quick=options.quick,
        budget=options.budget,
        limit=options.max_round_seconds,
        device=options.device,
        dtype=torch.float32 if cpu else getattr(torch, options.dtype),
        save_to=path,
        append=options.append,
        sweeps={"training": tuple(Shape(*shape) for shape in TINY)} if cpu else None,
    )
    if options.ncu:
        results.bytes_moved |= count_bytes(options.implementations or DEFAULT_IMPLEMENTATIONS)
        results.save(path)
    return results
