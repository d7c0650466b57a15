"""Guards the page of a study: what its runs have is shown, what they lack is named, a person's text stays."""

import json
import re
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.study import stages
from lingpt.study.page import MARKER
from lingpt.study.runs import StudyRun
from lingpt.tests.study.tiny import (
    COMMAND,
    FOLDER,
    PAGE,
    PIQA,
    fake_run,
    tiny_study,
    write_scores,
    write_tiny,
)

SCORES = "eval/step-00000004.json"


def page_of_the_study(*more: str) -> str:
    assert main([*COMMAND, "--stages", "page", *more]) == 0
    return PAGE.read_text()


def write_record(name: str, record) -> None:
    (FOLDER / name / "environment.json").write_text(json.dumps(record))


def edit_metrics(name: str, old: str, new: str) -> None:
    metrics = FOLDER / name / "metrics.jsonl"
    metrics.write_text(re.sub(old, new, metrics.read_text()))


def rows_of_summary() -> list[dict]:
    return json.loads((FOLDER / "summary.json").read_text())["rows"]


def test_what_goes_wrong_is_named_and_the_rest_is_shown(here, capsys):
    """A run missing, unfinished, diverged, of another attention; scores damaged: a line each, on the page and
    on the terminal."""
    write_tiny(attentions=["softmax", "ours", "gla", "ours-decay", "ours-gated"], mqar={})
    fake_run("softmax-seed0")
    fake_run("ours-seed0", steps=3)
    fake_run("gla-seed0", last={"kind": "diverged", "step": 4, "tokens": 512, "train_time": 4.0})
    fake_run("ours-gated-seed0", "ours")
    damaged = FOLDER / "softmax-seed0" / SCORES
    damaged.parent.mkdir()
    damaged.write_text("{")
    page = page_of_the_study()
    printed = capsys.readouterr().out
    left_out = page.partition("## Not in the tables\n")[2].partition("\n## ")[0]
    for line in (
        "ours-seed0: unfinished, at step 3 of 4",
        "gla-seed0: diverged at step 4, its loss was not finite",
        "ours-decay-seed0: not trained",
        "MQAR: not trained",
        "ours-gated-seed0: trained otherwise .* .model.attention: ours → ours-gated.: give",
        "step-00000004.json is damaged",
    ):
        assert len(re.findall(rf"^- .*{line}", left_out, re.M)) == 1
        assert len(re.findall(rf"^not in the tables: .*{line}", printed, re.M)) == 1
    assert re.search(r"\| softmax \| \S+ k +\| 0.003 +\| 0 +\| 4.0000", page) and not here


def test_what_a_person_wrote_stays(here, capsys):
    """The page is written anew below its marker alone; a README.md of another kind is not overwritten."""
    write_tiny(suites=[], attentions=["softmax"])
    fake_run("softmax-seed0")
    page = page_of_the_study()
    assert page.startswith(f"# Study tiny\n\n{MARKER}\n\nA test.\n\n## Setting\n")
    PAGE.write_text(page.replace(MARKER, f"Softmax wins.\n\n{MARKER}").replace("0.003", "0.004"))
    assert page_of_the_study() == page.replace(MARKER, f"Softmax wins.\n\n{MARKER}")
    PAGE.write_bytes("größer".encode("latin-1"))
    assert main([*COMMAND, "--stages", "page"]) == 2
    line = capsys.readouterr().err.strip()
    assert "README.md is not UTF-8" in line and line.endswith("save it as UTF-8") and "\n" not in line
    PAGE.write_text("# Mine\n")
    assert main([*COMMAND, "--stages", "page"]) == 2 and PAGE.read_text() == "# Mine\n"
    assert "README.md is not a study's page" in capsys.readouterr().err


