"""Guards Table 2: the paper's values as printed there, ours in the right cells, dashes elsewhere."""

import json
from dataclasses import replace

import pytest

from lingpt.eval.scores import Result, task_key
from lingpt.eval.suite_tables import score_table
from lingpt.eval.table2 import save_table2, table2_tables
from lingpt.eval.tables import Table

from . import conftest


def result(attention, scores, form=None) -> Result:
    """`{(task, shots, limit): (acc, stderr)}` as `evaluate` returns it."""
    sizes = {"step": 300, "parameters": 70_426_624, "tokens": 41_943_040}
    more = {"form": form} if form else {}
    return conftest.result(
        "pythia-70m-run",
        attention,
        {
            task_key(task, shots, limit): conftest.score(
                task,
                num_fewshot=shots,
                metrics={"acc": acc, "acc_stderr": stderr},
                documents=limit or 1000,
                complete=limit is None,
                prompts=None,
            )
            for (task, shots, limit), (acc, stderr) in scores.items()
        },
        **sizes,
        **more,
    )


def table2(results, markdown=False) -> str:
    return table2_tables(results)[0].text(markdown)


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
    assert rows[0] == ["Mechanism", "Run", "Parameters", "Tokens", *tasks]
    paper = ["paper, Pythia-1.4B", "1.4 B", "3 B"]
    assert rows[2:5] == [
        ["Regular Attention", *paper, "22.10", "23.04", "69.18", "33.83", "61.12", "60.34"],
        ["Gated LA", *paper, "21.15", "22.27", "65.38", "30.52", "57.73", "58.12"],
        ["Our LA", *paper, "21.16", "25.90", "68.63", "32.43", "59.95", "59.08"],
    ]


def test_ours_stand_below_the_papers():
    """Each checkpoint under the paper's row of its attention; others after; a limited score marked."""
    rows = cells(table2(RESULTS, markdown=True))
    run = ["pythia-70m-run, step 300", "70.4 M", "41.9 M"]
    assert rows[3] == ["", *run, "–", "25.00 ± 10.00", "60.00*", "–", "–", "–"]  # the larger part of PIQA
    assert rows[6] == ["", *run, "–", "24.53 ± 0.36", "–", "–", "37.12 ± 0.99", "37.12 ± 0.99"]
    assert rows[7] == ["ours-decay", *run, *"––––––"]
    assert rows[8] == ["softmax+ours", *run, "–", "–", "54.32 ± 1.16", "–", "–", "–"]
    assert rows[9][0] == "Chance"
    assert "* not the whole benchmark" in table2(RESULTS)
    assert "* not the whole" not in table2(RESULTS[:1])


def test_forms_of_one_attention_are_told_apart(tmp_path):
    """Guards: three forms of `ours-gated` had the same name; also where the paper has the attention."""
    forms = ["ours-gated", "ours-gated + output_gate", "ours-gated + output_gate + short_conv"]
    results = [result("ours-gated", {("piqa", 0, None): (0.5, 0.1)}, form=form) for form in forms]
    results += [result("ours", {}, form="ours + learnable_b"), result("ours", {}, form="ours")]
    main = table2_tables(results)[0]
    named = [row[0] for row in main.rows]
    assert named[-4:-1] == forms and named[3:5] == ["ours + learnable_b", ""]
    paths = save_table2(results, tmp_path)
    for path, form in ((paths[0], forms[2]), (paths[1], forms[2].replace("_", r"\_")), (paths[2], forms[2])):
        assert form in path.read_text()


@pytest.mark.parametrize("markdown", [True, False])
def test_notes_and_alignment(markdown):
    """The oddity of the paper's columns is said; every line of the table is as wide as the others allow."""
    text = table2(RESULTS, markdown)
    assert "two columns ARC-E" in text
    lines = text.split("\n\n")[0].splitlines()
    column = lines[0].index("Run")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[2:-1])


def test_every_score_is_listed():
    rows = cells(score_table(RESULTS).text(markdown=True))
    assert len(rows) == 2 + 6
    scores = ["arc_easy (0-shot)", "37.12 ± 0.99", "–", "–", "–", "1000"]
    assert ["ours", "pythia-70m-run, step 300", *scores] in rows


def test_the_normalised_accuracies_and_the_prompts_that_were_cut():
    piqa = conftest.score(metrics={"acc": 0.5, "acc_norm": 0.25}, cut_prompts=3, max_length=64)
    main, normalised = table2_tables([replace(result("ours", {}), scores={task_key("piqa", 0): piqa})])
    assert normalised.head[4:] == ["PIQA"] and [row[4] for row in normalised.rows] == ["25.00", "50"]
    assert any("3 of 8 prompts at 64 tokens were cut" in note for note in main.notes)


def test_names_are_shown_as_they_are():
    """Guards: `|` began another cell in Markdown; the mark of a note was the point of a list."""
    table = Table("of $x_$", ["Run $", "of a|b"], [["$y_$", "c|d"]], ["* $z_$"])
    assert table.body(markdown=True).splitlines() == [
        r"| Run $ | of a\|b |",
        "| ----- | ------- |",
        r"| $y_$  | c\|d    |",
    ]
    assert table.body().splitlines()[-1] == "$y_$   c|d"
    assert [table.text(markdown).splitlines()[-1] for markdown in (True, False)] == [r"\* $z_$", "* $z_$"]


def test_three_files(tmp_path):
    """Markdown, JSON with every number, and LaTeX that needs booktabs alone."""
    paths = save_table2(RESULTS, tmp_path)
    assert [path.suffix for path in paths] == [".md", ".tex", ".json"]
    values = json.loads(paths[2].read_text())
    assert values["paper"]["ours"][1] == 25.90 and len(values["runs"]) == len(RESULTS)
    assert values["runs"][0]["cells"]["arc_easy (0-shot)"]["metrics"]["acc"] == 0.3712
    tex = paths[1].read_text()
    assert r"37.12 $\pm$ 0.99" in tex and r"\toprule" in tex and "%" not in tex.replace(r"\%", "")
