"""Real text: English Wikipedia with the NeoX tokenizer. Skipped by name where LINGPT_TEST_DATA is not set."""

from pathlib import Path

import numpy as np
import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, bigram_loss, load_tokenizer, prepare
from lingpt.data.jsonl import read_documents


@pytest.fixture(scope="module")
def wiki(real_data: Path, tmp_path_factory):
    """The 463 test articles to train on, the 401 validation articles to validate on."""
    config = DataConfig(
        str(real_data / "enwiki" / "test.jsonl.xz"),
        str(real_data / "tokenizer"),
        seq_len=2048,
        val_source=str(real_data / "enwiki" / "validation.jsonl.xz"),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    return prepare(config, padded_vocab_size=50304, progress=False)


def test_counts_are_those_of_the_files(wiki):
    """Documents exactly, tokens (0.34 M and 0.39 M) as their page says."""
    train, val = (wiki.describe()[split] for split in ("train", "val"))
    assert (train["documents"], val["documents"]) == (463, 401)
    assert train["tokens"] == pytest.approx(0.39e6, rel=0.02) and val["tokens"] == pytest.approx(
        0.34e6, rel=0.02
    )
    assert wiki.tokenizer.vocab_size == 50277 and wiki.tokenizer.eos_id == 0


def test_every_document_comes_back(wiki, real_data: Path):
    """Split at the end-of-text token and decoded, the stream is the documents, accents and all."""
    stream = wiki.val.stream(0, 10**9)
    pieces = np.split(stream, np.flatnonzero(stream == wiki.tokenizer.eos_id) + 1)
    assert len(pieces) == 402 and len(pieces[-1]) == 0
    texts = [d.text for d in read_documents(real_data / "enwiki" / "validation.jsonl.xz")]
    assert [wiki.tokenizer.decode(piece[:-1]) for piece in pieces[:-1]] == texts
    assert any(not text.isascii() for text in texts)


def test_a_model_too_small_for_neox_is_refused(real_data: Path):
    """The base vocabulary of 50,254 would fit; with the added tokens it does not."""
    with pytest.raises(UserError, match="50277 tokens, added ones included"):
        load_tokenizer(real_data / "tokenizer" / "tokenizer.json").check_fits(50276)


def test_the_wikipedia_folder_keeps_its_splits(real_data: Path):
    """DATA=<the folder> must train on none of the held-out articles."""
    from lingpt.data.files import files_corpus

    rule = "held out by name: validation.jsonl.xz; left alone: test.jsonl.xz"
    assert files_corpus(str(real_data / "enwiki")).rule == rule


def test_the_bigram_baseline_is_plausible(wiki):
    """With 0.39 M tokens: better than unigrams (about 7.5 nats), far from a trained model (under 5)."""
    assert 5.5 < bigram_loss(wiki) < 7.2
