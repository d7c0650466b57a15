"""`lingpt study --dry_run`: estimates a study's cost before anything is trained: time, disk, card hours."""

import heapq
import math
from collections.abc import Sequence

from lingpt.common.format import counted, duration, scaled, scaled_count
from lingpt.common.run_folder import EVAL
from lingpt.data import availability
from lingpt.eval.language import PIECES, TOKENS
from lingpt.eval.mqar import TRIALS_PER_GPU, Trial
from lingpt.eval.phrases import CHOICES, QUESTIONS
from lingpt.eval.tables import Table
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
) -> str:
    """The plan of these stages: one line per row, then the totals. trials: the MQAR trials left to train."""
    peak, device = _peak(slots)
    trials = trials if "mqar" in stages else ()
    suites = study.suites if "scores" in stages else ()
    with_mqar = study.mqar is not None and "mqar" in stages
    firsts = [run for run in runs if run.seed == 0]
    parameters = {run.row: GPT.on_meta(model_config(run.recipe)).num_parameters() for run in firsts}
    rows, left = _costs(study, rate_runs, runs, stages, parameters)
    disk = _disk(rate_runs, runs, stages, parameters)
    host = host_seconds(study, suites)
    seconds = _seconds(left, host, len(runs), trials, slots, peak)
    eight = gpu_slots(8, study.devices_per_run, study.runs_per_device)
    on_eight = sum(_seconds(left, host, len(runs), trials, eight, H200_FLOPS).values())
    of_cards = sum(map(sum, left.values())) / H200_FLOPS + host * len(left["scores"])
    hours = (of_cards + sum(_mqar_seconds(trials, on_gpu=True))) / 3600
    head = ["Row", "Parameters", "Steps × tokens", "Runs", "Rate runs", "Done", "H200 hours to train all"]
    table = Table("", head, rows)
    cards = len({gpu for slot in slots for gpu in slot.gpus}) or len(slots)
    each = len(slots[0].gpus) or 1
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
    data = runs[0].recipe.data
    cost = f"{hours:.3g}" if hours >= 0.01 else "under 0.01"
    lines = [
        f"study {study.name}: {len(rows)} rows, {counted(study.seeds, 'seed')}, {scaled_count(study.tokens)} "
        f"tokens each, N = {data.seq_len:,}; nothing is trained, this is a dry run",
        "",
        table.body(),
        "",
        f"data    {data.source}: {availability(data)}",
        f"here    {cards} × {device}, {each} a run, {len(slots)} at once; what is left takes about "
        f"{duration(sum(seconds.values()))} ({parts or 'nothing'})",
        f"cost    {cost} card hours on H200s for what is left, at {STATED_MFU:.0%} of their peak: "
        f"{duration(on_eight)} on eight",
        f"disk    {scaled(disk, 'B')} of checkpoints at most; the rates' go when these are chosen",
        f"scores  {', '.join(suites) or 'none'}" + ("; MQAR" if with_mqar else ""),
        "Small models and short sequences reach less of the peak: the time is then longer."
        + (f" With a limit of {study.limit} documents a task scoring takes less." if study.limit else "")
        + (" MQAR's is the most: training ends where all is right." if trials else ""),
    ]
    return "\n".join(lines)


