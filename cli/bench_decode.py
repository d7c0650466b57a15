"""`lingpt bench decode`: measures time per token and size of the state; writes JSON, a table and a plot."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

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
    add(
        "--budget",
        type=float,
        default=150.0,
        help="time limit in seconds; what does not fit is recorded as skipped",
    )
    folder = "folder of decode.json, decode.md and the plot"
    add("--out", type=str, default="runs/bench/decoding", help=folder)
    add("--append", action="store_true", help="keep the rows in --out and measure those that are missing")
    redraw = "measure nothing: table and plot from the decode.json in --out"
    add("--redraw", action="store_true", help=redraw)


def run(args: Namespace) -> None:
    import matplotlib  # noqa: F401  (needed by the plot at the end: fails now if missing)

    from lingpt.bench.decoding import bench_decoding
    from lingpt.bench.decoding_results import DecodeResults, draw, table
    from lingpt.common.files import write_text

    out = Path(args.out)
    path = out / "decode.json"
    if args.redraw:
        results = DecodeResults.load(path)
    else:
        sizes = ("model", "attentions", "contexts", "batch_sizes")
        names = (*sizes, "dtype", "device", "graph", "budget", "append")
        results = bench_decoding(save_to=path, **{name: args[name] for name in names})
    text = table(results)
    write_text(out / "decode.md", text)
    print(text)
    print("\n".join(f"wrote {written}" for written in (path, out / "decode.md", *draw(results, out))))
