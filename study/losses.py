"""The losses of a study: their figure, their tables, and the numbers of both in summary.json."""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.files import write_errors, write_json
from lingpt.common.format import duration, scaled_count, with_error
from lingpt.common.run_folder import read_environment
from lingpt.eval.scores import DASH, signed_difference
from lingpt.eval.tables import Table
from lingpt.models import GPT
from lingpt.plots.curve_figure import caption, draw
from lingpt.plots.curves import Curve, hardware_label, mean_over_seeds, read_curve, time_to_loss
from lingpt.plots.figures import save_formats
from lingpt.study.config import Study
from lingpt.study.runs import RateSearch, StudyRun
from lingpt.train.model import model_config

SUMMARY, CURVES = "summary.json", "curves"


@dataclass
class RowLosses:
    """The numbers of a row, from its finished runs.

    losses: at the last step, in nats per token, one for each of `seeds`; loss, deviation: their mean and
        standard deviation (None for one seed).
    less: baseline → the difference to its mean, and the standard error (None if one of them has one seed).
    loss_at_equal_time: when the fastest row is done; None before the row's first validation.
    train_time, tokens_per_second, mfu, peak_memory: of the runs on the cards named in `hardware`; in seconds
        and bytes (of a process).
    """

    row: str
    attention: str
    parameters: int
    learning_rate: float
    muon_learning_rate: float | None  # of the matrices, if Muon trains them
    seeds: list[int]
    losses: list[float]
    loss: float
    deviation: float | None
    loss_at_equal_time: float | None
    train_time: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory: int | None
    hardware: str | None
    less: dict[str, tuple[float, float | None]] = field(default_factory=dict)


def loss_sections(
    study: Study, folder: Path, rates: RateSearch, done: Sequence[StudyRun], baseline: str
) -> tuple[list[str], list[str]]:
    """The sections on the losses of the runs that are `done`; and notes on rows whose seeds are not alike.

    Draws the figure into the folder and writes its summary.json. baseline: the row that the times are
    relative to.
    """
    runs = {row: [run for run in done if run.row == row] for row in dict.fromkeys(run.row for run in done)}
    timed = study.runs_per_device == 1  # times of runs that share a card are meaningless
    curves, notes = dict[str, Curve](), list[str]()
    for row, seeds in runs.items():
        first, *others = mean_over_seeds([read_curve(run.folder) for run in seeds])
        curves[row] = replace(first, label=row)
        if others:
            of = first.folder.name
            notes.append(f"the seeds of {row} differ in cards, data or settings: curve and times are {of}'s")
    plotted = [curves[row] for row in curves if row in study.plotted_rows] or list(curves.values())
    save_formats(draw(plotted, timed=timed), folder, CURVES)

    equal_time = min(float(curve.val[-1, 1]) for curve in curves.values())
    rows = [_row_losses(runs[row], curve, equal_time) for row, curve in curves.items()]
    _compare(rows, {baseline, *study.baselines})
    reached = time_to_loss(list(curves.values()), list(curves).index(baseline))
    with write_errors(folder / SUMMARY):
        numbers = {"equal_time": equal_time, "rows": [asdict(row) for row in rows], "time_to_loss": reached}
        write_json(folder / SUMMARY, numbers)
    about = caption(plotted).replace("\n", " ")
    sections = [f"## Loss\n\n![Loss]({CURVES}.png)\n\n{about}"]
    sections.append(_loss_table(rows, equal_time, timed).text(markdown=True))
    sections += [_time_table(list(curves), reached, baseline).section()] if timed and reached else []
    sections += [_rates_table(study, rates, done).section()] if rates.losses else []
    return sections, notes


def _row_losses(runs: Sequence[StudyRun], curve: Curve, equal_time: float) -> RowLosses:
    losses: list[Any] = [run.loss for run in runs]  # finished runs have a loss
    cards = hardware_label(curve.hardware)
    alike = [run for run in runs if hardware_label(read_environment(run.folder, "hardware")) == cards]
    lines = [line for run in alike for line in run.metrics if line["kind"] == "train"]
    times, validations = curve.val[:, 1], curve.val[:, 2]
    timed = len(times) > 1 and equal_time >= times[0]
    train = runs[0].recipe.train
    return RowLosses(
        row=runs[0].row,
        attention=curve.attention,
        parameters=GPT.on_meta(model_config(runs[0].recipe)).num_parameters(),
        learning_rate=train.learning_rate,
        muon_learning_rate=train.muon_learning_rate if train.optimizer == "muon" else None,
        seeds=[run.seed for run in runs],
        losses=losses,
        loss=statistics.mean(losses),
        deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        loss_at_equal_time=float(np.interp(equal_time, times, validations)) if timed else None,
        train_time=float(times[-1]),
        tokens_per_second=_median(lines, "tokens_per_second"),
        mfu=_median(lines, "mfu"),
        peak_memory=max((line["peak_memory"] for line in lines if "peak_memory" in line), default=None),
        hardware=cards,
    )


