"""`lingpt bench train`: times a training step of each attention; writes JSON, a table and a plot."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

HELP = "Time a whole training step of each attention, beside an identity in its place."
RENAMED = {"tokens": "tokens_per_step"}


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    models = "models (default: pythia-70m to -1.4b at N = 8192, and -160m and -1.4b at all lengths)"
    add("--models", type=str, default=[], nargs="*", help=models)
    lengths = "sequence lengths, for all models (default: 2048 to 131072)"
    add("--seq_lens", type=int, default=[], nargs="*", help=lengths)
    names = "attentions to time (default: all; an unknown name lists them)"
    add("--attentions", type=str, default=[], nargs="*", help=names)
    add("--tokens_per_step", type=int, default=131072, help="tokens per optimiser step, at every length")
    micro = "most tokens of a micro-batch (default: what the memory estimate allows)"
    add("--micro_batch_tokens", type=int | None, help=micro)
    add("--rounds", type=int, default=2, help="how often each attention is timed at a shape")
    add(
        "--budget",
        type=float,
        default=1500.0,
        help="time limit in seconds; what does not fit is recorded as skipped",
    )
    add("--accelerator", type=str, default="auto", help="auto, cpu or cuda")
    folder = "folder of bench.json, bench.md and the plot"
    add("--out", type=str, default="runs/bench/training", help=folder)
    append = "keep the rows of --out, measure those that are missing; ratios are within a session"
    add("--append", action="store_true", help=append)
    redraw = "measure nothing: table and plot from the bench.json in --out"
    add("--redraw", action="store_true", help=redraw)


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plot at the end: fails now if missing)

    from lingpt.bench.step_results import Results, draw, table
    from lingpt.bench.step_targets import targets_table
    from lingpt.bench.steps import bench_steps
    from lingpt.common.errors import UserError
    from lingpt.common.files import write_text

    if args.accelerator not in ("auto", "cpu", "cuda"):
        raise UserError(f"--accelerator is auto, cpu or cuda, not {args.accelerator!r}")
    out = Path(args.out)
    path = out / "bench.json"
    if args.redraw:
        results = Results.load(path)
    else:
        options = ("tokens_per_step", "micro_batch_tokens", "rounds", "budget", "accelerator", "append")
        results = bench_steps(
            args.models, args.seq_lens, args.attentions, save_to=path, **{o: args[o] for o in options}
        )
    text = f"{table(results)}\n{targets_table(results)}"
    write_text(out / "bench.md", text)
    print(text)
    print("\n".join(f"wrote {written}" for written in (path, out / "bench.md", *draw(results, out))))
