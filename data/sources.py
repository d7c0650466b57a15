"""What `--data.source` can name, and the corpus that it names: one of our own, files, or a data set of the
hub or of `save_to_disk`."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lingpt.common.errors import UserError
from lingpt.common.files import expand
from lingpt.common.format import counted
from lingpt.data.answer_rows import ANSWERS
from lingpt.data.corpus import TEXT_KEY, Corpus
from lingpt.data.embedded import embedded_corpus
from lingpt.data.files import files_corpus, find_files, whole_corpus
from lingpt.data.hub import HUB, check_hub_name, hub_corpus, is_saved, saved_corpus
from lingpt.data.tokens import token_dtype
from lingpt.data.wiki40b import wiki40b_corpus


class NamedCorpus(NamedTuple):
    """A corpus that `--data.source` can name."""

    open: Callable[[], Corpus]
    cache_size: Callable[[int], str]  # the size of its token cache, given the bytes of a token
    found: str  # where it is, in words


ON_HUB = "downloaded from the Hugging Face hub where this machine does not have it"
CORPORA = {
    "embedded": NamedCorpus(embedded_corpus, lambda token_bytes: "a few MB", "found in this Python"),
    "wiki40b": NamedCorpus(
        wiki40b_corpus, lambda token_bytes: f"about {2.2 * token_bytes:.0f} GB (English)", ON_HUB
    ),
}
NAMED = (*CORPORA, f"{HUB}owner/name")


def open_corpus(
    source: str, val_source: str | None = None, cache_dir: Path | None = None, text_key: str = TEXT_KEY
) -> Corpus:
    """The corpus that `source` names, validated on `val_source` if given. Raises `UserError`.

    cache_dir: where the hashes of files are remembered, if given.
    """
    if _is_path(source) and (val_source is None or _is_path(val_source)):
        return files_corpus(source, val_source, NAMED, cache_dir, text_key)
    corpus = _open(source, cache_dir, text_key)
    if val_source is None:
        return corpus
    val = validation_corpus(val_source, cache_dir, text_key)
    content_hash = hashlib.sha256(f"{corpus.content_hash} {val.content_hash}".encode()).hexdigest()
    rule = f"held out: {val_source}"
    if corpus.val:
        rule += f"; left alone: the validation split of {corpus.name}"
    return replace(corpus, content_hash=content_hash, val=val.train, rule=rule)


def validation_corpus(source: str, cache_dir: Path | None, text_key: str) -> Corpus:
    """What `source` has to validate on, as the only split: the validation split of a data set that has one,
    else all of it. Raises `UserError`."""
    if _is_path(source):
        return whole_corpus(source, NAMED, cache_dir, text_key)
    corpus = _open(source, cache_dir, text_key)
    if corpus.val is None:
        return corpus
    content_hash = hashlib.sha256(f"{corpus.content_hash} val".encode()).hexdigest()
    return replace(corpus, content_hash=content_hash, train=corpus.val, val=None)


def _is_path(source: str) -> bool:
    """Whether `source` names files, in a folder that is not one of `save_to_disk`."""
    return source not in CORPORA and not source.startswith(HUB) and not is_saved(expand(source))


def _open(source: str, cache_dir: Path | None, text_key: str) -> Corpus:
    if source in CORPORA:
        if text_key == ANSWERS:
            raise UserError(f"{source} has texts, without prompts and answers: leave out --data.rows answers")
        return CORPORA[source].open()
    name = source.removeprefix(HUB)
    if is_saved(expand(name)):
        return saved_corpus(name, text_key, cache_dir)
    if source.startswith(HUB):
        return hub_corpus(name, text_key)
    return files_corpus(source, None, NAMED, cache_dir, text_key)


def find_source(source: str) -> str:
    """Where `source` is, in words, without reading or downloading it. UserError for a missing file."""
    if source in CORPORA:
        return CORPORA[source].found
    if is_saved(expand(source.removeprefix(HUB))):
        return "found, saved by `datasets`"
    if source.startswith(HUB):
        check_hub_name(source.removeprefix(HUB))
        return ON_HUB
    files = find_files(source, NAMED)
    return f"{counted(len(files), 'file')}, {sum(f.stat().st_size for f in files) / 1e6:,.1f} MB, found"


def cache_size(source: str, vocab_size: int) -> str:
    """The size of the token cache of `source`, in words, as far as it is known before reading."""
    token_bytes = token_dtype(vocab_size).itemsize
    known = CORPORA.get(source)
    return known.cache_size(token_bytes) if known else f"{token_bytes} bytes a token of the corpus"
