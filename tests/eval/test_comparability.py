"""Guards that a score whose prompts differ from the others of its column is marked."""

import pytest

from lingpt.eval.results import pack_bits
from lingpt.eval.suite_tables import suite_tables
from lingpt.eval.table2 import table2_tables

PIQA = {"task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
PIQA |= {"metrics": {"acc": 0.5, "acc_norm": 0.25}, "correct": {"acc": pack_bits([True, False] * 4)}}


def results(entry, change):
    """Three runs with this score; that of the last, of ours, has the `change`."""
    about = {"step": 4, "model": "demo", "path": "x", "parameters": 1, "tokens": 1, "seed": 0}
    key = f"{entry['task']} ({entry['texts']})" if "texts" in entry else entry["task"]
    return [
        {"checkpoint": about | {"run": name, "attention": name, "form": name}, "scores": {key: score}}
        for name, score in (("softmax", entry), ("gla", entry), ("ours", entry | change))
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompts": "q"}, "other questions"),
        ({"cut_prompts": 3, "max_length": 512}, "prompts cut to 512 tokens"),
        ({"max_length": 512, "cut_prompts": 0}, None),  # all fit: the same prompts
        ({"documents": 4, "complete": False, "prompts": "half"}, None),  # which has its *
    ],
)
def test_a_benchmark_with_other_prompts(change, why):
    """In Table 2, its normalised form, and the difference to softmax where that is of the same prompts."""
    tables = {table.title.split()[0]: table for table in table2_tables(results(PIQA, change))}
    for name in ("Table", "Length-normalised"):
        column = tables[name].head.index("PIQA")
        marked = [row[1] for row in tables[name].rows if row[column].endswith("†")]
        assert marked == (["ours, step 4"] if why else [])
        notes = [note for note in tables[name].notes if note.startswith("†")]
        assert notes == (
            [f"† not comparable with the rest of the column: PIQA of ours ({why})."] if why else []
        )
    less = {row[0]: row[tables["Paired"].head.index("PIQA")] for row in tables["Paired"].rows}
    cut = "cut_prompts" in change and change["cut_prompts"] > 0
    assert less["ours"].endswith("†") == cut if "ours" in less else "prompts" in change
    assert any("† of the two runs one had its prompts cut" in note for note in tables["Paired"].notes) == cut
    assert "†" not in less["gla"] and (r"$\dagger$" in tables["Table"].latex()) == bool(why)


def test_rows_that_are_cut_alike_are_not_marked():
    """And where the one is cut that most are not, or the other way round, it is the one that is marked."""
    cut = PIQA | {"cut_prompts": 3, "max_length": 512}
    assert "†" not in table2_tables(results(cut, {}))[0].text()
    (note,) = [n for n in table2_tables(results(cut, {"cut_prompts": 0}))[0].notes if n.startswith("†")]
    assert note.endswith("PIQA of ours (no prompt cut).")


@pytest.mark.parametrize(
    ("entry", "change", "column", "why"),
    [
        (
            {"task": "bits_per_byte", "metrics": {"bits_per_byte": 1.0, "xz_bits_per_byte": 2.0}},
            {"max_length": 512},
            "novels",
            "512 tokens a piece",
        ),
        (
            {"task": "loss_by_position", "metrics": {}, "train_length": 64}
            | {"positions": [{"to": 32, "loss": 4.0}]},
            {"train_length": 32, "prompts": "q"},
            "Documents",
            "32 tokens a piece, other pieces",
        ),
        (
            {"task": "recall_phrases", "metrics": {"acc": 0.5, "acc_alone": 0.2, "exact": 0.1}},
            {"prompts": "q"},
            "Questions",
            "other pieces",
        ),
        (
            {"task": "hellaswag", "metrics": {"acc_norm": 0.5}},
            {"cut_prompts": 1, "max_length": 512},
            "HellaSwag",
            "prompts cut to 512 tokens",
        ),
    ],
    ids=lambda value: value.get("task", "") if isinstance(value, dict) else "",
)
def test_a_suite_with_other_prompts(entry, change, column, why):
    """Guards: bits per byte of windows of 512 tokens beside those of 2,048, say, without a word."""
    entry = {"num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p", "max_length": 2048} | entry
    entry |= {} if entry["task"] == "hellaswag" else {"texts": "novels"}
    for changes, marked in (({}, []), (change, ["ours"])):
        table = suite_tables(results(entry, changes))[0]
        cells = {row[0]: row[table.head.index(column)] for row in table.rows}
        assert [name for name, cell in cells.items() if cell.endswith("†")] == marked
        heading = column if entry["task"] == "hellaswag" else "novels"
        said = f"† not comparable with the rest of the column: {heading} of ours ({why})."
        assert (said in table.notes) == bool(marked)
