"""The token cache: a corpus's tokens on disk, written once and memory-mapped by every run.

    <cache_dir>/tokens/<key>/{train.arrow, val.arrow, manifest.json}

The key is a hash of all that decides the tokens: the documents, the tokenizer, the split, the format's
version. The sequence length is not part of it: the cache holds streams of tokens, and blocks are views of
them. An entry is a folder that is written whole or not at all. A lock lets one process work while the others
(such as the ranks of a run) wait for its entry. The manifest has checksums, its own and those of the tokens,
which are checked as they are read.
"""

import json
import sys
import time
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.common.files import new_folder, others_can_write, read_json_object, remove_partial, write_errors
from lingpt.common.format import counted
from lingpt.common.locks import file_lock
from lingpt.data.corpus import Corpus, Document, Split, hash_of
from lingpt.data.packing import PackedDocuments
from lingpt.data.stream import PackedDataset, StreamWriter
from lingpt.data.tokenizer import Tokenizer
from lingpt.data.tokens import Encoded, encode_documents, token_dtype

FORMAT = 1  # increase it when the same documents would give other files
MANIFEST = "manifest.json"
WRITE_ADVICE = "free some space, or choose another place with --data.cache_dir or LINGPT_CACHE"


class TokenCache:
    """An entry of the cache: the token streams of both splits, and the manifest that describes them.

    Raises UserError, naming the folder to delete, if the manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = read_json_object(folder / MANIFEST)
        except UserError as error:
            raise UserError(f"{error}: delete {folder} and run again") from None
        self._checksums: Any = self.manifest.pop("checksums", None)
        if self.manifest.pop("checksum", None) != _checksum(self.manifest, self._checksums):
            raise UserError(f"{folder / MANIFEST} is damaged: delete {folder} and run again")

    def blocks(self, split: str, seq_len: int, end: int | None = None) -> PackedDataset:
        """The stream `train` or `val` as blocks, or given the token that ends them, its documents packed.
        Raises `UserError` if the file is not as it was written."""
        given = self.folder / f"{split}.arrow", seq_len, self._checksums[split]
        blocks = PackedDataset(*given) if end is None else PackedDocuments(*given, end)
        tokens = self.manifest[split]["tokens"]
        if blocks.stream_length != tokens:
            raise UserError(
                f"{blocks.path} has {blocks.stream_length} tokens and should have {tokens}: "
                f"delete {self.folder} and run again"
            )
        return blocks


def token_cache(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    val_fraction: float | None,
    dedup: bool = False,
    num_workers: int | None = None,
    progress: bool = True,
) -> TokenCache:
    """The entry of `corpus` under `tokenizer`, written now if it does not exist.

    val_fraction: of the documents, held out if the corpus has no validation split; None for no document.
    dedup: leave out documents whose text has come before, those of the validation first.

    Raises:
        UserError: from the corpus; or if a split got no documents, or the disk cannot be written
    """
    fraction = None if corpus.val else val_fraction
    folder = entry_folder(corpus, tokenizer, cache_dir, fraction, dedup)
    if not folder.exists():
        with write_errors(folder.parent, WRITE_ADVICE), _lock(folder, progress) as locked:
            if locked:  # so partial folders are those of killed processes
                remove_partial(folder.parent, folder.name)
            try:
                if not folder.exists():
                    _make(folder, corpus, tokenizer, fraction, dedup, num_workers, progress)
            except OSError:
                if not folder.exists():  # without a lock, another process may have been first
                    raise
    for path in (folder.parent, folder, *folder.iterdir()):
        if others_can_write(path):
            raise UserError(
                f"others can write to {path}, so its tokens may not be those of the text: `chmod -R o-w` it "
                "if you trust it, or choose another place with --data.cache_dir or LINGPT_CACHE"
            )
    return TokenCache(folder)


def entry_folder(
    corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path, fraction: float | None, dedup: bool
) -> Path:
    """Where the entry of `corpus` is, or will be. fraction: of the documents, held out by their hash."""
    decides = [FORMAT, corpus.content_hash, tokenizer.hash, fraction, *(["dedup"] if dedup else [])]
    return cache_dir / "tokens" / hash_of(decides)[:32]


@contextmanager
def _lock(folder: Path, progress: bool) -> Iterator[bool]:
    """Lets one process at a time write `folder`; the system releases the lock of a process that dies.

    Yields False if the file system has no locks, as on some networks: several processes may then write.
    """
    path = folder.parent / f".{folder.name}.lock"

    def say(line: str) -> None:
        if progress:
            print(line, file=sys.stderr)

    waiting = f"waiting for another process that prepares the same data and holds {path}"
    with file_lock(path, before_waiting=lambda: say(waiting)) as lock:
        if lock.unsupported:
            say(
                f"{folder.parent}: its file system knows no locks ({lock.unsupported}), so each process "
                "prepares the data: run `lingpt data` before several of them"
            )
        yield lock.unsupported is None


def _make(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    fraction: float | None,
    dedup: bool,
    num_workers: int | None,
    progress: bool,
) -> None:
    seen, dropped = set[int](), 0

    def unique(split: Split, name: str) -> Generator[Encoded]:
        nonlocal dropped
        with closing(_encode(split, name, tokenizer, num_workers, progress, empty)) as documents:
            for document in documents:
                if document.digest in seen:
                    dropped += 1
                    continue
                if dedup:
                    seen.add(document.digest)
                yield document

    dtype, empty = token_dtype(tokenizer.vocab_size, tokenizer.end_id), {"train": 0, "val": 0}
    with new_folder(folder) as partial:
        with (
            StreamWriter(partial / "train.arrow", dtype) as train,
            StreamWriter(partial / "val.arrow", dtype) as val,
        ):
            if corpus.val:
                with closing(unique(corpus.val, "val")) as documents:
                    for document in documents:
                        val.add(document)
            with closing(unique(corpus.train, "train")) as documents:
                split_by_content(documents, fraction, train, val)
        _check_filled(corpus, train, val)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "source": corpus.name,
            "split": corpus.rule,
            "val_fraction": fraction,
            "content_hash": corpus.content_hash,
            "tokenizer": tokenizer.name,
            "tokenizer_hash": tokenizer.hash,
            "dtype": dtype.name,
            "train": train.counts(),
            "val": val.counts(),
            "empty_documents": empty,
            **({"dropped_duplicates": dropped} if dedup else {}),
        }
        checksums = {"train": train.checksums, "val": val.checksums}
        own = {"checksums": checksums, "checksum": _checksum(manifest, checksums)}
        (partial / MANIFEST).write_text(json.dumps({**manifest, **own}, indent=1))
    if progress and (skipped := sum(empty.values())):
        print(f"{corpus.name}: {skipped:,} empty document(s) skipped", file=sys.stderr)
    if progress and corpus.left_out:
        print(f"{corpus.name}: not read: {corpus.left_out}", file=sys.stderr)


def _checksum(manifest: dict[str, Any], checksums: Any) -> int:
    """CRC-32 of a manifest (without its own checksum) and of the tokens' checksums."""
    return zlib.crc32(json.dumps([manifest, checksums], sort_keys=True).encode())


