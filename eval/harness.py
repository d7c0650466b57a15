"""Evaluates a checkpoint on lm-eval's tasks and keeps the scores in its run."""

import contextlib
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lingpt.common.devices import device_name, find_device, named_dtype
from lingpt.common.errors import UserError
from lingpt.common.files import file_sha256
from lingpt.common.install import installed_version
from lingpt.common.run_folder import check_undamaged
from lingpt.eval.results import add_score, load_results, pack_bits, percent, results_path, task_key
from lingpt.eval.runs import Checkpoint

PACKAGES = ("lingpt", "lm_eval", "torch", "datasets", "tokenizers")


def evaluate(
    checkpoint: Checkpoint | str | Path,
    tasks: Sequence[str],
    *,
    num_fewshot: int = 0,
    data: str | Path | None = None,
    limit: int | None = None,
    batch_tokens: int = 16384,
    device: str = "auto",
    devices: int = 1,
    dtype: str | None = None,
    redo: bool = False,
    log: Callable[[str], None] = print,
    left_out: Callable[[str], None] | None = None,
    load: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Scores `checkpoint` on `tasks` and returns all its scores, earlier ones included (`load_results`).

    Args:
        checkpoint: a `Checkpoint`, or the folder of one.
        tasks: lm-eval's names; `mmlu:5` asks for five examples whatever `num_fewshot` says.
        num_fewshot: examples before each question.
        data: folder of benchmark JSONL (`tasks/sources.yaml`); None loads from the Hugging Face hub.
        limit: how many documents of each task (of each of MMLU's 57 subjects), the first ones; None for all.
        batch_tokens: most tokens of a batch, padding included.
        device: `auto`, or PyTorch's name of one.
        devices: how many devices, from `device` on, share the questions, each with a copy of the model. The
            scores do not depend on it.
        dtype: the dtype to compute in, the checkpoint's own by default.
        redo: compute again what the run's eval/ already holds for these weights, this data and limit.
        log: called with a line on each task.
        left_out: called with a line on each task that cannot be scored, while the others are; by default the
            first such task raises.
        load: `load_lm` by default; a `functools.cache` of it serves several calls on one checkpoint.

    Each score is written when its task is done, so an interruption loses at most one task. UserError for what
    the user can fix, also if the checkpoint's attention is not the one its run was configured with.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; it must be at least 1 (or leave it out)")
    if dtype is not None:
        named_dtype(dtype)
    data, where = Path(data) if data else None, find_devices(device, devices)
    if data is not None:
        from lingpt.eval.tasks.sources import check_folder

        check_folder(data)
    results, to_score, length = load_results(checkpoint), [], checkpoint.train_length
    prefix = f"{checkpoint.run.name} step {checkpoint.step}"
    for name, shots in [parse_task(task, num_fewshot) for task in tasks]:
        key = task_key(name, shots, limit)
        about: dict[str, Any] = {"dtype": dtype or checkpoint.dtype, "max_length": length}
        with leaving_out(key, prefix, log, left_out):
            about["data"] = describe_data(name, shots, data)
            if not redo and (known := known_score(results, key, about, prefix, log)):
                log_rows(known, f"{prefix}: {key}", log)
            else:
                to_score.append((name, shots, key, about))
    lm = (load or load_lm)(checkpoint, where, dtype, batch_tokens).reading(length) if to_score else None
    for name, shots, key, about in to_score:
        with leaving_out(key, prefix, log, left_out):
            entry = run_task(lm, name, shots, data, limit) | about
            results = add_score(checkpoint, key, entry)
            log(f"{prefix}: {key}: {summary(entry)} ({work(entry)})")
            log_rows(entry, f"{prefix}: {key}", log)
            if results["scores"][key] is not entry:
                log(f"{prefix}: {key}: not kept: {results_path(checkpoint)} has the whole benchmark")
    return results


@contextlib.contextmanager
def leaving_out(
    key: str, prefix: str, log: Callable[[str], None], left_out: Callable[[str], None] | None
) -> Iterator[None]:
    """Passes the UserError of one measurement to `left_out`, if given, instead of raising it. `log` gets a
    line without the reason, which `left_out` gets."""
    try:
        yield
    except UserError as error:
        if left_out is None:
            raise
        log(f"{prefix}: {key}: left out")
        left_out(f"{key}: {error}")


def known_score(
    results: dict[str, Any], key: str, about: dict[str, Any], prefix: str, log: Callable[[str], None]
) -> dict[str, Any] | None:
    """The score `key`, with a line to `log`, if it was computed with the settings `about`; else None."""
    known = results["scores"].get(key)
    if not known or not about.items() <= known.items():
        return None
    log(f"{prefix}: {key}: {summary(known)} (computed before; --redo computes it again)")
    return known


def log_rows(entry: dict[str, Any], prefix: str, log: Callable[[str], None]) -> None:
    """Logs a line on each benchmark file whose number of rows is not that of the official split."""
    for file, (rows, official) in entry.get("file_rows", {}).items():
        log(f"{prefix}: {file} has {rows:,} rows; the official split has {official:,}")


def parse_task(task: str, num_fewshot: int = 0) -> tuple[str, int]:
    """`mmlu:5` → `("mmlu", 5)`; `mmlu` → `("mmlu", num_fewshot)`."""
    name, colon, shots = task.partition(":")
    if colon and not shots.isdecimal():
        raise UserError(f"task {task!r}: after the colon stands the number of examples, as in {name}:5")
    if num_fewshot < 0:
        raise UserError(f"num_fewshot is {num_fewshot}; it must be at least 0")
    return name, int(shots) if colon else num_fewshot


def find_devices(name: str, count: int) -> tuple[torch.device, ...]:
    """`count` devices from the one called `name` on (the CPU repeated); UserError if they do not exist."""
    first = find_device(name)
    if count < 1:
        raise UserError(f"devices is {count}; it must be at least 1")
    if first.type != "cuda":
        return (first,) * count
    start, there = first.index or 0, torch.cuda.device_count()
    if start + count > there:
        raise UserError(f"--devices {count} from cuda:{start} on, but this machine has {there} GPUs")
    return tuple(torch.device("cuda", start + i) for i in range(count))


def load_lm(
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    dtype: str | None = None,
    batch_tokens: int = 16384,
) -> Any:
    """The checkpoint as an lm-eval `LM`; UserError if its attention is not its run's.

    Its context is the model's block size, which may be longer than the training length; `reading` changes it.
    The file is hashed and read once, whatever the number of devices.
    """
    from lingpt.data import load_tokenizer
    from lingpt.eval.lm import LinGPTLM, same_weights
    from lingpt.models import load_model

    check_undamaged(checkpoint.folder)
    wanted = named_dtype(dtype) if dtype else None
    model = load_model(checkpoint.folder, attention=checkpoint.attention, device=devices[0], dtype=wanted)
    tokenizer = load_tokenizer(checkpoint.folder)
    tokenizer.check_fits(model.config.padded_vocab_size)
    length = model.config.block_size
    model.autotune_inference(max(1, batch_tokens // length), length)
    models = [model, *(same_weights(model, device) for device in devices[1:])]
    name = f"{checkpoint.run.name} step {checkpoint.step}"
    return LinGPTLM(models, tokenizer, batch_tokens=batch_tokens, name=name)


def describe_data(name: str, num_fewshot: int, data: Path | None) -> dict[str, str]:
    """The data a task is measured on: SHA-256 of each file, or the hub. UserError if a file is missing."""
    if data is None:
        return {"from": "hub"}
    from lingpt.eval.tasks.benchmark import load_tasks

    files = {file for task in load_tasks(name, num_fewshot, data)["tasks"].values() for file in task.files}
    return {"from": "files"} | {file.name: file_sha256(file) for file in sorted(files)}


def run_task(lm: Any, name: str, num_fewshot: int, data: Path | None, limit: int | None) -> dict[str, Any]:
    """Runs one task or group in lm-eval: metrics with standard errors, and what they were measured on."""
    from lm_eval import evaluator

    from lingpt.eval.tasks.benchmark import load_tasks

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstraps would fork this process
    start, truncated, cut = time.monotonic(), lm.truncated, lm.cut_prompts
    loaded = load_tasks(name, num_fewshot, data)
    hidden = io.StringIO()  # lm-eval prints a progress bar for its bootstraps, which would fill a log
    bars = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(hidden)
    with contextlib.redirect_stdout(hidden), bars:
        found = evaluator.evaluate(lm, loaded, limit=limit, log_samples=True, bootstrap_iters=1000)
    parts = {task: metrics_of(found["results"][task]) for task in loaded["tasks"]}
    whole = metrics_of(found["groups"][name]) if name in found.get("groups", {}) else parts.get(name)
    counts = found["n-samples"]
    return {
        "task": name,
        "num_fewshot": num_fewshot,
        "limit": limit,
        "documents": sum(counts[task]["effective"] for task in parts),
        "complete": all(
            counts[part]["effective"] == counts[part]["original"] and getattr(task, "complete", True)
            for part, task in loaded["tasks"].items()
        ),
        "file_rows": {
            file: list(rows)
            for task in loaded["tasks"].values()
            for file, rows in getattr(task, "odd_rows", {}).items()
        },
        "metrics": whole or {},
        "correct": correct_answers(found["samples"]),
        "subtasks": {} if list(parts) == [name] else parts,
        "version": found["versions"].get(name),
        "prompts": prompt_hash(loaded["tasks"]),
        "truncated": lm.truncated - truncated,
        "cut_prompts": lm.cut_prompts - cut,
        "batch_tokens": lm.batch_tokens,
    } | how_measured(lm, time.monotonic() - start)


def how_measured(lm: Any, seconds: float) -> dict[str, Any]:
    """The record of how a score was computed, part of every score. `devices`: how many shared the work."""
    return {
        "max_length": lm.max_length,
        "device": device_name(lm.device),
        "devices": len(lm.models),
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: installed_version(package) for package in PACKAGES},
    }


def metrics_of(found: dict[str, Any]) -> dict[str, float | None]:
    """`{"acc,none": 0.5, "acc_stderr,none": 0.1, …}` → `{"acc": 0.5, "acc_stderr": 0.1}`; None if missing."""
    return {
        key.removesuffix(",none"): value if isinstance(value, (int, float)) else None
        for key, value in found.items()
        if "," in key
    }


def correct_answers(samples: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Which questions were answered correctly, per accuracy metric: `results.pack_bits`, subtasks in name
    order.

    With the same `prompts`, the bits of two checkpoints are of the same questions in the same order.
    """
    rows = [row for task in sorted(samples) for row in sorted(samples[task], key=lambda row: row["doc_id"])]
    metrics = [metric for metric in ("acc", "acc_norm") if all(metric in row for row in rows)]
    return {metric: pack_bits([bool(row[metric]) for row in rows]) for metric in metrics}


def prompt_hash(tasks: dict[str, Any]) -> str:
    """SHA-256 of all requests: scores with the same hash are of the same questions, byte for byte."""
    digest = hashlib.sha256()
    for name in sorted(tasks):
        for instance in tasks[name].instances:
            digest.update(json.dumps([instance.request_type, *instance.args], ensure_ascii=False).encode())
    return digest.hexdigest()


def summary(entry: dict[str, Any]) -> str:
    """An entry's metrics, as `acc 25.10 ± 0.88, acc_norm …`; accuracies in per cent."""
    shown = []
    for metric, value in entry["metrics"].items():
        if not metric.endswith("_stderr") and value is not None:
            text = percent(entry["metrics"], metric) if metric.startswith("acc") else f"{value:.2f}"
            shown.append(f"{metric} {text}")
    return ", ".join(shown)


def work(entry: dict[str, Any]) -> str:
    """The work for an entry, as `2376 documents, 20 s`, and how many requests exceeded the block size."""
    text = f"{entry['documents']} documents, {entry['seconds']:.0f} s"
    if cut := entry["cut_prompts"]:
        text += f", {cut} prompt{'s' if cut > 1 else ''} cut to {entry['max_length']} tokens"
    return text
