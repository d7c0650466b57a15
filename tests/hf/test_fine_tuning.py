"""docs/fine_tune.py: TRL with LoRA and the loss on answers only, on an export; then a chat in a terminal."""

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.data.tokenizer import train_bpe
from lingpt.models import GPT, ModelArgs, export_hf, load_model

SCRIPT = Path(__file__).parents[2] / "docs/fine_tune.py"
QUESTIONS = {"What is cold?": "The river is cold.", "What is old?": "The mill is old."}
# Another environment's Python, in which these are installed.
PYTHON = os.environ.get("LINGPT_TRL_PYTHON", sys.executable)
MISSING = [name for name in ("trl", "peft", "accelerate") if not find_spec(name)]


@pytest.fixture
def export(tmp_path) -> Path:
    """A small hybrid, its tokenizer and conversations."""
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 2, "block_size": 96, "vocab_size": 300}
    model = GPT.create(ModelArgs("small", "hybrid", **sizes).config(), seed=0)
    lines = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in QUESTIONS.items()
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"messages": line}) for line in lines * 8))
    texts = ["User: What is cold? Assistant: The river is cold. The mill is old."] * 9
    export_hf(model, tmp_path / "base", train_bpe(texts, 300).save(tmp_path))
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.skipif(
    bool(MISSING) and sys.executable == PYTHON,
    reason=f"not installed: {', '.join(MISSING)} (or LINGPT_TRL_PYTHON)",
)
def test_fine_tuned_it_answers(export, tmp_path, capsys, monkeypatch):
    """It has learned the answers, not the questions, whose loss does not count."""
    words = [PYTHON, "-P", str(SCRIPT), str(export), str(tmp_path / "data.jsonl"), str(tmp_path / "tuned")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*words, "--steps", "60", "--rate", "1e-2"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert load_model(tmp_path / "tuned").config == load_model(export).config
    for question, answer in QUESTIONS.items():
        capsys.readouterr()
        assert chat(monkeypatch, tmp_path / "tuned", question) == 0
        assert capsys.readouterr().out == f"{answer}\n"


def chat(monkeypatch, folder: Path, *lines: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n\n" for line in lines)))
    return main(
        ["generate", str(folder), "--chat", "--temperature", "0", "--device", "cpu", "--max_new_tokens", "30"]
    )


def test_a_chat_is_the_template_and_mistakes_are_one_line(export, capsys, monkeypatch):
    """Each answer continues the whole conversation, as `lingpt generate` does its text."""
    assert chat(monkeypatch, export, "hello") == 2
    assert "base has no chat template: fine-tune the model with one" in capsys.readouterr().err
    template = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
    (export / "chat_template.jinja").write_text(template)
    assert chat(monkeypatch, export, "the river") == 0
    first = capsys.readouterr().out
    assert chat(monkeypatch, export, "the river", "the mill") == 0
    second = capsys.readouterr().out.removeprefix(first)
    for prompt, answer in (("the river;", first), (f"the river;{first.strip()};the mill;", second)):
        words = ["--prompt", prompt, "--temperature", "0", "--device", "cpu", "--max_new_tokens", "30"]
        assert main(["generate", str(export), *words]) == 0
        assert capsys.readouterr().out.removeprefix(prompt).strip() == answer.strip()
    for wrong in ("{{ messages[7].content.nothing }}", "{{ messages[0].content + 1 }}"):
        (export / "chat_template.jinja").write_text(wrong)
        assert chat(monkeypatch, export, "hello") == 2
        assert "the chat template fails: " in capsys.readouterr().err
    (export / "chat_template.jinja").write_text(template)
    assert chat(monkeypatch, export, "river " * 200) == 2
    assert "exceed block size 96: shorten" in capsys.readouterr().err
