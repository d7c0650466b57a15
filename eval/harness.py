"""Evaluates a checkpoint on lm-eval's tasks and keeps the scores in its run."""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingpt.common.errors import UserError
from lingpt.common.files import file_sha256
from lingpt.eval.scores import Score, pack_bits, task_key
from lingpt.eval.scoring import Measurement, Scorer

if TYPE_CHECKING:
    from lingpt.eval.lm import LinGPTLM


def task_measurements(
    scorer: Scorer, tasks: Sequence[str], num_fewshot: int, data: str | Path | None, limit: int | None
) -> list[Measurement]:
    """The measurements of these tasks, each once; those whose files are missing are left out.

    Args:
        tasks: lm-eval's names; `mmlu:5` asks for five examples whatever `num_fewshot` says.
        num_fewshot: examples before each question.
        data: folder of benchmark JSONL (`tasks/sources.yaml`); None loads from the Hugging Face hub.
        limit: how many documents of each task (of each of MMLU's 57 subjects), the first ones; None for all.
    """
    folder = Path(data) if data else None
    if folder is not None:
        from lingpt.eval.tasks.sources import check_folder

        check_folder(folder)
    found = []
    for name, shots in dict.fromkeys(parse_task(task, num_fewshot) for task in tasks):
        key = task_key(name, shots, limit)
        with scorer.leaving_out(key):
            files = describe_data(name, shots, folder)
            measure = functools.partial(run_task, name=name, num_fewshot=shots, data=folder, limit=limit)
            found.append(Measurement(key, scorer.checkpoint.train_length, files, measure))
    return found


def parse_task(task: str, num_fewshot: int = 0) -> tuple[str, int]:
    """`mmlu:5` → `("mmlu", 5)`; `mmlu` → `("mmlu", num_fewshot)`."""
    name, colon, shots = task.partition(":")
    if colon and not shots.isdecimal():
        raise UserError(f"task {task!r}: after the colon stands the number of examples, as in {name}:5")
    return name, int(shots) if colon else num_fewshot


def describe_data(name: str, num_fewshot: int, data: Path | None) -> dict[str, str]:
    """The data a task is measured on: SHA-256 of each file, or the hub. UserError if a file is missing."""
    if data is None:
        return {"from": "hub"}
    from lingpt.eval.tasks.benchmark import load_tasks

    files = {file for task in load_tasks(name, num_fewshot, data)["tasks"].values() for file in task.files}
    return {"from": "files"} | {file.name: file_sha256(file) for file in sorted(files)}


def run_task(lm: "LinGPTLM", name: str, num_fewshot: int, data: Path | None, limit: int | None) -> Score:
    """Runs one task or group in lm-eval, with an `lm` of its own: metrics with standard errors, and what they
    were measured on."""
    from lingpt.eval.tasks.benchmark import load_tasks

    loaded = load_tasks(name, num_fewshot, data)
    tasks, found = loaded["tasks"], _evaluate(lm, name, loaded, limit)
    parts = {task: metrics_of(found["results"][task]) for task in tasks}
    whole = metrics_of(found["groups"][name]) if name in found.get("groups", {}) else parts[name]
    counts = [found["n-samples"][task] for task in tasks]
    odd_rows = [getattr(task, "odd_rows", {}) for task in tasks.values()]
    return Score(
        task=name,
        num_fewshot=num_fewshot,
        limit=limit,
        documents=sum(count["effective"] for count in counts),
        complete=not any(odd_rows) and all(count["effective"] == count["original"] for count in counts),
        file_rows={file: rows for files in odd_rows for file, rows in files.items()},
        metrics=whole,
        correct=correct_answers(found["samples"]),
        subtasks={} if list(parts) == [name] else parts,
        version=found["versions"].get(name),
        prompts=requests_hash(tasks),
        cut_prompts=lm.cut_prompts,
    )


def _evaluate(lm: "LinGPTLM", name: str, loaded: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """lm-eval's results, without its progress bars; UserError if a metric overflows."""
    from lm_eval import evaluator

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstraps would fork this process
    hidden = io.StringIO()  # lm-eval prints a progress bar for its bootstraps, which would fill a log
    bars = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(hidden)
    try:
        with contextlib.redirect_stdout(hidden), bars:
            return evaluator.evaluate(lm, loaded, limit=limit, log_samples=True, bootstrap_iters=1000)
    except ArithmeticError as error:  # such as exp of a mean loss above 709 nats
        raise UserError(
            f"the model's losses are too large for the metrics of {name} ({error}): score another checkpoint"
        ) from error


def metrics_of(found: dict[str, Any]) -> dict[str, float | None]:
    """`{"acc,none": 0.5, "acc_stderr,none": 0.1, …}` → `{"acc": 0.5, "acc_stderr": 0.1}`; None if missing, or
    NaN."""
    return {
        key.removesuffix(",none"): float(value)
        if isinstance(value, (int, float)) and not math.isnan(value)
        else None
        for key, value in found.items()
        if "," in key
    }


def correct_answers(samples: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Which questions were answered correctly, per accuracy metric: `scores.pack_bits`, subtasks in name
    order.

    With the same `prompts`, the bits of two checkpoints are of the same questions in the same order.
    """
    rows = [row for task in sorted(samples) for row in sorted(samples[task], key=lambda row: row["doc_id"])]
    metrics = [metric for metric in ("acc", "acc_norm", "contains") if all(metric in row for row in rows)]
    return {metric: pack_bits([bool(row[metric]) for row in rows]) for metric in metrics}


def requests_hash(tasks: dict[str, Any]) -> str:
    """SHA-256 of all requests: scores with the same hash are of the same questions, byte for byte."""
    digest = hashlib.sha256()
    for name in sorted(tasks):
        for instance in tasks[name].instances:
            digest.update(json.dumps([instance.request_type, *instance.args], ensure_ascii=False).encode())
    return digest.hexdigest()
