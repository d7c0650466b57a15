"""`lingpt study`: data → learning rates → runs → scores → tables, figures and a page, by one command.

Each training and each scoring is a child process of the real command. What is done is not done again; what
fails is named at the end, and the rest goes on.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lingpt.cli.jobs import Failure, Job, Slot, Stopped, card_slots, find_slots, run_jobs
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
    each = "GPUs of one run, or `all`: one run over all, then the next"
    add("--devices_per_run", type=str | None, help=each)
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
    from lingpt.common.errors import Interrupted
    from lingpt.common.files import write_errors, write_json
    from lingpt.eval.study import STAGES

    _check_arguments(args)
    asked = study_from(args)
    folder = Path(args.out) / f"study-{asked.name}"
    study = asked if args.dry_run else united(asked, folder)
    slots = find_slots(args.devices, study.devices_per_run, study.runs_per_device)
    cards = len(slots[0].gpus) or None

    def mine(runs: list) -> list:
        """Those asked for now; the page has all."""
        return [one for one in runs if one.row in asked.attentions and one.seed < asked.seeds]

    tried = rate_runs(study, folder, cards)
    runs = study_runs(study, folder, chosen_rates(tried), cards)
    for one in (*tried, *runs):
        _ = one.recipe  # refused now, not after hours
    trials = _mqar_left(study, folder)
    stages = args.stages or list(STAGES)
    if args.dry_run:
        print(format_plan(study, tried, runs, trials, slots, stages))
        return
    _check_inputs(study, runs, stages)
    with write_errors(folder / STUDY):
        write_json(folder / STUDY, study.to_dict())
    deadline = time.monotonic() + 60 * args.minutes if args.minutes is not None else None
    work = _Work(study, folder, slots, deadline, stages)
    try:
        if work.on("data"):
            work.data(runs[0])
        if work.on("rates"):
            work.rates(mine(tried))
            runs = study_runs(study, folder, chosen_rates(tried), cards)
        if work.on("runs"):
            work.train(mine(runs))
        if work.on("mqar"):
            work.mqar()
        if work.on("scores"):
            work.score(mine(runs))
    except Stopped:
        print(f"stopped after {args.minutes:g} minutes; the same command goes on")
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
        raise Interrupted(number, "stopped, and what ran has saved; the same command goes on") from stop
    if work.on("page"):
        print(f"page    {write_page(study, folder, tried, runs, work.failures)}")
    if args.publish:
        print(f"copied  {publish(folder, Path(args.publish), [*tried, *runs])}")
    if work.failures:
        named = "; ".join(f"{failure.job}: {failure.reason}" for failure in work.failures)
        raise UserError(
            f"{len(work.failures)} failed, all else is kept, and the same command tries again: {named}"
        )


def _check_arguments(args: Namespace) -> None:
    from lingpt.eval.study import STAGES

    for stage in args.stages:
        if stage not in STAGES:
            raise UserError(f"unknown stage {stage!r}{nearest(stage, STAGES)}; there are {', '.join(STAGES)}")
    if args.minutes is not None and not args.minutes > 0:
        raise UserError(f"--minutes {args.minutes:g}: give more than 0, or leave it out")
    each = args.devices_per_run
    if each is not None and each != "all" and not (each.isdecimal() and int(each) > 0):
        raise UserError(f"--devices_per_run {each}: a number of GPUs, at least 1, or `all`")


def _mqar_left(study: Any, folder: Path) -> list:
    """The models of its MQAR that are not trained yet. UserError for options that `lingpt mqar` refuses."""
    from lingpt.cli import mqar
    from lingpt.cli.main import parse

    if study.mqar is None:
        return []
    try:
        trials = mqar.asked_trials(parse("mqar", mqar, mqar.command_line(study.mqar)))
    except UserError as error:
        raise UserError(f"the study's `mqar`: {error}") from error
    try:
        known = mqar.read_known(folder / "mqar" / mqar.RESULTS, trials)[1]
    except UserError:  # which `lingpt mqar` keeps aside
        known = {}
    return [trial for trial in trials if trial.key not in known]


def _check_inputs(study: Any, runs: list, stages: list[str]) -> None:
    """UserError for data, benchmarks, tasks or texts that these stages would not find, hours from now."""
    from lingpt.cli.evaluate import benchmark_folder
    from lingpt.data import find_data
    from lingpt.eval.suites import check_scoring

    if {"data", "rates", "runs"} & set(stages):
        for data in {str(run.recipe.data): run.recipe.data for run in runs}.values():
            find_data(data)
    if "scores" in stages and study.suites:
        check_scoring(study.suites, study.tasks, study.texts, benchmark_folder(study.eval_data))


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
    if args.devices_per_run is not None:
        given["devices_per_run"] = None if args.devices_per_run == "all" else int(args.devices_per_run)
    changes = {key: value for key, value in given.items() if value is not None or key == "devices_per_run"}
    study = read_study(path, changes)
    options = {"data.source": args.source, "data.tokenizer": args.tokenizer}
    study = replace(study, options=study.options | {key: v for key, v in options.items() if v is not None})
    if args.attentions:
        known_rows = list(dict.fromkeys([*study.attentions, *ATTENTIONS]))
        for row in args.attentions:
            if row not in known_rows and row.partition("+")[0] not in ATTENTIONS:
                raise UserError(
                    f"unknown attention {row!r}{nearest(row, known_rows)}: {', '.join(known_rows)}"
                )
        rows = {row: study.attentions.get(row, {}) for row in args.attentions}
        study = replace(study, attentions=rows)
    return study


def united(asked: Any, folder: Path) -> Any:
    """The study with the rows and seeds that its folder has runs of, though they are not asked for now.

    UserError where the folder holds another study. Runs whose row has changed are told apart one by one.
    """
    from dataclasses import asdict, replace

    from lingpt.common.files import read_json_object
    from lingpt.common.run_folder import METRICS

    path = folder / STUDY
    if not path.exists():
        return asked
    before, now = read_json_object(path), json.loads(json.dumps(asdict(asked)))
    rows, seeds = before.get("attentions"), before.get("seeds")
    if not isinstance(rows, dict) or type(seeds) is not int:
        raise UserError(f"{path} is damaged: remove it, and the same command writes it anew")
    for key in ("recipe", "tokens", "options", "rates", "rate_tokens", "rate_options", "mqar"):
        # MQAR may come or go; other keys are in every study.json of this version.
        other = before.get(key, now[key])
        if other != now[key] and not (key == "mqar" and None in (other, now[key])):
            raise UserError(
                f"{folder} holds a study with another `{key}` ({other}, now {now[key]}): "
                "give the new one a --name, or move that folder away"
            )

    def begun(row: str, seed: int) -> bool:
        return (folder / f"{row}-seed{seed}" / METRICS).exists()

    kept = {row: options for row, options in rows.items() if any(begun(row, i) for i in range(seeds))}
    last = max((i for row in kept for i in range(seeds) if begun(row, i)), default=0)
    return replace(asked, attentions=kept | asked.attentions, seeds=max(asked.seeds, last + 1))


class _Work:
    """The stages, each a few child processes; `failures` has what failed so far."""

    def __init__(
        self, study: Any, folder: Path, slots: list, deadline: float | None, stages: list[str]
    ) -> None:
        self.study, self.folder, self.slots, self.stages = study, folder, slots, stages
        self.deadline = deadline
        self.failures: list[Failure] = []
        self.given_up: set[tuple[int, ...]] = set()  # cards, for as long as the command runs

    def on(self, stage: str) -> bool:
        return stage in self.stages

    def jobs(self, jobs: list[Job], slots: list | None = None) -> None:
        try:
            self.failures += run_jobs(jobs, slots or self.slots, self.deadline, given_up=self.given_up)
        except Stopped as stopped:
            self.failures += stopped.failures
            raise

    def cards(self) -> list[int]:
        """The GPUs that are not given up."""
        return sorted({gpu for slot in self.slots if slot.gpus not in self.given_up for gpu in slot.gpus})

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def data(self, run: Any) -> None:
        """Tokenises once; the runs then share the cache. UserError where it fails: nothing else can begin."""
        self.jobs([Job("data", ["data", *run.arguments[1:]], self.log("data"))], self.slots[:1])
        if self.failures:
            raise UserError(f"the data cannot be prepared: {self.failures[0].reason}")

    def rates(self, tried: list) -> None:
        """The short runs; their weights are not kept."""
        import shutil

        from lingpt.common.run_folder import CHECKPOINTS

        try:
            self.train(tried)
        finally:
            for run in tried:
                if run.is_over():
                    shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)

    def train(self, runs: list) -> None:
        """What is not done yet. A folder that holds another run is left as it is, and named; a run that
        diverged is a result, and no failure."""
        others = {run.name: conflict for run in runs if (conflict := run.conflict())}
        self.failures += [Failure(name, conflict) for name, conflict in others.items()]
        left = [run for run in runs if not (run.is_over() or run.name in others)]
        try:
            self.jobs([self._training(run) for run in left])
        finally:
            diverged = {run.name for run in left if run.diverged}
            self.failures[:] = [failure for failure in self.failures if failure.job not in diverged]

    def _training(self, run: Any) -> Job:
        from lingpt.common.run_folder import ENVIRONMENT

        job = Job(run.name, run.arguments, self.log(run.name), run.status)
        first = run.row == self.study.stopped_halfway and run.name == f"{run.row}-seed0"
        if first and not (run.folder / ENVIRONMENT).exists():
            job.interrupt = run.halfway
        return job

    def mqar(self) -> None:
        from lingpt.cli.mqar import command_line

        if self.study.mqar is None:
            return
        arguments = ["mqar", *command_line(self.study.mqar), "--out", str(self.folder / "mqar")]
        all_cards = Slot("all cards", tuple(self.cards()))
        self.jobs([Job("mqar", arguments, self.log("mqar"))], [all_cards])

    def score(self, runs: list) -> None:
        """One process a slot, with its share of the runs: the questions are built once in each. Of fewer
        runs than cards, several cards share the questions of each."""
        ready, study = [str(run.folder) for run in runs if run.is_done() and run.has_weights()], self.study
        if not ready or not study.suites:
            return
        slots, each = self.slots, len(self.cards()) // len(ready)
        if each > len(slots[0].gpus):
            slots = card_slots(self.cards(), each)
        options = ["--longest", str(study.longest)]
        if gpus := slots[0].gpus:
            options += ["--device", "cuda", "--devices", str(len(gpus)), "--dtype", "bfloat16"]
        options += ["--data", study.eval_data] if study.eval_data else []
        options += ["--limit", str(study.limit)] if study.limit else []
        texts = [f"{name}={path}" for name, path in study.texts.items()] or ["embedded"]
        jobs = []
        for i in range(len(slots)):
            if share := ready[i :: len(slots)]:
                lists = {"runs": share, "suite": study.suites, "tasks": study.tasks, "texts": texts}
                words = [word for key, values in lists.items() for word in (f"--{key}", *values)]
                name = f"scores-{i}" if len(slots) > 1 else "scores"
                jobs.append(Job(name, ["eval", *words, *options], self.log(name)))
        self.jobs(jobs, slots)
