"""`lingpt study`: data → learning rates → runs → scores → tables, figures and a page, by one command."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lingpt.common.errors import UserError
from lingpt.common.options import Option
from lingpt.study import STAGES, Study, find_study, read_study, studies, with_baseline, with_rows


@dataclass
class Options:
    """Train and score several attentions alike, and write the tables, the figures and a page."""

    FILE: ClassVar = Study

    # fmt: off
    config: Annotated[str | None, Option(f"a study: a YAML file, or one of {', '.join(studies())}")] = None
    model: Annotated[str, Option("without --config, take the study named after this model")] = "demo"
    tokens: Annotated[int | None, Option(
        "training tokens per run (default: the study's)", least=1, most=10**15)] = None
    attentions: Annotated[tuple[str, ...], Option(
        "rows to train: rows of the study, or names of attentions (default: the study's)")] = ()
    seeds: Annotated[int | None, Option(
        "number of runs per row (default: the study's)", least=1, most=1000)] = None
    baseline: Annotated[str | None, Option(
        "row that times and losses are compared with (default: the study's, else softmax, else its first)"
    )] = None
    devices: Annotated[int | None, Option(
        "number of GPUs, by default all; without a GPU of CPU processes, by default 1",
        least=1, most=1024)] = None
    devices_per_run: Annotated[int | Literal["all"] | None, Option(
        "GPUs per run, or `all`: one run after another, each on all GPUs (default: the study's)",
        least=1, most=1024)] = None
    source: Annotated[str | None, Option("text to train on, as --data.source of `lingpt train`")] = None
    tokenizer: Annotated[str | None, Option("tokenizer, as --data.tokenizer of `lingpt train`")] = None
    eval_data: Annotated[str | None, Option(
        "folder of benchmark JSONL instead of the hub (or set EVAL_DATA)")] = None
    texts: Annotated[tuple[str, ...], Option(
        "texts of the suites language and recall: name=path of held-out JSONL, Parquet or .txt "
        "files, or embedded"
    )] = ()
    out: Annotated[str, Option("the study's folder is <out>/study-<name>")] = "runs"
    name: Annotated[str | None, Option(
        "another name, for a study that differs from the one in the folder")] = None
    stages: Annotated[tuple[str, ...], Option(f"some of {', '.join(STAGES)} (default: all)")] = ()
    minutes: Annotated[float | None, Option(
        "stop after this many minutes; the same command continues", above=0)] = None
    publish: Annotated[str | None, Option(
        "folder to copy the page, tables, figures and small files of the runs to")] = None
    dry_run: Annotated[bool, Option("print the plan, and stop")] = False
    # fmt: on


def run(options: Options) -> None:
    from lingpt.study import run_study

    run_study(
        _asked(options),
        options.out,
        stages=options.stages or STAGES,
        devices=options.devices,
        minutes=options.minutes,
        publish=options.publish,
        dry_run=options.dry_run,
    )


def _file(options: Options) -> Path:
    """The study's file: `--config`, or the study named after the model; UserError if there is none."""
    if options.config is not None or options.model in studies():
        return find_study(options.config or options.model)
    known = ", ".join(f"{study} ({read_study(find_study(study)).recipe})" for study in studies())
    raise UserError(
        f"no study is named after the model {options.model!r}: with --config (make study STUDY=…) give one "
        f"of {known}, or a copy of its file with `recipe: {options.model}`"
    )


def _asked(options: Options) -> Study:
    """The study that the arguments describe: a file's, changed by the command line."""
    from lingpt.eval.texts import parse_texts

    names = ("tokens", "seeds", "eval_data", "name")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.texts:
        changes["texts"] = parse_texts(options.texts)
    if options.devices_per_run is not None:
        changes["devices_per_run"] = None if options.devices_per_run == "all" else options.devices_per_run
    study = read_study(_file(options), changes)
    data = {"data.source": options.source, "data.tokenizer": options.tokenizer}
    study = replace(study, options=study.options | {key: v for key, v in data.items() if v is not None})
    study = with_rows(study, options.attentions) if options.attentions else study
    return with_baseline(study, options.baseline) if options.baseline is not None else study
