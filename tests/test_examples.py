"""The Python that documents show runs as it stands."""

import gzip
import json
import re
import shlex
from pathlib import Path

import datasets
import pytest

from lingpt.cli.main import main
from lingpt.data.tokenizer import train_bpe
from lingpt.models import GPT, ModelArgs, export_hf

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("number", [0, 1])
def test_layers(number, tmp_path, monkeypatch):
    """A layer in one's own model, and in one of transformers: at most 20 lines each."""
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/layers.md")[number : number + 1]
    assert len(blocks("docs/layers.md")) == 2 and len(code.splitlines()) <= 20
    exec(code, {})


def test_the_readmes_operator():
    for code in blocks("README.md"):
        exec(code, {})


def test_the_manuals_model_in_transformers(tmp_path, monkeypatch, capsys):
    """With an export in `out`, as the command above it writes."""
    monkeypatch.chdir(tmp_path)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 2, "block_size": 128, "vocab_size": 300}
    model = GPT.create(ModelArgs("small", "hybrid", **sizes).config(), seed=0)
    export_hf(model, "out", train_bpe(["def main(): import os"] * 9, 300).save(tmp_path))
    code = next(code for code in blocks("docs/manual.md") if "lingpt.hf" in code)
    exec(code, {})
    assert "import" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_sources(tmp_path, monkeypatch, capsys):
    """Each example is read, but for those of the hub, which tests/data/test_hub.py has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path / "cache"))
    texts = [f"{number} " + "a heron watched the slow river " * 9 for number in range(30)]
    Path("text.jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": t}) for t in texts).encode())
    )
    Path("nested.jsonl").write_text("\n".join(json.dumps({"page": {"body": text}}) for text in texts))
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk("saved")
    for folder in ("parts", "books"):
        Path(folder).mkdir()
    rows.to_parquet("parts/0.parquet")
    for number, text in enumerate(texts):
        Path(f"books/{number}.txt").write_text(text)
    page = (ROOT / "docs/data.md").read_text()
    examples = re.findall(r"^\| .* \| `(--data.source .*)` \|$", page, flags=re.M)
    local = [example for example in examples if "hf:" not in example and "wiki40b" not in example]
    assert len(examples) == 9 and len(local) == 7
    for example in local:
        sizes = ["--data.seq_len", "32", "--data.vocab_size", "300", "--data.val_fraction", "0.1"]
        words = shlex.split(example)
        assert main(["data", *words, *sizes]) == 0, capsys.readouterr().err
        assert f"source       {words[1]}" in capsys.readouterr().out
