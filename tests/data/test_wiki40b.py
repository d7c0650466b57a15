"""Wiki-40B: rows of its real schema, through `datasets`, become plain text; others are refused by name.

The rows are written as the hub stores them (a folder of Parquet files with a card that declares the config),
so all from `load_dataset` on is the real thing.
"""

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, prepare, wiki40b
from lingpt.data.wiki40b import clean, wiki40b_corpus

FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in ("wikidata_id", "text", "version_id")}
)
ARTICLE = (
    "\n_START_ARTICLE_\nBöblingen\n_START_SECTION_\nHistory\n_START_PARAGRAPH_\n"
    "It was founded in 1253._NEWLINE_It has a lake_and_a_castle."
    "\n_START_SECTION_\nPeople\n_START_PARAGRAPH_\nMany."
)
CLEANED = "Böblingen\n\nHistory\n\nIt was founded in 1253.\nIt has a lake_and_a_castle.\n\nPeople\n\nMany."
CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train-*}
  - {split: validation, path: en/validation-*}
  - {split: test, path: en/test-*}
---
"""


def article(title: str) -> str:
    return f"\n_START_ARTICLE_\n{title}\n_START_PARAGRAPH_\n" + f"{title} is a town. " * 30


@pytest.fixture
def hub_copy(tmp_path: Path, monkeypatch):
    """Makes Wiki-40B be the given texts; returns the function that does."""

    def make(train: list[str], features: datasets.Features = FEATURES, revision: str = "1") -> None:
        folder = tmp_path / revision / "wiki40b"
        (folder / "en").mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(CARD)
        for split, rows in (("train", train), ("validation", [article("Val")]), ("test", [article("Test")])):
            names = list(features)
            table = {
                names[0]: [f"Q{i}" for i in range(len(rows))],
                names[1]: rows,
                names[2]: ["1"] * len(rows),
            }
            split_rows = datasets.Dataset.from_dict(table, features=features)
            split_rows.to_parquet(folder / "en" / f"{split}-00000-of-00001.parquet")
        monkeypatch.setattr(wiki40b, "HUB_NAME", str(folder))

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return make


def test_markup_becomes_plain_text():
    """Title, headings and paragraphs are kept, markers are not; underscores of the text are."""
    assert clean(ARTICLE, "Q1") == CLEANED


@pytest.mark.parametrize("text", [repr(ARTICLE.encode()), repr((ARTICLE + "'\"").encode())])
def test_the_repr_of_bytes_is_decoded(text):
    """Copies made from TFDS hold b'...' as text: without decoding, every accent would be an escape."""
    assert clean(text, "Q1").startswith(CLEANED)


def test_an_article_may_begin_with_b():
    """Only a literal that starts the text is one."""
    assert clean("_START_ARTICLE_\nb'x", "Q1") == "b'x"


@pytest.mark.parametrize(
    "text",
    [
        "_START_ARTICLE_\nTitle\n_START_TABLE_\nx",
        "_START_ARTICLE_\nTitle\n_END_PARAGRAPH_\nx",
        "_START_ARTICLE_\nTitle\n_START_PARAGRAPH_\nfoo_NEWLINE__START_LIST_ITEM_ bar",
    ],
)
def test_unknown_markup_is_an_error_that_names_the_row(text):
    """Silently training on markup is the failure that the specification rules out."""
    with pytest.raises(UserError, match=r"^wiki, row 42 has unknown markup _(START|END)_[A-Z_]+_ \(known"):
        clean(text, "wiki, row 42")


def test_a_broken_repr_is_an_error_that_names_the_row():
    with pytest.raises(UserError, match=r"^row 7 begins like the repr of bytes"):
        clean("b'\\n_START_ARTICLE_", "row 7")


def test_the_corpus_has_the_hub_splits(hub_copy):
    """Its own validation split is held out and its test split stays unread."""
    hub_copy([ARTICLE, article("Calw")])
    corpus = wiki40b_corpus()
    assert [d.text.splitlines()[0] for d in corpus.train.read()] == ["Böblingen", "Calw"]
    assert [d.text.splitlines()[0] for d in corpus.val.read()] == ["Val"]
    assert corpus.rule == "held out: its split validation; left alone: test" and corpus.name == "wiki40b"


def test_prepare_from_wiki40b(hub_copy, tokenizer, tokenizer_path, tmp_path: Path):
    """From rows to blocks: the stream is the cleaned articles, each followed by the end-of-text token."""
    hub_copy([ARTICLE, article("Calw")])
    config = DataConfig("wiki40b", tokenizer_path, seq_len=16, cache_dir=str(tmp_path / "cache"))
    dataset = prepare(config, progress=False)
    stream = dataset.train.stream(0, 10**6).tolist()
    assert stream == [*tokenizer.encode(CLEANED), 0, *tokenizer.encode(clean(article("Calw"), "")), 0]


def test_other_rows_are_another_cache(hub_copy):
    """The hash covers what `datasets` recorded of the files."""
    hub_copy([ARTICLE])
    before = wiki40b_corpus().content_hash
    assert wiki40b_corpus().content_hash == before
    hub_copy([ARTICLE, article("Calw")], revision="2")
    assert wiki40b_corpus().content_hash != before


def test_another_schema_is_refused(hub_copy):
    hub_copy(["x"], datasets.Features({name: datasets.Value("string") for name in ("id", "body", "v")}))
    with pytest.raises(UserError, match=r"split train has no column 'text' \(it has id, body, v\)"):
        wiki40b_corpus()


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_no_network_is_one_line(tmp_path: Path, tokenizer_path, environment):
    """In a process of its own, as the hub's settings are read at import: one line that says what to do."""
    code = (
        "import sys\n"
        "from lingpt.common.errors import UserError\n"
        "from lingpt.data import DataConfig, prepare\n"
        "for config in (DataConfig('wiki40b', sys.argv[1]), DataConfig(tokenizer='EleutherAI/pythia-70m')):\n"
        "    try: prepare(config)\n"
        "    except UserError as error: print(error)\n"
    )
    env = {
        **os.environ,
        **environment,
        "HF_HOME": str(tmp_path / "hf"),
        "LINGPT_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, tokenizer_path],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2 and done.stderr == ""
    assert lines[0].startswith("the data set google/wiki40b")
    assert "--data.source <path> (make: DATA=<path>)" in lines[0]
    assert lines[1].startswith("the tokenizer EleutherAI/pythia-70m")
    assert "--data.tokenizer <path> (make: TOKENIZER=<path>)" in lines[1]
    assert all("HF_HUB_OFFLINE" in line and "go online" in line for line in lines)
    assert "(no network)" in lines[1]