def test_the_setting_has_all_that_the_runs_were_made_with(here):
    """Guards: four passes over a small corpus that looked like as much text; times and versions of two
    machines under the name of the last; rows on different cards as if they were on one."""
    rows = {"softmax": {}, "wide": {"model.attention": "softmax", "model.intermediate_size": 96}}
    write_tiny(suites=[], attentions=rows)
    fake_run("softmax-seed0"), fake_run("wide-seed0")
    first = {"hardware": {"name": "NVIDIA A100", "world_size": 8}, "versions": {"torch": "2.9.0"}}
    last = {"hardware": {"name": "NVIDIA H200", "precision": "bf16-mixed"}, "versions": {"torch": "2.11.0"}}
    first, last = first | {"git": None, "source": "a1"}, last | {"git": {"revision": "b2"}, "source": "c3"}
    write_record("softmax-seed0", last | {"data": {"train": {"tokens": 150}}, "earlier": [first, 3]})
    page = page_of_the_study()
    for line in (
        "Model: demo",
        "Rows: softmax; wide (`--model.attention=softmax --model.intermediate_size=96`)",
        "Tokens a run: 512: 4 steps of 128; 3.4 passes over the text",
        "Sequence length: 32",
        "Text: train.jsonl",
        "Hardware: 1 × NVIDIA H200, bf16-mixed; 8 × NVIDIA A100",
        "Software: torch 2.11.0; torch 2.9.0",
        "Source: b2; a1",
    ):
        assert f"- {line}\n" in page
    assert re.search(r"^\| softmax .* 1 × NVIDIA H200 \|$", page, re.M)
    assert re.search(r"^\| wide .* – +\|$", page, re.M)


@pytest.mark.parametrize(
    "record",
    [
        {"hardware": "H200"},
        {"hardware": {"name": 3, "precision": []}, "versions": ["torch"], "earlier": 3},
        {"data": {"train": {"tokens": "many"}, "fingerprint": []}, "earlier": [3, None]},
        [],
    ],
)
def test_an_odd_record_does_not_matter(here, record):
    """Guards: one value of another type in an environment.json was a traceback instead of a page."""
    write_tiny(suites=[], attentions=["softmax"])
    fake_run("softmax-seed0")
    write_record("softmax-seed0", record)
    page = page_of_the_study()
    assert re.search(r"^\| softmax \|.* 4\.0000", page, re.M) and "passes" not in page
    assert ("made with: " in page) == (record == [])


@pytest.mark.parametrize("other", ["card", "data"])
def test_seeds_that_are_not_alike_are_said_to_be(here, other):
    """Guards: times of one card beside the speed of two; the mean of two texts."""
    write_tiny(seeds=2, suites=[], attentions=["softmax"])
    for seed in range(2):
        fake_run(f"softmax-seed{seed}")
        card = f"H{1 + seed}00" if other == "card" else "H100"
        text = f"1f{seed}" if other == "data" else "1f0"
        write_record(f"softmax-seed{seed}", {"hardware": {"name": card}, "data": {"fingerprint": text}})
    edit_metrics("softmax-seed1", "128.0", "64.0")
    edit_metrics("softmax-seed1", '"loss": 4.0', '"loss": 5.0')
    page = page_of_the_study()
    notes = page.partition("## Notes\n")[2].partition("\n## ")[0]
    assert "- the seeds of softmax differ in cards, data or settings: curve and times are softmax-" in notes
    assert ("the runs were trained on different data: 1f0, 1f1" in notes) == (other == "data")
    assert (rows_of_summary()[0]["seeds"], rows_of_summary()[0]["loss"]) == ([0, 1], 4.5)
    assert rows_of_summary()[0]["tokens_per_second"] == (128.0 if other == "card" else 96.0)


def test_the_rates_that_were_tried_and_used(here):
    """Guards: a table of rates without any, and a row that had begun before its rate was chosen."""
    write_tiny(learning_rates=[1e-3, 3e-3], rate_tokens=256, suites=[], attentions=["softmax", "ours"])
    fake_run("softmax-seed0"), fake_run("ours-seed0")  # both at 0.003
    assert "## Learning rates" not in page_of_the_study()
    for rate in (1e-3, 3e-3):
        fake_run(f"softmax-rate{rate:g}", steps=2)
    edit_metrics("softmax-rate0.001", '"loss": 6.0', '"loss": 5.5')
    table = page_of_the_study().partition("## Learning rates\n")[2]
    assert "Validation loss after 256 tokens" in table
    assert re.search(r"^\| softmax \| 5.5000 \| 6.0000 \| 0.001 \| 0.003 \|$", table, re.M)
    assert re.search(r"^\| ours    \| –      \| –      \| –     \| 0.003 \|$", table, re.M)


