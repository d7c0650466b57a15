"""The documents of one file: JSON Lines, plain or compressed, or a text file.

JSON Lines are read line by line, so that an error names the file and the line. (The JSON reader of `datasets`
names no line and accepts a row without a text.)
"""

import codecs
import functools
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import zstandard

from lingpt.common.errors import UserError
from lingpt.common.files import read_errors
from lingpt.data.answer_rows import ANSWERS, NEEDED, read_line
from lingpt.data.corpus import TEXT_KEY, TEXT_KEY_OPTION, Document
from lingpt.data.parquet import PARQUET

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
TEXT = ".txt"


def check_compression(path: Path) -> None:
    """Raises UserError if the file is compressed otherwise than its suffix says, or is Parquet without it."""
    with read_errors(path), path.open("rb") as file:
        begins = file.read(6)
    found = next((suffix for suffix, kind in COMPRESSED.items() if kind.start.match(begins)), "")
    if path.suffix in COMPRESSED and found != path.suffix:
        raise UserError(f"{path} is no {path.suffix} file: fetch it again, or give it its own name")
    if found and found != path.suffix:
        raise UserError(f"{path} is compressed: add {found} to its name")
    if begins.startswith(b"PAR1") and path.suffix not in (PARQUET, TEXT):
        raise UserError(f"{path} is Parquet: add {PARQUET} to its name")


def read_documents(path: Path, text_key: str = TEXT_KEY) -> Iterator[Document]:
    """The documents of one file, without blank lines; text that is only whitespace counts as empty. Progress
    is in bytes on disk.

    Raises:
        UserError: naming file and line
    """
    if path.suffix == TEXT:
        if text_key == ANSWERS:
            raise UserError(f"{path} is one text, without prompts and answers: {NEEDED}")
        yield _whole_text(path)
        return
    number, position, kind = 0, 0, COMPRESSED.get(path.suffix)
    with _readable(path) as file:
        content = _Decompressed(file, kind) if kind else file
        try:
            for number, line in enumerate(io.BufferedReader(content, 1 << 20), start=1):
                if line.isspace():
                    continue
                text = _text(line, text_key, f"{path}, line {number}")
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
                f"{path} is not UTF-8 at byte {error.start:,}: convert it, as by {_to_utf8(content)}"
            ) from None
    return Document(text if text.strip() else "", len(content))


def _to_utf8(begins: bytes) -> str:
    """How to convert a text that begins so: with UTF-16's mark, which Windows writes, or as Latin-1 may."""
    utf_16 = begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return f"`iconv -f {'utf-16' if utf_16 else 'cp1252'} -t utf-8`"


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
        self._rest = self._stream.unused_data
        return True


def _text(line: bytes, key: str, where: str) -> str:
    """The text of one line, "" if it is only whitespace. Raises a `UserError` that begins with `where`."""
    if key == ANSWERS:
        return read_line(line, where)
    other = ""  # what else might mend it
    try:
        row = json.loads(line.decode("utf-8-sig"))
        text = _find(row, key)
        if isinstance(text, str):
            text.encode()
            return text if text.strip() else ""
    except UnicodeDecodeError:
        fault = "is not UTF-8"
        other = f"; convert the file, as by {_to_utf8(line)}"
    except UnicodeEncodeError:
        fault = f"has half a surrogate pair in its {key}"
    except KeyError:
        fault = f'has no "{key}" among {json.dumps(list(row), ensure_ascii=False)[:200]}'
        other = f", or give another field with {TEXT_KEY_OPTION}, or --data.rows answers"
    # JSONDecodeError is a ValueError; so is a number of 5000 digits.
    except (ValueError, RecursionError) as error:
        fault = f"is not JSON ({error})"
        other = "; plain text is read from files that end in .txt"
    else:
        fault = f"has a {key} that is not a string" if isinstance(row, dict) else "is not a JSON object"
    raise UserError(f'{where} {fault}: every line must be a JSON object with a string "{key}"{other}')


def _find(row: object, key: str) -> object:
    """The value of `key`, or of `b` in the object `a` if `key` is `a.b`; None if `row` is no object. KeyError
    if there is no such value."""
    if not isinstance(row, dict):
        return None
    if key in row:
        return row[key]
    for part in key.split("."):
        if not isinstance(row, dict):
            raise KeyError(key)
        row = row[part]
    return row
