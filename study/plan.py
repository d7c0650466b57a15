"""The plan of a study: estimates its cost before anything is trained: time, disk, card hours."""

import contextlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lingpt.common.errors import UserError
from lingpt.common.format import counted, duration, scaled, scaled_count
from lingpt.common.run_folder import scores_file
from lingpt.data import availability
from lingpt.eval.harness import parse_task
from lingpt.eval.language import PIECES, TOKENS
from lingpt.eval.recall.mqar import TRIALS_PER_GPU, Trial
from lingpt.eval.recall.phrases import CHOICES, QUESTIONS
from lingpt.eval.scores import read_results, task_key, text_key
from lingpt.eval.suites import measures_of, suite_tasks, tasks_without_file
from lingpt.eval.tables import Table
from lingpt.eval.tasks.sources import benchmark_folder, official_questions
from lingpt.models import GPT
from lingpt.study.config import Study
from lingpt.study.jobs import Slot, gpu_slots, scoring_slots
from lingpt.study.runs import StudyRun
from lingpt.train.model import model_config
from lingpt.train.planning.machine import choose_machine
from lingpt.train.planning.throughput import CPU_CORE_FLOPS, DEVICES, STATED_MFU, peak_flops, run_flops

QUESTION_TOKENS = 120  # of a benchmark's question with its choices, or of an example before it
OTHER_QUESTIONS = 10_000  # of a benchmark whose size is not known here; HellaSwag has as many
MMLU_SUBJECTS = 57  # a limit is one of each
EMBEDDED_TOKENS = 1e5  # upper bound for the text that comes with Python
# Seconds on an H200 that scoring takes besides the model's FLOPs (short questions, built by the host), per
# question and per measure of a text, as measured on pythia-160m (docs/results/study/pythia-160m).
QUESTION_SECONDS, TEXT_SECONDS = 0.003, 8.0
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
        return f"study {study.name}: nothing is left to train or to score"
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
        + (" MQAR's is the most: training ends once 99.9 % of answers are right." if trials else ""),
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
    scored = runs if "scores" in stages else ()
    costs = {length: score_costs(study, length) for length in {run.recipe.data.seq_len for run in scored}}
    for run in scored:
        length = run.recipe.data.seq_len
        if left := _scores_left(run, costs[length]):
            tokens, seconds = map(sum, zip(*left, strict=True))
            # A scored token takes only a forward pass, a third of a training token's FLOPs.
            scores.append(models[run.name].flops_per_token(length) / 3 * tokens)
            host.append(seconds)
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
        if missing := tasks_without_file(suites, folder):
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


def _scores_left(run: StudyRun, costs: Mapping[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """The `score_costs` of those that the run lacks; none if it has diverged."""
    if run.diverged:
        return []
    file, known = scores_file(run.folder, run.recipe.total_steps), set[str]()
    with contextlib.suppress(UserError):  # a damaged file: it is scored again
        known = set(read_results(file).scores) if file.exists() else known
    return [cost for key, cost in costs.items() if key not in known]


def score_costs(study: Study, seq_len: int) -> dict[str, tuple[float, float]]:
    """Each score of a run, by its key → the tokens to score for it, roughly, and the seconds that it takes on
    a GPU besides the model's FLOPs. Texts count as long ones, benchmarks as complete."""
    costs = dict[str, tuple[float, float]]()
    for name, shots in map(parse_task, _tasks(study)):
        questions = official_questions(name) or OTHER_QUESTIONS
        if study.limit:
            questions = min(questions, study.limit * (MMLU_SUBJECTS if name == "mmlu" else 1))
        each = QUESTION_TOKENS * (1 + shots)
        costs[task_key(name, shots, study.limit)] = each * questions, QUESTION_SECONDS * questions
    most = {
        "bits_per_byte": TOKENS,
        "loss_by_position": PIECES * study.max_length_factor * seq_len,
        "recall_phrases": QUESTIONS * CHOICES * seq_len,  # each of the four answers after the whole text
    }
    for text, source in (study.texts or {"embedded": "embedded"}).items():
        for measure in measures_of(study.suites):
            short = source == "embedded" and measure != "recall_phrases"
            tokens = min(most[measure], EMBEDDED_TOKENS) if short else most[measure]
            costs[text_key(measure, text)] = tokens, 0.0 if source == "embedded" else TEXT_SECONDS
    return costs


def _tasks(study: Study) -> list[str]:
    """The benchmarks of the study's suites, `mmlu:5` with five examples; not those without a file."""
    tasks = list(study.tasks) if "table2" in study.suites else []
    others = [suite for suite in study.suites if suite != "table2"]
    tasks += [task for suite in others for task in suite_tasks(suite, ()) if task not in measures_of(others)]
    with contextlib.suppress(UserError):  # no such folder, which `_scores` says
        missing = tasks_without_file(study.suites, benchmark_folder(study.eval_data))
        tasks = [task for task in tasks if task not in missing]
    return tasks


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
