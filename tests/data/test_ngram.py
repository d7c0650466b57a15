"""The bigram baseline: what it computes, against a slow and obvious computation."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from lingpt.data import DataConfig, baseline_loss, bigram_loss, prepare


@pytest.fixture
def dataset(write_jsonl, texts, tokenizer_path, tmp_path: Path):
    source = write_jsonl(texts(40), "train.jsonl")
    val = write_jsonl(texts(4, seed=9), "val.jsonl")
    config = DataConfig(
        str(source), tokenizer_path, 16, val_source=str(val), cache_dir=str(tmp_path / "cache")
    )
    return prepare(config, progress=False)


def slow_model(train: list[int], vocab: int):
    """p(w|v) by counting in Python."""
    pairs, contexts, unigram = (Counter(pairwise(train)), Counter(train[:-1]), Counter(train))
    once, twice = (sum(c == n for c in pairs.values()) for n in (1, 2))
    discount = once / (once + 2 * twice)
    followers = Counter(v for v, _ in pairs)

    def p(w: int, v: int) -> float:
        base = (unigram[w] + 1) / (len(train) + vocab)
        if not contexts[v]:
            return base
        return max(pairs[v, w] - discount, 0) / contexts[v] + discount * followers[v] / contexts[v] * base

    return p


def test_it_is_the_interpolated_model(dataset):
    """The vectorised loss equals the obvious one, and the obvious one is a distribution."""
    train, vocab = dataset.train.stream(0, 10**9).tolist(), dataset.tokenizer.vocab_size
    p = slow_model(train, vocab)
    assert sum(p(w, train[5]) for w in range(vocab)) == pytest.approx(1)
    targets = [(v, w) for block in dataset.val for v, w in pairwise(block.tolist())]
    slow = -sum(math.log(p(w, v)) for v, w in targets) / len(targets)
    assert bigram_loss(dataset) == pytest.approx(slow, rel=1e-12)


def test_it_can_be_asked_of_fewer_blocks(dataset):
    """Training may validate on the first blocks only: the baseline is then of the same targets."""
    p = slow_model(dataset.train.stream(0, 10**9).tolist(), dataset.tokenizer.vocab_size)
    block = dataset.val[0].tolist()
    slow = -sum(math.log(p(w, v)) for v, w in pairwise(block)) / 16
    assert bigram_loss(dataset, num_blocks=1) == pytest.approx(slow, rel=1e-12)


def test_it_beats_guessing(dataset):
    """These texts have few successors a token, so a bigram model must find them."""
    assert bigram_loss(dataset) < 0.7 * math.log(dataset.tokenizer.vocab_size)


def test_only_a_corpus_that_asks_for_it_has_a_baseline(dataset, few_modules, tmp_path: Path):
    """A run reports it where it is cheap: the embedded corpus has it, files do not."""
    assert baseline_loss(dataset) is None
    embedded = prepare(DataConfig(seq_len=64, vocab_size=300, cache_dir=str(tmp_path)), progress=False)
    assert baseline_loss(embedded, 10) == bigram_loss(embedded, num_blocks=10)
