"""The page of a study: what was run, what came out, and what it cannot tell; from the runs' folders alone."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object, write_errors, write_json, write_text
from lingpt.common.run_folder import ENVIRONMENT, EVAL, attention_label, checkpoint_folder, read_metrics
from lingpt.eval.results import DASH, read_results
from lingpt.eval.seeds import left_out, mean_scores
from lingpt.eval.suite_tables import save_suites, suite_tables
from lingpt.eval.table2 import count, save_table2, table2_tables
from lingpt.eval.tables import Table
from lingpt.models import ATTENTIONS, GPT, attention_form
from lingpt.study.config import Study
from lingpt.study.jobs import Failure
from lingpt.study.paths import read_utf8
from lingpt.study.runs import StudyRun, chosen_rates, not_over
from lingpt.train.curve_figure import caption, draw
from lingpt.train.curves import (
    Curve,
    cards,
    format_table,
    mean_over_seeds,
    read_curves,
    time_to_loss,
)
from lingpt.train.machine import duration
from lingpt.train.model import model_config

PAGE, READING, TITLE = "README.md", "reading.md", "# Study "
PAPER_TOKENS, PAPER_CARDS = 3_000_000_000, 8
# What the page says of a run's environment.json, by type.
_RECORD = {
    "hardware": {"name": str, "precision": str, "world_size": int},
    "versions": {},
    "git": {"revision": str},
    "source": str,
    "data": {"train": {"tokens": int}},
    "earlier": list,
}


def write_page(
    study: Study,
    folder: Path,
    tried: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    failures: Sequence[Failure] = (),
    report: Callable[[str], None] = print,
    scored: bool = True,
) -> Path:
    """Writes tables, figures and README.md into the study's folder; returns the page's path. `report` takes
    the lines on what is not in the tables. `scored` is false where the runs' scores come later: one
    that has none is then no trouble, if its weights are there to be scored.

    Where the folder has a `reading.md`, a person's reading of the numbers, the page begins with it.
    """
    rows = list(study.attentions)
    judged = [(run, run.trouble()) for run in runs]
    done = sorted((r for r, why in judged if why is None), key=lambda run: (rows.index(run.row), run.seed))
    missing = [run.name for run in runs if not run.begun]
    trouble = [why for run, why in judged if why is not None and run.begun]
    if missing:
        trouble.insert(0, f"not trained: {', '.join(missing)}")
    known = set(trouble)  # a folder that holds another run is named by the run
    over = {run.name for run in done}  # one that failed may have been trained by another process
    failed = [
        f"{f.job} failed: {f.reason}"
        for f in failures
        if f"{f.job} {f.reason}" not in known and f.job not in over
    ]
    trouble += failed
    unscored = list[StudyRun]()
    baseline = _baseline(study, done)
    results = [f for r in done if (f := _results(r, baseline, trouble, unscored))] if study.suites else []
    trouble += _not_scored(unscored, scored) + left_out(results)
    results = mean_scores(results)
    records = _records(runs, trouble)
    training = _training(study, folder, tried, done, records, trouble) if done else []
    about = f"{study.about}\n\n" if study.about else ""
    rates = {run.options["train.learning_rate"] for run in tried if run.is_done()}
    parts = [f"{TITLE}{study.name}\n\n{about}{_what(study, runs, records, sorted(rates))}"]
    if (folder / READING).exists():
        parts.append(read_utf8(folder / READING).strip())
    if trouble:
        trouble = list(dict.fromkeys(trouble))
        parts.append("## Not in the tables\n\n" + "\n".join(f"- {line}" for line in trouble))
        for line in trouble:
            if line not in failed:  # those the command names itself
                report(f"not in the tables: {line}")
    parts += training
    if results:
        tables = table2_tables(results) if "table2" in study.suites else []
        if tables:
            save_table2(results, folder)
        save_suites(results, folder)
        parts += [_section(table) for table in [*tables, *suite_tables(results)]]
        if (folder / "positions.png").exists():
            parts.append("![Loss by position](positions.png)")
    parts += _mqar(folder)
    parts.append(_limits(study, runs, bool(rates)))
    parts.append(_how({run.name: records[run.name] for run in done if run.name in records}))
    with write_errors(folder / PAGE):
        write_text(folder / PAGE, "\n\n".join(filter(None, parts)) + "\n")
    return folder / PAGE


def _section(table: Table) -> str:
    return f"## {table.title}\n\n{table.text(markdown=True)}"


def _baseline(study: Study, done: Sequence[StudyRun]) -> str | None:
    """The row with softmax that the others are compared with: the first in `against`, else the first."""
    softmax = [run.row for run in done if attention_label(run.recipe.model.attention) == "softmax"]
    return next((row for row in (*study.against, *softmax) if row in softmax), None)


def _results(
    run: StudyRun, baseline: str | None, trouble: list[str], unscored: list[StudyRun]
) -> dict[str, Any] | None:
    """The newest scores of a run, as `evaluate` wrote them. Where they cannot be read, `trouble` gets the
    reason; where there are none, `unscored` the run."""
    files = sorted((run.folder / EVAL).glob("step-*.json"))
    try:
        found = read_results(files[-1]) if files else {"scores": {}}
    except UserError as error:
        trouble.append(str(error))
        return None
    if found["scores"]:
        model = run.recipe.model
        form = attention_form(model.attention, vars(model))  # older files do not say it
        path = checkpoint_folder(run.folder, found["checkpoint"]["step"])  # it may have been scored elsewhere
        named = {
            "attention": model.attention,
            "form": form,
            "path": str(path),
            "baseline": run.row == baseline,
        }
        return found | {"checkpoint": found["checkpoint"] | named}
    unscored.append(run)
    return None


def _not_scored(runs: Sequence[StudyRun], scored: bool) -> list[str]:
    """The runs without scores, a line for those that can be scored (if `scored`, as of `write_page`) and one
    for the others."""
    there = [run.name for run in runs if run.has_weights()]
    others = [run.name for run in runs if run.name not in there]
    lines = [f"in no table of scores, as they have none: {', '.join(there)}"] if there and scored else []
    if others:
        lines.append(
            f"in no table of scores, as they have none and their last checkpoint is not here or not whole: "
            f"{', '.join(others)}; to score one, remove its folder and train it again"
        )
    return lines


def _what(
    study: Study, runs: Sequence[StudyRun], records: dict[str, dict[str, Any]], tried: Sequence[float]
) -> str:
    recipe = runs[0].recipe
    seeds = f"{study.seeds} seeds" if study.seeds > 1 else "one seed"
    number = len(study.attentions)
    rows = f"{number} row{'s' if number > 1 else ''}"
    rates = ", ".join(f"{rate:g}" for rate in tried)
    differs = f"the attention, and its learning rate, the best of {rates}" if rates else "the attention"
    if others := {key for options in study.attentions.values() for key in options} - _of_the_attention():
        differs += f", and where a row says so {', '.join(sorted(others))}"
    elif not rates:
        differs += " alone"
    size = f"{recipe.tokens_per_step:,} tokens a step, {recipe.total_steps:,} steps"
    same = f"{'for each seed ' * (study.seeds > 1)}the same data in the same order"
    return (
        f"{recipe.model.name}, {rows}, {seeds}, {count(study.tokens)} tokens each, "
        f"N = {recipe.data.seq_len:,}, {size}; {same}, the same schedule. "
        f"{_passes(study, records)}What differs is {differs}."
    )


def _passes(study: Study, records: dict[str, dict[str, Any]]) -> str:
    """How often a run reads its text, where a record says how long that is."""
    texts = [(record.get("data") or {}).get("train") or {} for record in records.values()]
    lengths = [text["tokens"] for text in texts if text.get("tokens")]
    if not lengths:
        return ""
    passes = f"{study.tokens / min(lengths):.2g} passes over the text of {count(min(lengths))} tokens"
    return f"That is {passes}. "


def _of_the_attention() -> set[str]:
    """The keys of a row that make its attention."""
    options = {name for attention in ATTENTIONS.values() for name in attention.options()}
    return {"model.attention", *(f"model.{name}" for name in options)}


def _training(
    study: Study,
    folder: Path,
    tried: Sequence[StudyRun],
    done: Sequence[StudyRun],
    records: dict[str, dict[str, Any]],
    trouble: list[str],
) -> list[str]:
    """The picture of the losses, their table, time to loss and the rates; `trouble` gets what is odd."""
    by_row, hardware = {}, {name: record.get("hardware") or {} for name, record in records.items()}
    for row in dict.fromkeys(run.row for run in done):
        read = read_curves([run.folder for run in done if run.row == row])
        first, *others = mean_over_seeds([replace(c, hardware=hardware.get(c.name, {})) for c in read])
        by_row[row] = replace(first, label=row)
        ran_on = {curve.name: cards(curve.hardware) for curve in (first, *others)}
        if others:
            named = ", ".join(f"{name}: {card}" for name, card in ran_on.items())
            same = len(set(ran_on.values())) == 1
            why = "has runs of different data or settings" if same else f"ran on different cards ({named})"
            trouble.append(f"{row} {why}: curve and times are the first's")
    ran_on = {row: cards(curve.hardware) for row, curve in by_row.items()}
    if len(set(ran_on.values())) > 1:
        named = ", ".join(f"{row}: {machine}" for row, machine in ran_on.items())
        trouble.append(f"the rows ran on different cards ({named}): times and speeds compare these, too")
    curves = list(by_row.values())
    baseline = _baseline(study, done)
    base = list(by_row).index(baseline) if baseline else 0
    drawn = [curve for row, curve in by_row.items() if row in (study.drawn or study.attentions)]
    shared = study.runs_per_device > 1
    draw(drawn or curves, [folder / f"curves.{kind}" for kind in ("png", "svg", "pdf")], timed=not shared)
    reached = time_to_loss(curves, base)
    rows = _losses(study, done, by_row, hardware)
    with write_errors(folder / "summary.json"):
        write_json(folder / "summary.json", {"rows": rows, "time_to_loss": reached})
    note = caption(curves).replace("\n", " ")
    if shared:
        note += f" {study.runs_per_device} runs shared a GPU at a time: their times are left out."
    axes = "tokens and steps" if shared else "time, tokens and steps"
    parts = [f"## Loss\n\n![Loss against {axes}](curves.png)\n\n{note}"]
    parts.append(_loss_table(study, rows).text(markdown=True))
    if not shared:
        table = format_table(reached, curves[base].label)
        parts.append(f"## Time to a loss\n\n```\n{table}\n```")
    if any(run.is_done() for run in tried):
        parts.append(_section(_rates_table(study, tried, done)))
    return parts


def _losses(
    study: Study, done: Sequence[StudyRun], curves: dict[str, Curve], hardware: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The numbers of each row that has a finished run: losses, what they are less those of the rows in
    `against`, speed, and the loss at equal time.
    """
    common = min(float(curve.val[-1, 1]) for curve in curves.values())
    rows: list[dict[str, Any]] = []
    for row in study.attentions:
        if row not in curves:
            continue
        curve, mine = curves[row], [run for run in done if run.row == row]
        losses: list[Any] = [run.loss for run in mine]  # numbers, as they are done
        here = cards(curve.hardware)
        alike = [run for run in mine if cards(hardware.get(run.name, {})) == here]
        lines = [line for run in alike for line in read_metrics(run.folder) if line.get("kind") == "train"]
        rows.append(
            {
                "row": row,
                "attention": curve.attention,
                "parameters": _parameters(mine[0]),
                "rate": mine[0].recipe.train.learning_rate,
                "seeds": len(mine),
                "of_seeds": [run.seed for run in mine],
                "losses": losses,
                "loss": statistics.mean(losses),
                "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
                "loss_at_equal_time": _at(curve, common),
                "equal_time": common,
                "train_time": float(curve.val[-1, 1]),
                "tokens_per_second": _median([x for line in lines if (x := line.get("tokens_per_second"))]),
                "mfu": _median([line["mfu"] for line in lines if line.get("mfu") is not None]),
                "cards": curve.hardware.get("world_size", 1),
                "card": curve.hardware.get("name"),
            }
        )
    compared = study.against or (_baseline(study, done),)
    for one in rows:
        others = (other for other in rows if other["row"] in compared and other is not one)
        one["less"] = {other["row"]: _difference(one["losses"], other["losses"]) for other in others}
    return rows


