"""A study of seconds on a CPU, and runs of it as training leaves them."""

import json
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.files import write_json
from lingpt.study import read_study
from lingpt.study.runs import rate_runs, study_runs

TINY: dict[str, Any] = {
    "recipe": "demo",
    "tokens": 512,
    "seeds": 2,
    "attentions": {"softmax": {}, "mixed": {"model.attention": ["ours", "softmax"]}},
    "options": {
        "model.n_layer": 2, "model.n_embd": 64, "model.block_size": 32,
        "data.source": "train.jsonl", "data.tokenizer": "tokenizer.json", "data.seq_len": 32,
        "data.cache_dir": "cache", "train.global_batch_size": 4, "train.micro_batch_size": 4,
        "train.warmup_steps": 1, "train.eval_interval": 2, "train.eval_tokens": 128,
        "train.sample_tokens": 0, "train.accelerator": "cpu", "train.wandb": False,
    },
    "learning_rates": [3.0e-3],
    "rate_tokens": 256,
    "suites": ["language"],
    "max_length_factor": 2,
    "texts": {"words": "held-out.jsonl"},
    "about": "A test.",
}  # fmt: skip


COMMAND = ["study", "--config", "study-tiny.yaml"]
FOLDER = Path("runs/study-tiny")
PAGE = FOLDER / "README.md"
PIQA: dict[str, Any] = {
    "task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p",
    "metrics": {"acc": 0.5, "acc_stderr": 0.1},
}  # fmt: skip


def write_tiny(**changes):
    """The tiny study of one seed without short runs, with these changes."""
    write(TINY | {"learning_rates": [], "seeds": 1} | changes)


def write(values, name="study-tiny.yaml"):
    Path(name).write_text(yaml.safe_dump(values, sort_keys=False))
    return name


def tiny_study():
    return read_study(Path("study-tiny.yaml"))


def first_run():
    return study_runs(tiny_study(), FOLDER, {}, None)[0]


def fake_run(name, attention=None, steps=4, last=None, root=FOLDER, **changes):
    """A run's folder as training leaves it, without weights; `changes` are not what the study says."""
    study, folder = tiny_study(), Path(root)
    every = [*rate_runs(study, folder, None), *study_runs(study, folder, {}, None)]
    run = next(run for run in every if run.name == name)
    config = run.recipe.to_dict()
    config["model"]["attention"] = attention or config["model"]["attention"]
    for key, value in changes.items():
        config["train"][key] = value
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(1, steps + 1):
        clock = {"step": step, "tokens": 128 * step, "train_time": float(step)}
        lines += [{"kind": "train", **clock, "loss": 8.0 - step, "tokens_per_second": 128.0, "mfu": None}]
        lines += [{"kind": "val", **clock, "loss": 8.0 - step}] if step % 2 == 0 else []
    lines += [last] if last else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_scores(name, step, attention=None, **scores):
    """The scores of a run's checkpoint as `lingpt eval` leaves them."""
    attention = attention or name.partition("-seed")[0]
    about = {"run": name, "attention": attention, "step": step, "model": "demo", "tokens": 512}
    about |= {"parameters": None, "path": name}
    file = FOLDER / f"{name}/eval/step-{step:08d}.json"
    write_json(file, {"checkpoint": about, "scores": scores})
