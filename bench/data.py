"""`lingpt bench data`: how fast a corpus becomes a token cache, next to a bare `tokenizers.encode_batch`, and
Parquet becomes documents, next to pyarrow; and how many tokens a second training reads from that cache.

Both start from texts in memory: reading and decompressing is timed separately. Ours includes all that the
cache does (ids to arrays, hashes, the split, writing, syncing); the bare call keeps its results in memory.
"""

import functools
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch

from lingpt.common.devices import available_cores
from lingpt.common.errors import UserError
from lingpt.data.batches import BatchSampler, Prefetcher
from lingpt.data.cache import TokenCache, token_cache
from lingpt.data.corpus import Corpus, Document, Split
from lingpt.data.parquet import read_parquet
from lingpt.data.sources import open_corpus
from lingpt.data.tokenizer import Tokenizer


def measure(source: str, tokenizer: Tokenizer, max_bytes: int, repeats: int) -> dict:
    """MB/s of reading, of Parquet, of the bare call and of the cache; ratios to pyarrow and to the call.

    The two alternate and the best of each counts: other load on the machine can only slow them down.
    CPU time (of all threads) is measured too: on a busy machine it is more reliable.
    """
    start = time.perf_counter()
    documents, num_bytes = _first(open_corpus(source), max_bytes)
    reading = time.perf_counter() - start
    texts = [d.text for d in documents]
    corpus = Corpus("bench", "bench", Split(lambda: iter(documents), len(documents), "doc"), None, "")
    bare_parquet, parquet = _parquet(texts, repeats)
    bare, ours, loader = [], [], []
    for _ in range(repeats):
        bare.append(_seconds(lambda: tokenizer.raw.encode_batch(texts)))
        with tempfile.TemporaryDirectory() as folder:
            make = functools.partial(
                token_cache, corpus, tokenizer, Path(folder), val_fraction=0.005, progress=False
            )
            ours.append(_seconds(make))
            loader.append(_loader(make()))  # the finished cache
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
        "parquet_megabytes_per_second": num_bytes / parquet / 1e6,
        "parquet_ratio": bare_parquet / parquet,
        "read_megabytes_per_second": num_bytes / reading / 1e6,
        "encode_batch_megabytes_per_second": num_bytes / bare_wall / 1e6,
        "cache_megabytes_per_second": num_bytes / ours_wall / 1e6,
        "ratio": bare_wall / ours_wall,
        "processor_time_ratio": bare_cpu / ours_cpu,
        "loader_tokens_per_second": max(loader),
        "seconds_wall_and_processor": {"encode_batch": bare, "cache": ours},
    }


def _parquet(texts: list[str], repeats: int) -> tuple[float, float]:
    """Seconds in which pyarrow reads a column of text as Python strings, and we its documents."""
    import pyarrow as pa
    from pyarrow import parquet

    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.parquet"
        parquet.write_table(pa.table({"text": texts}), path)
        for _ in range(repeats):
            bare.append(_seconds(lambda: parquet.read_table(path)["text"].to_pylist())[0])
            ours.append(_seconds(lambda: deque(read_parquet(path, "text"), maxlen=0))[0])
    return min(bare), min(ours)


def _loader(cache: TokenCache) -> float:
    """Tokens a second of the micro-batches of a training run; longer sequences are faster."""
    seq_len, sequences, steps = 256, 64, 1000
    sampler = BatchSampler(cache.blocks("train", seq_len), seed=0, global_batch_size=sequences)
    batches = Prefetcher(sampler, [range(sequences)], torch.device("cpu"))
    seconds, _ = _seconds(lambda: [batches.get(step, 0) for step in range(steps)])
    batches.close()
    return steps * sequences * seq_len / seconds


def _first(corpus: Corpus, max_bytes: int) -> tuple[list[Document], int]:
    """The first documents, two at least, and their bytes."""
    documents, num_bytes = [], 0
    for document in corpus.train.read():
        documents.append(document)
        num_bytes += len(document.text.encode())
        if num_bytes >= max_bytes and len(documents) > 1:
            break
    if len(documents) < 2:
        raise UserError("a cache needs two documents, one of them for validation: give a larger --source")
    return documents, num_bytes


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu
