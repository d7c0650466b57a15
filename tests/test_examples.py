"""The Python that documents show runs as it stands."""

import re
from pathlib import Path

import pytest

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
