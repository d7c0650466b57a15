"""The plan of a study: estimates its cost before anything is trained: time, disk, card hours."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lingpt.common.errors import UserError
from lingpt.common.format import counted, duration, scaled, scaled_count
from lingpt.common.run_folder import scores_file
from lingpt.data import availability
from lingpt.eval.language import PIECES, TOKENS
from lingpt.eval.mqar import TRIALS_PER_GPU, Trial
from lingpt.eval.phrases import CHOICES, QUESTIONS
from lingpt.eval.results import read_results
from lingpt.eval.suites import suite_tasks, tasks_without_file
from lingpt.eval.tables import Table
from lingpt.eval.tasks.sources import benchmark_folder
from lingpt.models import GPT
from lingpt.study.config import Study
from lingpt.study.jobs import Slot, gpu_slots, scoring_slots
from lingpt.study.runs import StudyRun
from lingpt.train.machine import choose_machine
from lingpt.train.model import model_config
from lingpt.train.throughput import CPU_CORE_FLOPS, DEVICES, STATED_MFU, peak_flops, run_flops

TABLE2_TOKENS = 13e6  # with a GPT-NeoX tokenizer, including MMLU's five examples
COMMONSENSE_TOKENS = 1e6
EMBEDDED_TOKENS = 1e5  # upper bound for the text that comes with Python
# Seconds on an H200 that scoring a run takes besides the model's FLOPs (short questions, built by the host),
# as measured on three runs of pythia-160m (docs/results/study/pythia-160m); for texts, per text and suite.
TABLE2_SECONDS, COMMONSENSE_SECONDS, TEXT_SECONDS = 95.0, 30.0, 12.0
# Seconds of a card per token of MQAR, measured as the models are too small to estimate it from FLOPs: one of
# several processes on an H200 took 1.6e-6 to 2.1e-6 (docs/results/gate/learning/mqar.json).
MQAR_TOKEN = 2e-6 / TRIALS_PER_GPU
H200 = next(device for device in DEVICES if device.name == "H200")
H200_FLOPS = H200.bf16 * STATED_MFU  # FLOP/s that it is assumed to reach


def format_plan(
    study: Study,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    trials: Sequence[Trial],
    slots: Sequence[Slot],
    stages: Sequence[str],
    dry_run: bool,
) -> str:
    """The plan of these stages: one line per row, then the totals. trials: the MQAR trials left to train."""
    trials = trials if "mqar" in stages else ()
    rate_runs = rate_runs if "rates" in stages else ()
    models = _models((*rate_runs, *runs))
    left = _work_left(study, rate_runs, runs, stages, models)
    if not (dry_run or left or trials):
        return f"study {study.name}: nothing is left to train, and each suite has scores"
    data = runs[0].recipe.data
    head = ["Row", "Parameters", "Steps × tokens", "Runs", "Rate runs", "Done", "H200 hours to train all"]
    table = Table("", head, [_row(row, rate_runs, runs, models) for row in study.attentions])
    lines = [
        f"study {study.name}: {counted(len(table.rows), 'row')}, {counted(study.seeds, 'seed')}, "
        f"{scaled_count(study.tokens)} tokens each, N = {data.seq_len:,}"
        + ("; nothing is trained, this is a dry run" if dry_run else ""),
        "",
        table.body(),
        "",
        f"data    {data.source}: {availability(data)}",
        *_time(study, left, len(runs), trials, slots),
        f"disk    {scaled(_disk(rate_runs, runs, stages, models), 'B')} of checkpoints at most"
        + ("; the rates' go when these are chosen" if rate_runs else ""),
        f"scores  {_scores(study, stages)}",
        "Small models and short sequences reach less of the peak: the time is then longer."
        + (
            f" With a limit of {study.limit} documents a task scoring takes less."
            if study.limit and left.scores
            else ""
        )
        + (" MQAR's is the most: training ends where all is right." if trials else ""),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class _WorkLeft:
    """What is left to compute: the FLOPs of each run, by stage. host: seconds besides these that scoring each
    of the runs takes on a GPU."""

    rates: list[float]
    runs: list[float]
    scores: list[float]
    host: list[float]

    def __bool__(self) -> bool:
        return bool(self.rates or self.runs or self.scores)


def _models(runs: Iterable[StudyRun]) -> dict[str, GPT]:
    """Run → its model on the meta device. Equal models are built once: a large one takes a second."""
    built, found = dict[str, GPT](), {}
    for run in runs:
        key = str(run.recipe.model)
        if key not in built:
            built[key] = GPT.on_meta(model_config(run.recipe))
        found[run.name] = built[key]
    return found


def _row(
    row: str, rate_runs: Sequence[StudyRun], runs: Sequence[StudyRun], models: dict[str, GPT]
) -> list[str]:
    """The cells of a row."""
    mine, short = ([run for run in some if run.row == row] for some in (runs, rate_runs))
    recipe = mine[0].recipe
    hours = sum(run_flops(models[run.name], run.recipe) for run in [*short, *mine]) / H200_FLOPS / 3600
    return [
        row,
        scaled_count(models[mine[0].name].num_parameters()),
        f"{recipe.total_steps:,} × {scaled_count(recipe.tokens_per_step)}",
        str(len(mine)),
        str(len(short)),
        f"{sum(run.is_finished() for run in mine)} of {len(mine)}",
        f"{hours:.3g}" if hours >= 0.001 else "< 0.001",
    ]


def _work_left(
    study: Study,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    stages: Sequence[str],
    models: dict[str, GPT],
) -> _WorkLeft:
    def training(some: Sequence[StudyRun]) -> list[float]:
        unfinished = [run for run in some if not run.is_finished()]
        return [run_flops(models[run.name], run.recipe) * _part_left(run) for run in unfinished]

    scores, host = list[float](), list[float]()
    for run in runs if "scores" in stages else ():
        if suites := _suites_left(study, run):
            length = run.recipe.data.seq_len
            # A scored token takes only a forward pass, a third of a training token's FLOPs.
            token = models[run.name].flops_per_token(length) / 3
            scores.append(token * scored_tokens(study, length, suites))
            host.append(host_seconds(study, suites))
    return _WorkLeft(training(rate_runs), training(runs if "runs" in stages else ()), scores, host)


def _time(
    study: Study, left: _WorkLeft, runs: int, trials: Sequence[Trial], slots: Sequence[Slot]
) -> tuple[str, str]:
    """The lines on the time here, and on the cost in card hours. runs: number of runs in the study."""
    peak, device = _peak(slots)
    cards, each = len({gpu for slot in slots for gpu in slot.gpus}) or len(slots), len(slots[0].gpus) or 1
    seconds = _seconds(left, runs, trials, slots, peak)
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
    eight = gpu_slots(8, study.devices_per_run, study.runs_per_device)
    on_eight = sum(_seconds(left, runs, trials, eight, H200_FLOPS).values())
    of_cards = sum((*left.rates, *left.runs, *left.scores)) / H200_FLOPS + sum(left.host)
    hours = (of_cards + sum(_mqar_seconds(trials, on_gpu=True))) / 3600
    cost = f"{hours:.3g}" if hours >= 0.01 else "under 0.01"
    return (
        f"here    {cards} × {device}, {each} a run, {len(slots)} at once; what is left takes about "
        f"{duration(sum(seconds.values()))} ({parts or 'nothing'})",
        f"cost    {cost} card hours on H200s for what is left, at {STATED_MFU:.0%} of their peak: "
        f"{duration(on_eight)} on eight",
    )


def _scores(study: Study, stages: Sequence[str]) -> str:
    """The suites, and the tasks that are left out as the folder of benchmarks has no file for them; MQAR."""
    suites = study.suites if "scores" in stages else ()
    words = ", ".join(suites) or "none"
    folder = benchmark_folder(study.eval_data)
    try:
        if "commonsense" in suites and (missing := tasks_without_file(folder)):
            words += f"; {folder} has no file for {', '.join(missing)}"
    except UserError as error:  # a dry run plans all the same, as without the data
        words += f"; NOT FOUND: {error}"
    return words + ("; MQAR" if study.mqar is not None and "mqar" in stages else "")


def _disk(
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    stages: Sequence[str],
    models: dict[str, GPT],
) -> float:
    """Maximum bytes of checkpoints: those of the short runs are deleted before the runs begin."""

    def size(some: Sequence[StudyRun]) -> float:
        # Weights and AdamW's two moments in fp32; one checkpoint more than are kept, while it is written.
        kept = ((models[run.name], run.recipe.train.keep_checkpoints) for run in some)
        return sum(12 * model.num_parameters() * (keep + 1) for model, keep in kept)

    started = [run for run in runs if run.started]
    tuning = [run for run in rate_runs if not run.is_finished()]
    return max(size([*tuning, *started]), size(runs if "runs" in stages else started))


def _seconds(
    left: _WorkLeft, runs: int, trials: Sequence[Trial], slots: Sequence[Slot], peak: float
) -> dict[str, float]:
    """Seconds of each stage on these slots. runs: number of runs in the study."""
    cards = sorted({gpu for slot in slots for gpu in slot.gpus})
    scoring = scoring_slots(slots, cards, runs)
    host = left.host if cards else ()
    # The slots that `lingpt mqar` uses; without a GPU it trains one model at a time.
    mqar_slots = gpu_slots(len(cards), 1, TRIALS_PER_GPU) if cards else slots[:1]
    return {
        "rates": wall_seconds(left.rates, slots, peak),
        "runs": wall_seconds(left.runs, slots, peak),
        "scores": wall_seconds(left.scores, scoring, peak, host),
        "mqar": wall_seconds(_mqar_seconds(trials, on_gpu=bool(cards)), mqar_slots, peak=1.0),
    }


def wall_seconds(
    flops: Sequence[float], slots: Sequence[Slot], peak: float, more: Sequence[float] = ()
) -> float:
    """Seconds until all jobs are done: each starts, in this order, on the slot that is free first.

    flops: of each job. peak: FLOP/s of a card, or a CPU process. more: seconds of each job besides its FLOPs.
    """
    if not flops:
        return 0.0
    groups = len({slot.gpus for slot in slots if slot.gpus}) or len(slots)
    used = min(len(flops), len(slots))
    sharing = math.ceil(used / groups)  # jobs on the same cards at a time
    speed = peak * (len(slots[0].gpus) or 1) / sharing
    ends = [0.0] * used
    for job, besides in zip(flops, more or [0.0] * len(flops), strict=True):
        heapq.heapreplace(ends, ends[0] + job / speed + besides)
    return max(ends)


def _part_left(run: StudyRun) -> float:
    """The share of a run's steps that is left; 1 if its folder holds another run."""
    return 1.0 if run.config_mismatch() else max(0.0, 1.0 - run.step / run.recipe.total_steps)


