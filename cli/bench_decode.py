"""`lingpt bench decode`: measures time per token and size of the state; writes JSON, a table and a plot."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.cli.bench import add_common

HELP = "Time a token of decoding, and weigh the state, of each attention over the context."


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    add("--model", type=str, default="pythia-1.4b", help="the model, with random weights")
    names = "attentions, with options after a + (default: softmax, hybrid, "
    names += "ours-gated+output_gate+short_conv, ours, gla)"
    add("--attentions", type=str, default=[], nargs="*", help=names)
    contexts = "context lengths in tokens (default: 2048, 8192, 32768, 131072)"
    add("--contexts", type=int, default=[], nargs="*", help=contexts)
    add("--batch_sizes", type=int, default=[], nargs="*", help="batch sizes in sequences (default: 1 and 16)")
    kinds = "bfloat16, float16 or float32 (bfloat16 on a GPU that has it, else float32)"
    add("--dtype", type=str | None, help=kinds)
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:1")
    graph = "on a GPU, time replays of a CUDA graph of a step, as `lingpt generate` does; false: eager steps"
    add("--graph", type=bool, default=True, help=graph)
    add_common(parser, budget=150.0, out="runs/bench/decoding")


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plot at the end: fails now if missing)

    from lingpt.bench.decoding import bench_decoding
    from lingpt.bench.decoding_results import DecodeResults
    from lingpt.bench.results import check_numbers

    check_numbers(args, contexts=(4, 1e9), batch_sizes=(1, 1e6), budget=(0, 1e9))
    out = Path(args.out)
    if args.redraw:
        results = DecodeResults.load(out / "decode.json")
    else:
        sizes = ("model", "attentions", "contexts", "batch_sizes")
        options = {name: args[name] for name in (*sizes, "dtype", "device", "graph", "budget", "append")}
        results = bench_decoding(**options, save_to=out / "decode.json")
    results.report(out)
