"""Documents to token ids: in order, in parallel, in little memory."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lingpt.data import DataConfig, Tokenizer, prepare, tokens
from lingpt.data.corpus import Document
from lingpt.data.tokens import encode_documents, token_dtype


def test_large_vocabularies_get_four_bytes(tokenizer_path, write_jsonl, tmp_path: Path):
    """An id of 2^16 or more must not wrap around."""
    assert token_dtype(1 << 16) == np.uint16 and token_dtype((1 << 16) + 1) == np.int32
    raw = tokenizers.Tokenizer.from_file(tokenizer_path)
    raw.add_tokens([f"<{i}>" for i in range(66000)])
    large = Tokenizer(raw, "large")
    (encoded,) = encode_documents([Document("<65999>", 0)], large, 1)
    assert encoded.ids.tolist() == [320 + 65999, 0]
    source = write_jsonl(["<65999> " * 50] * 2 + ["<1> " * 50], "large.jsonl")
    config = DataConfig(
        str(source), str(large.save(tmp_path / "large")), 16, cache_dir=str(tmp_path / "cache")
    )
    assert 320 + 65999 in prepare(config, progress=False).train.stream(0, 100)


def test_the_digest_of_a_text_is_the_same_for_ever(tokenizer):
    """Golden: another one would move documents that were trained on into the validation."""
    (encoded,) = encode_documents([Document("Mühle", 7)], tokenizer, 1)
    assert encoded.digest == 1629751591667627256 and encoded.num_bytes == 6 and encoded.advance == 7


@pytest.mark.parametrize(("given", "threads"), [(5, 5), (None, 7)])
def test_documents_are_read_as_they_are_tokenised(tokenizer, monkeypatch, given, threads):
    """Three batches for each thread, of which there is one per core by default. Guards: a corpus that is read
    into memory as a whole."""
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 1)
    monkeypatch.setattr(tokens, "available_cores", lambda: 7)
    read = []
    documents = (read.append(number) or Document("mills", 0) for number in range(1000))
    with closing(encode_documents(documents, tokenizer, given)) as encoded:
        for taken in range(20):
            next(encoded)
            assert len(read) == 3 * threads + taken


def test_short_documents_are_tokenised_together(monkeypatch):
    """Guards: a batch for each document, which takes several times as long."""
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 10)
    batches = list(tokens._batched([Document("mills", 0)] * 5))
    assert [len(batch) for batch in batches] == [2, 2, 1]


@pytest.mark.parametrize("before", [None, "true"])
def test_tokenising_leaves_the_environment_alone(tokenizer, monkeypatch, before):
    """Tokenizers' own parallelism is off only meanwhile."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with closing(encode_documents([Document("mills", 0)], tokenizer, 1)) as encoded:
        next(encoded)
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
