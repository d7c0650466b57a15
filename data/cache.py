"""The token cache: a corpus's tokens on disk, made once and memory-mapped by every run.

    <cache_dir>/tokens/<key>/{train.arrow, val.arrow, manifest.json}

The key is a hash of all that decides the tokens: the documents, the tokenizer, the split, the format's
version. The sequence length is not part of it: the cache holds streams of tokens, and blocks are views of
them. An entry is written under another name, brought to the disk and renamed, so what has the right name is
whole. A lock lets one process work while the others (the ranks of a run, say) wait for its entry.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.data.corpus import Corpus, Split
from lingpt.data.storage import disk_errors, sync, sync_folder
from lingpt.data.stream import Blocks, StreamWriter
from lingpt.data.tokenizer import Tokenizer
from lingpt.data.tokens import Encoded, encode_documents, token_dtype

FORMAT = 1  # raise it when the same documents would give other files


class TokenCache:
    """An entry of the cache: the token streams of both splits, and the manifest that describes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict = json.loads((folder / "manifest.json").read_text())

    def blocks(self, split: str, seq_len: int) -> Blocks:
        """The stream `train` or `val` as blocks. Raises `UserError` if it was tampered with."""
        blocks, tokens = Blocks(self.folder / f"{split}.arrow", seq_len), self.manifest[split]["tokens"]
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
    val_fraction: float,
    num_workers: int | None = None,
    progress: bool = True,
) -> TokenCache:
    """The entry of `corpus` under `tokenizer`, made now if it is not there.

    Raises:
        UserError: from the corpus; or a split got no documents; or the disk cannot be written
    """
    fraction = None if corpus.val else val_fraction
    decides = json.dumps([FORMAT, corpus.content_hash, tokenizer.hash, fraction])
    folder = cache_dir / "tokens" / hashlib.sha256(decides.encode()).hexdigest()[:32]
    if not folder.exists():
        with _lock(folder, progress):
            if not folder.exists():
                _make(folder, corpus, tokenizer, fraction, num_workers, progress)
    return TokenCache(folder)


@contextmanager
def _lock(folder: Path, progress: bool) -> Iterator[None]:
    """Only one process at a time makes `folder`; the system takes the lock from a process that dies."""
    import filelock

    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            if progress:
                print("waiting for another process that prepares the same data", file=sys.stderr)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    fraction: float | None,
    num_workers: int | None,
    progress: bool,
) -> None:
    # The lock is ours, so these are of processes that were killed.
    for left_over in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with disk_errors(folder.parent):
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        dtype = token_dtype(tokenizer.vocab_size)
        with (
            StreamWriter(aside / "train.arrow", dtype) as train,
            StreamWriter(aside / "val.arrow", dtype) as val,
        ):
            with closing(_encode(corpus.train, "train", tokenizer, num_workers, progress)) as documents:
                split_by_content(documents, fraction, train, val)
            if corpus.val:
                with closing(_encode(corpus.val, "val", tokenizer, num_workers, progress)) as documents:
                    for document in documents:
                        val.add(document)
        _check_filled(corpus, train, val)
        manifest = {
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
        }
        _seal(aside, folder, manifest)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _encode(
    split: Split, name: str, tokenizer: Tokenizer, num_workers: int | None, progress: bool
) -> Iterator[Encoded]:
    """The encoded documents of `split`, under a progress bar."""
    hidden = None if progress else True  # None: hidden where stderr is no terminal
    bar = tqdm(
        total=split.total,
        unit=split.unit,
        unit_scale=split.unit == "B",
        desc=f"tokenising {name}",
        disable=hidden,
    )
    with bar, closing(encode_documents(split.read(), tokenizer, num_workers)) as documents:
        for document in documents:
            yield document
            bar.update(document.advance)


def split_by_content(
    documents: Iterable[Encoded], fraction: float | None, train: StreamWriter, val: StreamWriter
) -> None:
    """Holds out the documents whose hash lies in the lowest `fraction`; with None all are for training.

    Equal texts stay together and the order of documents plays no part. If the fraction holds out none, the
    document of the lowest hash is. That takes one pass only, because the lowest so far is kept back: it
    enters the training stream when a lower one, or the end, comes.
    """
    threshold, lowest = None if fraction is None else fraction * 2**64, None
    for document in documents:
        if threshold is None:
            train.add(document)
        elif document.digest < threshold:
            val.add(document)
        elif lowest is None or document.digest < lowest.digest:
            if lowest is not None:
                train.add(lowest)
            lowest = document
        else:
            train.add(document)
    if lowest is not None:
        (train if val.documents else val).add(lowest)


def _check_filled(corpus: Corpus, train: StreamWriter, val: StreamWriter) -> None:
    if not train.documents + val.documents:
        raise UserError(f"{corpus.name} holds no documents: give JSONL with a text on every line")
    if not train.documents:
        raise UserError(
            f"{corpus.name} holds only {val.documents} document(s), too few to hold one out for validation: "
            "give more, or documents to validate on with --data.val_source"
        )
    if not val.documents:
        raise UserError(
            f"the validation files of {corpus.name} hold no documents: give others as --data.val_source"
        )


def _seal(aside: Path, folder: Path, manifest: dict) -> None:
    """Brings everything in `aside` to the disk, then gives it its right name."""
    with disk_errors(folder.parent):
        with open(aside / "manifest.json", "wb") as file:
            file.write(json.dumps(manifest, indent=2).encode())
            sync(file)
        aside.chmod(0o755)  # mkdtemp's 0700 would hide it from other users of a shared cache
        sync_folder(aside)
        aside.rename(folder)
        sync_folder(folder.parent)
