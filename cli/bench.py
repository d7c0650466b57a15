"""`lingpt bench`: measures the kernels against the baselines; writes JSON, a table and plots."""

from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from lingpt.bench.kernels.results import Results

HELP = "Measure linear attention against the baselines: time, memory, correctness, plots."
RENAMED = {"limit": "max_round_seconds"}

TINY = ((2, 128, 2, 32), (2, 512, 2, 32), (2, 512, 2, 64))  # small enough for a CPU


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    add("--only", type=str, default=[], nargs="*", help="training, sweep-n, sweep-d (default: all)")
    names = "implementations to measure, ours and the baselines (default: all; an unknown name lists them)"
    add("--implementations", type=str, default=[], nargs="*", help=names)
    add("--quick", action="store_true", help="measure fewer shapes")
    round_seconds = "time limit in seconds for a round of one implementation at one shape"
    add("--max_round_seconds", type=float, default=6.0, help=round_seconds)
    warm = "compile Triton kernels in parallel: first, only (then stop) or skip"
    add("--warm", type=str, default="first", help=warm)
    ncu = "count the bytes moved with NVIDIA's profiler, which must be installed"
    add("--ncu", action="store_true", help=ncu)
    device = "cuda, cuda:1 … or cpu (tiny shapes, implementations in PyTorch)"
    add("--device", type=str, default="cuda", help=device)
    add_common(parser, budget=1200.0, out="runs/bench/kernels")


def add_common(parser: ArgumentParser, budget: float, out: str) -> None:
    """Options of each benchmark that has rows."""
    add = parser.add_argument
    limit = "time limit in seconds; what does not fit is recorded as skipped"
    add("--budget", type=float, default=budget, help=limit)
    add("--out", type=str, default=out, help="folder of the JSON file, the table and the plots")
    append = "keep the rows in --out and measure those that are missing; ratios are within a session"
    add("--append", action="store_true", help=append)
    redraw = "measure nothing: table and plots from the JSON file in --out"
    add("--redraw", action="store_true", help=redraw)


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plots at the end: fails now if missing)

    from lingpt.bench.kernels.results import Results
    from lingpt.bench.results import check_numbers
    from lingpt.common.errors import UserError

    if args.warm not in ("first", "only", "skip"):
        raise UserError(f"--warm is first, only or skip, not {args.warm!r}")
    check_numbers(args, budget=(0, 1e9), max_round_seconds=(0, 1e9))
    out = Path(args.out)
    results = Results.load(out / "results.json") if args.redraw else _measure(args)
    if results is not None:
        results.report(out)


def _measure(args: Namespace) -> "Results | None":
    """The results; None if only compiling the kernels was requested."""
    import torch

    from lingpt.bench.kernels.implementations import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS
    from lingpt.bench.kernels.runner import run_bench
    from lingpt.bench.kernels.shapes import Shape
    from lingpt.bench.kernels.traffic import count_bytes
    from lingpt.bench.kernels.warm import warm_up

    cpu, path = args.device == "cpu", Path(args.out) / "results.json"
    if not cpu and args.warm != "skip":
        for cell, error in warm_up(args.implementations, args.only).items():
            print(f"not compiled: {cell}: {error}")
    if args.warm == "only":
        return None
    results = run_bench(
        args.only,
        args.implementations or (IMPLEMENTATIONS if cpu else DEFAULT_IMPLEMENTATIONS),
        quick=args.quick,
        budget=args.budget,
        limit=args.max_round_seconds,
        device=args.device,
        dtype=torch.float32 if cpu else torch.bfloat16,
        save_to=path,
        append=args.append,
        sweeps={"training": tuple(Shape(*shape) for shape in TINY)} if cpu else None,
    )
    if args.ncu:
        results.bytes_moved |= count_bytes(args.implementations or DEFAULT_IMPLEMENTATIONS)
        results.save(path)
    return results