def _median(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def _compare(rows: Sequence[RowLosses], baselines: Collection[str]) -> None:
    """Sets each row's differences to the `baselines`, with Welch's standard error."""
    for other in (row for row in rows if row.row in baselines):
        for row in (row for row in rows if row is not other):
            error = None
            if row.deviation is not None and other.deviation is not None:
                error = math.sqrt(row.deviation**2 / len(row.losses) + other.deviation**2 / len(other.losses))
            row.less[other.row] = row.loss - other.loss, error


def _loss_table(rows: Sequence[RowLosses], equal_time: float, timed: bool) -> Table:
    compared = [row.row for row in rows if any(row.row in other.less for other in rows)]
    head = ["Row", "Parameters", "Learning rate", "Seeds", "Validation loss"]
    head += [f"minus {name}" for name in compared]
    notes = [
        "Loss: nats per token of held-out text after all tokens, mean ± standard deviation over seeds; "
        "differences ± their standard error (Welch)."
    ]
    if timed:
        head += ["at equal time", "Training", "Tokens/s", "MFU", "Cards"]
        notes.append(
            f"At equal time: after {duration(equal_time)} of training, when the fastest row is at the end of "
            "its learning-rate schedule and the others are not. Training: without start-up, compilation, "
            "validation and checkpoints."
        )
    cells = [_cells(row, compared, timed) for row in rows]
    if any(row.peak_memory for row in rows):
        head.append("Memory")
        for row, line in zip(rows, cells, strict=True):
            line.append(f"{row.peak_memory / 1e9:.1f} GB" if row.peak_memory else DASH)
        notes.append("Memory: the peak of a process in training, of its GPU if it has one.")
    return Table("", head, cells, notes)


def _cells(row: RowLosses, compared: Sequence[str], timed: bool) -> list[str]:
    cells = [
        row.row,
        scaled_count(row.parameters),
        f"{row.learning_rate:g}" + (f", Muon {row.muon_learning_rate:g}" if row.muon_learning_rate else ""),
        ", ".join(map(str, row.seeds)),
        with_error(row.loss, row.deviation, ".4f"),
        *(signed_difference(row.less.get(name), decimals=4) for name in compared),
    ]
    if timed:
        cells += [
            DASH if row.loss_at_equal_time is None else f"{row.loss_at_equal_time:.4f}",
            duration(row.train_time),
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else DASH,
            DASH if row.mfu is None else f"{100 * row.mfu:.1f} %",
            row.hardware or DASH,
        ]
    return cells


def _time_table(rows: Sequence[str], reached: Sequence[dict[str, Any]], baseline: str) -> Table:
    """When each row first had these losses. reached: from `time_to_loss`, in the order of `rows`."""
    times = [list(target["runs"].values()) for target in reached]
    cells = [[row, *(_time(target[number]) for target in times)] for number, row in enumerate(rows)]
    note = f"Training time until the validation loss is reached, and its ratio to that of {baseline}."
    return Table("Time to a loss", ["Row", *(f"{target['loss']:.2f}" for target in reached)], cells, [note])


def _time(found: dict[str, Any]) -> str:
    ratio = "" if found["ratio"] is None else f" ({found['ratio']:.2f}×)"
    return duration(found["time"]) + ratio


def _rates_table(study: Study, rates: RateSearch, done: Sequence[StudyRun]) -> Table:
    """The losses of the short runs, the best rate, and the rate that the row's runs have."""
    used = {run.row: f"{run.recipe.train.learning_rate:g}" for run in done}
    cells = []
    for row in study.attentions:
        losses = rates.losses.get(row, {})
        tried = [f"{losses[rate]:.4f}" if rate in losses else DASH for rate in study.learning_rates]
        best = f"{rates.chosen[row]:g}" if row in rates.chosen else DASH
        cells.append([row, *tried, best, used.get(row, DASH)])
    head = ["Row", *(f"{rate:g}" for rate in study.learning_rates), "Best", "Used"]
    tokens = scaled_count(study.rate_tokens)
    note = f"Validation loss after {tokens} tokens, one seed; – not finished, or not finite."
    return Table("Learning rates", head, cells, [note])
