"""The paper's Table 2 with our scores next to it, and what a reader needs to judge them.

Besides the accuracies: their length-normalised form if lm-eval has both, and the paired differences to
softmax over the same questions.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lingpt.common.files import write_errors, write_json
from lingpt.common.run_folder import attention_label
from lingpt.eval import paper
from lingpt.eval.benchmarks import (
    HEAD,
    Column,
    benchmark_table,
    chance_row,
    cut_notes,
    difference_table,
    run_row,
)
from lingpt.eval.comparison import Marks, mark_notes, pair_with_softmax, paired_difference, seeds_note
from lingpt.eval.scores import Result
from lingpt.eval.tables import Table, save_tables

PRINTED = tuple(Column(head, task, n, chance=str(chance)) for head, task, n, chance in paper.COLUMNS)
COLUMNS = tuple(dict.fromkeys(PRINTED))  # of which the paper prints ARC-E twice
NOTES = (
    "Accuracy in per cent, ± one standard error; – not evaluated.",
    "The paper heads two columns ARC-E without saying how they differ; our one ARC-Easy score is in both.",
)
NORMALISED = "An answer's log-likelihood is divided by its characters; per cent, ± one standard error."


def table2_tables(results: Sequence[Result]) -> list[Table]:
    """Table 2; then normalised accuracies and paired differences, if there are any."""
    by_length = [replace(column, metric="acc_norm") for column in COLUMNS]
    normalised = benchmark_table("Length-normalised accuracy (acc_norm)", by_length, results, NORMALISED)
    tables = [_accuracies(results), normalised, difference_table(COLUMNS, results)]
    return [table for table in tables if table.rows]


def _accuracies(results: Sequence[Result]) -> Table:
    """The paper's rows, each followed by our checkpoints of that attention, then our other attentions."""
    rows, marks = [], Marks(results)
    # Without any score a checkpoint is a row of dashes; with scores of other suites alone, in their tables.
    shown = [r for r in results if not r.scores or any(column.score(r) for column in COLUMNS)]
    for attention, (name, values) in paper.ACCURACIES.items():
        rows.append([name, *paper.RUN, *(f"{value:.2f}" for value in values)])
        for result in shown:
            if attention_label(result.checkpoint.attention) == attention:
                form, *cells = run_row(result, PRINTED, marks)
                rows.append(["" if form == attention else form, *cells])
    others = [r for r in shown if attention_label(r.checkpoint.attention) not in paper.ACCURACIES]
    for result in sorted(others, key=lambda r: attention_label(r.checkpoint.attention)):
        rows.append(run_row(result, PRINTED, marks))
    rows.append(chance_row(PRINTED))
    notes = [*NOTES, *seeds_note(results), *mark_notes(rows), *cut_notes(COLUMNS, results)]
    head = [*HEAD, *(column.heading for column in PRINTED)]
    return Table("Table 2 of the paper, and ours", head, rows, notes)


def save_table2(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes table2.md, .tex and .json into `folder`; returns their paths."""
    values = folder / "table2.json"
    with write_errors(folder):
        write_json(values, table2_values(results))
    return [*save_tables(table2_tables(results), folder, "table2"), values]


def table2_values(results: Sequence[Result]) -> dict[str, Any]:
    """All numbers of the tables, not rounded: for each run and column the metrics and the difference."""
    rows = []
    for result in results:
        cells = {}
        for key, score in filter(None, (column.find(result) for column in COLUMNS)):
            pair = pair_with_softmax(result, results, key)
            less = paired_difference(*pair) if pair else None
            kept = ("metrics", "documents", "complete", "max_length", "cut_prompts", "prompts", "date")
            cells[key] = {name: getattr(score, name) for name in kept}
            cells[key]["less_softmax"] = asdict(less) if less else None
        about = asdict(result.checkpoint) | {"seed": result.seeds}
        rows.append({"checkpoint": about, "cells": cells})
    columns = [
        {"heading": column.heading, "task": column.task, "num_fewshot": column.shots} for column in PRINTED
    ]
    accuracies = {name: values for name, (_, values) in paper.ACCURACIES.items()}
    return {"columns": columns, "paper": accuracies, "chance": [c.chance for c in PRINTED], "runs": rows}
