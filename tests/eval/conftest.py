"""A tiny GPT-NeoX with random weights, a tokenizer of its own, and benchmark files in the hub's fields."""

import json
import random
import socket
from pathlib import Path

import pytest
import torch

from lingpt.common.files import write_json
from lingpt.common.run_folder import (
    CONFIG,
    attention_label,
    checkpoint_folder,
    checkpoint_step,
    write_manifest,
)
from lingpt.data import Tokenizer
from lingpt.data.tokenizer import train_bpe
from lingpt.eval.harness import task_measurements
from lingpt.eval.runs import Checkpoint
from lingpt.eval.scores import About, Result, Score
from lingpt.eval.scoring import Scorer
from lingpt.models import ATTENTIONS, GPT, Config, load_model, save_model

BLOCK_SIZE = 64
SENTENCE = "the sun warms stone cold water runs under old bridges birds sing rain"
WORDS = SENTENCE.split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def evaluate(checkpoint, tasks, *, num_fewshot=0, data=None, limit=None, **options) -> Result:
    """Scores a checkpoint, or the folder of one, on tasks, as `lingpt eval` does; options: of `Scorer`."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    scorer = Scorer(checkpoint, **options)
    return scorer.score(task_measurements(scorer, tasks, num_fewshot, data, limit))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    rng = random.Random(0)
    return train_bpe([sentence(rng, 200) + "\n\nQuestion: A. B. C. D. Answer:" for _ in range(20)], 320)


@pytest.fixture(scope="session")
def hf_folder(tokenizer, tmp_path_factory) -> Path:
    """GPT-NeoX as `transformers` writes it, weights large enough to tell words apart, and a tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=BLOCK_SIZE,
        initializer_range=0.2,
        bos_token_id=tokenizer.eos_id,
        eos_token_id=tokenizer.eos_id,
    )
    folder = tmp_path_factory.mktemp("neox")
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def softmax_model(hf_folder) -> GPT:
    return load_model(hf_folder)


@pytest.fixture(scope="session", params=[name for name in ATTENTIONS if name != "softmax"])
def linear_model(request) -> GPT:
    return tiny_model(request.param)


def result(run: str, attention: str | list[str] = "ours", scores=None, **about) -> Result:
    """The scores of a run, by key, as `lingpt eval` reads them from its file."""
    known = {"path": f"runs/{run}", "step": 4, "model": "demo", "parameters": 10, "tokens": 20, "seed": 0}
    known |= {"form": attention_label(attention)} | about
    one = attention if isinstance(attention, str) else tuple(attention)
    return Result(checkpoint=About(run=run, attention=one, **known), scores=scores or {})


def score(task: str = "piqa", **values) -> Score:
    """A score of a whole benchmark of eight questions, or what `values` say."""
    return Score(**{"task": task, "documents": 8, "complete": True, "prompts": "p"} | values)


def tiny_model(attention: str | list[str], seed: int = 0) -> GPT:
    size = {"block_size": BLOCK_SIZE, "vocab_size": 320, "n_layer": 2, "n_embd": 64, "n_head": 2}
    config = Config.from_name("demo", **size, attention=attention, gla_n_head=2)
    model = GPT(config)
    model.init_weights(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def write_run(
    root: Path, name: str, attention: str | list[str], tokenizer: Tokenizer, steps=(10,), model: str = "demo"
) -> Path:
    """A run folder as training leaves it: its configuration and a checkpoint per step."""
    run = root / name
    write_config(run, model, attention)
    for step in steps:
        write_checkpoint(checkpoint_folder(run, step), tiny_model(attention, seed=step), tokenizer)
    return run


def write_config(run: Path, model: str, attention: str | list[str]) -> None:
    """What evaluation reads of a run's resolved recipe."""
    write_json(run / CONFIG, {"model": {"name": model, "attention": attention}})


def write_checkpoint(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """A whole checkpoint, less the state that only training needs."""
    save_model(model, folder)
    tokenizer.save(folder)
    write_manifest(folder, {"step": checkpoint_step(folder)})


@pytest.fixture(scope="session")
def eval_data(tmp_path_factory) -> Path:
    """EVAL_DATA with a few rows a benchmark: two of MMLU's 57 subjects have three questions, the rest two."""
    folder, rng = tmp_path_factory.mktemp("eval_data"), random.Random(1)

    def arc(n):
        return {
            "id": f"q{n}",
            "question": sentence(rng, 8) + "?",
            "choices": {"text": [sentence(rng, 1 + rng.randrange(3)) for _ in "ABCD"], "label": list("ABCD")},
            "answerKey": rng.choice("ABCD"),
        }

    def piqa(_):
        return {
            "goal": sentence(rng, 6),
            "sol1": sentence(rng, 5),
            "sol2": sentence(rng, 9),
            "label": rng.randrange(2),
        }

    def mmlu(subject):
        choices = [sentence(rng, 2) for _ in "ABCD"]
        return {
            "question": sentence(rng, 7),
            "subject": subject,
            "choices": choices,
            "answer": rng.randrange(4),
        }

    subjects = mmlu_subjects()
    rows = {
        "arc_easy_train": [arc(n) for n in range(12)],
        "arc_easy_test": [arc(n) for n in range(9)],
        "arc_challenge_train": [arc(n) for n in range(12)],
        "arc_challenge_test": [arc(n) for n in range(7)],
        "piqa_valid": [piqa(n) for n in range(6)],
        "mmlu_dev": [mmlu(subject) for subject in subjects for _ in range(5)],
        "mmlu_test": [mmlu(s) for i, s in enumerate(subjects) for _ in range(3 if i < 2 else 2)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def mmlu_subjects() -> list[str]:
    """The configurations of cais/mmlu, from the stock task files."""
    import lm_eval.tasks
    import yaml

    folder = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    return sorted(yaml.safe_load(file.read_text())["dataset_name"] for file in folder.glob("mmlu_*.yaml"))


@pytest.fixture
def at_the_same_moment(monkeypatch):
    """`at_the_same_moment(module, beside)` starts the thread `beside` just before the module's first
    `write_json`, and gives it time to write as well."""

    def start(module, beside):
        write = module.write_json

        def while_another_writes(path, value, indent):
            if beside.ident is None:
                beside.start()
                beside.join(1.0)  # it waits for this one
            write(path, value, indent=indent)

        monkeypatch.setattr(module, "write_json", while_another_writes)

    return start


@pytest.fixture
def no_network(monkeypatch):
    """Every way out raises, with a class that no `except OSError` can swallow."""

    class NetworkUsedError(BaseException):
        pass

    def refuse(*args, **kwargs):
        raise NetworkUsedError(args)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
