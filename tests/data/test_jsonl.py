"""JSONL: every compression reads the same, and whatever is wrong has a file and a line number."""

import errno
import gzip
import json
import lzma
import os
import re
from pathlib import Path

import pytest
import zstandard

from lingpt.common.errors import UserError
from lingpt.data.jsonl import find_files, jsonl_corpus, read_documents

COMPRESS = {
    "a.jsonl": lambda data: data,
    "a.jsonl.gz": gzip.compress,
    "a.gz": gzip.compress,
    "a.jsonl.xz": lzma.compress,
    "a.jsonl.zst": zstandard.compress,
}


def rows(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode()


@pytest.mark.parametrize("name", COMPRESS)
def test_every_compression_reads_the_same(tmp_path: Path, texts, name):
    """A file is its documents, whichever way it is compressed; the bar ends at the file's size."""
    expected = texts(3000)
    (tmp_path / name).write_bytes(COMPRESS[name](rows(expected)))
    documents = list(read_documents(tmp_path / name))
    assert [d.text for d in documents] == expected
    assert sum(d.advance for d in documents) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
def test_files_joined_from_parts_are_read_to_the_end(tmp_path: Path, texts, name):
    """`cat a.zst b.zst` is a valid file; many readers stop after the first part."""
    first, second = texts(200, seed=1), texts(200, seed=2)
    (tmp_path / name).write_bytes(COMPRESS[name](rows(first)) + COMPRESS[name](rows(second)))
    assert [d.text for d in read_documents(tmp_path / name)] == first + second


@pytest.mark.parametrize(
    ("name", "zeros"), [("a.xz", 4), ("a.xz", 70_000), ("a.gz", 1), ("a.gz", 512), ("a.zst", 0)]
)
def test_padding_and_every_stream_after_it(tmp_path: Path, texts, name, zeros):
    """Guards: the second half of a file, lost without a word behind four zeros that the format allows there;
    and the same zeros at the end, refused as damage."""
    first, second = (COMPRESS[f"a.jsonl{name[1:]}"](rows(texts(200, seed=seed))) for seed in (1, 2))
    (tmp_path / name).write_bytes(first + bytes(zeros) + second + bytes(2 * zeros))
    assert [d.text for d in read_documents(tmp_path / name)] == texts(200, seed=1) + texts(200, seed=2)


@pytest.mark.parametrize("name", ["a.gz", "a.xz", "a.zst"])
@pytest.mark.parametrize("harm", ["header", "cut off", "padding", "garbage"])
def test_a_damaged_second_stream_is_refused(tmp_path: Path, texts, name, harm):
    """Guards: 20 of 40 documents of an .xz file whose second stream has a damaged header."""
    first, second = (COMPRESS[f"a.jsonl{name[1:]}"](rows(texts(200, seed=seed))) for seed in (1, 2))
    end = {"header": b"?" + second[1:], "cut off": second[:-9], "padding": b"\0\0\0\1" + second}
    (tmp_path / name).write_bytes(first + end.get(harm, second + b"garbage"))
    with pytest.raises(UserError, match=rf"{name} is damaged or cut off after line \d+"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
@pytest.mark.parametrize("harm", ["cut off", "empty", "not compressed", "flipped"])
def test_damaged_files_are_refused(tmp_path: Path, texts, name, harm):
    """A half-downloaded file must not pass for a shorter one."""
    whole = COMPRESS[name](rows(texts(3000)))
    damaged = {
        "cut off": whole[:-40],
        "empty": b"",
        "not compressed": rows(texts(3)),
        "flipped": b"\0\0\0\0" + whole[4:],
    }
    (tmp_path / name).write_bytes(damaged[harm])
    with pytest.raises(UserError, match=r"a\.jsonl\..* is damaged or cut off after line \d+"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("log", [27, 28, 31])
def test_a_long_zstandard_window_is_read(tmp_path: Path, log):
    """Guards: files of `zstd --long=31`, which were called damaged."""
    data = rows(["rain"])
    header = zstandard.FRAME_HEADER + bytes(
        [0, (log - 10) << 3]
    )  # RFC 8878: no size, no checksum; the window
    block = (len(data) << 3 | 1).to_bytes(3, "little") + data  # the last one, not compressed
    assert zstandard.get_frame_parameters(header).window_size == 1 << log
    (tmp_path / "a.zst").write_bytes(header + block)
    assert [d.text for d in read_documents(tmp_path / "a.zst")] == ["rain"]


BAD_LINES = {
    "not json": (b"{text: 1}", "is not JSON"),
    "cut off": (b'{"text": "abc', "is not JSON"),
    "a list": (b'["text"]', "is not a JSON object"),
    "a string": (b'"text"', "is not a JSON object"),
    "no text": (b'{"title": "x"}', 'has no "text"'),
    "null": (b'{"text": null}', "has a text that is not a string"),
    "a number": (b'{"text": 3}', "has a text that is not a string"),
    "latin-1": ('{"text": "caf\xe9"}'.encode("latin-1"), "is not UTF-8"),
    "half a surrogate": (b'{"text": "\\ud83d"}', "has half a surrogate pair"),
    "a huge number": (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "is not JSON"),
}


@pytest.mark.parametrize("line, fault", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named(tmp_path: Path, line, fault):
    """One line that says file, line number, fault and what a line should be."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as error:
        list(read_documents(path))
    assert str(error.value).startswith(f"{path}, line 3 {fault}")
    # An empty text is none of these faults: it is skipped.
    assert str(error.value).endswith(': every line must be a JSON object with a string "text"')
    assert "\n" not in str(error.value)


def test_harmless_things_are_read(tmp_path: Path):
    """A byte-order mark, Windows line ends, blank lines and no newline at the end are no mistakes."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \n{"text": "two", "id": 7}')
    assert [d.text for d in read_documents(path)] == ["one", "two"]


def test_an_empty_text_is_an_empty_document(tmp_path: Path):
    """No mistake that a corpus of millions should stop for: it is skipped where documents are tokenised."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": ""}\n{"text": "one"}\n{"text": " \\n"}\n')
    assert [d.text for d in read_documents(path)] == ["", "one", ""]


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


@pytest.mark.parametrize(
    ("given", "name", "line"),
    [
        ("a.jsonl", "b.gz", "is no .gz file"),
        ("a.jsonl.xz", "b.zst", "is no .zst file"),
        ("a.jsonl.gz", "b.jsonl", "is compressed: add .gz to its name"),
        ("a.gz", "b", "is compressed: add .gz to its name"),
    ],
)
def test_a_wrong_suffix_is_refused_whether_or_not_its_bytes_are_cached(tmp_path: Path, given, name, line):
    """Guards: a file that could not be read, and could once the same bytes under another name had been
    tokenised."""
    for path in (tmp_path / given, tmp_path / name):
        path.write_bytes(COMPRESS[given](rows(["rain", "snow"])))
    assert [d.text for d in jsonl_corpus(str(tmp_path / given)).train.read()] == ["rain", "snow"]
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / name} {line}")):
        jsonl_corpus(str(tmp_path / name))


def test_text_files_are_documents(write_jsonl, tmp_path: Path):
    """Guards: whoever has books, and no JSONL, and was told that line 1 is not JSON. Windows' line ends and
    its byte-order mark are no part of a text."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.")
    (folder / "b.txt").write_bytes(b" \n")
    for source in (folder, folder / "*.txt"):
        corpus = jsonl_corpus(str(source))
        assert [d.text for d in corpus.train.read()] == ["One.\nTwo.", ""]
        assert sum(d.advance for d in corpus.train.read()) == corpus.train.total and not corpus.left_out
    (folder / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 at byte 3: convert it"):
        list(jsonl_corpus(str(folder)).train.read())


def test_the_same_bytes_as_text_and_as_lines_are_two_corpora(write_jsonl):
    """Guards: the token cache of one taken for the other's."""
    line, text = (write_jsonl(["a", "b"], name) for name in ("a.jsonl", "a.txt"))
    assert jsonl_corpus(str(line)).content_hash != jsonl_corpus(str(text)).content_hash
    assert jsonl_corpus(str(line), str(line.with_name("a.txt"))).content_hash != (
        jsonl_corpus(str(line), str(write_jsonl(["a", "b"], "b.jsonl"))).content_hash
    )


def test_what_is_not_read_beside_jsonl_is_named(write_jsonl, tmp_path: Path):
    """Guards: a folder of several formats, half of which was never trained on, without a word."""
    for name in ("mixed/train.jsonl", "mixed/test.jsonl", "mixed/more/b.jsonl", "mixed/.hidden"):
        write_jsonl(["x"], name)
    for name in ("b.txt", "c.parquet"):
        (tmp_path / "mixed" / name).write_text("x")
    assert jsonl_corpus(str(tmp_path / "mixed")).left_out == "b.txt, c.parquet, more/"


def test_parquet_is_told_how_to_become_jsonl(tmp_path: Path):
    """By what the training stack has installed."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for source in (tmp_path, tmp_path / "a.parquet"):
        with pytest.raises(UserError, match=r"is Parquet: in Python `datasets.Dataset.from_parquet\("):
            jsonl_corpus(str(source))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "empty", "nothing-*.jsonl", "wiki40B"])
def test_a_path_with_no_documents_is_refused(tmp_path: Path, monkeypatch, source):
    """The message names the source and what would do."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"no documents.*{source.replace('*', '.')}|{source} holds no.*: give a file"
    ):
        jsonl_corpus(source)


@pytest.mark.parametrize("name", ["iterdir", "is_file"])
def test_a_folder_that_cannot_be_read_is_to_be_made_readable(write_jsonl, tmp_path, monkeypatch, name):
    """Guards: advice to make the folder writable."""
    write_jsonl(["one"])

    def refuse(path: Path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, name, refuse)  # the tests may run as root, who may read all
    with pytest.raises(UserError) as error:
        find_files(str(tmp_path))
    expected = f"cannot read {tmp_path} (Permission denied): make it readable, or give another path"
    assert str(error.value) == expected


def test_files_named_by_split_are_kept_apart(write_jsonl, tmp_path: Path):
    """A folder with train, validation and test files must not train on what it is judged by."""
    for name in ("train-1.jsonl", "train-2.jsonl", "validation.jsonl", "test.jsonl", "testimony.jsonl"):
        write_jsonl([name], f"wiki/{name}")
    corpus = jsonl_corpus(str(tmp_path / "wiki"))
    assert [d.text for d in corpus.train.read()] == ["testimony.jsonl", "train-1.jsonl", "train-2.jsonl"]
    assert [d.text for d in corpus.val.read()] == ["validation.jsonl"]
    assert corpus.rule == "held out by name: validation.jsonl; left alone: test.jsonl"


@pytest.mark.parametrize("form", ["wiki.{}.jsonl", "en-{}.jsonl", "{}/part-0.jsonl"])
def test_a_split_is_known_by_a_later_word_and_by_its_folder_too(write_jsonl, tmp_path: Path, form):
    """Guards: validation and test text of such names was trained on."""
    for split in ("train", "valid", "test"):
        write_jsonl([split], f"c/{form.format(split)}")
    corpus = jsonl_corpus(str(tmp_path / "c/**/*.jsonl"))
    assert [d.text for d in corpus.train.read()] == ["train"]
    assert corpus.val is not None and [d.text for d in corpus.val.read()] == ["valid"]


def test_a_single_file_is_trained_on_whatever_its_name(write_jsonl):
    """Who names one file means it."""
    corpus = jsonl_corpus(str(write_jsonl(["x"], "validation.jsonl")))
    assert corpus.val is None and [d.text for d in corpus.train.read()] == ["x"]


def test_val_source_is_never_trained_on(write_jsonl, tmp_path: Path):
    """A glob may well match the validation file too."""
    write_jsonl(["a"], "a.jsonl")
    val = write_jsonl(["b"], "b.jsonl")
    corpus = jsonl_corpus(str(tmp_path / "*.jsonl"), str(val))
    assert [d.text for d in corpus.train.read()] == ["a"]
    assert [d.text for d in corpus.val.read()] == ["b"]
    with pytest.raises(UserError, match="no file that is not in"):
        jsonl_corpus(str(val), str(val))


def test_what_becomes_of_files_named_by_split_is_said(write_jsonl, tmp_path: Path):
    """Guards: beside a val_source, validation files of the source that were in neither split without a word;
    and such files that are trained on, since none is named train."""
    for name in ("train", "valid", "test"):
        write_jsonl([name], f"c/{name}.jsonl")
    other, all_of_it = str(write_jsonl(["v"], "v.jsonl")), str(tmp_path / "c")
    assert jsonl_corpus(all_of_it, other).rule == f"held out: {other}; left alone: test.jsonl, valid.jsonl"
    test = str(tmp_path / "c" / "test.jsonl")
    assert jsonl_corpus(all_of_it, test).rule == f"held out: {test}; left alone: valid.jsonl"
    write_jsonl(["more"], "d/more.jsonl")
    write_jsonl(["valid"], "d/valid.jsonl")
    corpus = jsonl_corpus(str(tmp_path / "d"), other)
    assert corpus.rule == f"held out: {other}; trained on, as no file is named train: valid.jsonl"
    assert [d.text for d in corpus.train.read()] == ["more", "valid"]


def test_the_hash_follows_content_not_names_or_dates(write_jsonl, tmp_path: Path):
    """A moved or touched file is the same data; a changed byte is not."""
    before = jsonl_corpus(str(write_jsonl(["a", "b"], "x.jsonl"))).content_hash
    assert jsonl_corpus(str(write_jsonl(["a", "b"], "moved/y.jsonl"))).content_hash == before
    assert jsonl_corpus(str(write_jsonl(["a", "c"], "x.jsonl"))).content_hash != before
    val = str(write_jsonl(["v"], "v.jsonl"))
    assert jsonl_corpus(str(tmp_path / "moved"), val).content_hash != before
