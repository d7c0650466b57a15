"""From a configuration to blocks of tokens: the interface of this folder for training and evaluation."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from lingpt.common.errors import UserError
from lingpt.common.files import cache_dir, write_errors
from lingpt.common.options import RARE, Option, check_options
from lingpt.data.cache import WRITE_ADVICE, TokenCache, token_cache
from lingpt.data.corpus import TEXT_KEY, Corpus
from lingpt.data.embedded import embedded_corpus
from lingpt.data.files import files_corpus, find_files, whole_corpus
from lingpt.data.hub import HUB, hub_corpus, is_saved, saved_corpus
from lingpt.data.paths import expand
from lingpt.data.stream import PackedDataset
from lingpt.data.tokenizer import Tokenizer, embedded_tokenizer, find_tokenizer, load_tokenizer
from lingpt.data.tokens import token_dtype
from lingpt.data.wiki40b import wiki40b_corpus


@dataclass
class DataConfig:
    """What to train on."""

    # fmt: off
    source: Annotated[str, Option(
        "embedded (source of Python's standard library; no network), wiki40b (English, from the Hugging Face "
        "hub), hf:owner/name[:config[:split]] (any data set of the hub), a folder saved by `save_to_disk` of "
        "`datasets`, or the path, folder or glob of JSONL (.jsonl, .gz, .xz, .zst), Parquet or text files "
        "(.txt, each one document)")] = "embedded"
    tokenizer: Annotated[str | None, Option(
        "a tokenizer.json, a folder that holds one, or a name on the hub; by default a small BPE trained on "
        "the embedded corpus")] = None
    seq_len: Annotated[int, Option("tokens of a training sample", least=1, most=1 << 24)] = 256
    packing: Annotated[Literal["blocks", "documents"], Option(
        "how text fills samples: `blocks` cuts the stream of all documents; `documents` packs whole ones (a "
        "longer one is cut), and no token sees another document")] = "blocks"
    val_source: Annotated[str | None, Option(
        "what to validate on, named as source is: the validation split of a data set that has one, else all "
        "of it; by default the source's own validation split if it has one, else the documents whose hash "
        "lies in the lowest val_fraction")] = None
    text_key: Annotated[str, Option(
        "the field of JSONL, or the column of Parquet and of data sets, that holds the text; `a.b` is b in a"
    )] = TEXT_KEY
    val_fraction: Annotated[float, Option(
        "share of the documents held out where the source has no validation split, at least one",
        above=0, below=1, heading=RARE)] = 0.005
    vocab_size: Annotated[int, Option(
        "tokens of the embedded corpus's BPE: every byte, the end of a text, and what is learned",
        least=257, most=1 << 20)] = 2048
    num_workers: Annotated[int | None, Option(
        "threads that tokenise; by default one per core", least=1, most=1024, may_change=True)] = None
    cache_dir: Annotated[str | None, Option(
        "where tokens are cached, and hashes of the source's files (by path, size and time of change); by "
        "default $LINGPT_CACHE, else ~/.cache/lingpt", may_change=True)] = None
    # fmt: on


@dataclass(frozen=True)
class Dataset:
    """Blocks of tokens to train and to validate on, and the tokenizer that made them.

    `fingerprint` identifies every token of every block: datasets with the same one give the same training.
    """

    train: PackedDataset
    val: PackedDataset
    tokenizer: Tokenizer
    fingerprint: str
    corpus: Corpus
    cache: TokenCache

    def describe(self) -> dict:
        """The run's record of its data: source, split, hashes; documents, tokens, bytes, blocks per split."""
        splits = {
            name: {**self.cache.manifest[name], "blocks": len(blocks)}
            for name, blocks in (("train", self.train), ("val", self.val))
        }
        return {
            **self.cache.manifest,
            "source": self.corpus.name,  # the manifest names the source that wrote this entry first
            "split": self.corpus.rule,
            **splits,
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.train.seq_len,
            "fingerprint": self.fingerprint,
            "cache": str(self.cache.folder),
        }

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per validation token: bits per byte are nats per token / (this · ln 2)."""
        return self.cache.manifest["val"]["bytes"] / self.cache.manifest["val"]["tokens"]


def prepare(config: DataConfig, *, padded_vocab_size: int | None = None, progress: bool = True) -> Dataset:
    """The dataset of `config`, tokenised now or read from the cache.

    Args:
        padded_vocab_size: rows of the model's embedding; a tokenizer that needs more is refused at once
        progress: show a progress bar if stderr is a terminal

    Raises:
        UserError: one line that says what is wrong and how to fix it
    """
    check_options(config, "data.")
    folder = _cache_folder(config)
    tokenizer = _tokenizer(config)
    if padded_vocab_size is not None:
        tokenizer.check_fits(padded_vocab_size)
    corpus = open_corpus(config.source, config.val_source, folder, config.text_key)
    cache = token_cache(
        corpus,
        tokenizer,
        folder,
        val_fraction=config.val_fraction,
        num_workers=config.num_workers,
        progress=progress,
    )
    end, decides = None, [cache.folder.name, config.seq_len]
    if config.packing == "documents":
        end, decides = tokenizer.eos_id, [*decides, config.packing]
    train, val = (_blocks(corpus.name, cache, split, config.seq_len, end) for split in ("train", "val"))
    fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    return Dataset(train, val, tokenizer, fingerprint[:16], corpus, cache)


def content_hashes(config: DataConfig) -> dict[str, str]:
    """`content_hash` and `tokenizer_hash`, as in a run's record, of what is at `config`'s paths now, without
    tokenising. Raises UserError."""
    corpus = open_corpus(config.source, config.val_source, _cache_folder(config), config.text_key)
    return {"content_hash": corpus.content_hash, "tokenizer_hash": _tokenizer(config).hash}


def _cache_folder(config: DataConfig) -> Path:
    return expand(config.cache_dir) if config.cache_dir else cache_dir()


def _tokenizer(config: DataConfig) -> Tokenizer:
    if config.tokenizer:
        return load_tokenizer(config.tokenizer)
    folder = _cache_folder(config)
    with write_errors(folder, WRITE_ADVICE):
        return embedded_tokenizer(config.vocab_size, folder)


class NamedCorpus(NamedTuple):
    """A corpus that `--data.source` can name."""

    open: Callable[[], Corpus]
    cache_size: Callable[[int], str]  # the size of its token cache, given the bytes of a token
    found: str  # where it is, in words


ON_HUB = "downloaded from the Hugging Face hub where this machine does not have it"
CORPORA = {
    "embedded": NamedCorpus(embedded_corpus, lambda token_bytes: "a few MB", "found in this Python"),
    "wiki40b": NamedCorpus(
        wiki40b_corpus,
        lambda token_bytes: f"about {2.2 * token_bytes:.0f} GB (English)",
        ON_HUB,
    ),
}
NAMED = (*CORPORA, f"{HUB}owner/name")


def vocab_size(config: DataConfig) -> int:
    """The vocabulary of the tokenizer of `config`; UserError if there is no such tokenizer."""
    return load_tokenizer(config.tokenizer).vocab_size if config.tokenizer else config.vocab_size


def open_corpus(
    source: str,
    val_source: str | None = None,
    cache_dir: Path | None = None,
    text_key: str = TEXT_KEY,
) -> Corpus:
    """The corpus that `source` names, validated on `val_source` if given. Raises `UserError`.

    cache_dir: where the hashes of files are remembered, if given.
    """
    if is_path(source) and (val_source is None or is_path(val_source)):
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


def validation_corpus(source: str, cache_dir: Path | None = None, text_key: str = TEXT_KEY) -> Corpus:
    """What `source` has to validate on, as the only split: the validation split of a data set that has one,
    else all of it. Raises `UserError`."""
    if is_path(source):
        return whole_corpus(source, NAMED, cache_dir, text_key)
    corpus = _open(source, cache_dir, text_key)
    if corpus.val is None:
        return corpus
    content_hash = hashlib.sha256(f"{corpus.content_hash} val".encode()).hexdigest()
    return replace(corpus, content_hash=content_hash, train=corpus.val, val=None)


def is_path(source: str) -> bool:
    """Whether `source` names files, in a folder that is not one of `save_to_disk`."""
    return source not in CORPORA and not source.startswith(HUB) and not is_saved(expand(source))


def _open(source: str, cache_dir: Path | None, text_key: str) -> Corpus:
    if source in CORPORA:
        return CORPORA[source].open()
    name = source.removeprefix(HUB)
    if is_saved(expand(name)):
        return saved_corpus(name, text_key, cache_dir)
    if source.startswith(HUB):
        return hub_corpus(name, text_key)
    return files_corpus(source, None, NAMED, cache_dir, text_key)


def find_data(config: DataConfig) -> str:
    """Where the data of `config` is, in words, without reading or downloading it. UserError if a file is
    missing."""
    if config.val_source:
        _find(config.val_source)
    if config.tokenizer:
        find_tokenizer(config.tokenizer)
    return _find(config.source)


def _find(source: str) -> str:
    if source in CORPORA:
        return CORPORA[source].found
    if is_saved(expand(source.removeprefix(HUB))):
        return "found, saved by `datasets`"
    if source.startswith(HUB):
        return ON_HUB
    files = find_files(source, NAMED)
    return f"{len(files)} file(s), {sum(f.stat().st_size for f in files) / 1e6:,.1f} MB, found"


def availability(config: DataConfig) -> str:
    """`find_data` for a plan: says what is missing instead of raising."""
    try:
        return find_data(config)
    except (UserError, OSError) as error:
        return f"NOT FOUND: {error}"


def cache_size(source: str, vocab_size: int) -> str:
    """The size of the token cache of `source`, in words, as far as it is known before reading."""
    token_bytes = token_dtype(vocab_size).itemsize
    known = CORPORA.get(source)
    return known.cache_size(token_bytes) if known else f"{token_bytes} bytes a token of the corpus"


def _blocks(source: str, cache: TokenCache, split: str, seq_len: int, end: int | None) -> PackedDataset:
    blocks = cache.blocks(split, seq_len, end)
    if not len(blocks):
        more = "give more text" if split == "train" else "raise --data.val_fraction, give --data.val_source"
        raise UserError(
            f"the {split} split of {source} has {blocks.stream_length} tokens, too few for "
            f"one block of seq_len + 1 = {seq_len + 1}: {more}, or lower --data.seq_len"
        )
    return blocks