def _difference(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Of the means, and its standard error: each row has a variance of its own (Welch); None of one seed."""
    error = None
    if len(losses) > 1 and len(others) > 1:
        error = math.sqrt(sum(statistics.variance(x) / len(x) for x in (losses, others)))
    return statistics.mean(losses) - statistics.mean(others), error


def _parameters(run: StudyRun) -> int:
    with torch.device("meta"):
        return GPT(model_config(run.recipe)).num_parameters()


def _at(curve: Curve, seconds: float) -> float | None:
    """The validation loss after so much training, linear between validations; None before the first, and of
    a single one.
    """
    times, losses = curve.val[:, 1], curve.val[:, 2]
    return float(np.interp(seconds, times, losses)) if len(times) > 1 and seconds >= times[0] else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _loss_table(study: Study, rows: list[dict[str, Any]]) -> Table:
    compared = [row["row"] for row in rows if any(row["row"] in other["less"] for other in rows)]
    body = []
    for row in rows:
        loss = f"{row['loss']:.4f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.4f}")
        less = [_signed(row["less"].get(name)) for name in compared]
        cells = [row["row"], count(row["parameters"]), f"{row['rate']:g}", str(row["seeds"]), loss, *less]
        body.append(cells + (_speed(row) if study.runs_per_device == 1 else []))
    head = ["Row", "Parameters", "Rate", "Seeds", "Validation loss", *(f"less {name}'s" for name in compared)]
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


def _signed(difference: tuple[float, float | None] | None) -> str:
    if difference is None:
        return DASH
    text = f"{difference[0]:+.4f}".replace("-", "−")
    return text if difference[1] is None else f"{text} ± {difference[1]:.4f}"


def _speed(row: dict[str, Any]) -> list[str]:
    equal = DASH if row["loss_at_equal_time"] is None else f"{row['loss_at_equal_time']:.4f}"
    used = DASH if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    speed, paper = DASH, DASH
    if tokens := row["tokens_per_second"]:
        speed, seconds = f"{tokens:,.0f}", PAPER_TOKENS / (PAPER_CARDS * tokens / row["cards"])
        paper = DASH if "CPU" in str(row["card"]) else duration(seconds)
    return [equal, duration(row["train_time"]), speed, used, paper]


def _rates_table(study: Study, tried: Sequence[StudyRun], done: Sequence[StudyRun]) -> Table:
    chosen, left = chosen_rates(tried), not_over(tried)
    rows = []
    notes = [
        f"Validation loss after {count(study.rate_tokens)} tokens, one seed; – not finished, or not finite."
    ]
    for row in study.attentions:
        losses = {
            run.options["train.learning_rate"]: run.loss for run in tried if run.row == row and run.is_done()
        }
        cells = [DASH if losses.get(r) is None else f"{losses[r]:.4f}" for r in study.rates]
        none = DASH if row in left else "the recipe's"  # all have diverged
        rows.append([row, *cells, f"{chosen[row]:g}" if row in chosen else none])
        used = next((run.recipe.train.learning_rate for run in done if run.row == row), None)
        if used is not None and row in chosen and used != chosen[row]:
            notes.append(f"{row}'s runs were begun with {used:g}, and keep it.")
    head = ["Row", *(f"{rate:g}" for rate in study.rates), "Chosen"]
    return Table("Learning rates", head, rows, notes)


def _mqar(folder: Path) -> list[str]:
    text = folder / "mqar" / "mqar.md"
    if not text.exists():
        return []
    return [
        "## Associative recall (MQAR)\n\n![MQAR](mqar/mqar.png)\n\n"
        + text.read_text(encoding="utf-8").strip()
    ]


def _limits(study: Study, runs: Sequence[StudyRun], tuned: bool) -> str:
    """What follows from the study's size alone."""
    source = runs[0].recipe.data.source
    lines = [
        f"{count(study.tokens)} tokens a run; the paper's recipe has 3 B. What leads here may not lead there."
    ]
    if study.seeds == 1:
        lines.append("One seed: differences smaller than what another seed would change mean nothing.")
    else:
        lines.append(f"{study.seeds} seeds: enough to see the order of the noise, not to measure it well.")
    if source != "wiki40b":
        lines.append(f"The text is not Wiki-40B but {Path(source).name}.")
    if not tuned:
        own = any("train.learning_rate" in options for options in study.attentions.values())
        all_rows = "all rows that give none of their own" if own else "all"
        lines.append(f"The learning rate is the recipe's for {all_rows}; none was tuned.")
    if study.limit:
        lines.append(f"Of each benchmark only the first {study.limit} documents were asked.")
    return "## What these runs cannot tell\n\n" + "\n".join(f"- {line}" for line in lines)


def _how(records: dict[str, dict[str, Any]]) -> str:
    """Machine, versions, source, from the records of the runs; restarts are said."""
    if not records:
        return ""
    lines = list(dict.fromkeys(map(_made_with, records.values())))
    if len(lines) > 1:
        lines = ["The runs were not all made alike:", *lines]
    again = [f"{name} ({len(found['earlier'])}×)" for name, found in records.items() if found.get("earlier")]
    if again:
        lines.append(f"Stopped and resumed: {', '.join(again)}; the losses go on as if they had not been.")
    return "## How it was made\n\n" + "\n\n".join(
        [*lines, "`lingpt study` wrote this page; `study.json` has the study."]
    )


def _made_with(record: dict[str, Any]) -> str:
    """Card, versions and source of one run."""
    hardware, versions, git = (record.get(key) or {} for key in ("hardware", "versions", "git"))
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    source = f"LinGPT at {git['revision'][:12]}" if git.get("revision") else "LinGPT outside of git"
    source += f", source {record['source']}" if record.get("source") else ""
    return f"{hardware.get('name', 'unknown hardware')}, {hardware.get('precision')}; {packages}; {source}."


def _records(runs: Sequence[StudyRun], trouble: list[str]) -> dict[str, dict[str, Any]]:
    """Run → what it was made with, of those that say; `trouble` gets a line on each that cannot be read."""
    records = {}
    for run in runs:
        path = run.folder / ENVIRONMENT
        if not path.exists():
            continue
        try:
            record = read_json_object(path)
            if wrong := _mistyped(record, _RECORD):
                raise UserError(f"{path} is damaged: {wrong} has no value of its type")
            records[run.name] = record
        except UserError as error:
            trouble.append(f"what {run.name} was made with: {error}")
    return records


def _mistyped(values: dict[str, Any], kinds: dict[str, Any]) -> str | None:
    """The first of these keys, such as `hardware.name`, whose value is of another type, or 0; what is not
    said is of no type."""
    for key, kind in kinds.items():
        value = values.get(key)
        if value is None:
            continue
        expected = dict if isinstance(kind, dict) else kind
        if not isinstance(value, expected) or value == 0:
            return key
        if expected is dict and (inner := _mistyped(value, kind)):
            return f"{key}.{inner}"
    return None
