"""`lingpt generate --chat`: its prompt is what transformers makes of the template, which exports keep."""

import io
import json

import pytest
import tokenizers
import torch
from transformers import AutoTokenizer

from lingpt.cli import chat
from lingpt.cli.main import main
from lingpt.common.chat_template import read_chat_template
from lingpt.data.tokenizer import load_tokenizer, train_bpe
from lingpt.models import GPT, ModelArgs, export_hf

TEMPLATE = """{{ bos_token }}{% for m in messages %}
  {{ m.content }}{{ eos_token }}
  {% endfor %}
{% if add_generation_prompt %}the{% endif %}"""


def small() -> GPT:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 96, "vocab_size": 300}
    return GPT.create(ModelArgs("small", "ours", **sizes).config(), seed=0)


OBJECT = {"__type": "AddedToken", "content": "<s>", "special": True}  # as transformers 4 writes it


@pytest.mark.parametrize("begin", ["<s>", OBJECT, "<|endoftext|>"], ids=str)
def test_the_prompt_begins_as_in_transformers(tmp_path, monkeypatch, begin):
    """Guards: a conversation with a Llama that begins with the token that ends its answers."""
    tokenizer = train_bpe(["the river and the mill"] * 9, 300)
    tokenizer.raw.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    folder = tmp_path / "model"
    export_hf(small(), folder, tokenizer.save(tmp_path))
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text()) | {"bos_token": begin, "chat_template": TEMPLATE}
    config.write_text(json.dumps(values))
    prompts = []
    monkeypatch.setattr(chat, "replies", lambda model, tokenizer, prompt, *_: prompts.append(prompt) or [])
    monkeypatch.setattr("sys.stdin", io.StringIO("the river\n"))
    assert main(["generate", str(folder), "--chat", "--device", "cpu"]) == 0
    messages = [{"role": "user", "content": "the river"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompts == [theirs.encode(text, add_special_tokens=False)]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    assert main(["generate", str(folder), "--chat", "--device", "cpu"]) == 0
    assert "caf\N{REPLACEMENT CHARACTER}" in theirs.decode(prompts[1])


def test_an_answer_ends_at_the_end_of_text_and_of_the_block(monkeypatch):
    """Guards: `<|endoftext|>` in an answer, and an error where a shorter answer has room."""
    tokenizer, asked = train_bpe(["the river"] * 9, 300), list[int]()
    ids = tokenizer.encode("the river")

    def stream(model, idx, new, **options):
        asked.append(new)
        assert options == {"seed": 3}
        return map(torch.tensor, [*ids, tokenizer.eos_id, ids[0]])

    monkeypatch.setattr(chat, "stream", stream)
    for prompt in (10, 90, 200):
        assert "".join(chat.replies(small(), tokenizer, [1] * prompt, 30, {"seed": 3})) == "the river"
    assert asked == [30, 6, 1]


def test_an_export_keeps_the_chat_and_the_end_of_a_text(tmp_path):
    """Guards: another end of text, of a folder whose generation_config.json alone names it, or another begin
    of a chat."""
    tokenizer = train_bpe(["the river and the mill"] * 9, 300)
    tokenizer.raw.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in ("<|im_end|>", "<s>")])
    export_hf(small(), tmp_path / "tuned")
    tokenizer.save(tmp_path / "tuned")
    end = tokenizer.raw.token_to_id("<|im_end|>")
    (tmp_path / "tuned/generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    names = {"bos_token": "<s>", "eos_token": "<of another>"}
    (tmp_path / "tuned/tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "tuned/chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(tmp_path / "tuned").eos_id == end
    assert main(["export", str(tmp_path / "tuned"), str(tmp_path / "own")]) == 0
    assert load_tokenizer(tmp_path / "own").eos_id == end
    assert main(["export", str(tmp_path / "tuned"), str(tmp_path / "hf"), "--hf", "true"]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert read_chat_template(tmp_path / "own")[0] == theirs.chat_template == TEMPLATE
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "<|im_end|>")
