"""The evaluation suites other than Table 2: their questions, and chance or a baseline for each.

table2        the paper's benchmarks
commonsense   OpenBookQA, WinoGrande, SIQA, LAMBADA, HellaSwag, by lm-eval
language      bits per byte of held-out text, and the loss by position past the training length
recall        phrases of a long text, asked for again at its end
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lingpt.common.errors import UserError, unknown
from lingpt.data.jsonl import find_files
from lingpt.eval.harness import parse_task
from lingpt.eval.results import text_key
from lingpt.eval.scoring import Measurement, Scorer
from lingpt.eval.texts import Texts, read_texts


class Benchmark(NamedTuple):
    """A column of the table: the metric that the literature reports, and the chance level in per cent."""

    heading: str
    task: str
    metric: str
    chance: str


COMMONSENSE = (
    Benchmark("OpenBookQA", "openbookqa", "acc_norm", "25"),
    Benchmark("WinoGrande", "winogrande", "acc", "50"),
    Benchmark("SIQA", "social_iqa", "acc", "33.3"),
    Benchmark("LAMBADA", "lambada_openai", "acc", "0"),
    Benchmark("LAMBADA ppl", "lambada_openai", "perplexity", "none"),
    Benchmark("HellaSwag", "hellaswag", "acc_norm", "25"),
)
SUITES = ("table2", "commonsense", "language", "recall")
MEASURES = {"language": ("bits_per_byte", "loss_by_position"), "recall": ("recall_phrases",)}


def check_suites(names: Sequence[str]) -> None:
    """Raises UserError for an unknown suite."""
    for name in names:
        if name not in SUITES:
            raise unknown("suite", name, SUITES)


def check_scoring(
    suites: Sequence[str], tasks: Sequence[str], texts: dict[str, str], data: Path | None
) -> None:
    """Raises UserError for an unknown task, and for missing benchmark files or texts.

    tasks: those of Table 2; `texts` and `data` as `text_measurements` and `evaluate` take them.
    """
    if data is not None:
        from lingpt.eval.tasks.sources import check_folder

        check_folder(data)
    names = list(tasks) if "table2" in suites else []
    for name in names + (commonsense_tasks(data) if "commonsense" in suites else []):
        from lingpt.eval.tasks.benchmark import check_task  # lm-eval takes seconds to import

        check_task(*parse_task(name), data)
    for source in texts.values() if set(suites) & MEASURES.keys() else ():
        if source != "embedded":
            find_files(source, ["embedded"])


def suite_tasks(suite: str, tasks: Sequence[str]) -> list[str]:
    """The names of what a suite measures, each the `task` of a score. tasks: those of Table 2."""
    if suite == "table2":
        return list(dict.fromkeys(task.partition(":")[0] for task in tasks))
    if suite == "commonsense":
        return list(dict.fromkeys(benchmark.task for benchmark in COMMONSENSE))
    return list(MEASURES[suite])


def suite_scores(
    results: dict[str, Any], suites: Sequence[str], tasks: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """A checkpoint's scores of these suites' tasks; for Table 2, also of those that are not in `tasks`."""
    from lingpt.eval.table2 import COLUMNS

    names = {task for suite in suites for task in suite_tasks(suite, tasks)}
    names |= {task for _, task, _ in COLUMNS if "table2" in suites}
    return {key: entry for key, entry in results["scores"].items() if entry["task"] in names}


def commonsense_tasks(data: Path | None) -> list[str]:
    """The suite's lm-eval tasks; with a local folder, those it has files for, the others named on stderr.

    UserError if it has none.
    """
    from lingpt.eval.tasks.sources import WITHOUT

    tasks, missing = suite_tasks("commonsense", ()), tasks_without_file(data)
    if missing == tasks:
        raise UserError(f"{data} has no file for any of {', '.join(tasks)}; {WITHOUT}")
    if missing:
        print(f"commonsense: {data} has no file for {', '.join(missing)}", file=sys.stderr)
    return [task for task in tasks if task not in missing]


def tasks_without_file(data: Path | None) -> list[str]:
    """The tasks of the suite `commonsense` that the folder `data` has no file for; none from the hub (None).
    UserError if there is no such folder.
    """
    if data is None:
        return []
    from lingpt.eval.tasks.benchmark import local_tasks
    from lingpt.eval.tasks.sources import check_folder

    check_folder(data)
    local = local_tasks(data)
    return [task for task in suite_tasks("commonsense", ()) if task not in local]


def text_measurements(
    scorer: Scorer, suites: Sequence[str], texts: dict[str, str], max_length_factor: int = 8
) -> list[Measurement]:
    """The measurements of the suites `language` and `recall`; texts that cannot be read are left out.

    Args:
        texts: name → source, as `texts.read_texts` takes it; the caller must know that it is held out.
        max_length_factor: the loss by position goes up to this multiple of the training length.

    A measure that a text is too short for, or has too few phrases for, is skipped with a line to the log.
    """
    if max_length_factor < 1:
        raise UserError(
            f"max_length_factor is {max_length_factor}; it must be at least 1, the training length itself"
        )
    measures = [name for suite in suites for name in MEASURES.get(suite, ())]
    length, found, measurements = scorer.checkpoint.train_length, [], []
    for name, source in texts.items() if measures else ():
        with scorer.leaving_out(f"text {name}"):
            found.append(read_texts(name, source))
    for measure in measures:
        room = length * (max_length_factor if measure == "loss_by_position" else 1)
        for data in found:
            settings = scorer.settings(room, data.data, **_settings(measure, max_length_factor))
            compute = functools.partial(_measure, measure=measure, texts=data, train_length=length)
            measurements.append(Measurement(text_key(measure, data.name), settings, compute))
    return measurements


def _settings(measure: str, max_length_factor: int) -> dict[str, int]:
    """The settings that a measure depends on, besides the model and the text."""
    from lingpt.eval.language import ENOUGH

    # "longest" is the factor's name in all files of scores.
    return {"longest": max_length_factor, "enough": ENOUGH} if measure == "loss_by_position" else {}


def _measure(lm: Any, measure: str, texts: Texts, train_length: int) -> dict[str, Any]:
    from lingpt.eval.language import bits_per_byte, loss_by_position
    from lingpt.eval.phrases import recall_phrases

    entry = {"task": measure, "num_fewshot": 0, "texts": texts.name, "complete": True}
    if measure == "bits_per_byte":
        return entry | bits_per_byte(lm, texts)
    if measure == "loss_by_position":
        return entry | loss_by_position(lm, texts, train_length)
    return entry | recall_phrases(lm, texts)
