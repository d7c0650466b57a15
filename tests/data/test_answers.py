"""Rows of prompts and answers: what is learned, and what a user reads about rows that are none."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import transformers
from pyarrow import parquet

from lingpt.common.chat_template import read_chat_template
from lingpt.common.errors import UserError
from lingpt.data import DataConfig, Tokenizer, prepare
from lingpt.data.packing import NO_TARGET

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [
    {"prompt": "Name a bird.", "completion": " A heron.", "source": "x"},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A mill?"},
            {"role": "assistant", "content": "By the river.", "id": 7},
            {"role": "user", "content": "A field?"},
            {"role": "assistant", "content": "Beyond it."},
            {"role": "user", "content": "Not answered."},
        ]
    },
]


@pytest.fixture
def chat(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """The folder of a tokenizer with a chat template."""
    tokenizer.save(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def config(lines: list, tokenizer: Path, **values) -> DataConfig:
    path = tokenizer / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    usual = {"source": str(path), "rows": "answers", "packing": "documents"}
    usual["cache_dir"] = str(tokenizer / "cache")
    return DataConfig(tokenizer=str(tokenizer), seq_len=256, **usual | values)


def test_only_answers_are_learned(chat):
    """The text of each row and of its targets, several turns of one conversation in one document; the end of
    a turn is learned, and is no border."""
    dataset = prepare(config(ROWS * 3, chat), progress=False)
    found = {}
    for split in (dataset.train, dataset.val):
        idx, targets, borders = split.gather(range(len(split)))
        assert split.num_targets(range(len(split))) == (targets != NO_TARGET).sum()
        for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            x, y = idx.flatten()[a:b], targets.flatten()[a:b]
            if (y != NO_TARGET).any():
                learned = [t if t != NO_TARGET else -1 for t in y.tolist()]
                text = dataset.tokenizer.decode([*x.tolist(), y[-1].item()])
                found[text] = "".join(dataset.tokenizer.decode([t]) if t >= 0 else "·" for t in learned)
    (one, two) = sorted(found, key=len)
    assert one == "Name a bird. A heron.<|endoftext|>"
    assert found[one].lstrip("·") == " A heron.<|endoftext|>"
    assert two == (
        "<|system|>Be brief.<|endoftext|>\n<|user|>A mill?<|endoftext|>\n"
        "<|assistant|>By the river.<|endoftext|>\n<|user|>A field?<|endoftext|>\n"
        "<|assistant|>Beyond it.<|endoftext|>\n"
    )
    answers = [part for part in found[two].split("·") if part]
    assert answers == ["By the river.<|endoftext|>\n", "Beyond it.<|endoftext|>\n"]


def test_the_same_rows_give_the_same_tokens_whatever_the_container(chat, tmp_path):
    """Guards: `--data.rows answers` of JSONL alone. A table has every column in every row: null is absent."""
    keys = ("prompt", "completion", "messages")
    rows: list[dict] = [dict.fromkeys(keys) | row for row in ROWS]
    table = pa.Table.from_pylist(rows * 3).append_column("n", pa.array(range(6)))
    (tmp_path / "parts").mkdir()
    parquet.write_table(table, tmp_path / "parts/0.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    expected = prepare(config(ROWS * 3, chat), progress=False)
    for source in ("parts", "parts/*.parquet", "saved", "hf:saved"):
        at = f"hf:{tmp_path / 'saved'}" if source == "hf:saved" else str(tmp_path / source)
        found = prepare(config([], chat, source=at), progress=False)
        for ours, theirs in ((found.train, expected.train), (found.val, expected.val)):
            assert ours.stream(0, 10**6).tolist() == theirs.stream(0, 10**6).tolist(), source


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"text": ["a"]}, r"has no messages, or prompt and completion \(it has text\): every row must have"),
        ({"prompt": ["a"], "n": [1]}, r"has no messages, or prompt and completion \(it has prompt, n\)"),
        (
            {"prompt": ["a", "b"], "completion": ["c", None]},
            "row 2 has no messages, or prompt and completion",
        ),
        ({"prompt": ["a", "b"], "completion": ["c", ""]}, "row 2 has no answer"),
        ({"messages": ["a"]}, "row 1 has no messages"),
        (
            {"prompt": pa.array([b"\xff"]).view(pa.string()), "completion": ["c"]},
            "rows 1 to 1 are not all UTF-8",
        ),
    ],
)
def test_a_table_without_answers_gets_one_line(chat, tmp_path, columns, error):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet,? {error}") as raised:
        prepare(config([], chat, source=str(tmp_path / "a.parquet")), progress=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["embedded", "one.txt"])
def test_text_has_no_answers(chat, tmp_path, monkeypatch, source):
    """Guards: a traceback from a text that was taken for JSON."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("A heron.")
    with pytest.raises(UserError, match=f"{source} .*without prompts and answers"):
        prepare(config([], chat, source=source), progress=False)


