"""`lingpt bench`: measures the kernels against their peers; writes JSON, plots and the table of targets."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

HELP = "Measure linear attention against its peers: time, memory, correctness, plots."

TINY = ((2, 128, 2, 32), (2, 512, 2, 32), (2, 512, 2, 64))  # what a CPU can do


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    add("--only", type=str, default=[], nargs="*", help="training, sweep-n, sweep-d (default: all)")
    add(
        "--peers",
        type=str,
        default=[],
        nargs="*",
        help="names (default: all; an unknown name lists them)",
    )
    add(
        "--out",
        type=str,
        default="docs/results/kernels",
        help="folder of results.json, bars.md and the plots",
    )
    add("--append", action="store_true", help="keep the rows of --out, measure what lacks")
    add("--quick", action="store_true", help="fewer shapes")
    add("--budget", type=float, default=1200.0, help="seconds; what does not fit is recorded as skipped")
    add("--limit", type=float, default=6.0, help="most seconds for a round of one peer at one shape")
    add("--warm", type=str, default="first", help="compile peers in parallel: first, only (and stop) or skip")
    add(
        "--ncu",
        action="store_true",
        help="count the bytes moved with NVIDIA's profiler, which must be installed",
    )
    add("--device", type=str, default="cuda", help="cuda, cuda:1 … or cpu (tiny shapes, PyTorch's peers)")
    add(
        "--redraw",
        action="store_true",
        help="measure nothing: plots and table from the results.json in --out",
    )


def run(args: Namespace) -> None:
    from lingpt.common.errors import UserError
    from lingpt.kernels.bench import Results, bars_table, draw

    if args.warm not in ("first", "only", "skip"):
        raise UserError(f"--warm is first, only or skip, not {args.warm!r}")
    out = Path(args.out)
    results = Results.load(out / "results.json") if args.redraw else _measure(args)
    if results is None:
        return
    table = bars_table(results)
    (out / "bars.md").write_text(table)
    print(_summary(results), table, sep="\n\n")
    print("\n".join(f"wrote {path}" for path in [out / "results.json", out / "bars.md", *draw(results, out)]))


def _measure(args: Namespace):
    """Results, or None if only the peers' compiling was asked for."""
    import torch

    from lingpt.kernels.bench import DEFAULT_PEERS, PEERS, Shape, run_bench, warm_up
    from lingpt.kernels.bench.traffic import count_bytes

    cpu, path = args.device == "cpu", Path(args.out) / "results.json"
    if not cpu and args.warm != "skip":
        for cell, error in warm_up(args.peers, args.only).items():
            print(f"not compiled: {cell}: {error}")
        if args.warm == "only":
            return None
    results = run_bench(
        args.only,
        args.peers or (PEERS if cpu else DEFAULT_PEERS),
        quick=args.quick,
        budget=args.budget,
        limit=args.limit,
        device=args.device,
        dtype=torch.float32 if cpu else torch.bfloat16,
        save_to=path,
        append=args.append,
        sweeps={"training": tuple(Shape(*shape) for shape in TINY)} if cpu else None,
    )
    if args.ncu:
        results.bytes_moved |= count_bytes(args.peers or DEFAULT_PEERS)
        results.save(path)
    return results


def _summary(results) -> str:
    """A line a row: what was measured, or why not; peers that cannot run here come in one line each."""
    from lingpt.kernels.bench import PEERS

    device = "cpu" if results.environment["card"].startswith("CPU") else "cuda"
    names = dict.fromkeys(row.peer for row in results.rows)
    absent = {name: reason for name in names if (reason := PEERS[name].available(device=device))}
    lines = [f"{'peer':<18}{'shape':<28}{'fwd ms':>9}{'bwd ms':>9}{'mem U':>7}{'error':>9}  "]
    for row in results.rows:
        if row.peer in absent:
            continue
        times = "".join(
            f"{ms:9.3f}" if ms is not None else f"{'–':>9}" for ms in (row.forward_ms, row.backward_ms)
        )
        memory = f"{row.both_memory:7.1f}" if row.both_memory is not None else f"{'–':>7}"
        error = f"{max(row.errors.values()):9.1e}" if row.errors else f"{'–':>9}"
        status = "" if row.status == "ok" else f"{row.status}: {row.reason}"
        lines.append(f"{row.peer:<18}{row.shape!s:<28}{times}{memory}{error}  {status}".rstrip())
    return "\n".join(lines + [f"{name:<18}skipped: {reason}" for name, reason in absent.items()])
