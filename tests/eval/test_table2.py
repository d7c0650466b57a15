"""Guards Table 2: the paper's values as printed there, ours in the right cells, dashes elsewhere."""

import pytest

from lingpt.eval import score_table, table2
from lingpt.eval.results import task_key


def result(attention, scores, step=300):
    """`{(task, shots, limit): (acc, stderr)}` as `evaluate` returns it."""
    return {
        "checkpoint": {"run": "pythia-70m-run", "attention": attention, "step": step},
        "scores": {
            task_key(task, shots, limit): {
                "task": task,
                "num_fewshot": shots,
                "metrics": {"acc": acc, "acc_stderr": stderr},
                "documents": limit or 1000,
                "complete": limit is None,
            }
            for (task, shots, limit), (acc, stderr) in scores.items()
        },
    }


def cells(table):
    return [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]


RESULTS = [
    result("ours", {("arc_easy", 0, None): (0.3712, 0.0099), ("mmlu", 5, None): (0.2453, 0.0036)}),
    result(["softmax", "ours"], {("piqa", 0, None): (0.5432, 0.0116)}),
    result(
        "softmax", {("piqa", 0, 50): (0.6, None), ("piqa", 0, 10): (0.9, 0.1), ("mmlu", 5, None): (0.25, 0.1)}
    ),
    result("ours-decay", {}),
]


def test_the_papers_values():
    """Table 2 as it stands in the paper, column by column, two of them headed ARC-E."""
    rows = cells(table2([], markdown=True))
    tasks = ["MMLU (0-shot)", "MMLU (5-shot)", "PIQA", "ARC-C", "ARC-E", "ARC-E"]
    assert rows[0] == ["Mechanism", "Run", *tasks]
    assert rows[2:5] == [
        ["Regular Attention", "paper, Pythia-1.4B", "22.10", "23.04", "69.18", "33.83", "61.12", "60.34"],
        ["Gated LA", "paper, Pythia-1.4B", "21.15", "22.27", "65.38", "30.52", "57.73", "58.12"],
        ["Our LA", "paper, Pythia-1.4B", "21.16", "25.90", "68.63", "32.43", "59.95", "59.08"],
    ]


def test_ours_stand_below_the_papers():
    """Each checkpoint under the paper's row of its attention; others after; a limited score marked."""
    rows = cells(table2(RESULTS, markdown=True))
    run = "pythia-70m-run, step 300"
    assert rows[3] == ["", run, "–", "25.00 ± 10.00", "60.00*", "–", "–", "–"]  # the larger part of PIQA
    assert rows[6] == ["", run, "–", "24.53 ± 0.36", "–", "–", "37.12 ± 0.99", "37.12 ± 0.99"]
    assert rows[7] == ["ours-decay", run, *"––––––"]
    assert rows[8] == ["softmax+ours", run, "–", "–", "54.32 ± 1.16", "–", "–", "–"]
    assert rows[9][0] == "Chance"
    assert "* on part of the benchmark" in table2(RESULTS)
    assert "* on part" not in table2(RESULTS[:1])


@pytest.mark.parametrize("markdown", [True, False])
def test_notes_and_alignment(markdown):
    """The oddity of the paper's columns is said; every line of the table is as wide as the others allow."""
    text = table2(RESULTS, markdown)
    assert "two columns ARC-E" in text
    lines = text.split("\n\n")[0].splitlines()
    column = lines[0].index("Run")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[2:-1])


def test_every_score_is_listed():
    rows = cells(score_table(RESULTS, markdown=True))
    assert len(rows) == 2 + 6
    assert ["ours", "pythia-70m-run, step 300", "arc_easy (0-shot)", "37.12 ± 0.99", "–", "1000"] in rows
