"""`lingpt study`: data → learning rates → runs → scores → tables, figures and a page, by one command.

Each training and each scoring is a child process of the real command. What is done is not done again; what
fails is named at the end, and the rest goes on.
"""

import time
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lingpt.cli.jobs import Failure, Job, Slot, Stopped, find_slots, last_line, run_jobs
from lingpt.common.errors import UserError, nearest
from lingpt.configs import recipe_names, recipe_path

HELP = "Train and score several attentions alike, and write the tables, the figures and a page."
STUDY = "study.json"


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=str | None, help="a study: a YAML file, or one of " + ", ".join(studies()))
    add("--model", type=str, default="demo", help="the study of this model (study-<model>), without --config")
    add("--tokens", type=int | None, help="that each run is trained on")
    add("--attentions", nargs="+", default=[], help="the rows: of the study's, or names of attentions")
    add("--seeds", type=int | None, help="runs of each row")
    add("--devices", type=int | None, help="GPUs (all); without one, processes on the CPU (1)")
    add("--cards_per_run", type=str | None, help="GPUs of one run, or `all`: one run over all, then the next")
    add("--source", type=str | None, help="what to train on, as --data.source of `lingpt train`")
    add("--tokenizer", type=str | None, help="its tokenizer, as --data.tokenizer")
    add("--eval_data", type=str | None, help="folder of benchmark JSONL instead of the hub")
    add("--texts", nargs="+", default=[], help="name=path of held-out JSONL for the suites language, recall")
    add("--out", type=str, default="runs", help="the study's folder is <out>/study-<name>")
    add("--name", type=str | None, help="another name, for a study that differs from the one in its folder")
    add("--stages", nargs="+", default=[], help="some of data, rates, runs, mqar, scores, page (all)")
    add("--minutes", type=float | None, help="stop after so many; the same command goes on")
    add("--publish", type=str | None, help="copy page, tables, figures and small files of the runs here")
    add("--dry_run", type=bool, default=False, help="print the plan, and stop")


def studies() -> list[str]:
    """The studies that ship."""
    return [name for name in recipe_names() if name.startswith("study-")]


def run(args: Namespace) -> None:
    from lingpt.cli.study_page import publish, write_page
    from lingpt.cli.study_plan import format_plan
    from lingpt.cli.study_runs import chosen_rates, rate_runs, study_runs
    from lingpt.eval.study import STAGES

    study = study_from(args)
    for stage in args.stages:
        if stage not in STAGES:
            raise UserError(f"unknown stage {stage!r}{nearest(stage, STAGES)}; there are {', '.join(STAGES)}")
    folder = Path(args.out) / f"study-{study.name}"
    slots = find_slots(args.devices, study.cards_per_run, study.runs_per_card)
    cards = len(slots[0].gpus) or None
    tried = rate_runs(study, folder, cards)
    runs = study_runs(study, folder, chosen_rates(tried), cards)
    for one in (*tried, *runs):
        _ = one.recipe  # refused now, not after hours
    if args.dry_run:
        print(format_plan(study, tried, runs, slots))
        return
    _keep(study, folder)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes is not None else None
    work = _Work(study, folder, slots, deadline, args.stages or list(STAGES))
    failures = []
    try:
        if work.on("data"):
            work.data(runs[0])
        if work.on("rates"):
            failures += work.rates(tried)
            runs = study_runs(study, folder, chosen_rates(tried), cards)
        failures += work.train(runs) if work.on("runs") else []
        failures += work.mqar() if work.on("mqar") else []
        failures += work.score(runs) if work.on("scores") else []
    except Stopped:
        print(f"stopped after {args.minutes:g} minutes; the same command goes on")
    if work.on("page"):
        print(f"page    {write_page(study, folder, tried, runs, failures)}")
    if args.publish:
        print(f"copied  {publish(folder, Path(args.publish), runs)}")
    if failures:
        named = "; ".join(f"{failure.job}: {failure.reason}" for failure in failures)
        raise UserError(
            f"{len(failures)} failed, all else is kept, and the same command tries again: {named}"
        )


def study_from(args: Namespace) -> Any:
    """The study that the arguments mean: a file's, with what the command line changes."""
    from dataclasses import replace

    from lingpt.common.files import read_yaml
    from lingpt.eval.study import read_study
    from lingpt.eval.texts import parse_texts
    from lingpt.models import ATTENTIONS

    wanted = args.config or f"study-{args.model}"
    path = Path(wanted) if Path(wanted).is_file() else recipe_path(wanted)
    if path is None or "attentions" not in (read_yaml(path) or {}):
        known = studies()
        raise UserError(f"no study {wanted!r}{nearest(wanted, known)}; a file, or one of {', '.join(known)}")
    given = {"tokens": args.tokens, "seeds": args.seeds, "eval_data": args.eval_data, "name": args.name}
    if args.texts:
        given["texts"] = parse_texts(args.texts)
    if args.cards_per_run is not None:
        if args.cards_per_run != "all" and not args.cards_per_run.isdecimal():
            raise UserError(f"--cards_per_run {args.cards_per_run}: a number of GPUs, or `all`")
        given["cards_per_run"] = None if args.cards_per_run == "all" else int(args.cards_per_run)
    changes = {key: value for key, value in given.items() if value is not None or key == "cards_per_run"}
    study = read_study(path, changes)
    options = {"data.source": args.source, "data.tokenizer": args.tokenizer}
    study = replace(study, options=study.options | {key: v for key, v in options.items() if v is not None})
    if args.attentions:
        known_rows = [*study.attentions, *ATTENTIONS]
        for row in args.attentions:
            if row not in known_rows:
                raise UserError(
                    f"unknown attention {row!r}{nearest(row, known_rows)}: {', '.join(known_rows)}"
                )
        rows = {row: study.attentions.get(row, {}) for row in args.attentions}
        study = replace(study, attentions=rows)
    return study


