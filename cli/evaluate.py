"""`lingpt eval`: scores the newest checkpoint of each attention of a model and prints the paper's Table 2."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.errors import UserError, by_reason
from lingpt.eval.paper import TASKS

if TYPE_CHECKING:
    from lingpt.eval.runs import Checkpoint
    from lingpt.eval.scores import Result

HELP = "Score checkpoints, and print the paper's Table 2, or another suite's table, with ours in it."
RENAMED = {"out": "runs_dir", "longest": "max_length_factor"}


class EvalFile(ActionConfigFile):
    """`--config`: a YAML file."""

    def __call__(self, parser, cfg, values, option_string=None):
        if not Path(values).is_file():
            raise UserError(f"no file {values!r}; --config takes a YAML file with these options")
        super().__call__(parser, cfg, values, option_string)


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", action=EvalFile, help="a YAML file with these options")
    add(
        "--model",
        type=str | None,
        help="score the newest run of each attention form of this model (default: the newest run's model)",
    )
    add("--runs", nargs="+", default=[], help="score these runs or checkpoint folders instead")
    suites = "one or more of table2 (the default), commonsense, retrieval, needle, language, recall"
    add("--suite", nargs="+", default=["table2"], help=suites)
    tasks = "tasks of the suite table2, as lm-eval names them; `mmlu:5` asks for five examples"
    add("--tasks", nargs="+", default=list(TASKS), help=tasks)
    texts = "texts of language and recall: name=path of held-out JSONL or .txt files, or embedded"
    add("--texts", nargs="+", default=["embedded"], help=texts)
    factor = "the loss by position, and needles, go up to this multiple of the training length"
    add("--max_length_factor", type=int, default=8, help=factor)
    add(
        "--num_fewshot",
        type=int,
        default=0,
        help="examples before each question, unless the task says how many",
    )
    add("--data", type=str | None, help="folder of benchmark JSONL instead of the hub (or set EVAL_DATA)")
    add("--limit", type=int | None, help="score only the first LIMIT documents of each task")
    add("--batch_tokens", type=int, default=16384, help="most tokens of a batch; lower it if memory runs out")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--devices", type=int, default=1, help="number of GPUs that share the questions, from --device on")
    add("--dtype", type=str | None, help="float32, bfloat16 or float16 (default: the checkpoint's)")
    add("--runs_dir", default="runs", help="the folder of runs that --model chooses from")
    add("--redo", action="store_true", help="compute scores again that a run's eval/ already holds")
    add("--save", type=str | None, help="folder to write the tables to: Markdown, JSON, LaTeX and PNG")
    add("--markdown", action="store_true", help="print Markdown tables")


def run(args: Namespace) -> None:
    from lingpt.eval.runs import find_checkpoints
    from lingpt.eval.scores import results_path
    from lingpt.eval.suites import benchmark_tasks, check_suites, suite_scores
    from lingpt.eval.tasks.sources import benchmark_folder
    from lingpt.eval.texts import parse_texts

    check_suites(args.suite)
    data, texts = benchmark_folder(args.data), parse_texts(args.texts)
    tasks = benchmark_tasks(args.suite, args.tasks, data)
    unread, unscored = list[str](), list[tuple[str, str]]()  # of runs, and of scores with their reasons
    done, paths = list["Result"](), list[Path]()
    for checkpoint in find_checkpoints(args.runs_dir, args.model, args.runs, unread.append):
        try:
            result = _score(args, checkpoint, tasks, data, texts, lambda *score: unscored.append(score))
        except UserError as error:
            unread.append(str(error))
            continue
        if asked := suite_scores(result, args.suite, args.tasks):
            done.append(replace(result, scores=asked))
            paths.append(results_path(checkpoint))
    if done:
        _show(args, done)
        print("\nWritten: " + ", ".join(map(str, paths)))
    _complain(unread, unscored, bool(done))


def _score(
    args: Namespace,
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

    options = {key: args[key] for key in ("batch_tokens", "device", "devices", "dtype", "redo")}
    scorer = Scorer(checkpoint, left_out=left_out, **options)
    of_tasks = task_measurements(scorer, tasks, args.num_fewshot, data, args.limit)
    of_texts = text_measurements(scorer, args.suite, texts, args.max_length_factor)
    return scorer.score([*of_tasks, *of_texts])


def _show(args: Namespace, results: "list[Result]") -> None:
    """Prints the tables of the requested suites and, with --save, writes them as files."""
    from lingpt.eval.suite_tables import save_suites, score_table, suite_tables
    from lingpt.eval.table2 import save_table2, table2_tables

    tables = table2_tables(results) if "table2" in args.suite else []
    print("\n" + score_table(results).text(args.markdown))
    for table in [*tables, *suite_tables(results, args.suite)]:
        print(f"\n{table.title}\n\n{table.text(args.markdown)}")
    if args.save:
        folder = Path(args.save)
        written = save_table2(results, folder) if "table2" in args.suite else []
        written += save_suites(results, folder, args.suite)
        print("\nTables: " + ", ".join(str(path) for path in written))


def _complain(unread: list[str], unscored: list[tuple[str, str]], done: bool) -> None:
    """Ends the command with an error if something could not be scored; the message gives the reasons.

    unread: why runs could not. unscored: the scores that could not be computed, and why.
    """
    unread, unscored = list(dict.fromkeys(unread)), list(dict.fromkeys(unscored))
    if number := len(unread) + len(unscored):
        kept = f"{number} left out, all else is scored and kept, the same command tries again: "
        raise UserError((kept if done else "") + "; ".join([*unread, *by_reason(unscored)]))
