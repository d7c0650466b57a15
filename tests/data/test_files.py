"""Files, folders and globs: which of them are read, and which are held out."""

import errno
import gzip
import io
import json
import lzma
import os
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lingpt.common.errors import UserError
from lingpt.data.files import files_corpus, find_files, whole_corpus


def test_paths_folders_and_globs(write_jsonl, tmp_path: Path):
    """All three name the same files, in one order; other files of a folder are not touched, nor hidden ones
    (macOS leaves `._a.jsonl` beside a file on a foreign disk)."""
    files = [write_jsonl(["x"], f"folder/{n}") for n in ("a.jsonl", "b.jsonl.xz")]
    (tmp_path / "folder" / "README.md").write_text("no data")
    (tmp_path / "folder" / "._a.jsonl").write_text("no data")
    assert find_files(str(tmp_path / "folder")) == files
    assert find_files(str(tmp_path / "folder" / "*.jsonl*")) == files
    (tmp_path / "folder" / "itself").symlink_to(tmp_path / "folder")  # guards: each document 41 times
    assert find_files(str(tmp_path / "**" / "*.jsonl*")) == files
    assert find_files(str(files[0])) == files[:1]
    brackets = write_jsonl(["x"], "a[1].jsonl")
    assert find_files(str(brackets)) == [brackets]


def as_parquet(lines: bytes) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(map(json.loads, lines.splitlines()))), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("given", "compress", "name", "line"),
    [
        ("a.jsonl", bytes, "b.gz", "is no .gz file"),
        ("a.jsonl.xz", lzma.compress, "b.zst", "is no .zst file"),
        ("a.jsonl.gz", gzip.compress, "b.jsonl", "is compressed: add .gz to its name"),
        ("a.gz", gzip.compress, "b", "is compressed: add .gz to its name"),
        ("a.parquet", as_parquet, "b.pq", "is Parquet: add .parquet to its name"),
    ],
)
def test_a_wrong_suffix_is_refused_whether_or_not_its_bytes_are_cached(tmp_path, given, compress, name, line):
    """Guards: a file that could not be read, and could once the same bytes under another name had been
    tokenised."""
    for path in (tmp_path / given, tmp_path / name):
        path.write_bytes(compress(b'{"text": "rain"}\n{"text": "snow"}\n'))
    assert [d.text for d in files_corpus(str(tmp_path / given)).train.read()] == ["rain", "snow"]
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / name} {line}")):
        files_corpus(str(tmp_path / name))


def test_text_files_are_documents(write_jsonl, tmp_path: Path):
    """Guards: whoever has books, and no JSONL, and was told that line 1 is not JSON. Windows' line ends and
    its byte-order mark are no part of a text."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.")
    (folder / "b.txt").write_bytes(b" \n")
    for source in (folder, folder / "*.txt"):
        corpus = files_corpus(str(source))
        assert [d.text for d in corpus.train.read()] == ["One.\nTwo.", ""]
        assert sum(d.advance for d in corpus.train.read()) == corpus.train.total and not corpus.left_out
    (folder / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 at byte 3: convert it"):
        list(files_corpus(str(folder)).train.read())


def test_the_same_bytes_as_text_and_as_lines_are_two_corpora(write_jsonl):
    """Guards: the token cache of one taken for the other's."""
    line, text = (write_jsonl(["a", "b"], name) for name in ("a.jsonl", "a.txt"))
    assert files_corpus(str(line)).content_hash != files_corpus(str(text)).content_hash
    assert files_corpus(str(line), str(line.with_name("a.txt"))).content_hash != (
        files_corpus(str(line), str(write_jsonl(["a", "b"], "b.jsonl"))).content_hash
    )


def test_another_field_of_the_same_bytes_is_another_corpus(write_jsonl, tmp_path: Path):
    """Guards: the cached tokens of one `--data.text_key` taken for those of another. Golden: the hashes of
    before name the entries that users have."""
    path = write_jsonl(["a", "b"])
    hashes = [files_corpus(str(path), text_key=key).content_hash[:8] for key in ("text", "title")]
    assert hashes == ["320ad441", "2b9a9b3b"]
    table = str(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["a"], "title": ["b"]}), table)
    assert files_corpus(table).content_hash != files_corpus(table, text_key="title").content_hash


