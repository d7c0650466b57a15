"""The paper's Table 2 with our scores next to it, and what a reader needs to judge them.

Besides the accuracies: their length-normalised form if lm-eval has both, the paired differences to softmax
over the same questions, chance, parameters and tokens of each run, and how many prompts did not fit.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lingpt.common.files import write_errors, write_json, write_text
from lingpt.common.format import scaled_count
from lingpt.common.run_folder import attention_label
from lingpt.eval.comparability import MARK, MajoritySetup, prompt_setup
from lingpt.eval.paired import Difference, SeedDifference, paired_difference
from lingpt.eval.results import DASH, percent, signed_difference, task_key
from lingpt.eval.seeds import seeds, seeds_note, shared_seeds, with_shared_seed
from lingpt.eval.tables import Table, draw_tables

# (column heading, task, number of examples). The only copy of the paper at hand heads two columns ARC-E and
# does not say how they differ.
COLUMNS = (
    ("MMLU (0-shot)", "mmlu", 0),
    ("MMLU (5-shot)", "mmlu", 5),
    ("PIQA", "piqa", 0),
    ("ARC-C", "arc_challenge", 0),
    ("ARC-E", "arc_easy", 0),
    ("ARC-E", "arc_easy", 0),
)
# Attention: the paper's name and accuracies in per cent (Table 2; Pythia-1.4B, English Wiki-40B, N = 8192).
PAPER = {
    "softmax": ("Regular Attention", (22.10, 23.04, 69.18, 33.83, 61.12, 60.34)),
    "gla": ("Gated LA", (21.15, 22.27, 65.38, 30.52, 57.73, 58.12)),
    "ours": ("Our LA", (21.16, 25.90, 68.63, 32.43, 59.95, 59.08)),
}
PAPER_RUN = ("paper, Pythia-1.4B", "1.4 B", "3 B")
CHANCE = (25, 25, 50, 25, 25, 25)  # a few ARC questions have three or five answers
NOTES = (
    "Accuracy in per cent, ± one standard error; – not evaluated.",
    "The paper heads two columns ARC-E without saying how they differ; our one ARC-Easy score is in both.",
)
DIFFERENCE_NOTE = (
    "Difference: accuracy minus softmax's of the same model, in points, over the same questions, with the "
    "[95 % interval] of a paired bootstrap or, of several seeds, ± a standard error over questions, paired, "
    "and seeds."
)
CUT_NOTE = f"{MARK} of the two runs one had its prompts cut to another length, or not at all."


def table2(results: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """The tables of `table2_tables` below each other.

    Args:
        results: what `evaluate` returned for each checkpoint.
        markdown: Markdown tables instead of those for the terminal.
    """
    main, *others = table2_tables(results)
    return "\n\n".join(
        [main.text(markdown), *(f"{table.title}\n\n{table.text(markdown)}" for table in others)]
    )


def table2_tables(results: Sequence[dict[str, Any]]) -> list[Table]:
    """Table 2; then normalised accuracies and paired differences, if there are any."""
    tables = [_accuracies(results), _normalised(results), _differences(results)]
    return [table for table in tables if table.rows]


def save_table2(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes table2.md, .json, .tex and .png into `folder`; returns their paths."""
    tables, paths = (
        table2_tables(results),
        [folder / f"table2.{kind}" for kind in ("md", "json", "tex", "png")],
    )
    with write_errors(folder):
        write_text(paths[0], "".join(f"{table.section()}\n\n" for table in tables))
        write_json(paths[1], table2_values(results))
        write_text(paths[2], "\n\n".join(table.latex() for table in tables) + "\n")
    draw_tables(tables, paths[3])
    return paths


