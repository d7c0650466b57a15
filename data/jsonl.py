"""Documents from disk: JSON Lines with a `text` on every line, plain or compressed, or text files of one
document each; one file or many.

JSON Lines are read line by line, so that an error names the file and the line. (The JSON reader of `datasets`
names no line and accepts a missing `text`.)
"""

import functools
import glob
import hashlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import zstandard

from lingpt.common.errors import UserError
from lingpt.common.files import read_errors
from lingpt.data.corpus import Corpus, Document, Split
from lingpt.data.file_hashes import file_hashes, file_stamp
from lingpt.data.paths import expand

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Compression(NamedTuple):
    start: re.Pattern[bytes]  # what every file begins with
    decompressor: Callable[[], Any]  # of one stream; a file may have several, one after another
    padding: int  # after a stream any number of so many zeros may follow; 0: none


COMPRESSED = {
    ".gz": Compression(re.compile(rb"\x1f\x8b"), functools.partial(zlib.decompressobj, wbits=31), padding=1),
    ".xz": Compression(re.compile(rb"\xfd7zXZ\x00"), lzma.LZMADecompressor, padding=4),
    ".zst": Compression(
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or one to be skipped
        lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),  # of `zstd --long=31`
        padding=0,
    ),
}
SUFFIXES = (".jsonl", *COMPRESSED)
TEXT, PARQUET = ".txt", ".parquet"
_SPLIT_NAME = re.compile(r"(?:^|[._-])(train|validation|valid|val|dev|test)(?![a-z])")


def jsonl_corpus(
    source: str, val_source: str | None = None, named: Iterable[str] = (), cache_dir: Path | None = None
) -> Corpus:
    """The documents of the files that `source` names: a path, a folder or a glob.

    If several files match and one has the word `train` in its name, or in its folder's, such words decide
    the splits: `validation`, `valid`, `val` or `dev` is held out and `test` left alone. Files of `val_source`
    are held out and never trained on. The files' hashes are cached in `cache_dir`, if given.

    Raises:
        UserError: no such files; its advice also offers `named`, the sources that are not files
    """
    matches = _matches(source)
    files = _documents(source, matches, named)
    train, val = _by_name(files)
    held_out = f"held out by name: {_names(val)}" if val else "held out: the documents of the lowest hashes"
    if val_source:
        val = find_files(val_source)
        kept_out = {f.resolve() for f in val}
        train = [f for f in train if f.resolve() not in kept_out]
        held_out = f"held out: {val_source}"
    if not train:
        raise UserError(
            f"{source} has no file that is not in {val_source} too: give other text to train or validate on"
        )
    splits = _split(train), _split(val) if val else None
    hashes = _hashes([*train, *val], cache_dir)
    parts = [hashes[: len(train)], hashes[len(train) :]]
    content_hash = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    read = {*files, *val}
    others = [p for p in matches if p not in read and not p.name.startswith(".")]
    rule = "; ".join([held_out, *_surprises(files, train, val)])
    return Corpus(source, content_hash, *splits, rule, left_out=_names(others))


def with_val_files(corpus: Corpus, val_source: str, cache_dir: Path | None = None) -> Corpus:
    """`corpus` with the JSONL or text files of `val_source` for validation."""
    files = find_files(val_source)
    split = _split(files)
    content_hash = hashlib.sha256(f"{corpus.content_hash} {_hashes(files, cache_dir)}".encode()).hexdigest()
    rule = f"held out: {val_source}; left alone: the validation split of {corpus.name}"
    return replace(corpus, content_hash=content_hash, val=split, rule=rule)


def find_files(source: str, named: Iterable[str] = ()) -> list[Path]:
    """The files that `source` names, sorted: its JSON Lines or, if there are none, its text files.

    Raises a `UserError`, which also offers `named`, if there are neither.
    """
    return _documents(source, _matches(source), named)