def test_what_is_not_read_beside_jsonl_is_named(write_jsonl, tmp_path: Path):
    """Guards: a folder of several formats, half of which was never trained on, without a word."""
    for name in ("mixed/train.jsonl", "mixed/test.jsonl", "mixed/more.jsonl/b.jsonl", "mixed/.hidden"):
        write_jsonl(["x"], name)
    for name in ("b.txt", "c.parquet"):
        (tmp_path / "mixed" / name).write_text("x")
    assert files_corpus(str(tmp_path / "mixed")).left_out == "b.txt, c.parquet, more.jsonl/"
    for number in range(7):
        (tmp_path / f"mixed/{number}.csv").write_text("x")
    first = ", ".join([*(f"{number}.csv" for number in range(7)), "b.txt"])
    assert files_corpus(str(tmp_path / "mixed")).left_out == f"{first}, … (10 in all)"


def test_a_licence_beside_parquet_is_not_read(tmp_path: Path):
    """Guards: a data set of one document, the text file that comes with it."""
    (tmp_path / "LICENSE.txt").write_text("You may.")
    parquet.write_table(pa.table({"text": ["rain"]}), tmp_path / "a.parquet")
    corpus = files_corpus(str(tmp_path))
    assert [d.text for d in corpus.train.read()] == ["rain"] and corpus.left_out == "LICENSE.txt"