def _suites_left(study: Study, run: StudyRun) -> list[str]:
    """The suites that the run has no score of at all; none if it has diverged."""
    if run.diverged:
        return []
    file = scores_file(run.folder, run.recipe.total_steps)
    try:
        scored = (
            {entry["task"] for entry in read_results(file)["scores"].values()} if file.exists() else set()
        )
    except UserError:  # it is scored again
        scored = set()
    return [suite for suite in study.suites if scored.isdisjoint(suite_tasks(suite, study.tasks))]


def scored_tokens(study: Study, seq_len: int, suites: Sequence[str]) -> float:
    """The approximate maximum number of tokens in the questions and texts of these suites, per run."""
    tokens = TABLE2_TOKENS * ("table2" in suites) + COMMONSENSE_TOKENS * ("commonsense" in suites)
    for source in study.texts.values() or ["embedded"]:
        most = EMBEDDED_TOKENS if source == "embedded" else math.inf
        if "language" in suites:
            tokens += min(most, TOKENS) + min(most, PIECES * study.max_length_factor * seq_len)
        if "recall" in suites:  # each of the four answers after the whole text
            tokens += QUESTIONS * CHOICES * seq_len
    return tokens


def host_seconds(study: Study, suites: Sequence[str]) -> float:
    """Seconds that scoring one run on a GPU takes besides the model's FLOPs."""
    seconds = TABLE2_SECONDS * ("table2" in suites) + COMMONSENSE_SECONDS * ("commonsense" in suites)
    texts = sum(source != "embedded" for source in study.texts.values())
    return seconds + TEXT_SECONDS * texts * (("language" in suites) + ("recall" in suites))