def _keep(study: Any, folder: Path) -> None:
    """Writes the study into its folder; UserError where that holds one whose runs are others."""
    from lingpt.common.files import read_json_object, write_errors, write_json

    path, same = folder / STUDY, ("recipe", "tokens", "options", "rates", "rate_tokens")
    if path.exists():
        before, now = read_json_object(path), study.to_dict()
        for key in same:
            new = list(now[key]) if isinstance(now[key], tuple) else now[key]
            if before.get(key) != new:
                raise UserError(
                    f"{folder} holds a study with another `{key}` ({before.get(key)}, now {new}): "
                    "give the new one a --name, or move that folder away"
                )
    with write_errors(path):
        write_json(path, study.to_dict())


class _Work:
    """The stages, each a few child processes."""

    def __init__(
        self, study: Any, folder: Path, slots: list, deadline: float | None, stages: list[str]
    ) -> None:
        self.study, self.folder, self.slots, self.stages = study, folder, slots, stages
        self.deadline = deadline

    def on(self, stage: str) -> bool:
        return stage in self.stages

    def jobs(self, jobs: list[Job], slots: list | None = None) -> list[Failure]:
        return run_jobs(jobs, slots or self.slots, self.deadline)

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _job(self, name: str, arguments: list[str]) -> Job:
        """One whose last line says how far it is."""
        log = self.log(name)
        return Job(name, arguments, log, lambda: last_line(log))

    def data(self, run: Any) -> None:
        """Tokenises once; the runs then share the cache. UserError where it fails: nothing else can begin."""
        arguments = ["data", *run.arguments[1:]]
        if failures := self.jobs([self._job("data", arguments)], self.slots[:1]):
            raise UserError(f"the data cannot be prepared: {failures[0].reason}")

    def rates(self, tried: list) -> list[Failure]:
        """The short runs; their weights are not kept."""
        import shutil

        from lingpt.common.run_folder import CHECKPOINTS

        failures = self.jobs([self._training(run) for run in tried if not run.is_done()])
        for run in tried:
            if run.is_done():
                shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)
        return failures

    def train(self, runs: list) -> list[Failure]:
        return self.jobs([self._training(run) for run in runs if not run.is_done()])

    def _training(self, run: Any) -> Job:
        from lingpt.common.run_folder import ENVIRONMENT

        job = Job(run.name, run.arguments, self.log(run.name), run.status)
        first = run.row == self.study.stopped_halfway and run.name == f"{run.row}-seed0"
        if first and not (run.folder / ENVIRONMENT).exists():
            job.interrupt = run.halfway
        return job

    def mqar(self) -> list[Failure]:
        if self.study.mqar is None:
            return []
        options = [f"--{key}={_word(value)}" for key, value in self.study.mqar.items()]
        arguments = ["mqar", "--out", str(self.folder / "mqar"), *options]
        cards = sorted({gpu for slot in self.slots for gpu in slot.gpus})
        return self.jobs([self._job("mqar", arguments)], [Slot("all cards", tuple(cards))])

    def score(self, runs: list) -> list[Failure]:
        """One process a slot, with its share of the runs: the questions are built once in each."""
        from lingpt.cli.study_runs import with_checkpoint

        ready, study = [str(run.folder) for run in with_checkpoint(runs)], self.study
        if not ready or not study.suites:
            return []
        # All cards share the questions of a run where one run had all cards.
        shared = ["--devices", str(len(self.slots[0].gpus))] if len(self.slots[0].gpus) > 1 else []
        options = ["--longest", str(study.longest), *shared]
        options += ["--dtype", "bfloat16"] if self.slots[0].gpus else []
        options += ["--data", study.eval_data] if study.eval_data else []
        options += ["--limit", str(study.limit)] if study.limit else []
        jobs = []
        for i in range(len(self.slots)):
            if share := ready[i :: len(self.slots)]:
                lists = {"runs": share, "suite": study.suites, "tasks": study.tasks}
                lists |= {"texts": [f"{name}={path}" for name, path in study.texts.items()] or ["embedded"]}
                words = [word for key, values in lists.items() for word in (f"--{key}", *values)]
                name = f"scores-{i}" if len(self.slots) > 1 else "scores"
                jobs.append(self._job(name, ["eval", *words, *options]))
        return self.jobs(jobs)


def _word(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
