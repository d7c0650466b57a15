"""Held-out texts to evaluate a model on: documents, their tokens, and the text of these tokens."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.common.files import file_sha256
from lingpt.data import Tokenizer
from lingpt.data.corpus import TEXT_KEY
from lingpt.data.embedded import embedded_corpus
from lingpt.data.files import find_files, read_file


class Unsuitable(UserError):
    """The text does not suit a measure (it is too short, for example); not a failure."""


CHARACTERS = 12  # per token, a generous bound: English text has 4


@dataclass(frozen=True)
class Texts:
    """Documents under a name, in a fixed order. `data` is what they were read from, with hashes."""

    name: str
    documents: tuple[str, ...]
    data: dict[str, str]


def parse_texts(words: Iterable[str]) -> dict[str, str]:
    """`["novels=texts/novels.jsonl.xz"]` → `{"novels": "texts/novels.jsonl.xz"}`; `embedded` stands for
    itself. UserError for any other word without `=`, and for a name given twice.
    """
    texts = dict[str, str]()
    for word in words:
        name, _, source = ("embedded=embedded" if word == "embedded" else word).partition("=")
        if not name or not source:
            raise UserError(
                f"--texts {word!r}: give name=path, such as novels=texts/novels.jsonl.xz, or embedded"
            )
        if name in texts:
            raise UserError(f"--texts names {name!r} twice: give each text its own name")
        texts[name] = source
    return texts


@lru_cache(maxsize=4)
def read_texts(name: str, source: str, text_key: str = TEXT_KEY) -> Texts:
    """The documents of files (a path, folder or glob), or of `embedded`, its validation modules.
    text_key: the field of their rows, or the column, that holds the text.

    UserError if they cannot be read. The caller must make sure that the text was not trained on.
    """
    if source == "embedded":
        corpus = embedded_corpus()
        documents = tuple(document.text for document in corpus.val.read()) if corpus.val else ()
        return Texts(name, documents, {"from": "embedded", "hash": corpus.content_hash})
    files = find_files(source, ["embedded"])
    documents = tuple(d.text for file in files for d in read_file(file, text_key) if d.text)
    if not documents:
        raise UserError(f"{source} holds no text to measure on")
    origin = "files" if text_key == TEXT_KEY else f"files, their {text_key}"
    return Texts(name, documents, {"from": origin} | _hashes(files))


def _hashes(files: list[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name, as in recorded scores; files of equal name by their path below
    the folder common to all files."""
    names = Counter(file.name for file in files)
    common = os.path.commonpath([file.parent for file in files])
    return {
        file.name if names[file.name] == 1 else file.relative_to(common).as_posix(): file_sha256(file)
        for file in files
    }


def spans(text: str, tokenizer: Tokenizer, length: int, most: int) -> Iterator[tuple[list[int], str]]:
    """Up to `most` pieces of `length` tokens, in their order, each with its text; the last may be shorter.

    Tokens may be bytes of a character. A character cut at the end of a piece is whole in that piece's text,
    and again in the next one's. Bits per byte use one piece per document, so no byte counts twice; but if the
    document goes on, up to three bytes count of a last character that the piece's tokens do not complete.
    """
    text = text[: CHARACTERS * length * most]  # only as much of a novel as is needed
    encoded = tokenizer.for_documents.encode(text, add_special_tokens=False)
    for start in range(0, min(len(encoded.ids), length * most), length):
        stop = min(start + length, len(encoded.ids))
        first = encoded.offsets[start][0] if start else 0  # Pythia's leaves out a space before the first word
        yield encoded.ids[start:stop], text[first : encoded.offsets[stop - 1][1]]


def prompts_hash(pairs: Iterable[tuple[list[int], list[int]]]) -> str:
    """SHA-256 of the prompts' tokens."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(repr(pair).encode())
    return digest.hexdigest()
