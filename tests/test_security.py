"""What SECURITY.md promises: no code out of a file, whatever the file is."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.models import Config, load_weights
from lingpt.models.gpt import GPT
from lingpt.train.runs.checkpoint import load_state

ROOT = Path(__file__).parent.parent


class Code:
    """Pickled: a call of `os.mkdir`."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


def model() -> GPT:
    return GPT(Config.from_name("mine", n_layer=1, n_embd=32, n_head=2, vocab_size=64, attention="softmax"))


@pytest.mark.parametrize("bare", [False, True], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("name", ["train_state.pt", "lit_model.pth", "pytorch_model.bin"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, name, bare):
    """In a checkpoint to go on from, and in weights to start from (LitGPT's and Hugging Face's)."""
    proof, folder = tmp_path / "proof", tmp_path / "folder"
    folder.mkdir()
    with open(folder / name, "wb") as file:
        (pickle.dump if bare else torch.save)({"model": Code(proof), "optimizer": {}}, file)
    if name == "lit_model.pth":
        (folder / "model_config.yaml").write_text("{name: mine, n_layer: 1, n_embd: 32, n_head: 2}")
    if name == "pytorch_model.bin":
        sizes = dict.fromkeys(
            ("max_position_embeddings", "vocab_size", "hidden_size", "intermediate_size"), 32
        )
        layers = {"model_type": "gpt_neox", "num_hidden_layers": 1, "num_attention_heads": 2}
        (folder / "config.json").write_text(json.dumps(sizes | layers))
    with pytest.raises(
        UserError, match=rf"{re.escape(name)} is missing, damaged, or not a PyTorch checkpoint"
    ):
        load_state(folder) if name == "train_state.pt" else load_weights(model(), folder)
    assert not proof.exists()
    with open(folder / name, "rb") as file:  # the file is as dangerous as it is said to be
        (pickle.load if bare else lambda f: torch.load(f, weights_only=False))(file)
    assert proof.exists()


@pytest.mark.parametrize(
    "text",
    [
        "train: !!python/object/apply:os.mkdir [proof]",
        "train: {name: !!python/object/apply:os.mkdir [proof]}",
        "model: {class_path: os.mkdir, init_args: {path: proof}}",
        "train: {name: '$(mkdir proof)', max_steps: 1}",
    ],
)
def test_a_recipe_runs_nothing(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    code = main(["train", "--config", "x.yaml", "--train.dry_run", "true"])
    assert code == (0 if "$(" in text else 2) and not Path("proof").exists()


def test_the_source_has_one_door_to_pickles_and_none_to_code():
    """`torch.load` stands in one place, with `weights_only`; YAML is loaded safely; nothing is evaluated."""
    sources = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert len(sources) > 100
    found = [
        f"{path.relative_to(ROOT)}: {call[0]}"
        for path in sources
        for call in re.finditer(
            r"torch\.load\(|pickle\.loads?\(|yaml\.(unsafe_|full_)?load\(|(?<![\w.])(eval|exec)\(|"
            r"trust_remote_code=True|allow_pickle=True|weights_only=False",
            path.read_text(),
        )
    ]
    assert found == ["models/model_folder.py: torch.load("]
    assert "weights_only=True" in (ROOT / "models/model_folder.py").read_text()


PACKAGES = (
    "bench", "cli", "common", "configs", "data", "eval", "hf", "kernels", "layers", "models", "plots",
    "study", "train",
)  # fmt: skip
