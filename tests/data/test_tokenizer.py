"""Tokenizers: what fits, what is refused, and that the embedded BPE is the same everywhere."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lingpt.common.errors import UserError
from lingpt.data import Tokenizer, load_tokenizer
from lingpt.data.tokenizer import embedded_tokenizer, train_bpe

ANY_TEXT = "naïve 水 🙂\u200d\n\n\tdef f():\r\n  x = '\\u0000'\x00 ﷽ e\u0301 <|endoftext|> end"


def test_any_text_survives(tokenizer):
    """Byte-level: whatever is encoded comes back, also what was never seen in training."""
    assert tokenizer.decode(tokenizer.encode(ANY_TEXT)) == ANY_TEXT
    assert tokenizer.encode_batch([ANY_TEXT, "x"]) == [tokenizer.encode(ANY_TEXT), tokenizer.encode("x")]


def test_end_of_text_inside_a_document_is_text(tokenizer):
    """An article about language models must not end in the middle; a prompt may use the token."""
    assert tokenizer.eos_id == 0
    assert tokenizer.encode("a<|endoftext|>b").count(0) == 1
    (document,) = tokenizer.encode_documents(["a<|endoftext|>b"])
    assert 0 not in document and tokenizer.decode(document) == "a<|endoftext|>b"
    assert tokenizer.encode("a<|endoftext|>b").count(0) == 1  # the copy left the original alone


@pytest.mark.parametrize(
    "change",
    [{"special": False}, {"normalized": True}, {"single_word": True}, {"lstrip": True, "rstrip": True}, None],
    ids=str,
)
def test_end_of_text_is_text_however_the_token_is_declared(tokenizer, change):
    """Guards: documents cut in two where the added token is not `special`; without one it is only in the
    vocabulary."""
    values = json.loads(tokenizer.raw.to_str())
    (token,) = values["added_tokens"]
    if change is None:
        values["added_tokens"] = []
    else:
        token.update({"special": False} | change)
    declared = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(values)), "declared")
    text = "an <|endoftext|> b<|endoftext|>c"
    (ids,) = declared.encode_documents([text])
    assert declared.eos_id == 0 and 0 not in ids and declared.decode(ids) == text


def test_a_vocabulary_with_no_other_tokens_for_end_of_text_is_refused():
    """Guards: the same where the whole word is a token of the model itself."""
    raw = tokenizers.Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match=r"the tokenizer words takes the text <\|endoftext\|> for the end"):
        Tokenizer(raw, "words").encode_documents(["a a"])


def test_a_tokenizer_that_panics_is_one_line(tokenizer, tmp_path: Path):
    """Guards: a traceback with Rust's PanicException, which is no Exception, from a regular expression that
    loads and gives up on a text."""
    values = json.loads(tokenizer.raw.to_str())
    pattern = {"Regex": "(?:(a|aa)+)+$"}
    values["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    panics = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(values)), "panics")
    for encode in (panics.encode_documents, panics.encode_batch):
        with pytest.raises(UserError, match=r"tokenizer panics fails on this text .*retry-limit") as error:
            encode(["a" * 40 + "b"])
        assert "\n" not in str(error.value)


def test_added_tokens_count(tokenizer_path):
    """The embedding needs a row for every id: added tokens beyond the base vocabulary included."""
    raw = tokenizers.Tokenizer.from_file(tokenizer_path)
    raw.add_tokens([" " * n for n in range(2, 10)])
    grown = Tokenizer(raw, "grown")
    assert grown.vocab_size == raw.get_vocab_size(with_added_tokens=False) + 8 == 328
    grown.check_fits(328)
    with pytest.raises(UserError, match=r"grown has 328 tokens, added ones included.*only 327"):
        grown.check_fits(327)


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path: Path):
    """Checkpoints carry tokenizer.json: file, folder and pickle give the same ids and the same hash."""
    path = tokenizer.save(tmp_path / "new" / "folder")
    for again in (load_tokenizer(path), load_tokenizer(path.parent), pickle.loads(pickle.dumps(tokenizer))):
        assert (again.hash, again.vocab_size, again.eos_id) == (tokenizer.hash, 320, 0)
        assert again.encode(ANY_TEXT) == tokenizer.encode(ANY_TEXT)


@pytest.mark.parametrize("settings", ["truncation", "padding"])
def test_a_text_is_encoded_whole_and_alone(tokenizer, tmp_path: Path, settings):
    """Guards: settings in a tokenizer.json that cut texts off or pad them, in scoring but not in training."""
    raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str())
    raw.enable_truncation(2) if settings == "truncation" else raw.enable_padding()
    raw.save(str(tmp_path / "tokenizer.json"))
    loaded, texts = load_tokenizer(tmp_path), [ANY_TEXT, "x"]
    assert loaded.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert loaded.encode(ANY_TEXT) == tokenizer.encode(ANY_TEXT) and loaded.hash == tokenizer.hash


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch):
    """Each with the path and how to fix it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(UserError, match="neither a path nor on the hub"):
        load_tokenizer("so..no-name/of-the-hub")


@pytest.mark.parametrize("path", ["/no/where/tokenizer.json", "~/no/where", "./no-where", "a/b/c", "x.json"])
def test_a_path_with_no_tokenizer_is_not_looked_for_on_the_hub(monkeypatch, path):
    """Guards: advice to log in, for a typo in a path."""
    monkeypatch.setattr("lingpt.data.tokenizer._from_hub", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match=f"there is no tokenizer at {path}: give the path") as error:
        load_tokenizer(path)
    assert "log in" not in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path):
    """Nothing could separate the documents."""
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|>"):
        load_tokenizer(tmp_path)


def test_the_bpe_is_deterministic(tokenizer, tmp_path: Path):
    """Another process, hash seed and number of threads: the same merges, or no cache would ever be found."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from conftest import make_texts; from lingpt.data.tokenizer import train_bpe\n"
        "print(train_bpe(make_texts(50), 320).hash)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == tokenizer.hash


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size 256 is too small"):
        train_bpe(["text"], 256)


def test_the_embedded_tokenizer_is_trained_once(tmp_path: Path, monkeypatch):
    """The second time it comes from the cache, under the same name and with the same ids."""
    first = embedded_tokenizer(300, tmp_path)
    monkeypatch.setattr("lingpt.data.tokenizer.train_bpe", lambda *_: pytest.fail("trained again"))
    second = embedded_tokenizer(300, tmp_path)
    assert (first.hash, first.name) == (second.hash, second.name) and first.vocab_size == 300
