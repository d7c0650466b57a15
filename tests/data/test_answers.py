"""Rows of prompts and answers: what is learned, and what a user reads about rows that are none."""

import json
from pathlib import Path

import pytest

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
    return DataConfig(
        source=str(path),
        tokenizer=str(tokenizer),
        seq_len=256,
        **{"rows": "answers", "packing": "documents", "cache_dir": str(tokenizer / "cache"), **values},
    )


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


def test_the_template_identifies_the_data(chat):
    before = prepare(config(ROWS * 3, chat), progress=False).fingerprint
    settings = chat / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("<|", "<"))
    assert prepare(config(ROWS * 3, chat), progress=False).fingerprint != before


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"text": "a"}, "rows.jsonl, line 1 has no messages, or prompt and completion: every line must be"),
        ({"prompt": "a", "completion": 3}, "line 1 has no answer, or what is not text"),
        ({"prompt": "a", "completion": ""}, "has no answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no answer"),
        ({"messages": [{"role": "user"}]}, "has no messages, or prompt"),
        (["messages"], "has no messages, or prompt"),
    ],
)
def test_a_row_without_an_answer_gets_one_line(chat, row, error):
    with pytest.raises(UserError, match=error):
        prepare(config([row], chat), progress=False)


def test_what_does_not_go_together_gets_one_line(chat, tokenizer, tmp_path):
    with pytest.raises(UserError, match="add --data"):
        prepare(config(ROWS, chat, packing="blocks"), progress=False)
    with pytest.raises(UserError, match="rows answers"):
        prepare(config(ROWS, chat, rows="text"), progress=False)
    (chat / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no chat template"):
        prepare(config(ROWS, chat), progress=False)
    rewrites = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": rewrites}
    (chat / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="changes earlier messages"):
        prepare(config(ROWS, chat), progress=False)