def _costs(
    study: Study,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    stages: Sequence[str],
    parameters: dict[str, int],
) -> tuple[list[list[str]], dict[str, list[float]]]:
    """The cells of each row; and, by stage, the FLOPs left in each run. parameters: number of each row's."""
    suites = study.suites if "scores" in stages else ()
    tuning = rate_runs if "rates" in stages else ()
    flops = {run.name: run_flops(GPT.on_meta(model_config(run.recipe)), run.recipe) for run in (*tuning, *runs)}
    rows = []
    for row in study.attentions:
        mine, short = ([run for run in some if run.row == row] for some in (runs, tuning))
        recipe = mine[0].recipe
        steps = f"{recipe.total_steps:,} × {scaled_count(recipe.tokens_per_step)}"
        done = f"{sum(run.is_finished() for run in mine)} of {len(mine)}"
        trained = sum(flops[run.name] for run in [*short, *mine])
        hours = trained / H200_FLOPS / 3600
        cells = [scaled_count(parameters[row]), steps, str(len(mine)), str(len(short)), done]
        rows.append([row, *cells, f"{hours:.3g}" if hours >= 0.001 else "< 0.001"])
    # A scored token takes only a forward pass, a third of a training token's FLOPs.
    recipe = runs[0].recipe
    scored = (
        scored_tokens(study, recipe.data.seq_len, suites) / (recipe.total_steps * recipe.tokens_per_step) / 3
    )
    left = {
        "rates": [flops[run.name] * _part_left(run) for run in tuning if not run.is_finished()],
        "runs": [
            flops[run.name] * _part_left(run) for run in runs if "runs" in stages and not run.is_finished()
        ],
        "scores": [flops[run.name] * scored for run in runs if suites and _is_unscored(run)],
    }
    return rows, left


def _disk(
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    stages: Sequence[str],
    parameters: dict[str, int],
) -> float:
    """Maximum bytes of checkpoints: those of the short runs are deleted before the runs begin."""

    def size(some: Sequence[StudyRun]) -> float:
        # Weights and AdamW's two moments in fp32; one checkpoint more than are kept, while it is written.
        return sum(12 * parameters[run.row] * (run.recipe.train.keep_checkpoints + 1) for run in some)

    started = [run for run in runs if run.started]
    tuning = [run for run in rate_runs if "rates" in stages and not run.is_finished()]
    return max(size([*tuning, *started]), size(runs if "runs" in stages else started))


def _seconds(
    left: dict[str, list[float]],
    host: float,
    runs: int,
    trials: Sequence[Trial],
    slots: Sequence[Slot],
    peak: float,
) -> dict[str, float]:
    """Seconds of each stage on these slots. host: seconds of scoring a run besides its FLOPs; runs: number of
    runs in the study."""
    cards = sorted({gpu for slot in slots for gpu in slot.gpus})
    scoring = scoring_slots(slots, cards, runs)
    host = host if cards else 0.0
    # The slots that `lingpt mqar` uses; without a GPU it trains one model at a time.
    mqar_slots = gpu_slots(len(cards), 1, TRIALS_PER_GPU) if cards else slots[:1]
    return {
        "rates": wall_seconds(left["rates"], slots, peak),
        "runs": wall_seconds(left["runs"], slots, peak),
        "scores": wall_seconds(left["scores"], scoring, peak, host),
        "mqar": wall_seconds(_mqar_seconds(trials, on_gpu=bool(cards)), mqar_slots, peak=1.0),
    }


def wall_seconds(flops: Sequence[float], slots: Sequence[Slot], peak: float, more: float = 0.0) -> float:
    """Seconds until all jobs are done: each starts, in this order, on the slot that is free first.

    flops: of each job. peak: FLOP/s of a card, or a CPU process. more: seconds per job besides its FLOPs.
    """
    if not flops:
        return 0.0
    groups = len({slot.gpus for slot in slots if slot.gpus}) or len(slots)
    used = min(len(flops), len(slots))
    sharing = math.ceil(used / groups)  # jobs on the same cards at a time
    speed = peak * (len(slots[0].gpus) or 1) / sharing
    ends = [0.0] * used
    for job in flops:
        heapq.heapreplace(ends, ends[0] + job / speed + more)
    return max(ends)


def _part_left(run: StudyRun) -> float:
    """The share of a run's steps that is left; 1 if its folder holds another run."""
    return 1.0 if run.config_mismatch() else max(0.0, 1.0 - run.step / run.recipe.total_steps)


def _is_unscored(run: StudyRun) -> bool:
    """Whether the run is to be scored: it has no scores, and has not diverged."""
    return not run.diverged and not any((run.folder / EVAL).glob("step-*.json"))


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
        seconds.append(tokens * (MQAR_TOKEN if on_gpu else _mqar_token_flops(trial) / CPU_CORE_FLOPS))
    return seconds


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
