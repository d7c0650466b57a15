"""The losses on the page of a study: figure, table, time to a loss, and learning rates."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.files import write_errors, write_json
from lingpt.common.format import duration, scaled_count, with_error
from lingpt.common.run_folder import attention_label
from lingpt.eval.scores import DASH, signed_difference
from lingpt.eval.tables import Table
from lingpt.models import GPT, attention_form
from lingpt.plots.curve_figure import caption, draw
from lingpt.plots.curves import (
    Curve,
    format_table,
    hardware_label,
    mean_over_seeds,
    read_curves,
    time_to_loss,
)
from lingpt.plots.figures import save_formats
from lingpt.study.config import Study
from lingpt.study.page_records import earlier_starts
from lingpt.study.runs import RateSearch, StudyRun
from lingpt.train.model import model_config

PAPER_TOKENS, PAPER_CARDS = 3_000_000_000, 8


def baseline_row(study: Study, runs: Sequence[StudyRun]) -> str | None:
    """The row of `runs` that the others are compared with: the first in `baselines`, else the first of
    softmax attention, else the first."""
    rows = [run.row for run in runs]
    softmax = [run.row for run in softmax_runs(runs)]
    return next((row for row in (*study.baselines, *softmax, *rows) if row in rows), None)


def softmax_runs(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """The runs with softmax attention in all layers."""
    return [run for run in runs if attention_label(run.recipe.model.attention) == "softmax"]


def loss_sections(
    study: Study,
    folder: Path,
    rates: RateSearch,
    done: Sequence[StudyRun],
    records: dict[str, dict[str, Any]],
) -> tuple[list[str], list[str]]:
    """The sections on the losses of the runs that are `done`, and notes on oddities.

    Draws the figure `curves` into the folder, and writes its summary.json. records: from
    `page_records.read_records`.
    """
    hardware = {name: record.get("hardware") or {} for name, record in records.items()}
    by_row, notes = _row_curves(done, hardware)
    notes += _moved(done, records)
    curves, shared = list(by_row.values()), study.runs_per_device > 1
    drawn = [curve for row, curve in by_row.items() if row in (study.plotted_rows or study.attentions)]
    save_formats(draw(drawn or curves, timed=not shared), folder, "curves")
    baseline = baseline_row(study, done) or next(iter(by_row))
    base = list(by_row).index(baseline)
    reached = time_to_loss(curves, base)
    rows = _losses(study, done, by_row, hardware, baseline)
    with write_errors(folder / "summary.json"):
        write_json(folder / "summary.json", {"rows": rows, "time_to_loss": reached})
    note = caption(curves).replace("\n", " ")
    if shared:
        note += f" {study.runs_per_device} runs shared a GPU at a time: their times are left out."
    axes = "tokens and steps" if shared else "time, tokens and steps"
    sections = [f"## Loss\n\n![Loss against {axes}](curves.png)\n\n{note}"]
    sections.append(_loss_table(study, rows).text(markdown=True))
    if not shared:
        table = format_table(reached, curves[base].label)
        sections.append(f"## Time to a loss\n\n```\n{table}\n```")
    if rates.losses:
        sections.append(_rates_table(study, rates, done).section())
    return sections, notes


def _row_curves(
    done: Sequence[StudyRun], hardware: dict[str, dict[str, Any]]
) -> tuple[dict[str, Curve], list[str]]:
    """Row → its curve, the mean over its seeds; and notes on runs and rows whose times are not comparable."""
    by_row, notes = {}, []
    for row in dict.fromkeys(run.row for run in done):
        read = read_curves([run.folder for run in done if run.row == row], attention_form)
        first, *others = mean_over_seeds([replace(c, hardware=hardware.get(c.name, {})) for c in read])
        by_row[row] = replace(first, label=row)
        if others:
            ran_on = [(Path(curve.folder).name, hardware_label(curve.hardware)) for curve in (first, *others)]
            named = ", ".join(f"{name}: {card}" for name, card in ran_on)
            same = len({card for _, card in ran_on}) == 1
            why = "has runs of different data or settings" if same else f"ran on different cards ({named})"
            notes.append(f"{row} {why}: curve and times are the first's")
    by_cards = {row: hardware_label(curve.hardware) for row, curve in by_row.items()}
    if len(set(by_cards.values())) > 1:
        named = ", ".join(f"{row}: {machine}" for row, machine in by_cards.items())
        notes.append(f"the rows ran on different cards ({named}): times and speeds compare these, too")
    return by_row, notes


def _moved(done: Sequence[StudyRun], records: dict[str, dict[str, Any]]) -> list[str]:
    """A note on each run that was resumed on other cards than before."""
    notes = []
    for run in done:
        record = records.get(run.name, {})
        starts = [hardware_label(start.get("hardware") or {}) for start in (*earlier_starts(record), record)]
        if len(ran_on := list(dict.fromkeys(filter(None, starts)))) > 1:
            named = ", then ".join(ran_on)
            notes.append(f"{run.name} was resumed on other cards ({named}): its times are of all of them")
    return notes


def _losses(
    study: Study,
    done: Sequence[StudyRun],
    curves: dict[str, Curve],
    hardware: dict[str, dict[str, Any]],
    baseline: str,
) -> list[dict[str, Any]]:
    """The numbers of each row that has a finished run: losses, their differences to those of the rows in
    `baselines`, speed, and the loss at equal time.
    """
    common = min(float(curve.val[-1, 1]) for curve in curves.values())
    rows = [
        _row_numbers([run for run in done if run.row == row], curves[row], hardware, common)
        for row in study.attentions
        if row in curves
    ]
    compared = study.baselines or (baseline,)
    for one in rows:
        others = (other for other in rows if other["row"] in compared and other is not one)
        one["less"] = {other["row"]: _difference(one["losses"], other["losses"]) for other in others}
    return rows


def _row_numbers(
    runs: Sequence[StudyRun], curve: Curve, hardware: dict[str, dict[str, Any]], equal_time: float
) -> dict[str, Any]:
    """The numbers of one row, from its finished runs. equal_time: training seconds that all rows reach."""
    losses: list[Any] = [run.loss for run in runs]  # finished runs have a loss
    here = hardware_label(curve.hardware)
    alike = [run for run in runs if hardware_label(hardware.get(run.name, {})) == here]
    lines = [line for run in alike for line in run.metrics if line["kind"] == "train"]
    return {
        "row": runs[0].row,
        "attention": curve.attention,
        "parameters": _parameters(runs[0]),
        "rate": runs[0].recipe.train.learning_rate,
        "seeds": len(runs),
        "of_seeds": [run.seed for run in runs],
        "losses": losses,
        "loss": statistics.mean(losses),
        "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "loss_at_equal_time": _at(curve, equal_time),
        "equal_time": equal_time,
        "train_time": float(curve.val[-1, 1]),
        "tokens_per_second": _median([x for line in lines if (x := line.get("tokens_per_second"))]),
        "mfu": _median([line["mfu"] for line in lines if line.get("mfu") is not None]),
        "cards": curve.hardware.get("world_size", 1),
        "card": curve.hardware.get("name"),
    }


def _difference(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """The difference of the means, and its standard error with separate variances (Welch); the error is None
    if a row has one seed."""
    error = None
    if len(losses) > 1 and len(others) > 1:
        error = math.sqrt(sum(statistics.variance(x) / len(x) for x in (losses, others)))
    return statistics.mean(losses) - statistics.mean(others), error


def _parameters(run: StudyRun) -> int:
    return GPT.on_meta(model_config(run.recipe)).num_parameters()


def _at(curve: Curve, seconds: float) -> float | None:
    """The validation loss after `seconds` of training, linear between validations; None before the first one,
    or if there is only one.
    """
    times, losses = curve.val[:, 1], curve.val[:, 2]
    return float(np.interp(seconds, times, losses)) if len(times) > 1 and seconds >= times[0] else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _loss_table(study: Study, rows: list[dict[str, Any]]) -> Table:
    compared = [row["row"] for row in rows if any(row["row"] in other["less"] for other in rows)]
    body = []
    for row in rows:
        loss = with_error(row["loss"], row["deviation"], ".4f")
        less = [signed_difference(row["less"].get(name), decimals=4) for name in compared]
        cells = [
            row["row"],
            scaled_count(row["parameters"]),
            f"{row['rate']:g}",
            str(row["seeds"]),
            loss,
            *less,
        ]
        body.append(cells + (_speed(row) if study.runs_per_device == 1 else []))
    head = ["Row", "Parameters", "Rate", "Seeds", "Validation loss", *(f"minus {name}" for name in compared)]
    notes = ["Loss in nats per token of held-out text; ± the standard deviation over seeds."]
    if any(row["deviation"] is not None for row in rows) and compared:
        notes[0] += " Differences of means ± their standard error (Welch)."
    if compared and len({tuple(row["of_seeds"]) for row in rows}) > 1:
        seeds = "; ".join(f"{row['row']}: {', '.join(map(str, row['of_seeds']))}" for row in rows)
        notes.append(f"Not all rows have the same seeds ({seeds}): their differences are of the seeds, too.")
    if study.runs_per_device == 1:
        head += ["at equal time", "Training", "Tokens/s", "MFU", "3 B tokens on 8 cards"]
        common = duration(rows[0]["equal_time"])
        notes.append(
            f"Equal time: after {common} of training, which all rows have had. Training time is without "
            "start-up, compiling, validation and checkpoints. The last column: as if eight cards were eight "
            "times as fast as one."
        )
        if len({row["train_time"] for row in rows}) > 1:
            notes.append(
                "At equal time the fastest row is at the end of its schedule, the others are before the end "
                "of theirs, at a higher learning rate: with a schedule that ends there their loss would be "
                "lower."
            )
    return Table("", head, body, notes)


def _speed(row: dict[str, Any]) -> list[str]:
    equal = DASH if row["loss_at_equal_time"] is None else f"{row['loss_at_equal_time']:.4f}"
    used = DASH if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    speed, paper = DASH, DASH
    if tokens := row["tokens_per_second"]:
        speed, seconds = f"{tokens:,.0f}", PAPER_TOKENS / (PAPER_CARDS * tokens / row["cards"])
        paper = DASH if "CPU" in str(row["card"]) else duration(seconds)
    return [equal, duration(row["train_time"]), speed, used, paper]


def _rates_table(study: Study, rates: RateSearch, done: Sequence[StudyRun]) -> Table:
    chosen = rates.chosen
    rows, kept = [], dict[float, list[str]]()
    for row in study.attentions:
        losses = rates.losses.get(row, {})
        cells = [f"{losses[rate]:.4f}" if rate in losses else DASH for rate in study.learning_rates]
        none = DASH if row in rates.unfinished else "the recipe's"  # all of them diverged
        rows.append([row, *cells, f"{chosen[row]:g}" if row in chosen else none])
        used = next((run.recipe.train.learning_rate for run in done if run.row == row), None)
        if used is not None and row in chosen and used != chosen[row]:
            kept.setdefault(used, []).append(row)
    tokens = scaled_count(study.rate_tokens)
    notes = [f"Validation loss after {tokens} tokens, one seed; – not finished, or not finite."]
    notes += [f"Had begun with {used:g}, and keep it: {', '.join(kept[used])}." for used in kept]
    head = ["Row", *(f"{rate:g}" for rate in study.learning_rates), "Chosen"]
    return Table("Learning rates", head, rows, notes)