def test_a_run_without_scores_is_named(here, monkeypatch):
    """Guards: a run that vanished from the scores without a line; the scores of its second step, or of
    another run, under its name; advice to score one whose checkpoint is gone. Scores that come later are no
    trouble."""
    write_tiny(suites=["table2"], tasks=["piqa"], attentions=["softmax", "ours", "gla"])
    for row in ("softmax", "ours", "gla"):
        fake_run(f"{row}-seed0")
    assert "Table 2" not in page_of_the_study()
    for step in (2, 4, 8):
        write_scores("softmax-seed0", step, **{"piqa (0-shot)": PIQA})
    write_scores("ours-seed0", 2, **{"piqa (0-shot)": PIQA})
    write_scores("gla-seed0", 4, "softmax", **{"piqa (0-shot)": PIQA})
    scores = FOLDER / "gla-seed0" / SCORES
    of_another = f"gla-seed0/{SCORES} has scores of {{}}: remove it to score gla-"
    assert of_another.format("gla-seed0 (softmax)") in page_of_the_study()
    scores.write_text(scores.read_text().replace("softmax", "gla").replace("gla-seed0", "softmax-seed0"))
    text = page_of_the_study()
    again = "its checkpoint is not here or not whole: remove the folder of the run to train it again"
    assert f"- ours-seed0: no scores of the last step, and {again}\n" in text
    assert of_another.format("softmax-seed0 (gla)") in text
    assert "softmax-seed0, step 4" in text and not re.search("step (2|8)|gla-seed0, step", text)
    (FOLDER / "ours-seed0" / SCORES).write_text("{")
    assert f"ours-seed0/{SCORES} is damaged, and {again}\n" in page_of_the_study()
    monkeypatch.setattr(StudyRun, "has_weights", lambda run: True)
    assert "`lingpt eval` scores again" in page_of_the_study()
    write_scores("ours-seed0", 4)
    assert "- ours-seed0: no scores of the last step\n" in page_of_the_study()
    assert main([*COMMAND, "--stages", "runs", "page"]) == 0
    assert "- ours-seed0: no scores" not in PAGE.read_text()
    monkeypatch.setattr(stages, "check_scoring", lambda *_: None)
    monkeypatch.setattr(stages, "run_jobs", lambda *_: [])
    assert main([*COMMAND, "--stages", "runs", "scores", "page"]) == 0
    assert "- ours-seed0: no scores of the last step\n" in PAGE.read_text()


@pytest.mark.parametrize(
    "content",
    [
        *('{"checkpoint": ', "[3]"),
        *({"task": 3}, {"metrics": {"acc": "high"}}, {"correct": {"acc": "!"}}),
        *({"documents": 10**400}, {"num_fewshot": 10**400}),
    ],
    ids=lambda content: str(content)[:40],
)
def test_an_odd_result_file_is_named_and_the_rest_is_shown(here, content):
    """Guards: a file of another version, hand-edited or cut short was a traceback instead of a page."""
    write_tiny(suites=["table2"], attentions=["ours", "softmax"])
    fake_run("softmax-seed0"), fake_run("ours-seed0")
    write_scores("softmax-seed0", 4, **{"piqa (0-shot)": PIQA})
    odd = PIQA | content if isinstance(content, dict) else PIQA
    write_scores("ours-seed0", 4, **{"piqa (0-shot)": odd})
    if isinstance(content, str):
        (FOLDER / "ours-seed0" / SCORES).write_text(content)
    page = page_of_the_study()
    assert page.count(f"ours-seed0/{SCORES}") == 1
    assert "softmax-seed0, step 4" in page and "50.00 ± 10.00" in page and "ours-seed0, step 4" not in page


def test_tables_of_an_earlier_page_do_not_stay(here):
    """Guards: the picture of scores that are gone, still on the page; tables of a suite that the study no
    longer has, still published."""
    same = PIQA | {"task": "bits_per_byte", "texts": "words"}
    bits = same | {"metrics": {"bits_per_byte": 1.5, "xz_bits_per_byte": 2.5}}
    positions = same | {"task": "loss_by_position", "train_length": 32, "metrics": {}}
    positions |= {"positions": [{"from": 0, "to": 32, "loss": 4.0, "stderr": 0.1}]}
    every = {"piqa (0-shot)": PIQA, "bits_per_byte (words)": bits, "loss_by_position (words)": positions}

    def written(suites, *keys):
        write_tiny(attentions=["softmax"], suites=suites)
        write_scores("softmax-seed0", 4, **{key: every[key] for key in keys})
        shown = "positions.png" in page_of_the_study()
        found = {path.stem for path in FOLDER.iterdir()} & {"table2", "suites", "positions"}
        assert shown == ("positions" in found)
        return found

    write_tiny(attentions=["softmax"])
    fake_run("softmax-seed0")
    assert written(["table2", "language"], *every) == {"table2", "suites", "positions"}
    assert written(["language"], "bits_per_byte (words)") == {"suites"}
    assert written(["language"]) == set()


