"""Small texts, a small tokenizer and JSONL files for the data tests."""

import json
import lzma
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from lingpt.data import Tokenizer
from lingpt.data.tokenizer import train_bpe

SENTENCE = "the river ran slowly past old mills and quiet fields while a heron watched from stones é ü 水 🙂"


def make_texts(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Different texts of a few lines, in a handful of alphabets."""
    rng = random.Random(seed)
    return [
        f"{seed}.{i} " + " ".join(rng.choices(SENTENCE.split(), k=words)) + "\n\nEnd." for i in range(count)
    ]


@pytest.fixture(scope="session")
def texts() -> Callable[..., list[str]]:
    return make_texts


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe(make_texts(50), vocab_size=320)


@pytest.fixture(scope="session")
def tokenizer_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tokenizer.save(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes texts as JSONL (xz where the name says so) below tmp_path and returns the file."""

    def write(texts: Iterable[str], name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps({"title": "t", "text": text}) + "\n" for text in texts).encode()
        path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
        return path

    return write
