"""The embedded corpus: there on every machine, the same every time, its validation never trained on."""

from pathlib import Path

import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, embedded, prepare
from lingpt.data.embedded import TRAIN_MODULES, VAL_MODULES, embedded_corpus


def test_the_modules_are_held_out_whole():
    """No module on both sides, none twice."""
    train, val = TRAIN_MODULES.split(), VAL_MODULES.split()
    assert len({*train, *val}) == len(train) + len(val)


def test_it_is_a_few_megabytes_of_text_and_the_same_every_time():
    """Enough for a first run, small enough to prepare in seconds."""
    corpus, again = embedded_corpus(), embedded_corpus()
    train, val = list(corpus.train.read()), list(corpus.val.read())
    assert 2e6 < sum(len(d.text) for d in train) < 1e7 and 1e5 < sum(len(d.text) for d in val) < 1e6
    assert corpus.content_hash == again.content_hash and len(corpus.content_hash) == 64
    assert not {d.text for d in train} & {d.text for d in val}
    assert len(train) == corpus.train.total and all(d.text.strip() for d in train + val)


def test_another_python_is_another_corpus(tmp_path: Path, monkeypatch):
    """The hash follows the text that this Python has; without the library's source there is one line."""
    before = embedded_corpus().content_hash
    for module in (TRAIN_MODULES + VAL_MODULES).split():
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {module}")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert embedded_corpus().content_hash != before
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match=r"source of Python's standard library is not in .* DATA=<jsonl>"):
        embedded_corpus()


def test_the_default_configuration_prepares(tmp_path: Path):
    """What `make train` does first: no network, its own tokenizer of 2048 tokens, uint16."""
    dataset = prepare(DataConfig(cache_dir=str(tmp_path)), padded_vocab_size=2048, progress=False)
    assert dataset.tokenizer.vocab_size == 2048 and len(dataset.train) > 3000 and len(dataset.val) > 100
    assert dataset.describe()["dtype"] == "uint16"
    text = dataset.tokenizer.decode(dataset.train[0])
    assert next(iter(embedded_corpus().train.read())).text.startswith(text)
