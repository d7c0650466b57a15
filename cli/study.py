"""`lingpt study`: data → learning rates → runs → scores → tables, figures and a page, by one command."""

from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.common.errors import UserError
from lingpt.study import STAGES, Study, find_study, read_study, studies, with_baseline, with_rows

HELP = "Train and score several attentions alike, and write the tables, the figures and a page."


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=str | None, help="a study: a YAML file, or one of " + ", ".join(studies()))
    add(
        "--model",
        type=str,
        default="demo",
        help="without --config, take the study named after this model",
    )
    add("--tokens", type=int | None, help="training tokens per run (default: the study's)")
    add(
        "--attentions",
        nargs="+",
        default=[],
        help="rows to train: rows of the study, or names of attentions (default: the study's)",
    )
    add("--seeds", type=int | None, help="number of runs per row (default: the study's)")
    row = "row that times and losses are compared with (default: the study's, else softmax, else its first)"
    add("--baseline", type=str | None, help=row)
    add(
        "--devices",
        type=int | None,
        help="number of GPUs (default: all); without a GPU, of CPU processes (default: 1)",
    )
    each = "GPUs per run, or `all`: one run after another, each on all GPUs (default: the study's)"
    add("--devices_per_run", type=str | None, help=each)
    add("--source", type=str | None, help="text to train on, as --data.source of `lingpt train`")
    add("--tokenizer", type=str | None, help="tokenizer, as --data.tokenizer of `lingpt train`")
    add("--eval_data", type=str | None, help="folder of benchmark JSONL instead of the hub")
    add(
        "--texts",
        nargs="+",
        default=[],
        help="name=path of held-out JSONL or .txt for the suites language, recall",
    )
    add("--out", type=str, default="runs", help="the study's folder is <out>/study-<name>")
    add("--name", type=str | None, help="another name, for a study that differs from the one in the folder")
    add("--stages", nargs="+", default=[], help=f"some of {', '.join(STAGES)} (default: all)")
    add("--minutes", type=float | None, help="stop after this many minutes; the same command continues")
    add(
        "--publish",
        type=str | None,
        help="folder to copy the page, tables, figures and small files of the runs to",
    )
    add("--dry_run", type=bool, default=False, help="print the plan and stop")


def run(args: Namespace) -> None:
    from lingpt.study import run_study

    options = {key: args[key] for key in ("devices", "minutes", "publish", "dry_run")}
    run_study(_asked(args), args.out, stages=args.stages or STAGES, **options)


def _file(args: Namespace) -> Path:
    """The study's file: `--config`, or the study named after the model; UserError if there is none."""
    if args.config is not None or args.model in studies():
        return find_study(args.config or args.model)
    known = ", ".join(f"{study} ({read_study(find_study(study)).recipe})" for study in studies())
    raise UserError(
        f"no study is named after the model {args.model!r}: with --config (make study STUDY=…) give one of "
        f"{known}, or a copy of its file with `recipe: {args.model}`"
    )


def _asked(args: Namespace) -> Study:
    """The study that the arguments describe: a file's, changed by the command line."""
    from lingpt.eval.texts import parse_texts

    each = args.devices_per_run
    if each is not None and each != "all" and not (each.isdecimal() and int(each) > 0):
        raise UserError(f"--devices_per_run {each}: a number of GPUs, at least 1, or `all`")
    changes = {key: args[key] for key in ("tokens", "seeds", "eval_data", "name") if args[key] is not None}
    if args.texts:
        changes["texts"] = parse_texts(args.texts)
    if each is not None:
        changes["devices_per_run"] = None if each == "all" else int(each)
    study = read_study(_file(args), changes)
    options = {"data.source": args.source, "data.tokenizer": args.tokenizer}
    study = replace(study, options=study.options | {key: v for key, v in options.items() if v is not None})
    study = with_rows(study, args.attentions) if args.attentions else study
    return with_baseline(study, args.baseline) if args.baseline is not None else study