def table2_values(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All numbers of the tables, not rounded: for each run and column the metrics and the difference."""
    rows = []
    for result in results:
        cells = {}
        for _, task, shots in dict.fromkeys(COLUMNS):
            entry = best_entry(result["scores"], task, shots)
            if entry:
                kept = ("metrics", "documents", "complete", "max_length", "cut_prompts", "prompts", "date")
                less = difference(result, results, task, shots)
                cells[task_key(task, shots)] = {key: entry.get(key) for key in kept} | {
                    "less_softmax": less._asdict() if less else None
                }
        rows.append({"checkpoint": result["checkpoint"], "cells": cells})
    keys = [_column_key(i) for i in range(len(COLUMNS))]
    paper = {name: dict(zip(keys, values, strict=True)) for name, (_, values) in PAPER.items()}
    return {"paper": paper, "chance": dict(zip(keys, CHANCE, strict=True)), "runs": rows}


def _column_key(i: int) -> str:
    """A key for the column: its task, marked for the second of two columns with the same heading."""
    _, task, shots = COLUMNS[i]
    again = " (second column)" if COLUMNS[i] in COLUMNS[:i] else ""
    return f"{task_key(task, shots)}{again}"


def _accuracies(results: Sequence[dict[str, Any]]) -> Table:
    """The paper's rows, each followed by our checkpoints of that attention, then our other attentions."""
    rows, majority = [], MajoritySetup(results)
    # Without any score a checkpoint is a row of dashes; with scores of other suites alone, in their tables.
    shown = [
        r
        for r in results
        if not r["scores"] or any(best_entry(r["scores"], task, n) for _, task, n in COLUMNS)
    ]
    for attention, (name, values) in PAPER.items():
        rows.append([name, *PAPER_RUN, *(f"{value:.2f}" for value in values)])
        ours = [result for result in shown if label(result) == attention]
        rows += [["" if form(r) == attention else form(r), *_our_row(r, majority)] for r in ours]
    for result in sorted(shown, key=label):
        if label(result) not in PAPER:
            rows.append([form(result), *_our_row(result, majority)])
    rows.append(["Chance", "", "", "", *(str(value) for value in CHANCE)])
    notes = [*NOTES, *seeds_note(results), *column_notes(results, majority)]
    head = ["Mechanism", "Run", "Parameters", "Tokens", *(heading for heading, _, _ in COLUMNS)]
    return Table("Table 2 of the paper, and ours", head, rows, notes)


def _our_row(result: dict[str, Any], majority: MajoritySetup) -> list[str]:
    cells = (_cell(result["scores"], task, shots, majority) for _, task, shots in COLUMNS)
    return [*run_cells(result), *cells]


def run_cells(result: dict[str, Any]) -> list[str]:
    """The run's name and step, its parameters and its tokens."""
    about = result["checkpoint"]
    return [_run(result), *(_count(about.get(key)) for key in ("parameters", "tokens"))]


def _count(number: int | None) -> str:
    return DASH if number is None else scaled_count(number)


def _normalised(results: Sequence[dict[str, Any]]) -> Table:
    """Accuracy by log-likelihood per character of the answer, for the tasks for which lm-eval has it."""
    columns = [column for column in dict.fromkeys(COLUMNS) if column[1] != "mmlu"]
    rows, majority = [], MajoritySetup(results)
    for result in results:
        cells = [_cell(result["scores"], task, shots, majority, "acc_norm") for _, task, shots in columns]
        if set(cells) != {DASH}:
            rows.append([form(result), *run_cells(result), *cells])
    if rows:
        rows.append(["Chance", "", "", "", *(str(CHANCE[COLUMNS.index(column)]) for column in columns)])
    head = ["Mechanism", "Run", "Parameters", "Tokens", *(heading for heading, _, _ in columns)]
    notes = ["An answer's log-likelihood is divided by its characters; per cent, ± one standard error."]
    notes += seeds_note(results) + column_notes(results, majority, columns)
    return Table("Length-normalised accuracy (acc_norm)", head, rows, notes)


def _differences(results: Sequence[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(COLUMNS))
    rows, compared = [], []
    for result in results:
        cells = [_signed_cell(result, results, task, shots) for _, task, shots in columns]
        if set(cells) != {DASH}:
            rows.append([form(result), _run(result), *cells])
            compared.append(result)
    head = ["Mechanism", "Run", *(heading for heading, _, _ in columns)]
    notes = [DIFFERENCE_NOTE, *comparison_notes(compared, results), *_partial_notes(results, columns)]
    notes += [CUT_NOTE] if any(MARK in cell for row in rows for cell in row) else []
    return Table("Paired differences to softmax", head, rows, notes)


def difference(
    result: dict[str, Any], results: Sequence[dict[str, Any]], task: str, shots: int
) -> Difference | SeedDifference | None:
    """Difference of a run to its softmax run on one task; None if there is no pair."""
    pair = entries_with_softmax(result, results, lambda scores: best_entry(scores, task, shots))
    return paired_difference(*pair) if pair else None


def entries_with_softmax(
    result: dict[str, Any],
    results: Sequence[dict[str, Any]],
    entry_of: Callable[[dict[str, Any]], dict[str, Any] | None],
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The entries of the run and of its softmax run, which `entry_of` finds in the scores of each; None if
    there is no pair."""
    softmax = softmax_of(result, results)
    if softmax is None or softmax is result:
        return None
    a, b = (entry_of(one["scores"]) for one in with_shared_seed(result, softmax))
    return (a, b) if a and b else None


def softmax_of(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The softmax run of the same model to compare with: the `baseline` that a study names, else softmax
    without options, else any; of several, one with scores of the same tasks, and the most in common of seed,
    tokens and length."""

    def likeness(other: dict[str, Any]) -> tuple[bool, bool, bool, int]:
        same = [about.get(key) == other["checkpoint"].get(key) for key in ("tokens", "seq_len")]
        named = other["checkpoint"].get("baseline", False)
        comparable = bool(result["scores"].keys() & other["scores"].keys())
        return named, form(other) == "softmax", comparable, sum(same) + bool(shared_seeds(result, other))

    about = result["checkpoint"]
    same = [
        r for r in results if label(r) == "softmax" and r["checkpoint"].get("model") == about.get("model")
    ]
    return max(same, key=likeness, default=None)


def comparison_notes(compared: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[str]:
    """Notes on which softmax run of `results` each run is compared with, and whether its seed, number of
    tokens or length differs. compared: the runs with a difference in the table."""
    found: dict[str, list[str]] = {}
    for result in compared:
        softmax = softmax_of(result, results)
        if softmax is None or softmax is result:
            continue
        one, other = result["checkpoint"], softmax["checkpoint"]
        shared = shared_seeds(result, softmax)
        names = {"tokens": "number of tokens", "seq_len": "length"}
        differs = ["seed"] * (not shared)
        differs += [name for key, name in names.items() if one.get(key) != other.get(key)]
        about = f" (of another {' and '.join(differs)})" if differs else ""
        if shared and min(seeds(result), seeds(softmax)) == 1 < max(seeds(result), seeds(softmax)):
            about += f" (its seed {shared[0]} alone)"
        found.setdefault(_run(softmax), []).append(one["run"] + about)
    return [f"Compared with {softmax}: {', '.join(runs)}." for softmax, runs in found.items()]


def signed_points(found: Difference | SeedDifference | None) -> str:
    """The difference in percentage points: `+0.53 [−0.42, +1.47]` or, over several seeds, `+0.53 ± 0.40`.

    An interval or error of 0 says nothing (a single question, or no run alone is right) and is left out.
    """
    if found is None:
        return DASH
    if isinstance(found, SeedDifference):
        error = 100 * found.stderr if found.stderr else None
        return signed_difference((100 * found.mean, error), decimals=2)
    mean, low, high = (signed_difference((100 * value, None), decimals=2) for value in found[:3])
    return mean if found.low == found.high else f"{mean} [{low}, {high}]"


def column_notes(
    results: Sequence[dict[str, Any]],
    majority: MajoritySetup,
    columns: Sequence[tuple[str, str, int]] = COLUMNS,
) -> list[str]:
    """The notes on * and †, and on prompts that were cut. columns: as `COLUMNS`."""
    entries = [
        (f"{heading} of {result['checkpoint']['run']}", best_entry(result["scores"], task, shots))
        for heading, task, shots in dict.fromkeys(columns)
        for result in results
    ]
    return [*_partial_notes(results, columns), *majority.notes(entries), *_cut_notes(results, columns)]


def _partial_notes(results: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, int]]) -> list[str]:
    """Notes on which benchmarks were evaluated in part only, and why."""
    found: dict[str, None] = {}
    for heading, task, shots in dict.fromkeys(columns):
        for entry in (best_entry(result["scores"], task, shots) for result in results):
            if entry and not entry["complete"]:
                files = entry.get("file_rows") or {}
                odd = [
                    f"{file} has {rows:,} rows of {official:,}" for file, (rows, official) in files.items()
                ]
                limit = [f"--limit {entry['limit']}"] if entry.get("limit") else []
                why = ", ".join(odd + limit) or f"{entry['documents']:,} documents"
                found[f"{heading} ({why})"] = None
    return [f"* not the whole benchmark: {'; '.join(found)}."] if found else []


def _cut_notes(results: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, int]]) -> list[str]:
    """A note for each benchmark with prompts that did not fit: how many of how many."""
    headings: dict[tuple[str, int], str] = {}  # a benchmark's first one: it may have several columns
    for heading, task, shots in columns:
        headings.setdefault((task, shots), heading)
    found: dict[str, dict[str, None]] = {}
    for (task, shots), heading in headings.items():
        for result in results:
            entry = best_entry(result["scores"], task, shots)
            if entry and entry.get("cut_prompts") and entry.get("max_length"):
                count, length = f"{entry['cut_prompts']:,} of {entry['documents']:,}", entry["max_length"]
                found.setdefault(heading, {})[f"{count} prompts at {length:,} tokens"] = None
    return [f"{heading}: {'; '.join(texts)} were cut on the left to fit." for heading, texts in found.items()]


