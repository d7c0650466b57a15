"""lm-eval's own adapter of transformers' models scores an exported one as `lingpt eval` does."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import lingpt.hf  # noqa: F401
from lingpt.data import load_tokenizer
from lingpt.data.tokenizer import train_bpe
from lingpt.eval.lm import LinGPTLM
from lingpt.models import GPT, ModelArgs, export_hf, load_model

MANUAL = Path(__file__).parents[2] / "docs/manual.md"

# lm-eval reads the 14,000 files of its own tasks to find one, which takes most of the command's time.
NO_OTHER_TASKS = """
from functools import partialmethod
from lm_eval.tasks import TaskManager
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
"""


def export(form: str, folder: Path) -> list[str]:
    """Exports a small model; returns texts of its tokenizer's words."""
    rng = random.Random(0)
    texts = [
        " ".join(rng.choices(["the", "river", "ran", "slowly", "past", "old", "mills"], k=9))
        for _ in range(30)
    ]
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "block_size": 64, "vocab_size": 300}
    model = GPT(ModelArgs("small", form, padding_multiple=64, **sizes).config())
    model.init_weights(0)
    export_hf(model, folder, train_bpe(texts, 300).save(folder))
    return texts


def own_adapter(folder: Path) -> LinGPTLM:
    return LinGPTLM(load_model(folder), load_tokenizer(folder), batch_tokens=256)


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ours", "hybrid"])
def test_lm_evals_scores_are_ours(form, tmp_path):
    """Log-likelihoods, whole texts, and greedy continuations of unequal prompts in one batch."""
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate")
    from lm_eval.models.huggingface import HFLM

    texts, ours = export(form, tmp_path), own_adapter(tmp_path)
    exported, tokenizer = (kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    theirs = HFLM(pretrained=exported, tokenizer=tokenizer, batch_size=3, device="cpu")
    assert ours.max_length == theirs.max_length == 64
    pairs = [(text[:n], text[n:]) for text, n in zip(texts, range(3, 33), strict=True)]
    for kind, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", [(t,) for t in texts])):
        expected = getattr(theirs, kind)(instances(kind, arguments), disable_tqdm=True)
        found = getattr(ours, kind)(instances(kind, arguments))
        if kind == "loglikelihood":
            assert [flag for _, flag in found] == [flag for _, flag in expected]
            found, expected = ([value for value, _ in values] for values in (found, expected))
        assert found == pytest.approx(expected, abs=1e-4)
    asked = instances("generate_until", [(a, {"until": [], "max_gen_toks": 8}) for a, _ in pairs[:7]])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.slow
def test_the_manuals_command_prints_the_same_accuracy(tmp_path):
    """On a task of local questions."""
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate")
    texts, rng = export("hybrid", tmp_path / "out"), random.Random(1)
    lines = [
        json.dumps({"q": text, "choices": rng.sample(texts, 4), "a": rng.randrange(4)}) for text in texts
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    files = {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = {"task": "rivers", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= {"doc_to_text": "q", "doc_to_choice": "choices", "doc_to_target": "a"}
    (tmp_path / "rivers.yaml").write_text(json.dumps(task | {"output_type": "multiple_choice"}))

    command = re.findall(r"^```bash\n(.*?cli_evaluate.*?)^```", MANUAL.read_text(), flags=re.M | re.S)[0]
    (tmp_path / "no_other_tasks.py").write_text(NO_OTHER_TASKS)
    command = command.replace("arc_easy", "rivers --include_path . --device cpu")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command.replace("cli_evaluate()", "import no_other_tasks; cli_evaluate()"),
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | environment,
    )
    manager = TaskManager(include_defaults=False, include_path=str(tmp_path))
    ours = simple_evaluate(own_adapter(tmp_path / "out"), tasks=["rivers"], task_manager=manager)
    accuracy = ours["results"]["rivers"]["acc,none"]
    assert 0 < accuracy < 1 and f"|acc     |↑  |{accuracy:.4f}|" in done.stdout, done.stdout + done.stderr
