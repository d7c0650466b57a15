"""`prepare`: mistakes are caught before any work, and a dataset describes itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lingpt.common.errors import UserError
from lingpt.data import BatchSampler, DataConfig, availability, prepare
from lingpt.data.sources import CORPORA


@pytest.fixture
def config(write_jsonl, texts, tokenizer_path, tmp_path: Path) -> DataConfig:
    source = write_jsonl(texts(300), "corpus.jsonl.xz")
    return DataConfig(str(source), tokenizer_path, 32, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_len": 0}, "seq_len is 0; it must be"),
        ({"val_fraction": 0.0}, "val_fraction is 0.0; it must be a number above 0 and below 1"),
        ({"val_fraction": 1.5}, "val_fraction is 1.5"),
        ({"num_workers": 0}, "num_workers is 0; it must be"),
        ({"seq_len": 10**6}, "the train split of .* has .* tokens, too few .*: give more text, or lower"),
        (
            {"seq_len": 3000},
            "the val split of .* too few .*: raise --data.val_fraction, give --data.val_source",
        ),
    ],
)
def test_values_that_cannot_be_meant(config, change, message):
    """One line, with what to change."""
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=message) as error:
        prepare(config, progress=False)
    assert "\n" not in str(error.value)


def test_a_tokenizer_too_large_for_the_model_is_refused_before_any_work(config):
    """320 tokens do not fit 319 rows; nothing is read or written."""
    with pytest.raises(UserError, match=r"has 320 tokens, added ones included.*only 319"):
        prepare(config, padded_vocab_size=319, progress=False)
    assert not Path(config.cache_dir).exists()
    prepare(config, padded_vocab_size=320, progress=False)


def test_a_dataset_describes_itself(config):
    """All that a run must record to say what it was trained on; plain JSON."""
    dataset = prepare(config, progress=False)
    about = json.loads(json.dumps(dataset.describe()))
    assert about["source"] == config.source
    assert about["split"] == "held out: the documents of the lowest hashes"
    assert about["train"]["documents"] + about["val"]["documents"] == 300 and about["val"]["documents"] >= 1
    assert about["train"]["blocks"] == len(dataset.train) and about["fingerprint"] == dataset.fingerprint
    assert about["val_fraction"] == 0.005 and about["tokenizer_hash"] == dataset.tokenizer.hash
    assert dataset.bytes_per_token == about["val"]["bytes"] / about["val"]["tokens"]
    assert 1 < dataset.bytes_per_token < 10


def test_batches_over_a_real_dataset(config):
    """The samples of a step are the blocks at its indices."""
    dataset = prepare(config, progress=False)
    batches = BatchSampler(dataset.train, seed=0, global_batch_size=6)
    samples = batches.get(2, [4, 1])
    assert samples.tolist() == [dataset.train[batches.indices(2)[p]].tolist() for p in (4, 1)]


def test_the_cache_folder_comes_from_the_environment(config, tmp_path: Path, monkeypatch):
    """`LINGPT_CACHE` where the configuration names none."""
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path / "elsewhere"))
    config.cache_dir = None
    assert prepare(config, progress=False).parts[0].cache.folder.is_relative_to(tmp_path / "elsewhere")


def test_whether_the_data_exist_is_known_without_reading_them(config, monkeypatch):
    """What a dry run prints: found, to be downloaded, or which of them is missing."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    assert availability(config) == f"1 file, {Path(config.source).stat().st_size / 1e6:,.1f} MB, found"
    assert "this Python" in availability(DataConfig()) and "hub" in availability(DataConfig("wiki40b"))
    for change in ({"source": "nowhere/*.jsonl"}, {"val_source": "nowhere.gz"}, {"tokenizer": "/no/where"}):
        assert availability(replace(config, **change)).startswith("NOT FOUND: there ")


@pytest.mark.parametrize("key", ["source", "val_source", "tokenizer", "cache_dir"])
def test_a_home_folder_that_there_is_not_is_a_line(config, key):
    """Guards: a traceback, `Could not determine home directory`."""
    path = "~no-such-user/x.jsonl"
    message = f"^{path}: this machine knows no home folder ~no-such-user: write the path out"
    wrong = replace(config, **{key: path})
    with pytest.raises(UserError, match=message):
        prepare(wrong, progress=False)
    assert key == "cache_dir" or availability(wrong).startswith(f"NOT FOUND: {path}")


def test_text_files_to_validate_on(config, few_modules, tmp_path: Path, texts):
    """A file is a document, whatever is trained on."""
    (tmp_path / "val.txt").write_text(" ".join(texts(20, seed=1)))
    for source in (config.source, "embedded"):
        chosen = replace(config, source=source, val_source=str(tmp_path / "val.txt"))
        about = prepare(chosen, progress=False).describe()
        assert about["val"]["documents"] == 1
    assert about["split"] == f"held out: {tmp_path / 'val.txt'}; left alone: the validation split of embedded"


def test_a_source_that_does_not_exist(config, tmp_path: Path):
    """The line offers files, the named corpora and the hub."""
    config.source = str(tmp_path / "nowhere.jsonl")
    offers = (
        rf"a file, folder or glob of JSONL, Parquet or text, or {', or '.join(CORPORA)}, or hf:owner/name$"
    )
    for change in ({}, {"source": "embedded", "val_source": "nowhere.jsonl"}):
        with pytest.raises(UserError, match=offers):
            prepare(replace(config, **change), progress=False)
