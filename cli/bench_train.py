"""`lingpt bench train`: times a training step of each attention; writes JSON, a table and a plot."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.cli.bench import add_common

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
    add("--accelerator", type=str, default="auto", help="auto, cpu or cuda")
    add_common(parser, budget=1500.0, out="runs/bench/training")


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plot at the end: fails now if missing)

    from lingpt.bench.results import check_numbers
    from lingpt.bench.step_results import Results
    from lingpt.bench.steps import bench_steps
    from lingpt.common.errors import UserError

    if args.accelerator not in ("auto", "cpu", "cuda"):
        raise UserError(f"--accelerator is auto, cpu or cuda, not {args.accelerator!r}")
    tokens = (1, 1e9)
    check_numbers(args, seq_lens=tokens, tokens_per_step=tokens, micro_batch_tokens=tokens)
    check_numbers(args, rounds=(1, 1e6), budget=(0, 1e9))
    out = Path(args.out)
    if args.redraw:
        results = Results.load(out / "bench.json")
    else:
        names = ("models", "seq_lens", "attentions", "tokens_per_step", "micro_batch_tokens", "rounds")
        options = {name: args[name] for name in (*names, "budget", "accelerator", "append")}
        results = bench_steps(**options, save_to=out / "bench.json")
    results.report(out)