def test_a_row_whose_first_validation_is_too_late_has_no_loss_at_equal_time(here):
    """Guards: the loss of a later time stood there as that at equal time."""
    write_tiny(suites=[], attentions=["softmax", "ours"])
    fake_run("softmax-seed0"), fake_run("ours-seed0")
    edit_metrics("ours-seed0", r'"train_time": (\d)', r'"train_time": 1\1')
    page = page_of_the_study()
    assert [row["loss_at_equal_time"] for row in rows_of_summary()] == [4.0, None]
    assert re.search(r"^\| ours .*\| – +\| 14 s", page, re.M)


@pytest.mark.parametrize("baseline", ["softmax", "high"])
def test_all_tables_compare_with_one_softmax(here, baseline):
    """Guards: losses less those of one softmax row, and scores less those of another, of another rate."""
    high = {"model.attention": "softmax", "train.learning_rate": 4e-3}
    rows = {"softmax": {}, "ours": {}, "high": high}
    write_tiny(attentions=rows, suites=["table2"], baselines=[baseline])
    for row, attention in {"softmax": "softmax", "ours": "ours", "high": "softmax"}.items():
        fake_run(f"{row}-seed0", attention, **({"learning_rate": 4e-3} if row == "high" else {}))
        scores = {"piqa (0-shot)": PIQA | {"correct": {"acc": "AA=="}}}
        write_scores(f"{row}-seed0", 4, attention, **scores)
    page = page_of_the_study()
    other = {"softmax": "high", "high": "softmax"}[baseline]
    assert f"minus {baseline}" in page and f"ratio to that of {baseline}" in page
    compared = re.search("^Compared with (.*)-seed0, step 4: (.*)\\.$", page, re.M)
    assert compared[1] == baseline and set(compared[2].split(", ")) == {"ours-seed0", f"{other}-seed0"}


def test_muon_s_own_rate_stands_beside_adamw_s(here):
    """Guards: rows by Muon with the rate of the embeddings alone."""
    muon = {"model.attention": "softmax", "train.optimizer": "muon", "train.muon_learning_rate": 2e-3}
    write_tiny(suites=[], attentions={"softmax": {}, "muon": muon})
    fake_run("softmax-seed0"), fake_run("muon-seed0")
    page = page_of_the_study()
    assert re.search(r"^\| muon .*\| \S+, Muon 0.002 ", page, re.M) and page.count("Muon 0.002") == 1
    assert [row["muon_learning_rate"] for row in rows_of_summary()] == [None, 2e-3]


def test_rows_that_are_trained_alike_are_two_rows(here):
    """Guards: a page that ended in a traceback where two rows differ in what they save alone, or where a
    line of a run has no speed."""
    write_tiny(
        suites=[],
        attentions={"softmax": {}, "again": {"model.attention": "softmax", "train.save_interval": 7}},
    )
    fake_run("softmax-seed0"), fake_run("again-seed0")
    edit_metrics("again-seed0", '"tokens_per_second"', '"speed"')
    edit_metrics(
        "softmax-seed0",
        '7.0, "tokens_per_second": 128.0, "mfu": null',
        '7.0, "tokens_per_second": 1.0, "peak_memory": 2500000000, "mfu": 0.4',
    )
    edit_metrics("softmax-seed0", '6.0, "tok', '6.0, "peak_memory": 1000000000, "tok')  # resumed
    page = page_of_the_study()
    rows = rows_of_summary()
    assert [row["peak_memory"] for row in rows] == [2.5e9, None] and "| 2.5 GB |" in page
    assert (rows[0]["tokens_per_second"], rows[0]["mfu"]) == (128.0, 0.4) and "| 128      | 40.0 % |" in page
    assert [row["row"] for row in rows] == ["softmax", "again"] and rows[1]["tokens_per_second"] is None


