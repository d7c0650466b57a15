"""The file of a token stream: as users have it, as it is read, and never taken for what it is not."""

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lingpt.common.errors import UserError
from lingpt.data import PackedDataset, stream
from lingpt.data.stream import StreamWriter
from lingpt.data.tokens import Encoded


def write(path: Path, tokens: np.ndarray) -> list[int]:
    """The file of one document; its checksums."""
    with StreamWriter(path, tokens.dtype) as writer:
        writer.add(Encoded(tokens, 0, 0, 0))
    return writer.checksums


def write_table(path: Path, batch: pa.RecordBatch) -> Path:
    with pa.ipc.new_stream(path, batch.schema) as file:
        file.write_batch(batch)
    return path


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_block_needs_the_next_token(tmp_path: Path, tokens, blocks):
    """No tokens, no blocks, no crash; the last block's last target is a token of the stream."""
    checksums = write(tmp_path / "x.arrow", np.arange(tokens, dtype=np.uint16))
    found = PackedDataset(tmp_path / "x.arrow", 8, checksums)
    assert len(found) == blocks and found.num_targets(range(blocks)) == 8 * blocks
    assert found.gather(range(blocks)).tolist() == [list(range(8 * i, 8 * i + 9)) for i in range(blocks)]
    assert found.stream(tokens + 1, tokens + 9).tolist() == []
    for index in (-1, blocks):
        with pytest.raises(IndexError):
            found[index]


def test_the_file_is_as_users_have_it(tmp_path: Path):
    """Golden: entries that were written before are read after; and others see a record batch at once."""
    with StreamWriter(tmp_path / "x.arrow", np.dtype(np.uint16)) as writer:
        writer.add(Encoded((np.arange(2**20 + 7) % 50_000).astype(np.uint16), 0, 0, 0))
        seen = pa.ipc.open_stream(pa.memory_map(str(tmp_path / "x.arrow"))).read_next_batch()
        assert len(seen) == 2**20
    assert writer.checksums == [400083378, 452044034]
    tokens = PackedDataset(tmp_path / "x.arrow", 8, writer.checksums).stream(2**20 - 1, 2**20 + 9)
    assert tokens.tolist() == [at % 50_000 for at in range(2**20 - 1, 2**20 + 7)]


@pytest.mark.parametrize("rows", [8, 32])
def test_record_batches_of_another_size_are_refused(tmp_path: Path, monkeypatch, rows):
    """Guards: tokens from other places than those that were asked for."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "ROWS", rows)
        checksums = write(tmp_path / "x.arrow", np.arange(30, dtype=np.uint16))
    monkeypatch.setattr(stream, "ROWS", 16)
    with pytest.raises(UserError, match=rf"has a record batch that is not of 16 tokens: delete {tmp_path} "):
        PackedDataset(tmp_path / "x.arrow", 4, checksums)


def test_as_many_record_batches_as_checksums(tmp_path: Path, monkeypatch):
    """Guards: a file that is cut off between two of them; and unchecked ones."""
    monkeypatch.setattr(stream, "ROWS", 16)
    checksums = write(tmp_path / "x.arrow", np.arange(40, dtype=np.uint16))
    for others in (checksums[:-1], [*checksums, 0]):
        with pytest.raises(UserError, match=rf"has 3 record batches and should have {len(others)}: delete"):
            PackedDataset(tmp_path / "x.arrow", 4, others)


@pytest.mark.parametrize(
    "column", [{"tokens": pa.array([1], pa.uint16())}, {"token": pa.array([1], pa.int16())}, {"token": ["a"]}]
)
def test_another_table_is_no_token_cache(tmp_path: Path, column):
    """Guards: a traceback; and numbers of the same bits, read with a sign."""
    path = write_table(tmp_path / "x.arrow", pa.RecordBatch.from_pydict(column))
    with pytest.raises(UserError, match=rf"x.arrow is not a token cache \(.*\): delete {tmp_path} and run"):
        PackedDataset(path, 4, [zlib.crc32(b"\1\0")])


def test_a_header_that_promises_more_than_there_is_is_refused(tmp_path: Path):
    """Guards: a read beyond the file's end, which kills the process."""
    checksums = write(tmp_path / "x.arrow", np.zeros(1000, np.uint16))
    content = (tmp_path / "x.arrow").read_bytes()
    length, more = ((n).to_bytes(8, "little") for n in (1000, 1 << 20))
    assert content.count(length) == 2  # of the record batch, and of its column
    (tmp_path / "x.arrow").write_bytes(content.replace(length, more))
    with pytest.raises(UserError, match="is not a token cache"):
        PackedDataset(tmp_path / "x.arrow", 4, checksums)
