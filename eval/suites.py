"""Suites beside Table 2: what is asked, chance or a baseline for each.

table2        the paper's benchmarks
commonsense   OpenBookQA, WinoGrande, SIQA, LAMBADA, HellaSwag, by lm-eval
language      bits per byte of held-out text, and the loss by position past the training length
recall        phrases of a long text, asked for again at its end
"""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lingpt.common.errors import UserError, unknown
from lingpt.eval.harness import PACKAGES, find_devices, load_lm, summary
from lingpt.eval.results import DASH, add_score, load_results
from lingpt.eval.runs import Checkpoint
from lingpt.eval.texts import Texts, read_texts


class Benchmark(NamedTuple):
    """A column of the table: the metric that the literature reports, and what guessing gets, in per cent."""

    heading: str
    task: str
    metric: str
    chance: str


COMMONSENSE = (
    Benchmark("OpenBookQA", "openbookqa", "acc_norm", "25"),
    Benchmark("WinoGrande", "winogrande", "acc", "50"),
    Benchmark("SIQA", "social_iqa", "acc", "33.3"),
    Benchmark("LAMBADA", "lambada_openai", "acc", "0"),
    Benchmark("LAMBADA ppl", "lambada_openai", "perplexity", DASH),
    Benchmark("HellaSwag", "hellaswag", "acc_norm", "25"),
)
SUITES = ("table2", "commonsense", "language", "recall")
MEASURES = {"language": ("bits_per_byte", "loss_by_position"), "recall": ("recall_phrases",)}


def check_suites(names: Sequence[str]) -> None:
    """UserError for a suite that there is not."""
    for name in names:
        if name not in SUITES:
            raise unknown("suite", name, SUITES)


def commonsense_tasks(data: Path | None) -> list[str]:
    """lm-eval's names; of a local folder those that it has, the others named on stderr."""
    tasks = list(dict.fromkeys(benchmark.task for benchmark in COMMONSENSE))
    if data is None:
        return tasks
    from lingpt.eval.tasks.benchmark import local_tasks

    there = local_tasks(data)
    if missing := [task for task in tasks if task not in there]:
        print(f"left out: {data} has no file for {', '.join(missing)}", file=sys.stderr)
    return [task for task in tasks if task in there]


def evaluate_texts(
    checkpoint: Checkpoint,
    suites: Sequence[str],
    texts: dict[str, str],
    *,
    longest: int = 8,
    batch_tokens: int = 16384,
    device: str = "auto",
    devices: int = 1,
    dtype: str | None = None,
    redo: bool = False,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The suites `language` and `recall` of a checkpoint on texts; returns all that is known of it.

    Args:
        texts: name → source, as `texts.read_texts` takes it; held out, as far as the caller knows.
        longest: the loss by position goes up to so many times the training length.
        The others are `harness.evaluate`'s.

    What cannot be measured on a text (too short, too few phrases) is named by `log` and left out.
    """
    results, where = load_results(checkpoint), find_devices(device, devices)
    prefix = f"{checkpoint.run.name} step {checkpoint.step}"
    measures = [name for suite in suites for name in MEASURES.get(suite, ())]
    for measure in measures:
        lm = None
        for name, source in texts.items():
            data, key = read_texts(name, source), f"{measure} ({name})"
            known = results["scores"].get(key)
            asked = {"data": data.data, "dtype": dtype or checkpoint.dtype, "longest": longest}
            if known and not redo and all(known.get(k) == v for k, v in asked.items()):
                log(f"{prefix}: {key}: {summary(known)} (computed before; --redo computes it again)")
                continue
            length = _train_length(checkpoint)
            if lm is None:
                room = length * longest if measure == "loss_by_position" else None
                lm = load_lm(checkpoint, where, dtype, batch_tokens, block_size=room)
            start = time.monotonic()
            try:
                entry = _measure(lm, measure, data, length)
            except UserError as error:
                log(f"{prefix}: {key}: left out: {error}")
                continue
            seconds = round(time.monotonic() - start, 1)
            results = add_score(checkpoint, key, _about(lm, measure, name, seconds) | asked | entry)
            log(f"{prefix}: {key}: {summary(entry)} ({entry['documents']} documents, {seconds:.0f} s)")
    return results


def _train_length(checkpoint: Checkpoint) -> int:
    """Tokens of a training sample; of a checkpoint that does not say, the model's block size."""
    from lingpt.common.files import read_json_object

    known = checkpoint.facts["seq_len"]
    return known or read_json_object(checkpoint.folder / "config.json")["block_size"]


def _measure(lm: Any, measure: str, texts: Texts, train_length: int) -> dict[str, Any]:
    from lingpt.eval.language import bits_per_byte, loss_by_position
    from lingpt.eval.phrases import recall_phrases

    if measure == "bits_per_byte":
        return bits_per_byte(lm, texts)
    if measure == "loss_by_position":
        return loss_by_position(lm, texts, train_length)
    return recall_phrases(lm, texts)


def _about(lm: Any, measure: str, texts: str, seconds: float) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "task": measure,
        "num_fewshot": 0,
        "texts": texts,
        "complete": True,
        "max_length": lm.max_length,
        "device": torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else lm.device.type,
        "seconds": seconds,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: version(package) for package in PACKAGES},
    }
