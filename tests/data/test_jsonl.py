"""JSONL: every compression reads the same, and whatever is wrong has a file and a line number."""

import gzip
import json
import lzma
import zlib
from pathlib import Path

import pytest
import zstandard

from lingpt.common.errors import UserError
from lingpt.data.jsonl import read_documents

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


def test_zeros_at_the_start_of_a_piece_are_content(tmp_path: Path):
    """Guards: a whole file called damaged, as if padding could stand inside of a stream. It is read 64 KB at
    a time."""
    for length in range(60):
        texts, gz = ["x" * length, *["y" * 20] * 1800], zlib.compressobj(0, wbits=31)
        lines = [gz.compress(rows([text])) + gz.flush(zlib.Z_FULL_FLUSH) for text in texts]
        content = b"".join(lines) + gz.flush()
        if content[1 << 16] == 0:
            break
    (tmp_path / "a.gz").write_bytes(content)
    assert content[1 << 16] == 0 and [d.text for d in read_documents(tmp_path / "a.gz")] == texts


@pytest.mark.parametrize("name", ["a.gz", "a.xz", "a.zst"])
@pytest.mark.parametrize("harm", ["header", "cut off", "padding", "garbage"])
def test_a_damaged_second_stream_is_refused(tmp_path: Path, texts, name, harm):
    """Guards: 20 of 40 documents of an .xz file whose second stream has a damaged header."""
    first, second = (COMPRESS[f"a.jsonl{name[1:]}"](rows(texts(200, seed=seed))) for seed in (1, 2))
    end = {"header": b"?" + second[1:], "cut off": second[:-9], "padding": b"\0\0\0\1" + second}
    (tmp_path / name).write_bytes(first + end.get(harm, second + b"garbage"))
    with pytest.raises(UserError, match=rf"{name} is damaged or cut off after line \d+"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("zeros", [1, 6, 65_535])
def test_the_padding_of_xz_is_whole_words(tmp_path: Path, zeros):
    (tmp_path / "a.xz").write_bytes(lzma.compress(rows(["rain"])) + bytes(zeros))
    with pytest.raises(UserError, match=rf"a.xz is damaged or cut off after line 1 \({zeros} zeros are no"):
        list(read_documents(tmp_path / "a.xz"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
@pytest.mark.parametrize("harm", ["cut off", "empty", "not compressed", "flipped"])
def test_damaged_files_are_refused(tmp_path: Path, texts, name, harm):
    """A half-downloaded file must not pass for a shorter one."""
    damaged = {"empty": b"", "not compressed": rows(texts(3))}
    if harm not in damaged:
        whole = COMPRESS[name](rows(texts(300)))
        damaged |= {"cut off": whole[:-40], "flipped": b"\0\0\0\0" + whole[4:]}
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
    "no text": (b'{"title": "x"}', 'has no "text" among ["title"]'),
    "null": (b'{"text": null}', "has a text that is not a string"),
    "a number": (b'{"text": 3}', "has a text that is not a string"),
    "latin-1": ('{"text": "caf\xe9"}'.encode("latin-1"), "is not UTF-8"),
    "utf-16": ('\ufeff{"text": "x"}'.encode("utf-16-le"), "is not UTF-8"),
    "half a surrogate": (b'{"text": "\\ud83d"}', "has half a surrogate pair"),
    "nested too deep": (b"[" * 100_000, "is not JSON"),
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
    assert ': every line must be a JSON object with a string "text"' in str(error.value)
    assert (".txt" in str(error.value)) == (fault == "is not JSON")
    encoding = "utf-16" if b"\0" in line else "cp1252"  # guards: UTF-16 converted as if it were Latin-1
    assert (f"`iconv -f {encoding} -t utf-8`" in str(error.value)) == (fault == "is not UTF-8")
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