def test_the_template_is_found_in_the_home_folder(chat, monkeypatch):
    """Guards: a disk that cannot be written, as the hub has no such name."""
    monkeypatch.setenv("HOME", str(chat.parent))
    usual = config(ROWS * 3, chat)
    home = prepare(replace(usual, tokenizer=f"~/{chat.name}"), progress=False)
    assert home.fingerprint == prepare(usual, progress=False).fingerprint


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_tokenizer_that_transformers_cannot_read_gets_one_line(chat, monkeypatch, error):
    def fails(path) -> None:
        raise error("no network")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(UserError, match=r"^transformers cannot read the tokenizer .* \(no network\)"):
        prepare(config(ROWS * 3, chat), progress=False)


@pytest.mark.parametrize("end", ["<|endoftext|>", "e"])
def test_a_checkpoint_of_a_conversation_can_chat(chat, tmp_path, monkeypatch, end):
    """Guards: `lingpt generate --chat` of a run on conversations, which had no template; and a config that
    was written with the end of a text alone before it had all tokens. Each file is written once."""
    settings = json.loads((chat / "tokenizer_config.json").read_text()) | {"bos_token": "<|endoftext|>"}
    (chat / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, written, replaced = prepare(config(ROWS * 3, chat, end_token=end)).tokenizer, [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda at, to: written.append(to.name) or replaced(at, to))
    tokenizer.save(tmp_path / "checkpoint")
    assert sorted(written) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    template, tokens = read_chat_template(tmp_path / "checkpoint")
    assert template == TEMPLATE and tokens == {"bos_token": "<|endoftext|>", "eos_token": end}


def test_of_several_templates_the_default_is_taken(chat, tmp_path):
    """Guards: an AttributeError at the first checkpoint, which writes the template."""
    expected = prepare(config(ROWS * 3, chat), progress=False).fingerprint
    path = chat / "tokenizer_config.json"
    settings, other = json.loads(path.read_text()), {"name": "rag", "template": "{{ documents }}"}
    templates = [other, {"name": "default", "template": TEMPLATE}]
    path.write_text(json.dumps(settings | {"chat_template": templates}))
    dataset = prepare(config(ROWS * 3, chat), progress=False)
    dataset.tokenizer.save(tmp_path / "checkpoint")
    assert dataset.fingerprint == expected
    assert read_chat_template(tmp_path / "checkpoint")[0] == TEMPLATE
    path.write_text(json.dumps(settings | {"chat_template": [other]}))
    with pytest.raises(UserError, match="has no chat template"):
        prepare(config(ROWS * 3, chat), progress=False)


def test_the_template_identifies_the_data(chat):
    """Also the tokens that it names; guards: another bos_token, and the cached text with the one before."""
    found, path = [], chat / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for template in (TEMPLATE, TEMPLATE.replace("<|", "<"), "{{ bos_token }}" + TEMPLATE):
        for begin in ("<s>", "<t>"):
            path.write_text(json.dumps(settings | {"chat_template": template, "bos_token": begin}))
            found.append(prepare(config(ROWS * 3, chat), progress=False).fingerprint)
    assert [found.index(one) for one in found] == [0, 0, 2, 2, 4, 5]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"text": "a"}, "rows.jsonl, line 1 has no messages, or prompt and completion: every row must have"),
        ({"prompt": "a", "completion": 3}, "line 1 has no answer, or what is not text"),
        ({"prompt": "a", "completion": ""}, "has no answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no answer"),
        ({"messages": []}, "line 1 has no answer"),
        ({"prompt": "a", "completion": "\ud83d"}, "line 1 has half a surrogate pair"),
        ({"messages": [{"role": "user"}]}, "has no messages, or prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 1 begins with an answer"),
        (["messages"], "has no messages, or prompt"),
    ],
)
def test_a_row_without_an_answer_gets_one_line(chat, row, error):
    with pytest.raises(UserError, match=error):
        prepare(config([row], chat), progress=False)