def test_rows_are_compared_over_their_seeds(here, pictures, monkeypatch):
    """Mean, standard deviation, the difference to the named rows and its standard error; shared cards have no
    speed, and what is not drawn is in the table all the same.
    """
    keys = {"baselines": ["softmax", "gla"], "plotted_rows": ["gla", "ours"], "runs_per_device": 2}
    write_tiny(seeds=3, attentions=["gla", "ours", "softmax"], row_by_row=True, **keys)
    for row, losses in {"softmax": (4.0, 4.1, 4.2), "gla": (3.9, 3.9, 4.2), "ours": (5.0, 5.0)}.items():
        for seed, loss in enumerate(losses):
            fake_run(f"{row}-seed{seed}")
            edit_metrics(f"{row}-seed{seed}", '"loss": 4.0', f'"loss": {loss}')
    names = [name for _, name, _ in tiny_study().run_names()]
    assert names[:4] == [*(f"gla-seed{i}" for i in range(3)), "ours-seed0"]
    monkeypatch.setattr("lingpt.plots.figures.FORMATS", ("svg",))  # text in it can be read
    page = page_of_the_study()
    assert "| 0, 1, 2 | 4.1000 ± 0.1000 | +0.1000 ± 0.1155 | –                |" in page  # √(0.01/3 + 0.03/3)
    assert "| 0, 1, 2 | 4.0000 ± 0.1732 | –                | −0.1000 ± 0.1155 |" in page
    assert "| 0, 1    | 5.0000 ± 0.0000 | +1.0000 ± 0.1000 | +0.9000 ± 0.0577 |" in page
    assert "Tokens/s" not in page and "Time to a loss" not in page and "ours-seed2: not trained\n" in page
    assert "; gla: mean of 3 seeds, band" in page  # of what is drawn
    picture = (FOLDER / "curves.svg").read_text()
    assert "ours" in picture and "softmax" not in picture and "training time" not in picture


def test_times_and_losses_are_compared_with_the_row_that_is_named(here, capsys):
    """Guards: time to a loss relative to softmax, whatever was asked for. The slower row's loss is taken at
    the time of the fastest."""
    rows = ["gla", "softmax", "ours"]
    write_tiny(attentions=rows, suites=[])
    for row in rows:
        fake_run(f"{row}-seed0")
    for step in (4, 3, 2, 1):
        edit_metrics("ours-seed0", f'"train_time": {step}.0', f'"train_time": {2 * step}.0')
    for baselines, words, compared in [
        ([], [], ["softmax"]),
        ([], ["--baseline", "ours"], ["ours"]),
        (["softmax"], ["--baseline", "ours"], ["ours", "softmax"]),
    ]:
        write_tiny(attentions=rows, suites=[], baselines=baselines)
        text = page_of_the_study(*words)
        assert f"ratio to that of {compared[0]}." in text
        ours, gla = ("1.00", "0.50") if compared[0] == "ours" else ("2.00", "1.00")
        assert re.search(rf"^\| ours .*\({ours}×\) \|$", text, re.M) and f"({gla}×) |" in text
        assert [row["loss_at_equal_time"] for row in rows_of_summary()] == [4.0, 4.0, 6.0]
        reached = json.loads((FOLDER / "summary.json").read_text())["time_to_loss"][-1]
        assert reached["loss"] == 4.0 and f"{reached['runs']['ours']['ratio']:.2f}" == ours
        assert sorted(re.findall(r"minus (\S+)", text)) == sorted(compared)
    capsys.readouterr()
    assert main([*COMMAND, "--stages", "page", "--baseline", "our"]) == 2
    line = "lingpt: unknown baseline 'our' (did you mean 'ours'?): use one of: gla, softmax, ours\n"
    assert capsys.readouterr().err == line
    write_tiny(attentions=[*rows, "ours-decay"], suites=[], baselines=["ours-decay"])  # not trained yet
    text = page_of_the_study()
    assert "ratio to that of softmax." in text and re.findall(r"minus (\S+)", text) == ["softmax"]


def test_a_benchmark_without_a_file_is_in_the_plan_and_on_the_page(here, capsys):
    """Guards: HellaSwag left out with a word on stderr alone."""
    Path("eval").mkdir()
    Path("eval/lambada_openai_test.jsonl").write_text("{}")
    lacks = (
        "wikitext, piqa, hellaswag, winogrande, arc_easy, arc_challenge, copa, sciq, boolq, openbookqa, "
        "social_iqa"
    )
    write_tiny(attentions=["gla", "softmax"], suites=["commonsense"], eval_data="eval")
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    assert f"\nscores  commonsense; eval has no file for {lacks}\n" in capsys.readouterr().out
    fake_run("softmax-seed0"), fake_run("gla-seed0")
    assert "no run has a score" not in page_of_the_study(), "of a task: no run has any"
    lambada = {
        "task": "lambada_openai",
        "metrics": PIQA["metrics"] | {"perplexity": 20.0, "perplexity_stderr": 1.0},
    }
    write_scores("gla-seed0", 4, **{"arithmetic (0-shot)": PIQA | {"task": "arithmetic"}})
    write_scores("softmax-seed0", 4, **{"lambada_openai (0-shot)": PIQA | lambada})
    assert f"- {lacks}: no run has a score\n" in page_of_the_study()