@pytest.mark.parametrize("source", ["nowhere.jsonl", "empty", "nothing-*.jsonl", "wiki40B"])
def test_a_path_with_no_documents_is_refused(tmp_path: Path, monkeypatch, source):
    """The message names the source and what would do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("no data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"no documents.*{source.replace('*', '.')}|{source} holds no.*: give a file"
    ):
        files_corpus(source)
    with pytest.raises(UserError, match=r": give several as --data\.source a\*0\.7,b\*0\.3, or"):
        files_corpus(f"{source},b.jsonl")


def test_of_a_folder_of_folders_it_is_said_how_to_read_them(write_jsonl, tmp_path: Path):
    """As many data sets are laid out; and the line is right, in a shell, too."""
    write_jsonl(["x"], "c/train/0.jsonl")
    with pytest.raises(UserError) as error:
        find_files(f"{tmp_path}/c/")
    advice = str(error.value).partition(": give ")[2]
    assert advice.startswith(f"'{tmp_path}/c/**' for those in its folders, or a file")
    (tmp_path / "c/empty").mkdir()
    corpus = files_corpus(shlex.split(advice)[0])
    assert [d.text for d in corpus.train.read()] == ["x"] and corpus.left_out == "empty/"


def test_a_file_that_opens_and_cannot_be_read_is_one_line():
    """Guards: a traceback from a failing disk."""
    with pytest.raises(UserError, match=r"^cannot read /proc/self/mem \(Input/output error\): make"):
        files_corpus("/proc/self/mem")


@pytest.mark.parametrize("name", ["iterdir", "is_file"])
def test_a_folder_that_cannot_be_read_is_to_be_made_readable(write_jsonl, tmp_path, monkeypatch, name):
    """Guards: advice to make the folder writable."""
    file = write_jsonl(["one"])

    def refuse(path: Path):
        if name == "is_file" and path != file:  # the folder can be listed, and not entered
            return False
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, name, refuse)  # the tests may run as root, who may read all
    with pytest.raises(UserError) as error:
        find_files(str(tmp_path))
    expected = f"cannot read {tmp_path} (Permission denied): make it readable, or give another path"
    assert str(error.value) == expected


def test_files_named_by_split_are_kept_apart(write_jsonl, tmp_path: Path):
    """A folder with train, validation and test files must not train on what it is judged by."""
    held_out = ["Dev-0.jsonl", "val.jsonl", "valid.jsonl", "validation.jsonl"]
    trained_on = ["evals.jsonl", "interval.jsonl", "testimony.jsonl", "train-1.jsonl", "training.jsonl"]
    for name in (*held_out, *trained_on, "eval.jsonl", "test.jsonl"):
        write_jsonl([name], f"wiki/{name}")
    corpus = files_corpus(str(tmp_path / "wiki"))
    assert [d.text for d in corpus.train.read()] == trained_on
    assert [d.text for d in corpus.val.read()] == held_out
    assert corpus.rule == f"held out by name: {', '.join(held_out)}; left alone: eval.jsonl, test.jsonl"


@pytest.mark.parametrize(
    "form", ["wiki.{}.jsonl", "en-{}.jsonl", "en_{}.jsonl", "{}/part-0.jsonl", "train/{}.jsonl"]
)
def test_a_split_is_known_by_a_later_word_and_by_its_folder_too(write_jsonl, tmp_path: Path, form):
    """Guards: validation and test text of such names was trained on. The file's name counts before that of
    its folder."""
    for split in ("train", "valid", "test"):
        write_jsonl([split], f"c/{form.format(split)}")
    corpus = files_corpus(str(tmp_path / "c/**/*.jsonl"))
    assert [d.text for d in corpus.train.read()] == ["train"]
    assert corpus.val is not None and [d.text for d in corpus.val.read()] == ["valid"]


def test_a_single_file_is_trained_on_whatever_its_name(write_jsonl):
    """Who names one file means it."""
    corpus = files_corpus(str(write_jsonl(["x"], "validation.jsonl")))
    assert corpus.val is None and [d.text for d in corpus.train.read()] == ["x"]


def test_val_source_is_never_trained_on(write_jsonl, tmp_path: Path):
    """A glob may well match the validation file too."""
    write_jsonl(["a"], "a.jsonl")
    val = write_jsonl(["b"], "b.jsonl")
    corpus = files_corpus(str(tmp_path / "*.jsonl"), str(val))
    assert [d.text for d in corpus.train.read()] == ["a"]
    assert [d.text for d in corpus.val.read()] == ["b"]
    with pytest.raises(UserError, match="no file that is not in"):
        files_corpus(str(val), str(val))


def test_val_source_is_not_trained_on_by_another_path(write_jsonl, tmp_path: Path):
    """Here through a link; and what is validated on is not called unread."""
    write_jsonl(["a"], "c/a.jsonl")
    write_jsonl(["b"], "c/b.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    corpus = files_corpus(str(tmp_path / "c"), str(tmp_path / "link" / "b.jsonl"))
    assert [d.text for d in corpus.train.read()] == ["a"] and "left alone" not in corpus.rule
    text = write_jsonl(["b"], "c/b.txt")
    assert files_corpus(str(tmp_path / "c"), str(text)).left_out == ""


def test_a_text_to_validate_on_is_all_of_its_files(write_jsonl, tmp_path: Path):
    """Whatever the words in their names; each of them decides its hash."""
    hashes = set()
    for last in ("c", "d"):
        for name, text in (("train", "a"), ("test", "b"), ("valid", last)):
            write_jsonl([text], f"v/{name}.jsonl")
        corpus = whole_corpus(str(tmp_path / "v"), (), None, "text")
        assert sorted(d.text for d in corpus.train.read()) == ["a", "b", last] and corpus.val is None
        hashes.add(corpus.content_hash)
    assert len(hashes) == 2


def test_what_becomes_of_files_named_by_split_is_said(write_jsonl, tmp_path: Path):
    """Guards: beside a val_source, validation files of the source that were in neither split without a word;
    and such files that are trained on, since none is named train."""
    for name in ("train", "valid", "test"):
        write_jsonl([name], f"c/{name}.jsonl")
    other, all_of_it = str(write_jsonl(["v"], "v.jsonl")), str(tmp_path / "c")
    assert files_corpus(all_of_it, other).rule == f"held out: {other}; left alone: test.jsonl, valid.jsonl"
    test = str(tmp_path / "c" / "test.jsonl")
    assert files_corpus(all_of_it, test).rule == f"held out: {test}; left alone: valid.jsonl"
    write_jsonl(["more"], "d/more.jsonl")
    write_jsonl(["valid"], "d/valid.jsonl")
    corpus = files_corpus(str(tmp_path / "d"), other)
    assert corpus.rule == f"held out: {other}; trained on, as no file is named train: valid.jsonl"
    assert [d.text for d in corpus.train.read()] == ["more", "valid"]


def test_the_hash_follows_content_not_names_or_dates(write_jsonl, tmp_path: Path):
    """A moved or touched file is the same data; a changed byte is not, nor are files in another order."""
    orders = []
    for folder, first, second in (("1", "a", "b"), ("2", "b", "a")):
        write_jsonl([first], f"{folder}/0.jsonl")
        write_jsonl([second], f"{folder}/1.jsonl")
        orders.append(files_corpus(str(tmp_path / folder)).content_hash)
    assert orders[0] != orders[1]
    before = files_corpus(str(write_jsonl(["a", "b"], "x.jsonl"))).content_hash
    assert files_corpus(str(write_jsonl(["a", "b"], "moved/y.jsonl"))).content_hash == before
    assert files_corpus(str(write_jsonl(["a", "c"], "x.jsonl"))).content_hash != before
    val = str(write_jsonl(["v"], "v.jsonl"))
    assert files_corpus(str(tmp_path / "moved"), val).content_hash != before