def _documents(source: str, matches: list[Path], named: Iterable[str]) -> list[Path]:
    """`find_files`, given the paths that match `source`."""
    with read_errors(source):
        one = len(matches) == 1 and expand(source).is_file()  # whatever its name
        lines = [p for p in matches if p.is_file() and (one or p.name.endswith(SUFFIXES))]
        files = lines or [p for p in matches if p.is_file() and p.suffix == TEXT]
    tables = [p for p in files or matches if p.suffix == PARQUET]
    if tables:
        make = f"datasets.Dataset.from_parquet({str(tables[0])!r}).to_json('{tables[0].stem}.jsonl')"
        raise UserError(f"{tables[0]} is Parquet: in Python `{make}` makes JSONL of it, to be given instead")
    if not files:
        holds = f"the folder {source} holds no documents"
        where = holds if expand(source).is_dir() else f"there are no documents at {source}"
        give = ", or ".join(["a file, folder or glob of JSONL or text", *named])
        raise UserError(f"{where} ({', '.join((*SUFFIXES, TEXT))}): give {give}")
    return files


def _matches(source: str) -> list[Path]:
    """The files that `source` (a file, a folder or a glob) stands for, sorted; no hidden ones of a folder."""
    path = expand(source)
    with read_errors(source):
        if path.is_file():
            return [path]
        if path.is_dir():
            return sorted(file for file in path.iterdir() if not file.name.startswith("."))
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        found.sort(key=lambda path: -len(path.parts))
        # Each file once, by its shortest path: `**` follows a link to its own folder for ever.
        return sorted({os.path.realpath(path): path for path in found}.values())


def _hashes(files: list[Path], cache_dir: Path | None) -> list[str]:
    """A hash of each file's bytes and of how it is read."""
    hashes = file_hashes(files, cache_dir)
    return [
        f"text {content}" if file.suffix == TEXT else content
        for file, content in zip(files, hashes, strict=True)
    ]


def _split_word(file: Path) -> str | None:
    """The word `train`, `valid`, `test`, … in the file's name, else in its folder's; None if in neither."""
    found = (_SPLIT_NAME.search(name.lower()) for name in (file.name, file.parent.name))
    return next((match[1] for match in found if match), None)


def _by_name(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on and to validate on; those to test on are in neither."""
    words = {file: _split_word(file) for file in files}
    if len(files) == 1 or "train" not in words.values():
        return files, []
    val = [file for file, word in words.items() if word in ("validation", "valid", "val", "dev")]
    return [file for file, word in words.items() if word in (None, "train")], val


def _surprises(files: list[Path], train: list[Path], val: list[Path]) -> list[str]:
    """Names the `files` of a source that are in neither split, or trained on despite a word in their name."""
    used = {file.resolve() for file in (*train, *val)}
    unused = [file for file in files if file.resolve() not in used]
    despite = [file for file in train if len(files) > 1 and _split_word(file) not in (None, "train")]
    said = [f"left alone: {_names(unused)}"] if unused else []
    return said + ([f"trained on, as no file is named train: {_names(despite)}"] if despite else [])


def _names(paths: list[Path]) -> str:
    names = [path.name + "/" * path.is_dir() for path in paths]
    return ", ".join(names if len(names) <= 8 else [*names[:8], f"… ({len(names)} in all)"])


def _split(files: list[Path]) -> Split:
    """The documents of `files`, to be made before these are hashed: a UserError ends the reading of a file
    that has changed since. UserError for a file whose name says otherwise how it is compressed: its bytes
    might be in the token cache, read otherwise.
    """
    stamps = list(map(_stamp, files))
    for path in files:
        _check_compression(path)

    def read() -> Iterator[Document]:
        for path, stamp in zip(files, stamps, strict=True):
            yield from read_documents(path)
            if _stamp(path) != stamp:
                raise UserError(f"{path} changed after it was hashed: run again when nothing writes to it")

    return Split(read, total=sum(size for size, *_ in stamps), unit="B")


def _stamp(path: Path) -> list[int]:
    with read_errors(path):
        return file_stamp(path)


def _check_compression(path: Path) -> None:
    with _readable(path) as file:
        begins = file.read(6)
    found = next((suffix for suffix, kind in COMPRESSED.items() if kind.start.match(begins)), "")
    if path.suffix in COMPRESSED and found != path.suffix:
        raise UserError(f"{path} is no {path.suffix} file: fetch it again, or give it its own name")
    if found and found != path.suffix:
        raise UserError(f"{path} is compressed: add {found} to its name")


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of one file, without blank lines; text that is only whitespace counts as empty. Progress
    is in bytes on disk.

    Raises:
        UserError: naming file and line
    """
    if path.suffix == TEXT:
        yield _whole_text(path)
        return
    number, position = 0, 0
    with _readable(path) as file:
        try:
            for number, line in enumerate(io.BufferedReader(_Decompressed.of(file, path), 1 << 20), start=1):
                if line.isspace():
                    continue
                text = _text(line, f"{path}, line {number}")
                before, position = position, file.tell()
                yield Document(text, position - before)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            raise UserError(
                f"{path} is damaged or cut off after line {number} ({error}): fetch it again"
            ) from None


def _whole_text(path: Path) -> Document:
    """A text file as one document, with CRLF line ends converted to LF."""
    with _readable(path) as file:
        try:
            with read_errors(path, "fetch it again"):
                content = file.read()
            text = content.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 at byte {error.start:,}: convert it, as by `iconv -f latin1 -t utf-8`"
            ) from None
    return Document(text if text.strip() else "", len(content))


