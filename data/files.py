"""Documents from disk: JSON Lines, Parquet or text files; a file, a folder or a glob of them."""

import glob
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.common.files import expand, read_errors
from lingpt.data.corpus import TEXT_KEY, Corpus, Document, Split, hash_of
from lingpt.data.file_hashes import file_hashes, file_stamp
from lingpt.data.jsonl import COMPRESSED, TEXT, check_compression, read_documents
from lingpt.data.parquet import PARQUET, read_parquet

KINDS = ((".jsonl", *COMPRESSED), (PARQUET,), (TEXT,))  # of several in one folder, the first is read
_SPLIT_NAME = re.compile(  # the words of `datasets`
    r"(?:^|[._-])(?:(?P<train>train|training)|(?P<val>validation|valid|val|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?![a-z])"
)


def files_corpus(
    source: str,
    val_source: str | None = None,
    named: Iterable[str] = (),
    cache_dir: Path | None = None,
    text_key: str = TEXT_KEY,
) -> Corpus:
    """The documents of the files that `source` names: a path, a folder or a glob.

    If several files match and one has the word `train` in its name, or in its folder's, such words decide
    the splits: `validation`, `valid`, `val` or `dev` is held out, `test` or `eval` left alone. Files of
    `val_source` are held out and never trained on. The files' hashes are cached in `cache_dir`, if given.
    `text_key` is the field of JSON Lines, or the column of Parquet, that holds the text.

    Raises:
        UserError: no such files; its advice also offers `named`, the sources that are not files
    """
    matches = _matches(source)
    files = _documents(source, matches, named)
    train, val = _by_name(files)
    held_out = f"held out by name: {_names(val)}" if val else "held out: the documents of the lowest hashes"
    if val_source:
        val = find_files(val_source, named)
        kept_out = {f.resolve() for f in val}
        train = [f for f in train if f.resolve() not in kept_out]
        held_out = f"held out: {val_source}"
    if not train:
        raise UserError(
            f"{source} has no file that is not in {val_source} too: give other text to train or validate on"
        )
    splits = _split(train, text_key), _split(val, text_key) if val else None
    hashes = _hashes([*train, *val], cache_dir, text_key)
    content_hash = hash_of([hashes[: len(train)], hashes[len(train) :]])
    read = {*files, *val, *(folder for file in files for folder in file.parents)}  # `**` matches folders, too
    others = [path for path in matches if path not in read]
    rule = "; ".join([held_out, *_surprises(files, train, val)])
    return Corpus(source, content_hash, *splits, rule, left_out=_names(others))


def whole_corpus(source: str, named: Iterable[str], cache_dir: Path | None, text_key: str) -> Corpus:
    """All documents of the files that `source` names, whatever the words in their names."""
    files = find_files(source, named)
    split = _split(files, text_key)
    return Corpus(source, str(_hashes(files, cache_dir, text_key)), split, None, "all of it")


def find_files(source: str, named: Iterable[str] = ()) -> list[Path]:
    """The files that `source` names, sorted: its JSON Lines, else its Parquet, else its text files.

    Raises a `UserError`, which also offers `named`, if there are none.
    """
    return _documents(source, _matches(source), named)


def _documents(source: str, matches: list[Path], named: Iterable[str]) -> list[Path]:
    """`find_files`, given the paths that match `source`."""
    with read_errors(source):
        found = [path for path in matches if path.is_file()]
        one = found if expand(source).is_file() else []  # whatever its name
    kinds = ([path for path in found if path.name.endswith(suffixes)] for suffixes in KINDS)
    files = one or next(filter(None, kinds), [])
    if not files:
        folder = expand(source).is_dir()
        where = f"the folder {source} holds no documents" if folder else f"there are no documents at {source}"
        nested = folder and any(path.is_dir() for path in matches)
        inner = shlex.quote(f"{source.rstrip('/')}/**")  # else the shell replaces it
        give = [f"{inner} for those in its folders"] if nested else []
        give += ["several as --data.source a*0.7,b*0.3"] if "," in source else []
        give += ["a file, folder or glob of JSONL, Parquet or text", *named]
        raise UserError(f"{where} ({', '.join(sum(KINDS, ()))}): give {', or '.join(give)}")
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


def _hashes(files: list[Path], cache_dir: Path | None, text_key: str) -> list[str]:
    """A hash of each file's bytes and of how it is read."""
    key = "" if text_key == TEXT_KEY else f" {text_key}"
    how = {TEXT: "text ", PARQUET: f"parquet{key} "}
    hashes = zip(files, file_hashes(files, cache_dir), strict=True)
    return [how.get(file.suffix, f"lines{key} " if key else "") + content for file, content in hashes]


def _split_word(file: Path) -> str | None:
    """`train`, `val` or `test`, by a word in the file's name, else in its folder's; None if in neither."""
    found = (_SPLIT_NAME.search(name.lower()) for name in (file.name, file.parent.name))
    return next((match.lastgroup for match in found if match), None)


def _by_name(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on and to validate on; those to test on are in neither."""
    words = {file: _split_word(file) for file in files}
    if "train" not in words.values():
        return files, []
    val = [file for file, word in words.items() if word == "val"]
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


def _split(files: list[Path], text_key: str) -> Split:
    """The documents of `files`, to be made before these are hashed: a UserError ends the reading of a file
    that has changed since. UserError for a file whose name says otherwise how it is compressed: its bytes
    might be in the token cache, read otherwise.
    """
    stamps = list(map(file_stamp, files))
    for path in files:
        check_compression(path)

    def read() -> Iterator[Document]:
        for path, stamp in zip(files, stamps, strict=True):
            yield from read_file(path, text_key)
            if file_stamp(path) != stamp:
                raise UserError(f"{path} changed after it was hashed: run again when nothing writes to it")

    return Split(read, total=sum(size for size, *_ in stamps), unit="B")


def read_file(path: Path, text_key: str = TEXT_KEY) -> Iterator[Document]:
    """The documents of one file; progress is in bytes on disk. UserError, naming file and line or row."""
    check_compression(path)
    return read_parquet(path, text_key) if path.suffix == PARQUET else read_documents(path, text_key)
