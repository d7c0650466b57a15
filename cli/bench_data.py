"""`lingpt bench data`: measures how fast text becomes a token cache; prints and writes JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lingpt.common.options import Option


@dataclass
class Options:
    """Time how fast a corpus becomes a token cache, next to a bare call of its tokenizer."""

    # fmt: off
    source: Annotated[str, Option("as in --data.source")] = "embedded"
    tokenizer: Annotated[str | None, Option(
        "as in --data.tokenizer (default: trained on the embedded corpus)")] = None
    megabytes: Annotated[float, Option("of text to measure on", least=0.001, most=10**6)] = 16.0
    repeats: Annotated[int, Option("how often each is timed; the best counts", least=1, most=10**6)] = 5
    out: Annotated[str | None, Option("JSON file to write")] = None
    # fmt: on


def run(options: Options) -> None:
    from lingpt.bench.data import measure
    from lingpt.common.files import cache_dir, write_errors, write_json
    from lingpt.data.tokenizer import embedded_tokenizer, load_tokenizer

    tokenizer = (
        load_tokenizer(options.tokenizer) if options.tokenizer else embedded_tokenizer(2048, cache_dir())
    )
    result = measure(options.source, tokenizer, int(options.megabytes * 1e6), options.repeats)
    print(json.dumps(result, indent=2))
    if options.out:
        with write_errors(out := Path(options.out)):
            write_json(out, result, indent=2)
