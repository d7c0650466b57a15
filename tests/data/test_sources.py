"""Parquet, data sets of `datasets`, nested keys: the same text from any container; a fault is one line."""

import errno
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, availability, cache_size, content_hashes, prepare
from lingpt.data.sources import find_source, open_corpus, validation_corpus


def write_parquet(path: Path, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, row_group_size=100)
    return path


def containers(folder: Path, texts: list[str]) -> dict[str, tuple[Path | str, str]]:
    """Source and text key of each container, all of which hold the `texts`."""
    lines = folder / "nested.jsonl"
    lines.write_text("".join(json.dumps({"text": 1, "a": {"b": text}}) + "\n" for text in texts))
    plain = folder / "plain.jsonl"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for part in (0, 1):
        write_parquet(folder / "parts" / f"{part}.parquet", text=texts[150 * part :][:150], n=[7] * 150)
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk(folder / "saved", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(folder / "splits")
    dictionary = pa.array(texts).dictionary_encode()
    return {
        "jsonl": (plain, "text"),
        "nested jsonl": (lines, "a.b"),
        "parquet folder": (folder / "parts", "text"),
        "parquet glob": (folder / "parts" / "*.parquet", "text"),
        "nested parquet": (write_parquet(folder / "n.parquet", a=[{"b": t} for t in texts]), "a.b"),
        "dotted parquet": (write_parquet(folder / "d.parquet", **{"a.b": texts, "a": [1] * 300}), "a.b"),
        "dictionary": (write_parquet(folder / "c.parquet", text=dictionary), "text"),
        "large strings": (write_parquet(folder / "l.parquet", x=pa.array(texts, pa.large_string())), "x"),
        "saved": (folder / "saved", "text"),
        "saved, as hf:": (f"hf:{folder / 'saved'}", "text"),
        "saved splits": (folder / "splits", "text"),
    }


def test_the_same_text_gives_the_same_tokens_whatever_the_container(texts, tokenizer_path, tmp_path: Path):
    """Every row is read, in order, whitespace as an empty one, and the bar ends at its total; other
    containers have other cache entries only where their bytes differ."""
    expected, found, hashes = [*texts(299), ""], {}, {}
    for name, (source, key) in containers(tmp_path, [*texts(299), " \n"]).items():
        val = write_parquet(tmp_path / "val" / f"{key}.parquet", **{key: texts(9, seed=1)})
        paths = {"val_source": str(val), "cache_dir": str(tmp_path / "cache")}
        config = DataConfig(str(source), tokenizer_path, 32, text_key=key, **paths)
        assert "found" in availability(config)
        corpus = open_corpus(config.source, config.val_source, None, key)
        assert [document.text for document in corpus.train.read()] == expected, name
        assert sum(document.advance for document in corpus.train.read()) == corpus.train.total
        dataset = prepare(config, progress=False)
        found[name] = [split.stream(0, 10**9).tolist() for split in (dataset.train, dataset.val)]
        hashes[name] = content_hashes(config)["content_hash"]
    assert all(streams == found["jsonl"] for streams in found.values())
    assert hashes["parquet folder"] == hashes["parquet glob"] and hashes["saved"] == hashes["saved, as hf:"]
    assert len(set(hashes.values())) == len(hashes) - 2


def test_the_cache_size_is_known_of_the_named_corpora():
    """What `--plan` prints before anything is read; of files, what a token takes: two bytes, or four."""
    assert cache_size("embedded", 2048) == "a few MB"
    assert cache_size("wiki40b", 50304) == "about 4 GB (English)"
    assert cache_size("wiki40b", 100_000) == "about 9 GB (English)"
    assert cache_size("mine.jsonl", 1 << 16) == "2 bytes a token of the corpus"
    assert cache_size("mine.jsonl", (1 << 16) + 1) == "4 bytes a token of the corpus"


def test_splits_of_a_data_set(tmp_path: Path):
    """Its validation split is held out, and read where it is named to validate on; others are left alone.
    What is validated on is a part of the hash: guards the cached tokens of another text."""
    rows = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "d")
    corpus = open_corpus(str(tmp_path / "d"))
    assert [d.text for d in corpus.train.read()] == ["train"]
    assert corpus.val is not None and [d.text for d in corpus.val.read()] == ["validation"]
    assert corpus.rule == "held out: its split validation; left alone: test"
    other = open_corpus("embedded", str(tmp_path / "d"))
    assert other.val is not None and [d.text for d in other.val.read()] == ["validation"]
    assert other.rule.startswith(f"held out: {tmp_path / 'd'}; left alone: the validation split of embedded")
    files = [write_parquet(tmp_path / name / "v.parquet", text=[name]) for name in ("1", "2")]
    named = [open_corpus(str(tmp_path / "d"), str(file)) for file in files]
    alone = validation_corpus(str(tmp_path / "d"), None, "text")
    assert [d.text for d in alone.train.read()] == ["validation"] and alone.val is None
    assert len({one.content_hash for one in (corpus, *named, alone)}) == 4


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_the_splits_of_a_data_set_have_names(tmp_path: Path, name):
    """Without `train`, the only one is read, and of several one is to be named: it is a folder."""
    rows = {split: datasets.Dataset.from_dict({"text": [split]}) for split in ("train", name)}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "d")
    assert open_corpus(str(tmp_path / "d")).rule == f"held out: its split {name}"
    datasets.DatasetDict({name: rows[name]}).save_to_disk(tmp_path / "one")
    assert [d.text for d in open_corpus(str(tmp_path / "one")).train.read()] == [name]
    datasets.DatasetDict({name: rows[name], "more": rows[name]}).save_to_disk(tmp_path / "two")
    with pytest.raises(
        UserError, match=rf"has no split 'train': name one, as .*two/<split> \(of {name}, more\)"
    ):
        open_corpus(str(tmp_path / "two"))
    assert [d.text for d in open_corpus(str(tmp_path / "two" / "more")).train.read()] == [name]


