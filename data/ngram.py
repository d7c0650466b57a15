"""The baseline that a trained model must beat: an interpolated bigram model of the same tokens."""

import numpy as np

from lingpt.data.dataset import Dataset
from lingpt.data.packing import PackedDocuments

MAX_TRAIN_TOKENS = 50_000_000  # time and memory grow with it


def baseline_loss(dataset: Dataset, num_blocks: int | None = None) -> float | None:
    """`bigram_loss` if the only source has `Corpus.bigram_baseline`, and blocks to compare; else None."""
    part, *more = dataset.parts
    compares = part.corpus.bigram_baseline and not more and not isinstance(part.val, PackedDocuments)
    return bigram_loss(dataset, num_blocks=num_blocks) if compares else None


def bigram_loss(dataset: Dataset, *, num_blocks: int | None = None) -> float:
    """Nats per token, on the validation blocks' targets, of a bigram model fitted on the training stream (on
    its first MAX_TRAIN_TOKENS tokens).

    Absolute discounting (Ney, Essen and Kneser 1994), interpolated with an add-one unigram model:

        p(w|v) = max(c(v,w) − d, 0)/c(v) + d·t(v)/c(v) · p(w)

    with t(v) the number of distinct successors of v, and d = n₁/(n₁ + 2n₂) from the numbers of pairs seen
    once and twice. Every target has its predecessor, also the first of a block.

    Args:
        dataset: of one source
        num_blocks: how many validation blocks, from the first on, to use (all by default)
    """
    vocab, part = dataset.tokenizer.vocab_size, dataset.parts[0]
    train = part.train.stream(0, MAX_TRAIN_TOKENS)
    blocks = len(part.val) if num_blocks is None else min(num_blocks, len(part.val))
    val = part.val.stream(0, blocks * part.val.seq_len + 1)

    unigram = (np.bincount(train, minlength=vocab) + 1) / (len(train) + vocab)
    pairs, counts = np.unique(train[:-1] * vocab + train[1:], return_counts=True)
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once else 0.0
    context = np.bincount(train[:-1], minlength=vocab)
    followers = np.bincount(pairs // vocab, minlength=vocab)

    before, target = val[:-1], val[1:]
    wanted = before * vocab + target
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[at] == wanted, counts[at] - discount, 0.0)
    total = np.maximum(context[before], 1)
    backoff = np.where(context[before] > 0, discount * followers[before] / total, 1.0)
    return float(-np.log(seen / total + backoff * unigram[target]).mean())
