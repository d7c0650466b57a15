"""From a configuration to blocks of tokens: the interface of this folder for training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from lingpt.common.errors import UserError
from lingpt.common.files import cache_dir, expand, write_errors
from lingpt.common.options import RARE, Option, check_options
from lingpt.data.answer_rows import ANSWERS
from lingpt.data.answers import AnswerTokenizer
from lingpt.data.cache import WRITE_ADVICE, TokenCache, entry_folder, token_cache
from lingpt.data.corpus import TEXT_KEY, Corpus, hash_of
from lingpt.data.growing import GrowingDataset
from lingpt.data.mixture import Mixture, parse_mixture
from lingpt.data.sources import find_source, open_corpus, validation_corpus
from lingpt.data.stream import PackedDataset
from lingpt.data.tokenizer import Tokenizer, embedded_tokenizer, find_tokenizer, load_tokenizer


@dataclass
class DataConfig:
    """What to train on."""

    # fmt: off
    source: Annotated[str, Option(
        "embedded (source of Python's standard library; no network), wiki40b (English, from the Hugging Face "
        "hub), hf:owner/name[:config[:split]] (any data set of the hub), a folder saved by `save_to_disk` of "
        "`datasets`, or the path, folder or glob of JSONL (.jsonl, .gz, .xz, .zst), Parquet or text files "
        "(.txt, each one document). `a*0.7,b*0.3` is a mixture of two, with their shares of the samples"
    )] = "embedded"
    tokenizer: Annotated[str | None, Option(
        "a tokenizer.json, a folder that holds one, or a name on the hub; by default a small BPE trained on "
        "the embedded corpus")] = None
    seq_len: Annotated[int, Option("tokens of a training sample", least=1, most=1 << 24)] = 256
    val_source: Annotated[str | None, Option(
        "what to validate on, named as source is: the validation split of a data set that has one, else all "
        "of it; by default the source's own validation split if it has one, else the documents whose hash "
        "lies in the lowest val_fraction")] = None
    val_sources: Annotated[str | None, Option(
        "further texts to validate on, each reported apart: name=source,name=source")] = None
    dedup: Annotated[bool, Option(
        "leave out exact copies of another document of the source, or of one that it validates on; "
        "val_sources and the other sources of a mixture do not count")] = False
    stream: Annotated[bool, Option(
        "train before the last document is tokenised: samples are drawn from windows of 33 M tokens, one "
        "after another; needs a validation text of its own")] = False
    text_key: Annotated[str, Option(
        "the field of JSONL, or the column of Parquet and of data sets, that holds the text; `a.b` is b in a"
    )] = TEXT_KEY
    rows: Annotated[Literal["text", "answers"], Option(
        "what a row of the source holds: a text, or `messages` or `prompt` and `completion`, of which only "
        "the answers are learned")] = "text"
    packing: Annotated[Literal["blocks", "documents"], Option(
        "how text fills samples: `blocks` cuts the stream of all documents; `documents` packs whole ones (a "
        "longer one is cut), and no token sees another document")] = "blocks"
    end_token: Annotated[str | None, Option(
        "the token that ends each document; by default the `eos_token` of the tokenizer_config.json beside "
        "tokenizer.json, else `<|endoftext|>`, `<|end_of_text|>`, `</s>` or another usual one")] = None
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

    @property
    def row_key(self) -> str:
        """What the rows of a source have: `text_key`, or prompts and answers."""
        return ANSWERS if self.rows == "answers" else self.text_key


class Unfinished(NamedTuple):
    """An entry of the cache that is being written, with what is known of its manifest."""

    folder: Path
    manifest: dict[str, Any]


class Part(NamedTuple):
    """A source with its tokens. share: of the samples, in millionths."""

    corpus: Corpus
    cache: TokenCache | Unfinished
    share: int
    train: PackedDataset
    val: PackedDataset

    def record(self) -> dict[str, Any]:
        """Source, split, hashes; documents, tokens, bytes, blocks per split."""
        manifest = self.cache.manifest
        splits = {"train": self.train, "val": self.val}
        return {
            **manifest,
            "source": self.corpus.name,  # the manifest names the source that wrote this entry first
            "split": self.corpus.rule,
            **{
                name: {**manifest[name], "blocks": len(blocks)} if manifest[name] else {}
                for name, blocks in splits.items()
            },
            "cache": str(self.cache.folder),
        }


@dataclass(frozen=True)
class Dataset:
    """Blocks of tokens to train and to validate on, and the tokenizer that made them.

    `fingerprint` identifies every token of every block: datasets with the same one give the same training.
    `val_sources` are further texts to validate on, by name; `parts` are the sources of a mixture, or the one
    source.
    """

    train: PackedDataset | Mixture
    val: PackedDataset | Mixture
    tokenizer: Tokenizer
    fingerprint: str
    parts: tuple[Part, ...]
    val_sources: dict[str, PackedDataset]

    def describe(self) -> dict[str, Any]:
        """The run's record of its data: that of its source, or of each source of a mixture and their sums."""
        records = [part.record() for part in self.parts]
        about = dict(records[0])
        if len(records) > 1:
            about["source"] = ",".join(f"{part.corpus.name}*{part.share / 1e6:g}" for part in self.parts)
            shares = [part.share for part in self.parts]
            about["content_hash"] = hash_of([[record["content_hash"] for record in records], shares])
            about |= _sums(records, one_val=self.val is self.parts[0].val)
            about["sources"] = records
        return {
            **about,
            # The entry's name is a hash of text and tokenizer.
            "val_sources": {
                name: {"entry": blocks.path.parent.name, "tokens": blocks.stream_length}
                for name, blocks in self.val_sources.items()
            },
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.train.seq_len,
            "fingerprint": self.fingerprint,
        }

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per validation token: bits per byte are nats per token / (this · ln 2)."""
        counts = [(part.share, part.cache.manifest["val"]) for part in self.parts]
        ratios = [share * count["bytes"] / count["tokens"] for share, count in counts]
        return sum(ratios) / sum(share for share, _ in counts)

    def repetitions(self, samples: int) -> str | None:
        """The line on how often each source is read by so many training samples; None if none repeats."""
        if any(isinstance(part.cache, Unfinished) for part in self.parts):
            return None  # not known yet
        whole = sum(part.share for part in self.parts)
        reads = [samples * part.share / whole / len(part.train) for part in self.parts]
        if max(reads) <= 1:
            return None
        each = [f"{part.corpus.name} {read:.3g} times" for part, read in zip(self.parts, reads, strict=True)]
        return f"the text repeats: this run reads {', '.join(each)}"

    def close(self) -> None:
        """Ends the waiting for samples of text that is not tokenised yet, in whichever thread."""
        for part in self.parts:
            if isinstance(part.train, GrowingDataset):
                part.train.close()


def _sums(records: list[dict[str, Any]], one_val: bool) -> dict[str, Any]:
    """The counts of a mixture. one_val: of a `val_source`, on which all sources are validated."""
    sums: dict[str, Any] = {"empty_documents": {}}
    for split, some in {"train": records, "val": records[:1] if one_val else records}.items():
        known = all(record[split] for record in some)  # not while it is tokenised
        sums[split] = {key: sum(r[split][key] for r in some) for key in some[0][split]} if known else {}
        sums["empty_documents"][split] = sum(record["empty_documents"][split] for record in some)
    if "dropped_duplicates" in records[0]:
        sums["dropped_duplicates"] = sum(record["dropped_duplicates"] for record in records)
    return sums


def check_packing(config: DataConfig) -> None:
    """Raises UserError if the text cannot be packed as `config` says."""
    if config.rows == "answers" and config.packing != "documents":
        raise UserError("data.rows answers are packed whole: add --data.packing documents")
    if config.stream and config.packing == "documents":
        raise UserError("data.packing documents needs all of the text, which data.stream does not wait for")


def prepare(config: DataConfig, *, padded_vocab_size: int | None = None, progress: bool = True) -> Dataset:
    """The dataset of `config`, tokenised now or read from the cache.

    Args:
        padded_vocab_size: rows of the model's embedding; a tokenizer that needs more is refused at once
        progress: show a progress bar if stderr is a terminal

    Raises:
        UserError: one line that says what is wrong and how to fix it
    """
    check_options(config, "data.")
    check_packing(config)
    folder, shares, named = _cache_folder(config), parse_mixture(config.source), val_sources(config)
    tokenizer = _tokenizer(config)
    if padded_vocab_size is not None:
        tokenizer.check_fits(padded_vocab_size)
    end = tokenizer.end_id if config.packing == "documents" else None
    how: dict[str, Any] = {"dedup": config.dedup, "num_workers": config.num_workers, "progress": progress}

    def cached(corpus: Corpus, val_fraction: float | None) -> TokenCache:
        return token_cache(corpus, tokenizer, folder, val_fraction=val_fraction, **how)

    parts = []
    for source, share in shares.items():
        corpus = open_corpus(source, config.val_source, folder, config.row_key)
        if config.stream:
            parts.append(_growing(replace(config, source=source), corpus, tokenizer, folder, share, cached))
            continue
        cache = cached(corpus, config.val_fraction)
        splits = (
            _blocks(f"the {split} split of {corpus.name}", cache, split, config.seq_len, end)
            for split in ("train", "val")
        )
        parts.append(Part(corpus, cache, share, *splits))
    others = {}
    for name, source in named.items():
        cache = cached(validation_corpus(source, folder, config.row_key), None)
        others[name] = _blocks(source, cache, "train", config.seq_len, end)
    train: PackedDataset | Mixture = parts[0].train
    val: PackedDataset | Mixture = parts[0].val
    decides: list[Any] = [parts[0].cache.folder.name, config.seq_len]
    if len(parts) > 1:
        weights = list(shares.values())
        train = Mixture([part.train for part in parts], weights)
        val = val if config.val_source else Mixture([part.val for part in parts], weights)
        decides = [[part.cache.folder.name for part in parts], weights, config.seq_len]
    decides += [config.packing] if end is not None else []
    decides += ["stream"] if config.stream else []
    return Dataset(train, val, tokenizer, hash_of(decides)[:16], tuple(parts), others)


def _growing(
    config: DataConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    share: int,
    cached: Callable[[Corpus, float | None], TokenCache],
) -> Part:
    """The part of a source of `--data.stream`; its validation text is tokenised first."""
    if corpus.val is None:
        raise UserError(
            f"{corpus.name} has no validation split, and to hold documents out of it all of it must be read: "
            "give --data.val_source, or leave out --data.stream"
        )
    entry = entry_folder(corpus, tokenizer, folder, None, config.dedup)
    held_out = replace(corpus, content_hash=hash_of([corpus.content_hash, "val"]), train=corpus.val, val=None)
    val_cache = cached(held_out, None)
    val = _blocks(f"the val split of {corpus.name}", val_cache, "train", config.seq_len, None)
    manifest = {
        **val_cache.manifest,
        "content_hash": corpus.content_hash,
        "train": {},
        "val": val_cache.manifest["train"],
        "empty_documents": {"train": 0, "val": val_cache.manifest["empty_documents"]["train"]},
    }
    cache = TokenCache(entry) if entry.exists() else Unfinished(entry, manifest)

    def finished() -> PackedDataset:
        train = f"the train split of {corpus.name}"
        return _blocks(train, TokenCache(entry), "train", config.seq_len, None)

    work = replace(config, stream=False, val_sources=None)
    return Part(corpus, cache, share, GrowingDataset(entry, config.seq_len, finished, prepare, [work]), val)


def val_sources(config: DataConfig) -> dict[str, str]:
    """The texts of `--data.val_sources` by name; one without a name has its own. UserError for a name given
    twice, or without a source."""
    found: dict[str, str] = {}
    for text in config.val_sources.split(",") if config.val_sources else ():
        name, source = map(str.strip, text.split("=", 1) if "=" in text else ("", text))
        if not source:  # it would be the folder that the command runs in
            raise UserError(f"--data.val_sources has no source in {text!r}: give name=source,name=source")
        if (name or source) in found:
            raise UserError(f"--data.val_sources names {name or source!r} twice: give each text its own name")
        found[name or source] = source
    return found


def content_hashes(config: DataConfig) -> dict[str, str]:
    """`content_hash` and `tokenizer_hash`, as in a run's record, of what is at `config`'s paths now, without
    tokenising. Raises UserError."""
    shares, folder = parse_mixture(config.source), _cache_folder(config)
    corpora = [open_corpus(source, config.val_source, folder, config.row_key) for source in shares]
    hashes = [corpus.content_hash for corpus in corpora]
    content_hash = hashes[0] if len(hashes) == 1 else hash_of([hashes, list(shares.values())])
    return {"content_hash": content_hash, "tokenizer_hash": _tokenizer(config).hash}


def _cache_folder(config: DataConfig) -> Path:
    return expand(config.cache_dir) if config.cache_dir else cache_dir()


def _tokenizer(config: DataConfig) -> Tokenizer:
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer, config.end_token)
    else:
        folder = _cache_folder(config)
        with write_errors(folder, WRITE_ADVICE):
            tokenizer = embedded_tokenizer(config.vocab_size, folder, config.end_token)
    return AnswerTokenizer(tokenizer, config.tokenizer) if config.rows == "answers" else tokenizer


def vocab_size(config: DataConfig) -> int:
    """The vocabulary of the tokenizer of `config`; UserError if there is no such tokenizer."""
    return _tokenizer(config).vocab_size if config.tokenizer else config.vocab_size


def find_data(config: DataConfig) -> str:
    """Where the data of `config` is, in words, without reading or downloading it. UserError if a file is
    missing."""
    for source in filter(None, [config.val_source, *val_sources(config).values()]):
        find_source(source)
    if config.tokenizer:
        find_tokenizer(config.tokenizer)
    shares = parse_mixture(config.source)
    found = [find_source(source) for source in shares]
    if len(found) == 1:
        return found[0]
    return "; ".join(f"{source}: {where}" for source, where in zip(shares, found, strict=True))


def availability(config: DataConfig) -> str:
    """`find_data` for a plan: says what is missing instead of raising."""
    try:
        return find_data(config)
    except (UserError, OSError) as error:
        return f"NOT FOUND: {error}"


def _blocks(text: str, cache: TokenCache, split: str, seq_len: int, end: int | None) -> PackedDataset:
    """`cache.blocks`; UserError, which begins with `text`, if there are none."""
    blocks = cache.blocks(split, seq_len, end)
    if not len(blocks):
        more = "give more text" if split == "train" else "raise --data.val_fraction, give --data.val_source"
        raise UserError(
            f"{text} has {blocks.stream_length} tokens, too few for one block of seq_len + 1 = "
            f"{seq_len + 1}: {more}, or lower --data.seq_len"
        )
    return blocks
