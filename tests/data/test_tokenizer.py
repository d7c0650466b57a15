"""Tokenizers: what fits, what is refused, and that the embedded BPE is the same everywhere."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import models, pre_tokenizers, processors

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, Tokenizer, load_tokenizer, prepare
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


def test_what_a_tokenizer_adds_to_a_text_is_left_out(tokenizer):
    """Guards: documents and prompts that begin and end with the tokens of a template, as Llama's do."""
    raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str())
    end = "<|endoftext|>"
    raw.post_processor = processors.TemplateProcessing(single=f"{end} $A {end}", special_tokens=[(end, 0)])
    adds = Tokenizer(raw, "adds")
    assert adds.raw.encode("a mill").ids == [0, *tokenizer.encode("a mill"), 0]
    for encode in (adds.encode_documents, adds.encode_batch):
        assert encode(["a mill"]) == [tokenizer.encode("a mill")]


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
    with pytest.raises(TypeError):  # not of the tokenizer
        panics.encode_batch([None])


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
    (tmp_path / "tokenizer.model").write_bytes(b"\n\xff")  # of SentencePiece
    with pytest.raises(UserError, match=r"model is not a tokenizer\.json .*: give one in the format"):
        load_tokenizer(tmp_path / "tokenizer.model")
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


def special(tokenizer, *tokens: str) -> tokenizers.Tokenizer:
    """`tokenizer` with these special tokens instead of `<|endoftext|>`, the first one with its id."""
    raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str().replace("<|endoftext|>", tokens[0]))
    raw.add_special_tokens(list(tokens))
    return raw


@pytest.mark.parametrize("end", ["<|end_of_text|>", "</s>", "<eos>"])
def test_the_end_of_text_has_the_tokenizer_s_own_name(tokenizer, tmp_path: Path, end):
    """Guards: Llama's tokenizers, refused for their name of it. A document may contain it."""
    special(tokenizer, end, "<s>").save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    text = f"an {end} b{end}c"
    (ids,) = loaded.encode_documents([text])
    assert (loaded.end_token, loaded.eos_id) == (end, 0)
    assert 0 not in ids and loaded.decode(ids) == text and loaded.encode(text).count(0) == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}}),
        ("generation_config.json", {"eos_token_id": 320}),
        ("generation_config.json", {"eos_token_id": [320, 0]}),
    ],
)
def test_a_config_beside_the_tokenizer_names_the_end_of_text(tokenizer, tmp_path: Path, name, values):
    """Wherever the tokenizer is saved or sent, it is the same; the tokens that it makes are others."""
    special(tokenizer, "<|endoftext|>", "<|im_end|>").save(str(tmp_path / "tokenizer.json"))
    before = load_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(values))
    loaded = load_tokenizer(tmp_path)
    assert (before.end_token, loaded.end_token, loaded.eos_id) == ("<|endoftext|>", "<|im_end|>", 320)
    assert loaded.hash != before.hash
    saved = loaded.save(tmp_path / "elsewhere")
    for again in (load_tokenizer(saved), pickle.loads(pickle.dumps(loaded))):
        assert (again.end_token, again.hash) == (loaded.end_token, loaded.hash)
    assert load_tokenizer(tmp_path, "<|endoftext|>").hash == before.hash  # a user's word comes first
    (tmp_path / name).write_text(json.dumps({"eos_token": "<of another>", "eos_token_id": 10**10}))
    assert load_tokenizer(tmp_path).end_token == "<|endoftext|>"


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer, few_modules, tmp_path: Path):
    """Nothing could separate the documents; a `</s>` that is no special token is HTML."""
    raw = special(tokenizer, "<stop>")
    raw.add_tokens(["</s>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"no token <.*>, to .*: name its own with --data.end_token"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has no token <stopp>, to separate"):
        load_tokenizer(tmp_path, "<stopp>")
    config = DataConfig(tokenizer=str(tmp_path), end_token="<stop>", seq_len=64, cache_dir=str(tmp_path))
    found = prepare(config, progress=False)
    ends = int((found.train.stream(0, found.train.stream_length) == 0).sum())
    assert found.tokenizer.end_token == "<stop>" and ends == found.describe()["train"]["documents"]


@pytest.mark.slow
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


def test_ids_differ_where_the_other_tokenizer_has_another_token_or_none(tokenizer):
    raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str())
    raw.add_tokens(["<a>", "<b>"])
    more = Tokenizer(raw, "more")
    assert (tokenizer.count_differing_ids(more), more.count_differing_ids(tokenizer)) == (0, 2)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size 256 is too small"):
        train_bpe(["text"], 256)


def test_the_embedded_tokenizer_is_trained_once(tmp_path: Path, few_modules, monkeypatch):
    """The second time it comes from the cache, under the same name and with the same ids; not where another
    Python's text or another version of `tokenizers` would make others."""
    first = embedded_tokenizer(300, tmp_path)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("lingpt.data.tokenizer.train_bpe", lambda *_: pytest.fail("trained again"))
        second = embedded_tokenizer(300, tmp_path)
    assert (first.hash, first.name) == (second.hash, second.name) and first.vocab_size == 300
    with pytest.raises(UserError, match="has no token </s>, to separate"):  # guards: another end, ignored
        prepare(DataConfig(vocab_size=300, end_token="</s>", cache_dir=str(tmp_path)), progress=False)
    for name, value in (("tokenizers.__version__", "0"), ("lingpt.data.embedded.TRAIN_MODULES", "ast heapq")):
        monkeypatch.setattr(name, value)
        embedded_tokenizer(300, tmp_path)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 3


def test_a_tokenizer_of_the_hub_may_have_no_config(tokenizer_path, monkeypatch):
    """Guards: one with a tokenizer.json alone, called neither a path nor on the hub."""

    asked = []

    def download(name: str, file: str) -> str:
        asked.append(file)
        if file == "tokenizer_config.json":
            raise LocalEntryNotFoundError("none")
        return tokenizer_path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_tokenizer("owner/name").name == "owner/name"
    assert asked == ["tokenizer.json", "tokenizer_config.json"]
