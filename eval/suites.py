"""The suites of `lingpt eval`: which benchmarks and which measures of held-out text each has."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lingpt.common.errors import UserError
from lingpt.data.corpus import TEXT_KEY
from lingpt.data.files import find_files, read_file
from lingpt.eval import table2
from lingpt.eval.benchmarks import Column
from lingpt.eval.harness import parse_task
from lingpt.eval.scores import Result, Score, measure_key
from lingpt.eval.scoring import Measurement, Scorer
from lingpt.eval.texts import Texts, read_texts

if TYPE_CHECKING:
    from lingpt.eval.lm import LinGPTLM


@dataclass(frozen=True)
class Suite:
    """columns: benchmarks, by lm-eval. measures: of held-out text, or of generated text (needle)."""

    columns: tuple[Column, ...] = ()
    measures: tuple[str, ...] = ()


COMMONSENSE = (
    Column("WikiText ppl", "wikitext", 0, "word_perplexity", "none"),
    Column("LAMBADA ppl", "lambada_openai", 0, "perplexity", "none"),
    Column("LAMBADA", "lambada_openai", 0, "acc", "0"),
    Column("PIQA", "piqa", 0, "acc", "50"),
    Column("HellaSwag", "hellaswag", 0, "acc_norm", "25"),
    Column("WinoGrande", "winogrande", 0, "acc", "50"),
    Column("ARC-E", "arc_easy", 0, "acc", "25"),
    Column("ARC-C", "arc_challenge", 0, "acc_norm", "25"),
    Column("COPA", "copa", 0, "acc", "50"),
    Column("SciQ", "sciq", 0, "acc", "25"),
    Column("BoolQ", "boolq", 0, "acc", "50"),
    Column("OpenBookQA", "openbookqa", 0, "acc_norm", "25"),
    Column("SIQA", "social_iqa", 0, "acc", "33.3"),
)
RETRIEVAL = (
    Column("SQuAD", "squad_contains", 0, "contains"),
    Column("SQuAD completion", "squad_completion", 0, "contains"),
    Column("FDA", "fda", 0, "contains"),
    Column("SWDE", "swde", 0, "contains"),
)
SUITES = {
    "table2": Suite(table2.COLUMNS),
    "commonsense": Suite(COMMONSENSE),  # the zero-shot tasks of the tables of GLA and its successors
    "retrieval": Suite(RETRIEVAL),  # answers that stand in the prompt, as Based measures recall
    "needle": Suite(measures=("needle",)),
    "language": Suite(measures=("bits_per_byte", "loss_by_position", "loss_within_documents")),
    "recall": Suite(measures=("recall_phrases",)),
}


def measures_of(suites: Sequence[str]) -> list[str]:
    """The suites' measures, each once."""
    return list(dict.fromkeys(measure for suite in suites for measure in SUITES[suite].measures))


def text_measures(suites: Sequence[str]) -> list[str]:
    """Those of held-out text."""
    return [measure for measure in measures_of(suites) if measure != "needle"]


def suite_tasks(suite: str, tasks: Sequence[str]) -> list[str]:
    """The names of what a suite measures, each the `task` of a score. tasks: those of Table 2."""
    if suite == "table2":
        return list(dict.fromkeys(task.partition(":")[0] for task in tasks))
    return list(dict.fromkeys([*(c.task for c in SUITES[suite].columns), *SUITES[suite].measures]))


def suite_scores(result: Result, suites: Sequence[str], tasks: Sequence[str]) -> dict[str, Score]:
    """A checkpoint's scores of these suites' tasks; for Table 2, also of those that are not in `tasks`."""
    names = {task for suite in suites for task in suite_tasks(suite, tasks)}
    names |= {column.task for suite in suites for column in SUITES[suite].columns}
    return {key: score for key, score in result.scores.items() if score.task in names}


