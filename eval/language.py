"""Language-modelling measures: bits per byte, the loss by position, and that within documents.

Bits per byte do not depend on the tokenizer; those of `xz` on the same bytes are given for comparison. The
loss by position goes far beyond the training length (arXiv 2312.06635, figure 5).
"""

import itertools
import lzma
import math
from collections import Counter
from collections.abc import Iterable

import torch

from lingpt.eval.comparison import ratio
from lingpt.eval.lm import LinGPTLM
from lingpt.eval.scores import PerDocument, Positions, Score
from lingpt.eval.texts import Texts, Unsuitable, prompts_hash, spans

TOKENS = 1_000_000  # scored tokens per text
DOCUMENT_TOKENS = 2_000_000  # for the loss within documents, whose first tokens are few
PIECES = 32  # long pieces for the loss by position, one per document
ENOUGH = 8  # documents in the mean at each position, if that many are long enough


def bits_per_byte(lm: LinGPTLM, texts: Texts, tokens: int = TOKENS) -> Score:
    """Bits per UTF-8 byte of the texts, in windows of the model's context.

    Each document contributes at most the same number of tokens, at least one window; together about `tokens`.
    The standard error is over documents.
    """
    share = max(lm.max_length, tokens // len(texts.documents))
    parts: list[tuple[list[int], str]] = []
    taken = 0
    for document in texts.documents:
        for ids, text in spans(document, lm.text_tokenizer, share, 1):  # none of an empty document
            parts.append((ids, text))
            taken += len(ids)
        if taken >= tokens:
            break
    nats = [-total for total in lm.rolling([ids for ids, _ in parts])]
    sizes = [len(text.encode()) for _, text in parts]
    compressed = len(lzma.compress("\n".join(text for _, text in parts).encode(), preset=9))
    value, error = ratio(nats, sizes)
    to_bits = 1 / math.log(2)
    return Score(
        task="bits_per_byte",
        texts=texts.name,
        documents=len(parts),
        complete=True,
        metrics={
            "bits_per_byte": to_bits * value,
            "bits_per_byte_stderr": to_bits * error if error is not None else None,
            "loss": sum(nats) / taken,
            "xz_bits_per_byte": 8 * compressed / sum(sizes),
        },
        per_document=PerDocument(nats=tuple(round(x, 2) for x in nats), bytes=tuple(sizes)),
        prompts=prompts_hash((ids, []) for ids, _ in parts),
    )


def loss_by_position(lm: LinGPTLM, texts: Texts, train_length: int, pieces: int = PIECES) -> Score:
    """Nats per token by position, in groups that double, as far as `ENOUGH` documents reach.

    The model must have been loaded with a `block_size` as large as the longest position. The beginning of
    each long enough document is scored: the same documents at all positions, so that the curve depends on the
    position alone. The group that ends at `train_length` is the reference for the others; the baseline is the
    loss of the best unigram model of these tokens.
    """
    found = [ids for d in texts.documents for ids, _ in spans(d, lm.text_tokenizer, lm.max_length, 1)]
    edges = _edges(train_length, [len(ids) for ids in found])
    found = [ids[: edges[-1]] for ids in found if len(ids) >= edges[-1]][:pieces]
    losses = torch.stack(lm.token_losses([[lm.eot_token_id, *ids] for ids in found]))
    groups, per_document = [], []
    for start, stop in itertools.pairwise(edges):
        per_window = losses[:, start:stop].mean(1)
        error = per_window.std().item() / math.sqrt(len(found)) if len(found) > 1 else None
        groups.append(Positions(to=stop, loss=per_window.mean().item(), stderr=error))
        per_document.append(tuple(round(x, 4) for x in per_window.tolist()))
    within = next(group for group in groups if group.to == train_length)
    return Score(
        task="loss_by_position",
        texts=texts.name,
        documents=len(found),
        complete=True,
        metrics={"loss_at_training_length": within.loss, "loss_at_the_end": groups[-1].loss},
        positions=tuple(groups),
        per_document=PerDocument(losses=tuple(per_document)),
        unigram=entropy(token for ids in found for token in ids),
        train_length=train_length,
        prompts=prompts_hash((ids, []) for ids in found),
    )


def loss_within_documents(
    lm: LinGPTLM, texts: Texts, train_length: int, tokens: int = DOCUMENT_TOKENS
) -> Score:
    """Nats per token by the number of its document's tokens before it, in groups that double, up to the
    training length.

    Each document is scored by itself, its first tokens up to the training length, together about `tokens`.
    Nothing precedes it, not even end-of-text, which a model of packed documents never reads. So models that
    were trained with and without packing are compared on the same. The standard errors are over documents.
    """
    found, taken = list[list[int]](), 0
    for document in texts.documents:
        for ids, _ in spans(document, lm.text_tokenizer, train_length + 1, 1):
            if len(ids) > 1:
                found.append(ids)
                taken += len(ids) - 1
        if taken >= tokens:
            break
    if not found:
        raise Unsuitable("no document has two tokens: the loss within documents needs longer ones")
    losses = lm.token_losses(found)
    edges = [0, *sorted({train_length >> i for i in range(train_length.bit_length())})]
    groups = []
    for start, stop in itertools.pairwise(edges):
        parts = [part for loss in losses if len(part := loss[start:stop])]
        if parts:
            value, error = ratio([part.sum().item() for part in parts], [len(part) for part in parts])
            groups.append(Positions(to=stop, loss=value, stderr=error))
    return Score(
        task="loss_within_documents",
        texts=texts.name,
        documents=len(found),
        complete=True,
        metrics={"loss": sum(loss.sum().item() for loss in losses) / taken},
        positions=tuple(groups),
        train_length=train_length,
        prompts=prompts_hash((ids, []) for ids in found),
    )


def _edges(train_length: int, lengths: list[int]) -> list[int]:
    """The edges 0, N/16, N/8 … N, 2N … of the groups, N the training length; rounded down.

    The last edge is one that `ENOUGH` documents reach; if fewer reach 2N, one that as many reach as 2N; if
    one or none does, N. UserError if none reaches N.
    """

    def reach(edge: int) -> int:
        return min(ENOUGH, sum(length >= edge for length in lengths))

    if not reach(train_length):
        raise Unsuitable(
            f"the longest document has {max(lengths, default=0):,} tokens, fewer than the training length "
            f"{train_length:,}: the loss by position needs longer texts"
        )
    edges = [0, *sorted({max(1, train_length >> i) for i in range(5)})]
    past = reach(2 * train_length)
    while past > 1 and reach(2 * edges[-1]) == past:
        edges.append(2 * edges[-1])
    return edges


def entropy(tokens: Iterable[int]) -> float:
    """The entropy of the tokens' frequencies, in nats: the loss of the best unigram model of them."""
    counts = Counter(tokens)
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values())
