"""Measures how fast a corpus becomes a token cache, next to a bare `tokenizers.encode_batch` of its texts.

    python -m lingpt.bench.data --source 'wiki/*.jsonl.xz' --tokenizer tokenizer.json --out bench.json

Both start from texts in memory: reading and decompressing is timed separately. Ours includes all that the
cache does (ids to arrays, hashes, the split, writing, syncing); the bare call keeps its results in memory.
"""

import argparse
import functools
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from lingpt.common.files import cache_dir, write_json
from lingpt.data.cache import token_cache
from lingpt.data.corpus import Corpus, Document, Split
from lingpt.data.dataset import open_corpus
from lingpt.data.tokenizer import Tokenizer, embedded_tokenizer, load_tokenizer
from lingpt.data.tokens import available_cores


def main(argv: Sequence[str] | None = None) -> dict:
    """Measures, prints, writes JSON where `--out` says, and returns what it wrote."""
    parser = argparse.ArgumentParser(prog="lingpt.bench.data", description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="embedded", help="as in --data.source")
    parser.add_argument("--tokenizer", help="as in --data.tokenizer")
    parser.add_argument("--megabytes", type=float, default=16, help="of text to measure on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else embedded_tokenizer(2048, cache_dir())
    result = measure(args.source, tokenizer, int(args.megabytes * 1e6), args.repeats)
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result, indent=2)
    return result


def measure(source: str, tokenizer: Tokenizer, max_bytes: int, repeats: int) -> dict:
    """MB/s of reading, of the bare call and of the cache, and the ratio of the latter two.

    The two alternate and the best of each counts: other load on the machine can only slow them down.
    CPU time (of all threads) is measured too: on a busy machine it is more reliable.
    """
    start = time.perf_counter()
    documents, num_bytes = _first(open_corpus(source), max_bytes)
    reading = time.perf_counter() - start
    texts = [d.text for d in documents]
    corpus = Corpus("bench", "bench", Split(lambda: iter(documents), len(documents), "doc"), None, "")
    bare, ours = [], []
    for _ in range(repeats):
        bare.append(_seconds(lambda: tokenizer.raw.encode_batch(texts)))
        with tempfile.TemporaryDirectory() as folder:
            make = functools.partial(token_cache, corpus, tokenizer, Path(folder), val_fraction=0.005)
            ours.append(_seconds(functools.partial(make, progress=False)))
    (bare_wall, bare_cpu), (ours_wall, ours_cpu) = (
        map(min, zip(*times, strict=True)) for times in (bare, ours)
    )
    return {
        "source": source,
        "tokenizer": tokenizer.name,
        "megabytes": num_bytes / 1e6,
        "documents": len(documents),
        "cores": available_cores(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "read_megabytes_per_second": num_bytes / reading / 1e6,
        "encode_batch_megabytes_per_second": num_bytes / bare_wall / 1e6,
        "cache_megabytes_per_second": num_bytes / ours_wall / 1e6,
        "ratio": bare_wall / ours_wall,
        "processor_time_ratio": bare_cpu / ours_cpu,
        "seconds_wall_and_processor": {"encode_batch": bare, "cache": ours},
    }


def _first(corpus: Corpus, max_bytes: int) -> tuple[list[Document], int]:
    documents, num_bytes = [], 0
    for document in corpus.train.read():
        documents.append(document)
        num_bytes += len(document.text.encode())
        if num_bytes >= max_bytes:
            break
    return documents, num_bytes


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