def _mqar_seconds(trials: Sequence[Trial], on_gpu: bool) -> list[float]:
    """Seconds of a card, or of a CPU process, for each of these trials."""
    seconds = []
    for trial in trials:
        tokens = trial.steps * trial.batch_size * trial.length
        # The rate does not matter: one model of each kind is built.
        flops = 0.0 if on_gpu else _mqar_token_flops(replace(trial, rate=0.0))
        seconds.append(tokens * (MQAR_TOKEN if on_gpu else flops / CPU_CORE_FLOPS))
    return seconds


@cache
def _mqar_token_flops(trial: Trial) -> float:
    per_token = GPT.on_meta(trial.config()).flops_per_token(trial.length)
    # Only the positions of queries go through lm_head.
    return per_token - (1 - trial.pairs / trial.length) * 6 * trial.width * trial.vocabulary


def _peak(slots: Sequence[Slot]) -> tuple[float, str]:
    """FLOP/s that one card, or one CPU process, of this machine is assumed to reach, and its name."""
    from lingpt.train import TrainConfig

    if not slots[0].gpus:
        return CPU_CORE_FLOPS, "CPU process"
    machine = choose_machine(TrainConfig(devices=1))
    return (peak_flops(machine.name, machine.precision) or H200.bf16) * STATED_MFU, machine.name
