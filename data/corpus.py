"""The interface of a source of text, whatever it is read from.

A corpus describes its documents and hashes its content; documents are read when a split is iterated. The
later steps (tokenising, caching, packing) see only this interface.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

TEXT_KEY = "text"  # the field or column that holds the text, by default
TEXT_KEY_OPTION = "--data.text_key (`lingpt eval`: --text_key; texts of a study: text_key)"  # for errors


def hash_of(values: object) -> str:
    """The SHA-256 of the values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Document(NamedTuple):
    text: str  # encodable as UTF-8; an empty one is skipped and counted when it would be tokenised
    advance: int  # how far the progress bar moves for it, in the split's unit


@dataclass(frozen=True)
class Split:
    """Documents in a fixed order; `read` starts again on every call."""

    read: Callable[[], Iterator[Document]]
    total: int  # in `unit`, for the progress bar
    unit: str


@dataclass(frozen=True)
class Corpus:
    """A source: its splits, and what identifies them.

    `content_hash` changes whenever a document of either split may have changed. A source without a validation
    split (`val is None`) has a fraction of its documents held out (`cache.split_by_content`). `rule` says in
    words how it is split; `left_out` names files next to those read that are not read. With `bigram_baseline`
    a run also reports the loss of a bigram model (`ngram.baseline_loss`).
    """

    name: str
    content_hash: str
    train: Split
    val: Split | None
    rule: str
    bigram_baseline: bool = False
    left_out: str = ""
