"""Documents to token ids, in parallel and in order.

Threads, not processes: `tokenizers` releases the GIL, so a few threads, each encoding a small batch, keep
every core busy without pickling or start-up. The library's own parallelism is off meanwhile: it would wait
for the longest document at the end of every batch. A document is tokenised whole, since cutting a long one
could change its tokens.
"""

import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import numpy as np

from lingpt.common.devices import available_cores
from lingpt.data.corpus import Document
from lingpt.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 17  # large enough for little overhead, small enough to balance the threads


class Encoded(NamedTuple):
    ids: np.ndarray  # the document's tokens, then the one that ends it
    num_bytes: int  # length of its text in UTF-8
    digest: int  # 64 bits of its text's hash, which decide between training and validation
    advance: int  # how far the progress bar moves for it


def token_dtype(vocab_size: int, end_id: int = 0) -> np.dtype:
    """uint16 where every id and `end_id` fits, else int32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 and end_id >= 0 else np.int32)


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, num_workers: int | None = None
) -> Generator[Encoded]:
    """Every document's tokens, in the documents' order, on `num_workers` threads (by default one per core).

    At most three batches per thread are in flight, so memory does not grow with the corpus.
    """
    workers = num_workers or available_cores()
    end_id = tokenizer.end_id
    dtype = token_dtype(tokenizer.vocab_size, end_id)

    def encode(batch: list[Document]) -> list[Encoded]:
        ids = tokenizer.encode_documents([document.text for document in batch])
        return [_encoded(d, i, end_id, dtype) for d, i in zip(batch, ids, strict=True)]

    batches, pending = _batched(documents), deque[Future[list[Encoded]]]()
    with _tokenizers_parallelism_off(), ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                pending.extend(pool.submit(encode, b) for b in islice(batches, 3 * workers - len(pending)))
                if not pending:
                    return
                yield from pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _encoded(document: Document, ids: list[int], end_id: int, dtype: np.dtype) -> Encoded:
    ids.append(end_id)
    tokens = np.fromiter(ids, dtype, len(ids))  # faster than np.array, and it holds the GIL
    text = document.text.encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return Encoded(tokens, len(text), digest, document.advance)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def _tokenizers_parallelism_off() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
