"""The plan of a study: estimates its cost before anything is trained: time, disk, GPU hours."""

import contextlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from lingpt.common.errors import UserError
from lingpt.common.format import counted, duration, scaled, scaled_count
from lingpt.common.run_folder import scores_file
from lingpt.data import availability
from lingpt.eval.harness import parse_task
from lingpt.eval.language import DOCUMENT_TOKENS, PIECES, TOKENS
from lingpt.eval.recall.mqar import TRIALS_PER_GPU, Trial
from lingpt.eval.recall.needle import NEEDLES, needle_lengths
from lingpt.eval.recall.phrases import CHOICES, QUESTIONS
from lingpt.eval.scores import measure_key, read_results, task_key
from lingpt.eval.suites import benchmark_tasks, measures_of, tasks_without_file, text_measures
from lingpt.eval.tables import Table
from lingpt.eval.tasks.sources import benchmark_folder, official_questions
from lingpt.models import GPT
from lingpt.study.config import Study
from lingpt.study.jobs import Slot, gpu_slots, scoring_slots
from lingpt.study.runs import StudyRun
from lingpt.train.model import model_config
from lingpt.train.planning.machine import choose_machine
from lingpt.train.planning.memory_fit import checkpoint_bytes
from lingpt.train.planning.throughput import CPU_CORE_FLOPS, DEVICES, STATED_MFU, peak_flops, run_flops

QUESTION_TOKENS = 120  # of a benchmark's question with its choices, or of an example before it
OTHER_QUESTIONS = 10_000  # of a benchmark whose size is not known here; HellaSwag has as many
MMLU_SUBJECTS = 57  # a limit is one of each
EMBEDDED_TOKENS = 1e5  # upper bound for the text that comes with Python
# Seconds on an H200 that scoring takes besides the model's FLOPs (short questions, built by the host), per
# question and per measure of a text, as measured on pythia-160m (docs/results/study/pythia-160m).
QUESTION_SECONDS, TEXT_SECONDS = 0.003, 8.0
# Seconds per token of MQAR on an H200 beside seven others; its models are too small for their FLOPs to
# matter. Measured: 1.6e-6 to 2.1e-6 (docs/results/gate/learning/mqar.json).
MQAR_TOKEN = 2e-6
H200 = next(device for device in DEVICES if device.name == "H200")
H200_FLOPS = H200.bf16 * STATED_MFU  # FLOP/s that it is assumed to reach


class Cost(NamedTuple):
    """What a job computes. host: seconds that it takes on a GPU besides its FLOPs."""

    flops: float
    host: float = 0.0


Left = dict[str, list[Cost]]  # stage → its jobs that are left


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
    rate_runs = rate_runs if "rates" in stages else ()
    models = _models((*rate_runs, *runs))
    left = {
        "rates": _training(rate_runs, models),
        "runs": _training(runs, models),
        "scores": _scoring(study, runs, models),
        "mqar": [mqar_cost(trial) for trial in trials],
    }
    left = {stage: costs for stage, costs in left.items() if stage in stages and costs}
    if not (dry_run or left):
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
        *_time(study, left, len(runs), slots),
        f"disk    {scaled(_disk(rate_runs, runs, stages, models), 'B')} of checkpoints at most"
        + ("; the rates' go when these are chosen" if rate_runs else ""),
        f"scores  {_scores(study, stages)}",
        "The start of each run and its compilation come on top, and small models and short sequences reach "
        "less of the peak."
        + (" MQAR's is the most: training ends once 99.9 % of answers are right." if "mqar" in left else ""),
    ]
    return "\n".join(lines)


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


def _training(runs: Sequence[StudyRun], models: dict[str, GPT]) -> list[Cost]:
    """The unfinished runs, by the steps that are left; all of them if the folder holds another run."""
    costs = []
    for run in (run for run in runs if not run.is_finished()):
        done = 0.0 if run.config_mismatch() else run.step / run.recipe.total_steps
        costs.append(Cost(run_flops(models[run.name], run.recipe) * max(0.0, 1.0 - done)))
    return costs


def _scoring(study: Study, runs: Sequence[StudyRun], models: dict[str, GPT]) -> list[Cost]:
    """The scores that each run lacks; a run that diverged gets none."""
    costs = []
    for run in (run for run in runs if not run.diverged):
        file, known = scores_file(run.folder, run.recipe.total_steps), set[str]()
        with contextlib.suppress(UserError):  # a damaged file: it is scored again
            known = set(read_results(file).scores) if file.exists() else known
        length = run.recipe.data.seq_len
        if missing := [cost for key, cost in score_costs(study, length).items() if key not in known]:
            tokens, seconds = map(sum, zip(*missing, strict=True))
            # A scored token takes only a forward pass, a third of a training token's FLOPs.
            costs.append(Cost(models[run.name].flops_per_token(length) / 3 * tokens, seconds))
    return costs


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
        "loss_within_documents": DOCUMENT_TOKENS,
        "loss_by_position": PIECES * study.max_length_factor * seq_len,
        "recall_phrases": QUESTIONS * CHOICES * seq_len,  # each of the four answers after the whole text
    }
    if "needle" in measures_of(study.suites):
        lengths = needle_lengths(study.max_length_factor * seq_len)
        costs |= {key: (float(NEEDLES * tokens), 0.0) for key, tokens in lengths.items()}
    for text, source in (study.texts or {"embedded": "embedded"}).items():
        for measure in text_measures(study.suites):
            short = source == "embedded" and measure != "recall_phrases"
            tokens = min(most[measure], EMBEDDED_TOKENS) if short else most[measure]
            costs[measure_key(measure, text)] = tokens, 0.0 if source == "embedded" else TEXT_SECONDS
    return costs


