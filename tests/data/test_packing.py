"""Whole documents in sequences: each of them once, nothing across a border, little left empty."""

import pickle
from bisect import bisect_left, insort
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lingpt.data import BatchSampler, DataConfig, PackedDataset, prepare
from lingpt.data.answers import ROW_END
from lingpt.data.packing import NO_TARGET, PackedDocuments, best_fit
from lingpt.data.stream import StreamWriter
from lingpt.data.tokens import Encoded


@pytest.fixture
def config(write_jsonl, texts, tokenizer_path, tmp_path) -> DataConfig:
    lengths = (1, 3, 8, 60, 200)  # in words; the longest do not fit into one sequence
    documents = [text for words in lengths for text in texts(40, seed=words, words=words)]
    np.random.default_rng(0).shuffle(documents)
    return DataConfig(
        source=str(write_jsonl(documents)),
        tokenizer=tokenizer_path,
        seq_len=128,
        packing="documents",
        val_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )


def test_documents_are_whole_and_apart(config, monkeypatch):
    """Every pair of neighbours in a document is an input and its target once, in order within one of the
    sequence's documents; no other place has a target. The stream has several record batches."""
    monkeypatch.setattr("lingpt.data.stream.ROWS", 1000)
    dataset = prepare(config, progress=False)
    train, end = dataset.train, dataset.tokenizer.eos_id
    stream = train.stream(0, 10**9).tolist()
    documents, begins = [], 0
    for at, token in enumerate(stream):
        if token == end:
            documents.append(stream[begins : at + 1])
            begins = at + 1
    expected = sorted(
        (document[at : at + 129][:-1], document[at + 1 : at + 129])
        for document in documents
        for at in range(0, len(document) - 1, 128)
    )
    assert any(len(document) > 129 for document in documents)
    found, sizes = [], set()
    for first in range(0, len(train), 3):
        idx, targets, cu_seqlens = train.gather(range(first, min(first + 3, len(train))))
        sizes.add((len(idx), len(cu_seqlens)))
        borders = cu_seqlens.tolist()
        assert cu_seqlens.dtype == torch.int32 and {128 * row for row in range(len(idx) + 1)} <= set(borders)
        for a, b in pairwise(borders):
            x, y = idx.flatten()[a:b].tolist(), targets.flatten()[a:b].tolist()
            if y and y[0] != NO_TARGET:
                found.append((x, y))
            else:
                assert set(y) <= {NO_TARGET}
    assert sorted(found) == expected
    assert len({size for _, size in sizes}) == len({B for B, _ in sizes}), "a size that is not B's alone"
    assert train.num_targets(range(len(train))) == sum(len(document) - 1 for document in documents)
    empty = 128 * len(train) - train.num_targets(range(len(train)))
    assert empty < 0.03 * 128 * len(train) and train.filled == pytest.approx(1 - empty / 128 / len(train))
    assert pickle.loads(pickle.dumps(train)).gather([1]).idx.equal(train.gather([1]).idx)
    assert train[1].equal(train.gather([1]).idx[0])
    for index in (-1, len(train)):
        with pytest.raises(IndexError):
            train[index]


def packed(path: Path, documents: list[list[int]], seq_len: int, end: int) -> PackedDocuments:
    with StreamWriter(path, np.dtype(np.int32)) as writer:
        for document in documents:
            writer.add(Encoded(np.array(document, np.int32), 0, 0, 0))
    return PackedDocuments(path, seq_len, writer.checksums, end)


def test_by_hand(tmp_path: Path):
    """Guards: borders of a batch of the sequence with most documents, one too few. Documents without a text
    are nowhere, also where there are no others."""
    two = packed(tmp_path / "x.arrow", [[1, 2, 9], [9], [3, 4, 9]], 8, end=9)
    idx, targets, cu_seqlens = two.gather([0, 0])
    no = NO_TARGET
    assert len(two) == 1 and idx.tolist() == [[1, 2, 3, 4, 0, 0, 0, 0]] * 2
    assert targets.tolist() == [[2, 9, 4, 9, no, no, no, no]] * 2
    assert cu_seqlens.tolist() == [0, 2, 4, 8, 10, 12, 16]
    for documents in ([], [[9], [9]]):
        assert len(packed(tmp_path / "x.arrow", documents, 8, end=9)) == 0


def test_the_targets_of_an_answer_that_is_cut_are_counted(tmp_path: Path):
    """Each sequence is a piece of it, of whose targets two, none and one are an answer's."""
    row = [~1, 2, 3, ~4, ~5, 6, ROW_END]
    pieces = packed(tmp_path / "x.arrow", [row], 2, end=ROW_END)
    found = [pieces.gather([piece]).targets[0] for piece in range(len(pieces))]
    assert sorted(targets.tolist() for targets in found) == [[NO_TARGET] * 2, [2, 3], [6, NO_TARGET]]
    counts = [pieces.num_targets([piece]) for piece in range(len(pieces))]
    assert counts == [(targets != NO_TARGET).sum() for targets in found]


def test_the_first_sequences_are_like_the_others(config):
    """Guards: a validation on the first of them that sees the longest documents alone."""
    train = prepare(config, progress=False).train
    per_row = [(train.gather([row]).cu_seqlens.diff() > 0).sum().item() for row in range(len(train))]
    half = len(per_row) // 2
    assert np.mean(per_row[:half]) == pytest.approx(np.mean(per_row[half:]), rel=0.35)


def test_the_packing_identifies_the_data_and_not_the_cache(config):
    packed, blocks = (prepare(replace(config, packing=p), progress=False) for p in ("documents", "blocks"))
    assert packed.fingerprint != blocks.fingerprint
    assert packed.parts[0].cache.folder == blocks.parts[0].cache.folder
    assert type(blocks.train) is PackedDataset


def test_a_batch_counts_its_targets(config):
    batches = BatchSampler(prepare(config, progress=False).train, seed=1, global_batch_size=4)
    for step in (0, 7):
        targets = batches.get(step, range(4)).targets
        assert batches.num_targets(step) == (targets != NO_TARGET).sum()
        assert batches.get(step, [2]).targets.equal(targets[2:3])


@pytest.mark.parametrize("size", [7, 128])
def test_best_fit_fills(size):
    """No bin overflows, and there are as many as when items are put one by one, of items just over a half, a
    third and a quarter of a bin, and of others."""
    rng = np.random.default_rng(size)
    hard = np.repeat([size // k + 1 for k in (2, 3, 4)], 50)
    lengths = rng.permutation(np.concatenate([hard, rng.integers(1, size + 1, 500)]))
    filled = np.bincount(best_fit(lengths, size), lengths)
    assert filled.max() <= size and filled.min() > 0
    assert len(best_fit(lengths[:0], size)) == 0
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else size) - length)
    assert len(filled) == len(rooms)