def test_another_column_or_split_is_another_corpus(tmp_path: Path, monkeypatch):
    """Guards: the cached tokens of one taken for those of the other. A named split is all that is read."""
    rows = datasets.Dataset.from_dict({"text": ["a"], "body": ["b"], "dotted.name": ["c"]})
    rows.save_to_disk(tmp_path / "d")
    dotted = open_corpus(str(tmp_path / "d"), text_key="dotted.name")
    assert [document.text for document in dotted.train.read()] == ["c"]
    text, body = (open_corpus(str(tmp_path / "d"), text_key=key).content_hash for key in ("text", "body"))
    assert text != body
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for split in ("train", "validation"):
        write_parquet(tmp_path / "hub" / f"{split}.parquet", text=[split])
    corpora = [open_corpus(f"hf:{tmp_path / 'hub'}{named}") for named in ("", "::train", "::validation")]
    texts = [[document.text for document in corpus.train.read()] for corpus in corpora]
    assert texts == [["train"], ["train"], ["validation"]]
    assert [corpus.val is None for corpus in corpora] == [False, True, True]
    write_parquet(tmp_path / "hub" / "train.parquet", text=["trail"])  # of the same size
    corpora.append(open_corpus(f"hf:{tmp_path / 'hub'}"))
    assert len({corpus.content_hash for corpus in corpora}) == 4


@pytest.mark.parametrize(
    ("columns", "key", "message"),
    [
        ({"body": ["a"], "n": [1]}, "text", r" has no column 'text' \(it has body, n\): give another with"),
        ({"a": [{"c": "x"}]}, "a.b", r" has no column 'a.b' \(it has a\)"),
        ({"a": ["x"]}, "a.b", " has no column 'a.b'"),
        ({"text": [1, 2]}, "text", " has int64 in its column 'text', not text"),
        ({"text": [b"a"]}, "text", " has binary in its column 'text', not text"),
        ({"text": [None, None]}, "text", " has null in its column 'text', not text"),
        ({"text": ["a"] * 1500 + [None]}, "text", ", row 1501 has a null text"),
        ({"a": [{"b": "x"}, None]}, "a.b", ", row 2 has a null text: every row must have a string 'a.b'"),
        ({"text": pa.array([b"a", b"\xff"]).view(pa.string())}, "text", ", row 2 is not UTF-8"),
    ],
)
def test_a_fault_of_a_column_is_one_line(tmp_path: Path, columns, key, message):
    """In a Parquet file, and in a folder of `save_to_disk`: where, what, and how to mend it."""
    path = write_parquet(tmp_path / "a.parquet", **columns)
    sources = {str(path): str(path)}
    if "UTF-8" not in message:
        datasets.Dataset(pa.table(columns)).save_to_disk(tmp_path / "saved")
        sources[str(tmp_path / "saved")] = f"{tmp_path / 'saved'}, split train"
    for source, where in sources.items():
        with pytest.raises(UserError, match=message) as error:
            list(open_corpus(source, text_key=key).train.read())
        assert str(error.value).startswith(where) and "\n" not in str(error.value)