def _tasks(study: Study) -> list[str]:
    """The benchmarks of the study's suites, `mmlu:5` with five examples; not those without a file."""
    tasks = benchmark_tasks(study.suites, study.tasks, None)
    with contextlib.suppress(UserError):  # no such folder, which `_scores` says
        missing = tasks_without_file(study.suites, benchmark_folder(study.eval_data))
        tasks = [task for task in tasks if task not in missing]
    return tasks


def mqar_cost(trial: Trial) -> Cost:
    tokens = trial.steps * trial.batch_size * trial.length
    return Cost(tokens * _mqar_token_flops(replace(trial, rate=0.0)), tokens * MQAR_TOKEN)


@cache
def _mqar_token_flops(trial: Trial) -> float:
    per_token = GPT.on_meta(trial.config()).flops_per_token(trial.length)
    # Only the positions of queries go through lm_head.
    return per_token - (1 - trial.pairs / trial.length) * 6 * trial.width * trial.vocabulary


def _time(study: Study, left: Left, runs: int, slots: Sequence[Slot]) -> tuple[str, str]:
    """The lines on the time here, and on the cost in GPU hours. runs: number of runs in the study."""
    peak, device = _peak(slots)
    cards, each = len({gpu for slot in slots for gpu in slot.gpus}) or len(slots), len(slots[0].gpus) or 1
    here = stage_seconds(left, runs, slots, peak)
    parts = ", ".join(f"{name} {duration(value)}" for name, value in here.items())
    eight = gpu_slots(8, study.devices_per_run, study.runs_per_device)
    on_eight = sum(stage_seconds(left, runs, eight, H200_FLOPS).values())
    of_cards = sum(
        cost.flops / H200_FLOPS + cost.host / (TRIALS_PER_GPU if stage == "mqar" else 1)
        for stage, costs in left.items()
        for cost in costs
    )
    hours = f"{of_cards / 3600:.3g}" if of_cards >= 36 else "under 0.01"
    return (
        f"here    {cards} × {device}, {each} a run, {len(slots)} at once; what is left takes about "
        f"{duration(sum(here.values()))} ({parts or 'nothing'})",
        f"cost    {hours} GPU hours on H200s for what is left, at {STATED_MFU:.0%} of their peak: "
        f"{duration(on_eight)} on eight",
    )


def _peak(slots: Sequence[Slot]) -> tuple[float, str]:
    """FLOP/s that one card, or one CPU process, of this machine is assumed to reach, and its name."""
    from lingpt.train import TrainConfig

    if not slots[0].gpus:
        return CPU_CORE_FLOPS, "CPU process"
    machine = choose_machine(TrainConfig(devices=1))
    return (peak_flops(machine.name, machine.precision) or H200.bf16) * STATED_MFU, machine.name


def stage_seconds(left: Left, runs: int, slots: Sequence[Slot], peak: float) -> dict[str, float]:
    """Seconds of each stage on these slots. runs: number of runs in the study."""
    cards = len({gpu for slot in slots for gpu in slot.gpus})
    # The slots that `lingpt mqar` uses; without a GPU it trains one model at a time.
    mqar = gpu_slots(cards, 1, TRIALS_PER_GPU) if cards else slots[:1]
    places = {"scores": scoring_slots(slots, cards, runs), "mqar": mqar}
    return {stage: wall_seconds(costs, places.get(stage, slots), peak) for stage, costs in left.items()}


def wall_seconds(costs: Sequence[Cost], slots: Sequence[Slot], peak: float) -> float:
    """Seconds until all jobs are done: each starts, in this order, on the slot that is free first. peak:
    FLOP/s of a card, or a CPU process."""
    if not costs:
        return 0.0
    gpus, groups = len(slots[0].gpus), len({slot.gpus for slot in slots if slot.gpus}) or len(slots)
    used = min(len(costs), len(slots))
    sharing = math.ceil(used / groups)  # jobs on the same cards at a time
    speed = peak * (gpus or 1) / sharing
    ends = [0.0] * used
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost.flops / speed + (cost.host if gpus else 0.0))
    return max(ends)


def _disk(
    rate_runs: Sequence[StudyRun], runs: Sequence[StudyRun], stages: Sequence[str], models: dict[str, GPT]
) -> float:
    """Maximum bytes of checkpoints: those of the short runs are deleted before the runs begin."""

    def size(some: Sequence[StudyRun]) -> float:
        return sum(checkpoint_bytes(models[run.name], run.recipe)[1] for run in some)

    started = [run for run in runs if run.started]
    tuning = [run for run in rate_runs if not run.is_finished()]
    return max(size([*tuning, *started]), size(runs if "runs" in stages else started))


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
