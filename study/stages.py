"""Runs a study from its data to its page. Each training and each scoring is a child process of `lingpt`.

Finished work is not repeated; failures are named at the end, and do not stop the rest.
"""

import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lingpt.common.arguments import command_line
from lingpt.common.errors import Interrupted, UserError, by_reason, check_known
from lingpt.common.files import write_errors, write_json
from lingpt.common.run_folder import CHECKPOINTS, without_seed
from lingpt.data import find_data
from lingpt.eval.recall.mqar import Trial
from lingpt.eval.recall.options import trials_left
from lingpt.eval.suites import check_scoring
from lingpt.eval.tasks.sources import benchmark_folder
from lingpt.study.config import STAGES, STUDY, Study, with_started_runs
from lingpt.study.jobs import Failure, Job, Slot, Stopped, find_slots, run_jobs, scoring_slots
from lingpt.study.page import check_page, write_page
from lingpt.study.plan import format_plan
from lingpt.study.publish import publish_study
from lingpt.study.runs import StudyRun, clear_caches, rate_runs, read_rate_search, study_runs
from lingpt.train.runs.run_lock import RunLock


def run_study(
    study: Study,
    out: str | Path = "runs",
    *,
    devices: int | None = None,
    stages: Sequence[str] = STAGES,
    minutes: float | None = None,
    publish: str | Path | None = None,
    dry_run: bool = False,
) -> Path:
    """Trains and scores the study's runs, and writes tables, figures and a page; returns the study's folder.

    The same call continues where an earlier one stopped. Progress is printed. lingpt must be installed: the
    child processes are `python -m lingpt.cli.main`.

    Args:
        study: from `read_study`. Other rows and seeds in its folder stay on the page.
        out: the study's folder is `<out>/study-<name>`.
        devices: number of GPUs, by default all; without a GPU, processes on the CPU, by default one.
        stages: the `STAGES` to run, always in that order.
        minutes: stop after so many minutes, once running jobs have saved; by default run to the end.
        publish: a folder that gets the page, tables, figures and small files of the runs.
        dry_run: print the plan and stop, without writing anything.

    Raises:
        UserError: before any training for what cannot work; at the end for what has failed (all else is
            kept).
        Interrupted: a KeyboardInterrupt; after Ctrl-C or a signal, once running jobs have saved.
    """
    check_known("stage", stages, STAGES)
    if minutes is not None and not minutes > 0:
        raise UserError(f"--minutes {minutes:g}: give more than 0, or leave it out")
    clear_caches()
    folder = Path(out) / f"study-{study.name}"
    check_page(folder)
    if publish is not None:
        check_page(Path(publish))
        if Path(publish).resolve() == folder.resolve():
            raise UserError(f"--publish {publish} is the study's own folder: give another one for the copy")
    slots = find_slots(devices, study.devices_per_run, study.runs_per_device)
    work = _Stages(with_started_runs(study, folder), study, folder, slots)
    work.check(stages, dry_run)
    if dry_run:
        print(work.plan(stages, dry_run))
        return folder
    with RunLock(folder, "--name") as lock:
        lock.acquire()
        work = _Stages(with_started_runs(study, folder), study, folder, slots)  # one may just have ended
        if {"rates", "runs", "mqar", "scores"} & set(stages):
            print(work.plan(stages))
        with write_errors(folder / STUDY):
            write_json(folder / STUDY, asdict(work.study))
        work.run(stages, minutes)
        lock.check()
        if "page" in stages:
            scored = "scores" in stages or not {"rates", "runs"} & set(stages)
            page = write_page(work.study, folder, work.rate_runs, work.runs, work.failures, scored)
            print(f"page    {page}")
        if publish:
            print(f"copied  {publish_study(folder, Path(publish), work.rate_runs, work.runs)}")
    if work.failures:
        named = "; ".join(by_reason((failure.job, failure.why()) for failure in work.failures))
        raise UserError(
            f"{len(work.failures)} failed, all else is kept, and the same command tries again: {named}"
        )
    return folder


