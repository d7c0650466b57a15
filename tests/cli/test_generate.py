"""`lingpt generate`: its options reach the model; a document of any length, kept in a file or not."""

from pathlib import Path

import pytest
import torch

from lingpt.cli.main import main
from lingpt.common.files import write_json
from lingpt.common.format import scaled
from lingpt.data.tokenizer import Tokenizer, train_bpe
from lingpt.models import GPT, ModelArgs, generate, load_model, save_model

DOCUMENT = "the old mill stands by the river and the river runs by the mill " * 9
BLOCK = 48


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder: Path, attention: str) -> tuple[GPT, Tokenizer]:
    """The model folder `attention`, with random weights, and what is in it."""
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": BLOCK, "vocab_size": 300}
    tokenizer = train_bpe([DOCUMENT], 300)
    (folder / attention).mkdir()
    tokenizer.save(folder / attention)
    save_model(GPT.create(ModelArgs("small", attention, **sizes).config(), seed=0), folder / attention)
    return load_model(folder / attention), tokenizer


def shown(capsys, *words: str) -> str:
    """What the verb prints on a CPU."""
    capsys.readouterr()
    assert main(["generate", *words, "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_its_options_reach_the_model(folder, capsys):
    model, tokenizer = make(folder, "ours")
    ids = tokenizer.encode("the river")
    options = {"temperature": 1.7, "top_k": 90, "seed": 3}
    text = generate(model, torch.tensor([ids]), 9, vocab_size=tokenizer.vocab_size, **options)[0].tolist()
    words = [f"--{key}={value}" for key, value in options.items()]
    assert tokenizer.eos_id not in text
    found = shown(capsys, "ours", "--prompt", "the river", "--max_new_tokens", "9", *words)
    assert found == tokenizer.decode(text) + "\n"
    begin = torch.tensor([[tokenizer.eos_id]])
    new = generate(model, begin, 5, temperature=0, vocab_size=tokenizer.vocab_size)[0, 1:].tolist()
    found = shown(capsys, "ours", "--max_new_tokens", "5", "--temperature", "0")
    assert tokenizer.eos_id not in new and found == tokenizer.decode(new) + "\n"
    # A text ends before the token that the tokenizer's config names.
    assert text[-5] not in text[:-5]
    stop = {"eos_token": tokenizer.raw.id_to_token(text[-5])}
    write_json(Path("ours/tokenizer_config.json"), stop)
    found = shown(capsys, "ours", "--prompt", "the river", "--max_new_tokens", "9", *words)
    assert found == tokenizer.decode(text[:-5]) + "\n"
    tokenizer.raw.add_tokens([f"<{i}>" for i in range(300)])
    tokenizer.save("ours")
    assert main(["generate", "ours", "--device", "cpu"]) == 2
    assert "take the model's own tokenizer" in capsys.readouterr().err
    assert main(["generate", "ours", "--chat", "--state", "a"]) == 2
    assert "leave out --prompt, --document and --state" in capsys.readouterr().err


def test_a_document_is_read_once_and_asked_twice(folder, capsys):
    """With its state in a file, the text is that of the document before the prompt; it is longer than the
    block size. A file is not written over, and one that is missing is a line."""
    model, tokenizer = make(folder, "ours")
    Path("long.txt").write_text(DOCUMENT)
    greedy = ["ours", "--temperature", "0", "--max_new_tokens", "60"]
    ask = [*greedy, "--prompt", "the river"]
    whole = shown(capsys, *ask, "--document", "long.txt")
    assert whole.startswith("the river") and whole != shown(capsys, *ask)
    written = shown(capsys, *greedy, "--document", "long.txt", "--state", "a")
    ids = tokenizer.encode(DOCUMENT)
    assert written == f"a: {len(ids):,} tokens, {scaled(Path('a').stat().st_size, 'B')}\n"
    model.any_length = True
    text = generate(model, torch.tensor([ids]), 60, temperature=0, vocab_size=tokenizer.vocab_size)[0]
    new = tokenizer.decode(text[len(ids) :].tolist())
    assert shown(capsys, *greedy, "--document", "long.txt") == f"{new}\n"
    assert [shown(capsys, *ask, "--state", "a") for _ in range(2)] == [whole, whole]
    told, text = shown(capsys, *ask, "--document", "long.txt", "--state", "b").split("\n", 1)
    assert told.startswith("b: ") and text == whole
    for words, line in ((["--document", "long.txt"], "a exists already"), ([], "c does not exist")):
        assert main(["generate", *ask, *words, "--state", line[0]]) == 2
        assert line in capsys.readouterr().err
    shown(capsys, *greedy, "--document", "long.txt", "--state", "half", "--dtype", "bfloat16")
    assert main(["generate", *ask, "--state", "half", "--device", "cpu"]) == 2
    assert "give --dtype bfloat16" in capsys.readouterr().err


def test_softmax_stops_at_the_block_size(folder, capsys):
    """The last token that has room is generated; a prompt that fills the block is a line."""
    model, tokenizer = make(folder, "softmax")
    ids = tokenizer.encode(DOCUMENT)[:BLOCK]
    prompt, full = tokenizer.decode(ids[:-1]), tokenizer.decode(ids)
    assert tokenizer.encode(prompt) == ids[:-1] and tokenizer.encode(full) == ids
    expected = generate(model, torch.tensor([ids[:-1]]), 1, temperature=0, vocab_size=tokenizer.vocab_size)
    found = shown(capsys, "softmax", "--temperature", "0", "--prompt", prompt)
    assert found == tokenizer.decode(expected[0].tolist()) + "\n"
    Path("short.txt").write_text(tokenizer.decode(ids[:-8]))
    ask = ["softmax", "--temperature", "0", "--prompt", tokenizer.decode(ids[-8:-5])]
    whole = shown(capsys, *ask, "--document", "short.txt")
    shown(capsys, "softmax", "--document", "short.txt", "--state", "a")
    assert shown(capsys, *ask, "--state", "a") == whole
    assert main(["generate", "softmax", "--device", "cpu", "--prompt", full]) == 2
    assert f"block size {BLOCK}: shorten it" in capsys.readouterr().err