def _readable(path: Path) -> io.BufferedReader:
    with read_errors(path):
        return path.open("rb")


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, all of its streams. EOFError, or the library's own error, unless each
    is whole and nothing but padding follows them: the libraries' readers ignore what follows, or a stream
    that ends early."""

    def __init__(self, file: BinaryIO, kind: Compression) -> None:
        self._file, self._kind, self._ready = file, kind, memoryview(b"")
        self._stream, self._rest = kind.decompressor(), b""  # the present stream, and what was read beyond it
        self._zeros = 0

    @classmethod
    def of(cls, file: io.BufferedReader, path: Path) -> io.RawIOBase | io.BufferedReader:
        """The content of `file`, compressed as the suffix of `path` says."""
        return cls(file, COMPRESSED[path.suffix]) if path.suffix in COMPRESSED else file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._ready:
            if not self._decompress_more():
                return 0
        target = memoryview(buffer)
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress_more(self) -> bool:
        """Decompresses what can be had of the file's next piece; False at its end."""
        data = self._rest or self._file.read(1 << 16)
        self._rest = b""
        if self._stream.eof and data and self._kind.padding:
            padded, data = len(data), data.lstrip(b"\0")
            self._zeros += padded - len(data)
            if not data:
                return True
        if self._stream.eof:
            if self._zeros and self._zeros % self._kind.padding:
                raise EOFError(f"{self._zeros} zeros are no padding")
            if not data:
                return False
            self._stream, self._zeros = self._kind.decompressor(), 0
        elif not data:
            raise EOFError("it is empty" if self._file.tell() == 0 else "it ends early")
        self._ready = memoryview(self._stream.decompress(data))
        if self._stream.eof:
            self._rest = self._stream.unused_data
        return True


def _text(line: bytes, where: str) -> str:
    """The `text` of one line, "" if it is only whitespace. Raises a `UserError` that begins with `where`."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
        text = row.get("text") if isinstance(row, dict) else None
        if isinstance(text, str):
            text.encode()
            return text if text.strip() else ""
    except UnicodeDecodeError:
        fault = "is not UTF-8"
    except UnicodeEncodeError:
        fault = "has half a surrogate pair in its text"
    # JSONDecodeError is a ValueError; so is a number of 5000 digits.
    except (ValueError, RecursionError) as error:
        fault = f"is not JSON ({error})"
    else:
        if not isinstance(row, dict):
            fault = "is not a JSON object"
        elif "text" not in row:
            fault = 'has no "text"'
        else:
            fault = "has a text that is not a string"
    raise UserError(f'{where} {fault}: every line must be a JSON object with a string "text"')
