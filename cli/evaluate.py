"""`lingpt eval`: scores the newest checkpoint of each attention of a model and prints the paper's Table 2."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lingpt.common import arguments
from lingpt.common.arguments import ConfigFile
from lingpt.common.errors import UserError, by_reason, check_known
from lingpt.common.options import Option
from lingpt.eval.paper import TASKS

if TYPE_CHECKING:
    from lingpt.eval.runs import Checkpoint
    from lingpt.eval.scores import Result


@dataclass
class Options:
    """Score checkpoints, and print the paper's Table 2, or another suite's table, with ours in it."""

    # fmt: off
    model: Annotated[str | None, Option(
        "score the newest run of each attention variant of this model (default: the newest run's model)"
    )] = None
    runs: Annotated[tuple[str, ...], Option(
        "score these runs, checkpoints or model folders (of `lingpt export`) instead")] = ()
    suite: Annotated[tuple[str, ...], Option(
        "one or more of table2, commonsense, retrieval, needle, language, recall")] = ("table2",)
    tasks: Annotated[tuple[str, ...], Option(
        "tasks of the suite table2, as lm-eval names them; `mmlu:5` asks for five examples")] = TASKS
    texts: Annotated[tuple[str, ...], Option(
        "texts of language and recall: name=path of held-out JSONL, Parquet or .txt files, or "
        "embedded"
    )] = ("embedded",)
    text_key: Annotated[str, Option(
        "the field of JSONL, or the column of Parquet, that holds the text; `a.b` is b in a")] = "text"
    max_length_factor: Annotated[int, Option(
        "the loss by position, and needles, go up to this multiple of the training length", least=1)] = 8
    num_fewshot: Annotated[int, Option(
        "examples before each question, unless the task says how many", least=0)] = 0
    data: Annotated[str | None, Option(
        "folder of benchmark JSONL instead of the hub (or set EVAL_DATA)")] = None
    limit: Annotated[int | None, Option(
        "score only so many documents of each benchmark; needles and texts are measured whole", least=1
    )] = None
    batch_tokens: Annotated[int, Option(
        "most tokens of a batch; lower it if memory runs out", least=1)] = 16384
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1")] = "auto"
    devices: Annotated[int, Option(
        "number of GPUs that share the questions, from --device on", least=1, most=1024)] = 1
    dtype: Annotated[str | None, Option("float32, bfloat16 or float16 (default: the checkpoint's)")] = None
    runs_dir: Annotated[str, Option("the folder of runs that --model chooses from")] = "runs"
    redo: Annotated[bool, Option("compute scores again that a run's eval/ already holds")] = False
    save: Annotated[str | None, Option("folder to write the tables to: Markdown, JSON and LaTeX")] = None
    markdown: Annotated[bool, Option("print Markdown tables")] = False
    # fmt: on


def find_config(name: str) -> Path:
    """The file that `--config` names. UserError if there is none."""
    if not Path(name).is_file():
        raise UserError(f"no file {name!r}; --config takes a YAML file with these options")
    return Path(name)


def parse(words: Sequence[str]) -> Options:
    return arguments.parse("eval", Options, words, ConfigFile(find_config, "a YAML file with these options"))


def run(options: Options) -> None:
    from lingpt.eval.runs import find_checkpoints
    from lingpt.eval.scores import results_path
    from lingpt.eval.suites import SUITES, benchmark_tasks, measures_of, suite_scores
    from lingpt.eval.tasks.sources import benchmark_folder
    from lingpt.eval.texts import parse_texts

    check_known("suite", options.suite, SUITES)
    if not options.suite:
        raise UserError(f"--suite needs one or more of {', '.join(SUITES)}")
    data, texts = benchmark_folder(options.data), parse_texts(options.texts)
    tasks = benchmark_tasks(options.suite, options.tasks, data)
    if options.limit and (whole := measures_of(options.suite)):
        print(f"--limit is for benchmarks only; measured whole: {', '.join(whole)}", file=sys.stderr)
    unread, unscored = list[str](), list[tuple[str, str]]()  # of runs, and of scores with their reasons
    done, paths = list["Result"](), list[Path]()
    for checkpoint in find_checkpoints(options.runs_dir, options.model, options.runs, unread.append):
        try:
            result = _score(options, checkpoint, tasks, data, texts, lambda *score: unscored.append(score))
        except UserError as error:
            unread.append(str(error))
            continue
        if asked := suite_scores(result, options.suite, options.tasks):
            done.append(replace(result, scores=asked))
            paths.append(results_path(checkpoint))
    if done:
        _show(options, done)
        print("\nWritten: " + ", ".join(map(str, paths)))
    _complain(unread, unscored, bool(done))


def _score(
    options: Options,
    checkpoint: "Checkpoint",
    tasks: list[str],
    data: Path | None,
    texts: dict[str, str],
    left_out: Callable[[str, str], None],
) -> "Result":
    """Scores one checkpoint on the requested suites; returns all its scores, earlier ones included."""
    from lingpt.eval.harness import task_measurements
    from lingpt.eval.scoring import Scorer
    from lingpt.eval.suites import text_measurements

    names = ("batch_tokens", "device", "devices", "dtype", "redo")
    scorer = Scorer(checkpoint, left_out=left_out, **{name: vars(options)[name] for name in names})
    of_tasks = task_measurements(scorer, tasks, options.num_fewshot, data, options.limit)
    of_texts = text_measurements(scorer, options.suite, texts, options.max_length_factor, options.text_key)
    return scorer.score([*of_tasks, *of_texts])


def _show(options: Options, results: "list[Result]") -> None:
    """Prints the tables of the requested suites and, with --save, writes them as files."""
    from lingpt.eval.suite_tables import save_suites, score_table, suite_tables
    from lingpt.eval.table2 import save_table2, table2_tables

    tables = table2_tables(results) if "table2" in options.suite else []
    if (listed := score_table(results)).rows:
        print("\n" + listed.text(options.markdown))
    for table in [*tables, *suite_tables(results, options.suite)]:
        print(f"\n{table.title}\n\n{table.text(options.markdown)}")
    if options.save:
        folder = Path(options.save)
        written = save_table2(results, folder) if "table2" in options.suite else []
        written += save_suites(results, folder, options.suite)
        print("\nTables: " + ", ".join(str(path) for path in written))


def _complain(unread: list[str], unscored: list[tuple[str, str]], done: bool) -> None:
    """Ends the command with an error if something could not be scored; the message gives the reasons.

    unread: why runs could not. unscored: the scores that could not be computed, and why.
    """
    unread, unscored = list(dict.fromkeys(unread)), list(dict.fromkeys(unscored))
    if number := len(unread) + len(unscored):
        kept = f"{number} left out, all else is scored and kept, the same command tries again: "
        raise UserError((kept if done else "") + "; ".join([*unread, *by_reason(unscored)]))
