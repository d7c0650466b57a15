"""The paper's Table 2 with our scores next to it, and a plain table of every score."""

from collections.abc import Sequence
from typing import Any

from lingpt.common.run_folder import attention_label
from lingpt.eval.results import DASH, percent, task_key

# Column heading and the task (with its number of examples) under it. Two columns are headed
# ARC-E in the only copy of the paper at hand, which does not say how they differ.
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
CHANCE = (25, 25, 50, 25, 25, 25)  # a few ARC questions have three or five answers
NOTES = (
    "Accuracy in per cent, ± one standard error; – not evaluated.",
    "The paper heads two columns ARC-E without saying how they differ; our one ARC-Easy score is in both.",
)
PARTIAL_NOTE = "* on part of the benchmark only (--limit, or a file that is not complete)."


def table2(results: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """The paper's rows, each followed by our checkpoints of that attention, then our other attentions.

    Args:
        results: what `evaluate` returned for each checkpoint.
        markdown: a Markdown table instead of one for the terminal.
    """
    rows = []
    for attention, (name, values) in PAPER.items():
        rows.append([name, "paper, Pythia-1.4B", *(f"{value:.2f}" for value in values)])
        rows += [["", *_our_row(result)] for result in results if _label(result) == attention]
    for result in sorted(results, key=_label):
        if _label(result) not in PAPER:
            rows.append([_label(result), *_our_row(result)])
    rows.append(["Chance", "", *(str(value) for value in CHANCE)])
    partial = any("*" in cell for row in rows for cell in row[2:])
    notes = NOTES + ((PARTIAL_NOTE,) if partial else ())
    head = ["Mechanism", "Run", *(heading for heading, _, _ in COLUMNS)]
    return _render(head, rows, markdown) + "\n\n" + "\n".join(notes)


def score_table(results: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """Every score of every checkpoint: accuracy, length-normalised accuracy, number of documents."""
    rows = []
    for result in sorted(results, key=_label):
        for key, entry in result["scores"].items():
            metrics = [percent(entry["metrics"], metric) for metric in ("acc", "acc_norm")]
            rows.append([_label(result), _run(result), key, *metrics, str(entry["documents"])])
    return _render(["Attention", "Run", "Task", "acc", "acc_norm", "Documents"], rows, markdown)


def _our_row(result: dict[str, Any]) -> list[str]:
    return [_run(result), *(_cell(result["scores"], task, shots) for _, task, shots in COLUMNS)]


def _cell(scores: dict[str, Any], task: str, num_fewshot: int) -> str:
    """The score on the whole benchmark, or on the largest part of it that was evaluated (marked *)."""
    matching = [e for e in scores.values() if (e["task"], e["num_fewshot"]) == (task, num_fewshot)]
    if not matching:
        return DASH
    best = scores.get(task_key(task, num_fewshot)) or max(matching, key=lambda entry: entry["documents"])
    return percent(best["metrics"], "acc") + ("" if best["complete"] else "*")


def _label(result: dict[str, Any]) -> str:
    return attention_label(result["checkpoint"]["attention"])


def _run(result: dict[str, Any]) -> str:
    return f"{result['checkpoint']['run']}, step {result['checkpoint']['step']}"


def _render(head: list[str], rows: list[list[str]], markdown: bool) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    text = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    rule = ["-" * width for width in widths]
    lines = [text[0], rule, *text[1:]]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)
