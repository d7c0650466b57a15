"""`lingpt bench`: measures the kernels against the baselines; writes JSON, plots and the table of targets."""

from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from lingpt.bench.kernels import Results, Row

HELP = "Measure linear attention against the baselines: time, memory, correctness, plots."
RENAMED = {"limit": "max_round_seconds"}

TINY = ((2, 128, 2, 32), (2, 512, 2, 32), (2, 512, 2, 64))  # small enough for a CPU


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    add("--only", type=str, default=[], nargs="*", help="training, sweep-n, sweep-d (default: all)")
    names = "implementations to measure, ours and the baselines (default: all; an unknown name lists them)"
    add("--implementations", type=str, default=[], nargs="*", help=names)
    folder = "folder of results.json, targets.md and the plots"
    add("--out", type=str, default="runs/bench/kernels", help=folder)
    add("--append", action="store_true", help="keep the rows in --out and measure those that are missing")
    add("--quick", action="store_true", help="measure fewer shapes")
    add(
        "--budget",
        type=float,
        default=1200.0,
        help="time limit in seconds; what does not fit is recorded as skipped",
    )
    round_seconds = "time limit in seconds for a round of one implementation at one shape"
    add("--max_round_seconds", type=float, default=6.0, help=round_seconds)
    warm = "compile Triton kernels in parallel: first, only (then stop) or skip"
    add("--warm", type=str, default="first", help=warm)
    ncu = "count the bytes moved with NVIDIA's profiler, which must be installed"
    add("--ncu", action="store_true", help=ncu)
    device = "cuda, cuda:1 … or cpu (tiny shapes, implementations in PyTorch)"
    add("--device", type=str, default="cuda", help=device)
    redraw = "measure nothing: plots and table from the results.json in --out"
    add("--redraw", action="store_true", help=redraw)


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plots at the end: fails now if missing)

    from lingpt.bench.kernels import Results, draw, targets_table
    from lingpt.common.errors import UserError
    from lingpt.common.files import write_text

    if args.warm not in ("first", "only", "skip"):
        raise UserError(f"--warm is first, only or skip, not {args.warm!r}")
    out = Path(args.out)
    results = Results.load(out / "results.json") if args.redraw else _measure(args)
    if results is None:
        return
    table = targets_table(results)
    write_text(out / "targets.md", table)
    print(_summary(results), table, sep="\n\n")
    written = [out / "results.json", out / "targets.md", *draw(results, out)]
    print("\n".join(f"wrote {path}" for path in written))


def _measure(args: Namespace) -> "Results | None":
    """The results; None if only compiling the kernels was requested."""
    import torch

    from lingpt.bench.kernels import DEFAULT_IMPLEMENTATIONS, IMPLEMENTATIONS, Shape, run_bench, warm_up
    from lingpt.bench.kernels.traffic import count_bytes

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


def _summary(results: "Results") -> str:
    """One line per row, measured or with the reason why not; one per implementation that cannot run here."""
    from lingpt.bench.kernels import IMPLEMENTATIONS

    device = "cpu" if results.environment["card"].startswith("CPU") else "cuda"
    names = dict.fromkeys(row.implementation for row in results.rows)
    absent = {
        name: reason for name in names if (reason := IMPLEMENTATIONS[name].unsupported_reason(device=device))
    }
    head = f"{'implementation':<18}{'shape':<28}{'fwd ms':>9}{'bwd ms':>9}{'mem U':>7}{'error':>9}"
    lines = [_line(row) for row in results.rows if row.implementation not in absent]
    return "\n".join([head, *lines, *(f"{name:<18}skipped: {reason}" for name, reason in absent.items())])


def _line(row: "Row") -> str:
    def cell(value: float | None, width: int, format: str) -> str:
        return f"{'–' if value is None else f'{value:{format}}':>{width}}"

    worst = max(row.errors.values(), default=None)
    numbers = cell(row.forward_ms, 9, ".3f") + cell(row.backward_ms, 9, ".3f")
    numbers += cell(row.both_memory, 7, ".1f") + cell(worst, 9, ".1e")
    status = row.reason if row.status == "ok" else f"{row.status}: {row.reason}"
    return f"{row.implementation:<18}{row.shape!s:<28}{numbers}  {status}".rstrip()