def _encode(
    split: Split,
    name: str,
    tokenizer: Tokenizer,
    num_workers: int | None,
    progress: bool,
    empty: dict[str, int],
) -> Generator[Encoded]:
    """The encoded documents of `split`, under a progress bar with documents per second and the time left;
    those without a text are counted in `empty`."""
    bar = tqdm(
        total=split.total,
        unit=split.unit,
        unit_scale=split.unit == "B",
        desc=f"tokenising {name}",
        disable=None if progress else True,  # None: where stderr is not a terminal
    )

    def with_text() -> Iterator[Document]:
        for document in split.read():
            if document.text:
                yield document
            else:
                empty[name] += 1
                bar.update(document.advance)

    began = time.monotonic()
    with bar, closing(encode_documents(with_text(), tokenizer, num_workers)) as documents:
        for number, document in enumerate(documents, start=1):
            yield document
            if bar.update(document.advance) and split.unit != "doc":  # it has been drawn
                rate = number / (time.monotonic() - began)
                bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)


def split_by_content(
    documents: Iterable[Encoded], fraction: float | None, train: StreamWriter, val: StreamWriter
) -> None:
    """Holds out the documents whose hash lies in the lowest `fraction`; with None all are for training.

    Equal texts go to the same split, and the order of documents does not matter. If the fraction holds out
    none, the text with the lowest hash is held out instead. One pass suffices: the text with the lowest hash
    so far is kept back; it goes to the training stream when a lower one comes, or at the end if others were
    held out.
    """
    threshold, lowest = None if fraction is None else fraction * 2**64, list[Encoded]()
    for document in documents:
        if threshold is None:
            train.add(document)
        elif document.digest < threshold:
            val.add(document)
        elif not lowest or document.digest < lowest[0].digest:
            for higher in lowest:
                train.add(higher)
            lowest = [document]
        elif document.digest == lowest[0].digest:
            lowest.append(document)
        else:
            train.add(document)
    to = train if val.documents else val
    for document in lowest:
        to.add(document)


def _check_filled(corpus: Corpus, train: StreamWriter, val: StreamWriter) -> None:
    if not train.documents + val.documents:
        raise UserError(
            f"{corpus.name} holds no documents: give JSONL or Parquet with a text in every row, or text files"
        )
    if not train.documents and corpus.val:
        raise UserError(
            f"{corpus.name} has no document to train on, besides empty ones and, with --data.dedup, copies "
            "of those to validate on: give more text"
        )
    if not train.documents and val.documents > 1:
        raise UserError(
            f"all {val.documents} documents of {corpus.name} would be held out for validation: lower "
            "--data.val_fraction, or, if they are equal, give others as --data.val_source"
        )
    if not train.documents:
        raise UserError(
            f"{corpus.name} holds only {counted(val.documents, 'document')}, too few to hold one out for "
            "validation: give more, or documents to validate on with --data.val_source"
        )
    if not val.documents and corpus.val:
        raise UserError(
            f"the validation files of {corpus.name} hold no documents: give others as --data.val_source"
        )