def check_scoring(
    suites: Sequence[str],
    tasks: Sequence[str],
    texts: dict[str, str],
    data: Path | None,
    text_key: str = TEXT_KEY,
) -> None:
    """Raises UserError for an unknown task, for missing benchmark files or texts, and for a text whose first
    document cannot be read.

    tasks: those of Table 2; `texts`, `text_key` and `data` as `text_measurements` and
    `task_measurements` take them.
    """
    if data is not None:
        from lingpt.eval.tasks.sources import check_folder

        check_folder(data)
    for name in benchmark_tasks(suites, tasks, data):
        from lingpt.eval.tasks.benchmark import check_task  # lm-eval takes seconds to import

        check_task(*parse_task(name), data)
    for source in texts.values() if text_measures(suites) else ():
        if source != "embedded":
            next(read_file(find_files(source, ["embedded"])[0], text_key), None)


def benchmark_tasks(suites: Sequence[str], tasks: Sequence[str], data: Path | None) -> list[str]:
    """The suites' lm-eval tasks: for Table 2 `tasks`; of the others, with a local folder, those that it has
    files for, the others named on stderr. UserError if it has none of a suite.
    """
    from lingpt.eval.tasks.sources import WITHOUT

    found = list(tasks) if "table2" in suites else []
    for suite in suites:
        if suite == "table2" or not SUITES[suite].columns:
            continue
        wanted, missing = suite_tasks(suite, ()), tasks_without_file([suite], data)
        if missing == wanted:
            raise UserError(f"{data} has no file for any of {', '.join(wanted)}; {WITHOUT}")
        if missing:
            print(f"{suite}: {data} has no file for {', '.join(missing)}", file=sys.stderr)
        found += [task for task in wanted if task not in missing]
    return found


def tasks_without_file(suites: Sequence[str], data: Path | None) -> list[str]:
    """The tasks of these suites (other than Table 2's) that the folder `data` has no file for; none from the
    hub (None). UserError if there is no such folder.
    """
    if data is None:
        return []
    from lingpt.eval.tasks.benchmark import local_tasks
    from lingpt.eval.tasks.sources import check_folder

    check_folder(data)
    local = local_tasks(data)
    wanted = [column.task for suite in suites if suite != "table2" for column in SUITES[suite].columns]
    return [task for task in dict.fromkeys(wanted) if task not in local]


def text_measurements(
    scorer: Scorer,
    suites: Sequence[str],
    texts: dict[str, str],
    max_length_factor: int = 8,
    text_key: str = TEXT_KEY,
) -> list[Measurement]:
    """The measures of held-out text of these suites; texts that cannot be read are left out.

    Args:
        texts: name → source, as `texts.read_texts` takes it; the caller must know that it is held out.
        max_length_factor: the loss by position, and needles, go up to this multiple of the training length.
        text_key: the field of the texts' rows, or the column, that holds the text.

    A measure that a text is too short for, or has too few phrases for, is skipped with a line to the log.
    """
    measures, found, measurements = text_measures(suites), list[Texts](), list[Measurement]()
    length = scorer.checkpoint.train_length
    if "needle" in measures_of(suites):
        from lingpt.eval.recall.needle import LENGTHS, find_needles, needle_lengths

        if not (lengths := needle_lengths(length * max_length_factor)):
            scorer.log(
                f"needle: not measured: its texts have {LENGTHS[0]:,} tokens or more, more than "
                f"{max_length_factor} times the training length {length:,}: raise --max_length_factor"
            )
        measurements += [
            Measurement(key, tokens, {"from": "generated"}, find_needles) for key, tokens in lengths.items()
        ]
    for name, source in texts.items() if measures else ():
        with scorer.leaving_out(f"text {name}"):
            found.append(read_texts(name, source, text_key))
    for measure in measures:
        room = length * (max_length_factor if measure == "loss_by_position" else 1)
        for text in found:
            compute = functools.partial(_measure, measure=measure, texts=text, train_length=length)
            measurements.append(Measurement(measure_key(measure, text.name), room, text.data, compute))
    return measurements


def _measure(lm: "LinGPTLM", measure: str, texts: Texts, train_length: int) -> Score:
    from lingpt.eval.language import bits_per_byte, loss_by_position, loss_within_documents
    from lingpt.eval.recall.phrases import recall_phrases

    if measure == "bits_per_byte":
        return bits_per_byte(lm, texts)
    if measure == "loss_by_position":
        return loss_by_position(lm, texts, train_length)
    if measure == "loss_within_documents":
        return loss_within_documents(lm, texts, train_length)
    return recall_phrases(lm, texts)