class _Stages:
    """The stages, which run child processes; `failures` lists those that failed so far.

    study: with all rows and seeds in its folder; asked: with those that are trained and scored now.
    """

    def __init__(self, study: Study, asked: Study, folder: Path, slots: Sequence[Slot]) -> None:
        self.study, self.asked, self.folder, self.slots = study, asked, folder, slots
        self.deadline: float | None = None
        self.failures: list[Failure] = []
        self.each = len(slots[0].gpus) or None  # GPUs of one run; None on the CPU
        self.cards = len({gpu for slot in slots for gpu in slot.gpus})
        self.rate_runs = rate_runs(study, folder, self.each)
        self.runs = study_runs(study, folder, read_rate_search(self.rate_runs).chosen, self.each)
        self.trials: list[Trial] = trials_left(study.mqar, folder / "mqar") if study.mqar is not None else []
        # Without the stage `rates`, and if no short run has begun, the recipe's rates are used.
        self.tunes = any(run.started for run in self.rate_runs)

    def check(self, stages: Sequence[str], dry_run: bool = False) -> None:
        """Raises UserError now, not after hours, for a row with options that do not exist, for a run that
        these stages have yet to train if `lingpt train` would refuse it, and for data, benchmarks, tasks or
        texts that they would miss. A dry run may be for another machine."""
        for run in (*self.rate_runs, *self.runs):
            _ = run.recipe
        trained = {"rates": self.rate_runs, "runs": self.runs}
        asked = [run for stage, runs in trained.items() if stage in stages for run in self._now(runs)]
        left = {without_seed(run.name): run for run in asked if not run.is_finished()}  # seeds are alike
        for run in left.values():
            run.check(dry_run)
        if dry_run:
            return
        if {"data", "rates", "runs"} & set(stages):
            for data in {str(run.recipe.data): run.recipe.data for run in self._now(self.runs)}.values():
                find_data(data)
        if "scores" in stages and self.study.suites:
            study = self.study
            check_scoring(
                study.suites, study.tasks, study.texts, benchmark_folder(study.eval_data), study.text_key
            )

    def plan(self, stages: Sequence[str], dry_run: bool = False) -> str:
        """The plan of what is requested now."""
        rates, runs = self._now(self.rate_runs), self._now(self.runs)
        return format_plan(self.asked, rates, runs, self.trials, self.slots, stages, dry_run)

    def run(self, stages: Sequence[str], minutes: float | None) -> None:
        """Runs these stages, without the page, until they are done or the time is up."""
        if minutes is not None:
            self.deadline = time.monotonic() + 60 * minutes
        order = {
            "data": self.data,
            "rates": self.rates,
            "runs": self.train,
            "mqar": self.mqar,
            "scores": self.score,
        }
        try:
            for name, stage in order.items():
                if name in stages:
                    stage()
        except Stopped:
            print(f"stopped after {minutes:g} minutes; the same command resumes")
        except KeyboardInterrupt as stop:
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            raise Interrupted(number, "stopped, and what ran has saved; the same command resumes") from stop

    def data(self) -> None:
        """Tokenises once; the runs then share the cache. UserError if it fails, as nothing else can begin."""
        first = self._now(self.runs)[0]
        self._run_jobs([Job("data", ["data", *first.arguments[1:]], self._log("data"))], self.slots[:1])
        if self.failures:
            raise UserError(f"the data cannot be prepared: {self.failures[0].reason}")

    def rates(self) -> None:
        """Trains the short runs, without keeping their weights. The runs then get the chosen rates."""
        runs, self.tunes = self._now(self.rate_runs), True
        try:
            self._train(runs)
        finally:
            for run in runs:
                if run.is_finished():
                    shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)
        self.runs = study_runs(self.study, self.folder, read_rate_search(self.rate_runs).chosen, self.each)

    def train(self) -> None:
        """Trains the runs. Rows with unfinished short runs wait, as a run keeps the rate it begins with."""
        left = read_rate_search(self.rate_runs).unfinished if self.tunes else {}
        runs = self._now(self.runs)
        waiting = [run for run in runs if run.row in left and not run.started]
        for run in waiting:
            reason = "it waits for its learning rate, until the stage `rates` is done with "
            self.failures.append(Failure(run.name, reason + ", ".join(left[run.row])))
        self._train([run for run in runs if run not in waiting])

    def mqar(self) -> None:
        if self.study.mqar is None:
            return
        arguments = ["mqar", *command_line(self.study.mqar), "--out", str(self.folder / "mqar")]
        all_cards = Slot("all cards", tuple(range(self.cards)))
        self._run_jobs([Job("mqar", arguments, self._log("mqar"))], [all_cards])

    def score(self) -> None:
        """Scores the runs: one process per slot, which builds the questions once for its share of them."""
        study = self.study
        ready = [str(run.folder) for run in self._now(self.runs) if run.has_result() and run.has_weights()]
        if not study.suites:
            return
        if not ready:
            print("scores: nothing to score: no run is finished and has its weights")
            return
        slots = scoring_slots(self.slots, self.cards, len(ready))
        options = {
            "suite": study.suites, "tasks": study.tasks or None,  # no tasks without table2
            "texts": [f"{name}={path}" for name, path in study.texts.items()] or ["embedded"],
            "text_key": study.text_key, "max_length_factor": study.max_length_factor,
            "data": study.eval_data, "limit": study.limit,
        }  # fmt: skip
        if gpus := slots[0].gpus:
            options |= {"device": "cuda", "devices": len(gpus), "dtype": "bfloat16"}
        jobs = []
        for i in range(len(slots)):
            if share := ready[i :: len(slots)]:
                name = f"scores-{i}" if len(slots) > 1 else "scores"
                jobs.append(Job(name, ["eval", *command_line({"runs": share} | options)], self._log(name)))
        self._run_jobs(jobs, slots)

    def _now(self, runs: Sequence[StudyRun]) -> list[StudyRun]:
        """The `runs` that are requested now."""
        return [run for run in runs if run.row in self.asked.attentions and run.seed < self.asked.seeds]

    def _train(self, runs: Sequence[StudyRun]) -> None:
        """Trains the unfinished runs. A folder that holds another run is a failure and is left unchanged; a
        run that diverged is a result, not a failure."""
        others = {run.name: mismatch for run in runs if (mismatch := run.config_mismatch())}
        self.failures += [Failure(name, mismatch) for name, mismatch in others.items()]
        left = [run for run in runs if not (run.is_finished() or run.name in others)]
        try:
            self._run_jobs([Job(run.name, run.arguments, self._log(run.name), run.status) for run in left])
        finally:
            diverged = {run.name for run in left if run.diverged}
            self.failures[:] = [failure for failure in self.failures if failure.job not in diverged]

    def _run_jobs(self, jobs: Sequence[Job], slots: Sequence[Slot] | None = None) -> None:
        try:
            self.failures += run_jobs(jobs, slots or self.slots, self.deadline)
        except Stopped as stopped:
            self.failures += stopped.failures
            raise

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"