@pytest.mark.parametrize("harm", ["no footer", "no middle", "empty", "text"])
def test_a_damaged_parquet_file_is_refused(texts, tmp_path: Path, harm):
    """A half-downloaded file must not pass for a shorter one."""
    path = write_parquet(tmp_path / "a.parquet", text=texts(300))
    whole = path.read_bytes()
    middle = whole[:2000] + bytes(len(whole) - 4000) + whole[-2000:]
    path.write_bytes({"no footer": whole[:-9], "no middle": middle, "empty": b"", "text": b"{}\n"}[harm])
    with pytest.raises(
        UserError, match=r"a.parquet is damaged or cut off after row \d+ \(.*\): fetch it"
    ) as error:
        list(open_corpus(str(path)).train.read())
    assert "\n" not in str(error.value)


def test_a_damaged_saved_folder_is_refused(tmp_path: Path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "d")
    next((tmp_path / "d").glob("*.arrow")).write_bytes(b"")
    with pytest.raises(UserError, match=rf"{tmp_path / 'd'} is damaged \(.*\): save it again"):
        open_corpus(str(tmp_path / "d"))


def test_a_saved_split_without_rows_is_refused(tmp_path: Path):
    """Guards: a traceback of `datasets`, which cannot read what it has saved."""
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=rf"^{tmp_path / 'd'} has a split without rows: save it again"):
        open_corpus(str(tmp_path / "d"))


def test_a_data_set_whose_files_do_not_fit_is_one_line(tmp_path: Path, monkeypatch):
    """Guards: a traceback with no reason but "An error occurred while generating the dataset". A full disk
    stays the error of a disk."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for number, column in enumerate(("text", "body")):
        write_parquet(tmp_path / "d" / f"{number}.parquet", **{column: ["a"]})
    with pytest.raises(
        UserError, match=r"cannot be read \(.*column names don't match\): take another"
    ) as error:
        open_corpus(f"hf:{tmp_path / 'd'}")
    assert "\n" not in str(error.value)

    def full(*_: object) -> None:
        raise datasets.exceptions.DatasetGenerationError from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(OSError, match="No space left on device"):
        open_corpus("hf:owner/name")


@pytest.mark.parametrize("source", ["hf:", "hf:/", "hf::train"])
@pytest.mark.parametrize("ask", [open_corpus, find_source])
def test_the_hub_without_a_name_is_a_line(source, ask):
    """Guards: a traceback of `datasets`, or a dry run that finds it."""
    with pytest.raises(UserError, match=f"^{source} names no data set: give hf:owner/name"):
        ask(source)


def test_null_and_mixed_rows_of_jsonl_have_a_line(tmp_path: Path):
    """With the key that was asked for."""
    for line, message in (
        ('{"a": {"b": null}}', "has a a.b that is not a string"),
        ('{"a": {"b": 3}}', "has a a.b that is not a string"),
        ('{"a": "x"}', 'has no "a.b".*give another field with --data.text_key'),
        ('{"a": {"c": "x"}}', 'has no "a.b"'),
    ):
        (tmp_path / "a.jsonl").write_text('{"a": {"b": "fine"}}\n' + line)
        with pytest.raises(UserError, match=f"a.jsonl, line 2 {message}"):
            list(open_corpus(str(tmp_path / "a.jsonl"), text_key="a.b").train.read())