def test_a_line_may_have_a_mark_and_windows_end(chat):
    """And one that no JSON reader can follow is named."""
    expected, windows = prepare(config(ROWS * 3, chat), progress=False), chat / "windows.jsonl"
    lines = (chat / "rows.jsonl").read_bytes()
    windows.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
    found = prepare(config([], chat, source=str(windows)), progress=False)
    assert found.train.stream(0, 10**6).tolist() == expected.train.stream(0, 10**6).tolist()
    (chat / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"deep.jsonl, line 1 is not JSON in UTF-8 \(.*recursion"):
        prepare(config([], chat, source=str(chat / "deep.jsonl")), progress=False)


def test_what_does_not_go_together_gets_one_line(chat, tokenizer, tmp_path):
    with pytest.raises(UserError, match="add --data"):
        prepare(config(ROWS, chat, packing="blocks"), progress=False)
    with pytest.raises(UserError, match="rows answers"):
        prepare(config(ROWS, chat, rows="text"), progress=False)
    (chat / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no chat template"):
        prepare(config(ROWS, chat), progress=False)
    for fails, why in (("{{ raise_exception('roles') }}", "roles"), ("{% if %}", "Expected an expression")):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": fails}
        (chat / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=rf"fails \({why}.*\) on the conversation that begins 'Be"):
            prepare(config(ROWS, chat), progress=False)
    for message, then in (
        ("{{ loop.length }}{{ m.content }}", ""),
        ("{{ m.content }}{% if loop.last and m.role == 'assistant' %} a thought{% endif %}", ""),
        ("{{ m.content }}", "{% if add_generation_prompt %} a thought{% endif %}"),
    ):
        rewrites = f"{{% for m in messages %}}{message}{{% endfor %}}{then}"
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": rewrites}
        (chat / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match="changes earlier messages"):
            prepare(config(ROWS, chat), progress=False)


def test_of_the_embedded_tokenizer_there_is_no_template(chat, few_modules, tmp_path):
    """It learns completions, and its checkpoint has no template; messages get one line."""
    rows = [{"prompt": f"{number}:", "completion": " a heron"} for number in range(9)]
    usual = {"tokenizer": None, "vocab_size": 300}
    tokenizer = prepare(replace(config(rows, chat), **usual), progress=False).tokenizer
    assert tokenizer.save(tmp_path / "checkpoint").exists()
    assert not (tmp_path / "checkpoint/chat_template.jinja").exists()
    with pytest.raises(UserError, match=r"the tokenizer embedded .* has no chat template, which"):
        prepare(replace(config(ROWS, chat), **usual), progress=False)


def test_the_tokenizer_of_an_export_is_read_silently(chat, capsys):
    """Guards: two lines of transformers about the model beside it, which the tokenizer does not need."""
    (chat / "config.json").write_text('{"model_type": "lingpt"}')
    prepare(config(ROWS * 3, chat), progress=False)
    assert capsys.readouterr().err == ""
