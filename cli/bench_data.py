"""`lingpt bench data`: measures how fast text becomes a token cache; prints and writes JSON."""

import json
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

HELP = "Time how fast a corpus becomes a token cache, next to a bare call of its tokenizer."


def configure(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    add = parser.add_argument
    add("--source", type=str, default="embedded", help="as in --data.source")
    add(
        "--tokenizer",
        type=str | None,
        help="as in --data.tokenizer (default: trained on the embedded corpus)",
    )
    add("--megabytes", type=float, default=16.0, help="of text to measure on")
    add("--repeats", type=int, default=5, help="how often each is timed; the best counts")
    add("--out", type=str | None, help="JSON file to write")


def run(args: Namespace) -> None:
    from lingpt.bench.data import measure
    from lingpt.bench.results import check_numbers
    from lingpt.common.files import cache_dir, write_json
    from lingpt.data.tokenizer import embedded_tokenizer, load_tokenizer

    check_numbers(args, megabytes=(0.001, 1e6), repeats=(1, 1e6))
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else embedded_tokenizer(2048, cache_dir())
    result = measure(args.source, tokenizer, int(args.megabytes * 1e6), args.repeats)
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(Path(args.out), result, indent=2)
