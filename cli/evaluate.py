"""`lingpt eval`: scores the newest checkpoint of each attention of a model and prints the paper's Table 2."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.errors import UserError, by_reason

if TYPE_CHECKING:
    from lingpt.eval import Checkpoint

HELP = "Score checkpoints, and print the paper's Table 2, or another suite's table, with ours in it."
DEFAULTS = Path(__file__).parents[1] / "eval" / "table2.yaml"
RENAMED = {"out": "runs_dir", "longest": "max_length_factor"}


class EvalFile(ActionConfigFile):
    """`--config`: a YAML file, or the name of one that ships with LinGPT (`table2`)."""

    def __call__(self, parser, cfg, values, option_string=None):
        path = DEFAULTS if values == "table2" and not Path(values).is_file() else Path(values)
        if not path.is_file():
            raise UserError(f"no file {values!r}; --config takes a YAML file, or `table2`")
        super().__call__(parser, cfg, str(path), option_string)


def configure(parser: ArgumentParser) -> None:
    """Adds the verb's options; eval/table2.yaml has the defaults of those that a study fixes."""
    parser.default_config_files = [str(DEFAULTS)]
    add = parser.add_argument
    add("--config", action=EvalFile, help="a YAML file, or `table2`, the default")
    add(
        "--model",
        type=str | None,
        help="score the newest run of each attention form of this model (default: the newest run's model)",
    )
    add("--runs", nargs="+", default=[], help="score these runs or checkpoint folders instead")
    suites = "one or more of table2 (the default), commonsense, language, recall"
    add("--suite", nargs="+", default=["table2"], help=suites)
    tasks = "tasks of the suite table2, as lm-eval names them; `mmlu:5` asks for five examples"
    add("--tasks", nargs="+", default=[], help=tasks)
    texts = "texts of language and recall: name=path of held-out JSONL or .txt files, or embedded"
    add("--texts", nargs="+", default=["embedded"], help=texts)
    factor = "the loss by position goes up to this multiple of the training length"
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
    from lingpt.eval import find_checkpoints, results_path
    from lingpt.eval.suites import check_suites, suite_scores
    from lingpt.eval.texts import parse_texts

    check_suites(args.suite)
    if "table2" in args.suite and not args.tasks:
        raise UserError("no task to evaluate: give --tasks, for example --tasks arc_easy piqa")
    tasks, texts = _tasks(args), parse_texts(args.texts)
    unread, unscored = list[str](), list[tuple[str, str]]()  # of runs, and of scores with their reasons
    done = []
    for checkpoint in find_checkpoints(args.runs_dir, args.model, args.runs, unread.append):
        try:
            scores = _score(args, checkpoint, tasks, texts, lambda *score: unscored.append(score))
        except UserError as error:
            unread.append(str(error))
            continue
        if asked := suite_scores(scores, args.suite, args.tasks):
            done.append((scores | {"scores": asked}, results_path(checkpoint)))
    if done:
        _show(args, [scores for scores, _ in done])
        print("\nWritten: " + ", ".join(str(path) for _, path in done))
    _complain(unread, unscored, bool(done))


def _tasks(args: Namespace) -> list[str]:
    """The lm-eval tasks of the requested suites."""
    from lingpt.eval.suites import commonsense_tasks
    from lingpt.eval.tasks.sources import benchmark_folder

    tasks = list(args.tasks) if "table2" in args.suite else []
    return tasks + (commonsense_tasks(benchmark_folder(args.data)) if "commonsense" in args.suite else [])


def _score(
    args: Namespace,
    checkpoint: "Checkpoint",
    tasks: list[str],
    texts: dict[str, str],
    left_out: Callable[[str, str], None],
) -> dict[str, Any]:
    """Scores one checkpoint on the requested suites; returns all its results, earlier ones included."""
    from lingpt.eval.harness import task_measurements
    from lingpt.eval.scoring import Scorer
    from lingpt.eval.suites import text_measurements
    from lingpt.eval.tasks.sources import benchmark_folder

    options = {key: args[key] for key in ("batch_tokens", "device", "devices", "dtype", "redo")}
    scorer = Scorer(checkpoint, left_out=left_out, **options)
    data = benchmark_folder(args.data)
    of_tasks = task_measurements(scorer, tasks, args.num_fewshot, data, args.limit)
    of_texts = text_measurements(scorer, args.suite, texts, args.max_length_factor)
    return scorer.score([*of_tasks, *of_texts])


def _show(args: Namespace, results: list[dict[str, Any]]) -> None:
    """Prints the tables of the requested suites and, with --save, writes them as files."""
    from lingpt.eval import score_table, table2
    from lingpt.eval.suite_tables import save_suites, suite_tables
    from lingpt.eval.table2 import save_table2

    print("\n" + score_table(results, args.markdown))
    if "table2" in args.suite:
        print("\nTable 2 of the paper, and ours\n")
        print(table2(results, args.markdown))
    for table in suite_tables(results, args.suite):
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