def score_table(results: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """Every score of every checkpoint: accuracy, length-normalised accuracy, number of documents."""
    rows = []
    for result in sorted(results, key=label):
        for key, entry in result["scores"].items():
            metrics = [percent(entry["metrics"], metric) for metric in ("acc", "acc_norm")]
            rows.append([form(result), _run(result), key, *metrics, str(entry["documents"])])
    head = ["Attention", "Run", "Task", "acc", "acc_norm", "Documents"]
    return Table("", head, rows).text(markdown)


def best_entry(scores: dict[str, Any], task: str, num_fewshot: int) -> dict[str, Any] | None:
    """The score on the whole benchmark, else on the largest part of it that was evaluated."""
    matching = [e for e in scores.values() if (e["task"], e["num_fewshot"]) == (task, num_fewshot)]
    whole = scores.get(task_key(task, num_fewshot))
    return whole or max(matching, key=lambda entry: entry["documents"], default=None)


def _cell(
    scores: dict[str, Any], task: str, num_fewshot: int, majority: MajoritySetup, metric: str = "acc"
) -> str:
    """The score as `percent` formats it, marked * if it is of part of the benchmark, † if its prompts differ
    from those of most of the column."""
    best = best_entry(scores, task, num_fewshot)
    if best is None or best["metrics"].get(metric) is None:
        return DASH
    return percent(best["metrics"], metric) + marks(best, majority)


def marks(entry: dict[str, Any], majority: MajoritySetup) -> str:
    """The marks * and † of a score, which `column_notes` explains."""
    return ("" if entry["complete"] else "*") + majority.mark(entry)


def _signed_cell(result: dict[str, Any], results: Sequence[dict[str, Any]], task: str, shots: int) -> str:
    """The difference to softmax, marked * if it is of part of the benchmark, † as `CUT_NOTE` says."""
    pair = entries_with_softmax(result, results, lambda scores: best_entry(scores, task, shots))
    found = paired_difference(*pair) if pair else None
    if pair is None or found is None:
        return DASH
    star = "" if pair[0]["complete"] else "*"
    dagger = "" if prompt_setup(pair[0]) == prompt_setup(pair[1]) else MARK
    return signed_points(found) + star + dagger


def label(result: dict[str, Any]) -> str:
    """The attention, as one word."""
    return attention_label(result["checkpoint"]["attention"])


def form(result: dict[str, Any]) -> str:
    """The attention and its options that are not at their defaults: `lingpt.models.attention_form`."""
    return result["checkpoint"]["form"]


def _run(result: dict[str, Any]) -> str:
    about, number = result["checkpoint"], seeds(result)
    return f"{about['run']}, step {about['step']}" + (f", {number} seeds" if number > 1 else "")
