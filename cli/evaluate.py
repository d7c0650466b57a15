"""`lingpt eval`: scores the newest checkpoint of each attention of a model and prints the paper's Table 2."""

import os
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from lingpt.common.errors import UserError
from lingpt.configs import recipe_path

HELP = "Score checkpoints with lm-eval, and print the paper's Table 2 with ours next to it."


class EvalFile(ActionConfigFile):
    """`--config`: a YAML file, or the name of one that ships with LinGPT (`table2`)."""

    def __call__(self, parser, cfg, values, option_string=None):
        path = Path(values) if Path(values).is_file() else recipe_path(values)
        if path is None:
            raise UserError(f"no file {values!r}; --config takes a YAML file, or `table2`")
        super().__call__(parser, cfg, str(path), option_string)


def configure(parser: ArgumentParser) -> None:
    """The options of the verb; configs/table2.yaml has the defaults of those that a study fixes."""
    parser.default_config_files = [str(recipe_path("table2"))]
    add = parser.add_argument
    add("--config", action=EvalFile, help="a YAML file, or `table2`, the default")
    add(
        "--model",
        type=str | None,
        help="the newest run of each attention of this model (of the newest run's)",
    )
    add("--runs", nargs="+", default=[], help="these runs, or checkpoint folders, instead")
    add("--tasks", nargs="+", default=[], help="names of lm-eval's tasks; `mmlu:5` asks for five examples")
    add("--num_fewshot", type=int, default=0, help="examples before each question, where a task does not say")
    add("--data", type=str | None, help="folder of benchmark JSONL instead of the hub (or set EVAL_DATA)")
    add("--limit", type=int | None, help="only the first so many documents of each task")
    add("--batch_tokens", type=int, default=16384, help="most tokens of a batch; lower it if memory runs out")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--dtype", type=str | None, help="float32, bfloat16 or float16 (the checkpoint's own)")
    add("--out", default="runs", help="the folder of runs")
    add("--redo", action="store_true", help="compute again what a run's eval/ already holds")
    add("--markdown", action="store_true", help="print Markdown tables")


def run(args: Namespace) -> None:
    from lingpt.common.errors import skipping_sick
    from lingpt.eval import Checkpoint, evaluate, find_checkpoints, results_path, score_table, table2

    if not args.tasks:
        raise UserError("no task to evaluate: give --tasks, for example --tasks arc_easy piqa")

    def scored(checkpoint: Checkpoint) -> tuple[dict[str, Any], Path]:
        scores = evaluate(
            checkpoint,
            args.tasks,
            num_fewshot=args.num_fewshot,
            data=args.data or os.environ.get("EVAL_DATA"),
            limit=args.limit,
            batch_tokens=args.batch_tokens,
            device=args.device,
            dtype=args.dtype,
            redo=args.redo,
        )
        return scores, results_path(checkpoint)

    done = skipping_sick(scored, find_checkpoints(args.out, args.model, args.runs))
    results = [scores for scores, _ in done]
    print("\n" + score_table(results, args.markdown))
    print("\nTable 2 of the paper, and ours\n")
    print(table2(results, args.markdown))
    print("\nWritten: " + ", ".join(str(path) for _, path in done))
