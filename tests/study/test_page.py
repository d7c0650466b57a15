"""Guards the page of a study: what its runs have is shown, what they lack is named, nothing is claimed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.common.files import write_json
from lingpt.study import read_study
from lingpt.study.page_setting import what_it_cannot_tell
from lingpt.study.runs import RateSearch, StudyRun
from lingpt.tests.study.tiny import COMMAND, TINY, fake_run, write, write_scores


def test_what_goes_wrong_is_named_and_the_rest_is_shown(here, capsys):
    """A run missing, unfinished, diverged, of another attention; scores damaged: a line each, on the page and
    on the terminal."""
    rows = ["softmax", "ours", "gla", "ours-decay", "ours-gated"]
    write(TINY | {"learning_rates": [], "seeds": 1, "attentions": rows, "mqar": {}})
    folder = Path("runs/study-tiny")
    fake_run("softmax-seed0")
    fake_run("ours-seed0", steps=3)
    end = {"kind": "diverged", "step": 4, "tokens": 512, "train_time": 4.0, "skipped": 10}
    fake_run("gla-seed0", last=end)
    fake_run("ours-gated-seed0", "ours")
    damaged = folder / "softmax-seed0" / "eval" / "step-00000004.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page, printed = (folder / "README.md").read_text(), capsys.readouterr().out
    left_out = page.partition("## Not in the tables\n")[2].partition("\n## ")[0]
    for line in (
        "ours-seed0: unfinished, at step 3 of 4",
        "gla-seed0: diverged at step 4, its loss was not finite",
        "ours-decay-seed0: not trained",
        "MQAR: not trained",
        "ours-gated-seed0: trained with ours, and its row is ours-gated: give the study another --name",
        "step-00000004.json is damaged",
    ):
        assert len(re.findall(rf"^- .*{line}", left_out, re.M)) == 1
        assert len(re.findall(rf"^not in the tables: .*{line}", printed, re.M)) == 1
    assert re.search(r"\| softmax \| \S+ k +\| 0.003 \| 1     \| 4.0000", page) and not here


def test_the_page_says_how_often_the_text_is_read(here):
    """Guards: four passes over a small corpus that looked like as much text."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    record = {"hardware": {"name": "CPU", "precision": "32-true"}, "data": {"train": {"tokens": 150}}}
    Path("runs/study-tiny/softmax-seed0/environment.json").write_text(json.dumps(record))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert "512 tokens each" in page and "That is 3.4 passes over the text of 150 tokens." in page


@pytest.mark.parametrize("second", [{"name": "NVIDIA H100"}, {"name": "NVIDIA H200", "world_size": 8}])
def test_runs_that_were_not_made_alike_are_said(here, second):
    """Guards: times of one card beside the speed of two, or of eight; the first run's card and versions for
    all; a page that fell over a record that does not say them; remarks under "Not in the tables"."""
    write(TINY | {"learning_rates": [], "seeds": 2, "suites": [], "attentions": ["softmax", "ours"]})
    hardware = [{"name": "NVIDIA H200"}, second]
    for seed, card in enumerate(hardware):
        for row in ("softmax", "ours"):
            fake_run(f"{row}-seed{seed}")
            record = {"hardware": {**card, "precision": "bf16-mixed"}} if row == "softmax" else {}
            Path(f"runs/study-tiny/{row}-seed{seed}/environment.json").write_text(json.dumps(record))
    metrics = Path("runs/study-tiny/softmax-seed1/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"tokens_per_second": 128.0', '"tokens_per_second": 64.0'))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    cards = [f"{card.get('world_size', 1)} × {card['name']}" for card in hardware]
    named = ", ".join(f"softmax-seed{seed}: {card}" for seed, card in enumerate(cards))
    assert "Not in the tables" not in page  # both are
    notes = page.partition("## Notes\n")[2].partition("\n## ")[0]
    assert "- the rows ran on different cards (softmax: 1 × NVIDIA H200, ours: None)" in notes
    assert f"- softmax ran on different cards ({named}): curve and times are the first's" in notes
    rows = json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"]
    assert [row["tokens_per_second"] for row in rows] == [128.0, 128.0] and rows[0]["seeds"] == 2
    how = page.partition("## How it was made")[2]
    assert "The runs were not all made alike:" in how and all(card["name"] in how for card in hardware)
    assert "unknown hardware" in how


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"hardware": "H200"}, "hardware is 'H200'"),
        ({"hardware": {"name": "NVIDIA H200", "world_size": "two"}}, "hardware.world_size is 'two'"),
        ({"hardware": {"name": "NVIDIA H200", "world_size": 0}}, "hardware.world_size is 0"),
        ({"versions": ["torch"]}, "versions is "),
        ({"git": {"revision": 3}}, "git.revision is 3"),
        ({"data": [3]}, "data is "),
        ({"data": {"train": {"tokens": "many"}}}, "data.train.tokens is 'many'"),
        ({"earlier": 3}, "earlier is 3"),
        ([], "holds no JSON object"),
    ],
)
def test_an_odd_record_is_named_and_the_rest_is_shown(here, record, wrong):
    """Guards: one value of another type in an environment.json was a traceback instead of a page."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    Path("runs/study-tiny/softmax-seed0/environment.json").write_text(json.dumps(record))
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert (
        len(re.findall(f"^- what softmax-seed0 was made with: .*environment.json .*{wrong}", page, re.M)) == 1
    )
    assert re.search(r"^\| softmax \|.* 4\.0000", page, re.M) and "How it was made" not in page


def test_a_reading_that_is_no_utf8_is_one_line(here, capsys):
    """Guards: a traceback at the end of a study, when its page is written or copied."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    Path("runs/study-tiny/reading.md").write_bytes("größer".encode("latin-1"))
    record = {"command": ["--data.source=/data/wiki.jsonl"]}  # a path, which the copy has otherwise
    Path("runs/study-tiny/softmax-seed0/environment.json").write_text(json.dumps(record))
    for more in (["--stages", "page"], ["--stages", "runs", "--publish", "copy"]):
        assert main([*COMMAND, *more]) == 2
        line = capsys.readouterr().err.strip()
        assert "reading.md is not UTF-8" in line and line.endswith("save it as UTF-8") and "\n" not in line


def test_seeds_of_different_data_are_said_to_be(here):
    """Guards: two runs on cards of one name `ran on different cards`, where the text had changed."""
    write(TINY | {"learning_rates": [], "seeds": 2, "suites": [], "attentions": ["softmax"]})
    for seed in range(2):
        fake_run(f"softmax-seed{seed}")
        record = {"hardware": {"name": "NVIDIA H200"}, "data": {"fingerprint": f"1f{seed}"}}
        Path(f"runs/study-tiny/softmax-seed{seed}/environment.json").write_text(json.dumps(record))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert "- softmax has runs of different data or settings: curve and times are the first's" in page


def page_of_the_study() -> str:
    assert main([*COMMAND, "--stages", "page"]) == 0
    return Path("runs/study-tiny/README.md").read_text()


def test_rates_that_were_not_tried_are_not_claimed(here):
    """Guards: "the best of 0.001, 0.003" on the page of a study whose stage `rates` was left out, or is not
    over; "the recipe's" of a rate that the study gives, or that short runs gave which are not there."""
    write(
        TINY | {"learning_rates": [1e-3, 3e-3], "seeds": 1, "suites": [], "attentions": ["softmax", "ours"]}
    )
    fake_run("softmax-seed0"), fake_run("ours-seed0")
    text = page_of_the_study()
    assert "What differs is the attention alone." in text
    assert "The learning rate is the recipe's for all; none was tuned." in text
    assert "best of" not in text and "Learning rates" not in text
    fake_run("softmax-rate0.003")
    text = page_of_the_study()
    assert "best of" not in text and "none was tuned" not in text
    assert "Not trained at the best rate of their short runs: softmax, ours." in text
    shutil.rmtree("runs/study-tiny/softmax-rate0.003")
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    text = page_of_the_study()
    assert "What differs is the attention, and its learning rate." in text and "none was tuned" not in text
    options = TINY["options"] | {"train.learning_rate": 2e-3, "train.min_learning_rate": 2e-4}
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["ours"], "options": options})
    shutil.rmtree("runs")
    fake_run("ours-seed0")
    assert "The learning rate is the study's for all; none was tuned." in page_of_the_study()


def test_the_page_says_which_rows_have_the_rate_that_was_chosen(here):
    """Guards: "its learning rate, the best of 0.001, 0.003" where all rows had begun before, at one rate."""
    rows = {"learning_rates": [1e-3, 3e-3], "rate_tokens": 512, "attentions": ["softmax", "ours"]}
    write(TINY | rows | {"seeds": 1, "suites": []})

    def chooses(row: str, rate: float) -> None:
        for tried in (1e-3, 3e-3):
            fake_run(f"{row}-rate{tried:g}")
        metrics = Path(f"runs/study-tiny/{row}-rate{rate:g}/metrics.jsonl")
        metrics.write_text(metrics.read_text().replace('"loss": 4.0', '"loss": 3.5'))

    chooses("softmax", 1e-3), chooses("ours", 3e-3)
    fake_run("softmax-seed0"), fake_run("ours-seed0")  # both at 0.003
    text = page_of_the_study()
    assert "What differs is the attention alone." in text and "none was tuned" not in text
    assert "Not trained at the best rate of their short runs: softmax." in text
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    text = page_of_the_study()
    assert "its learning rate, the best of 0.001, 0.003." in text
    assert "Not trained at the best rate" not in text
    chooses("ours", 1e-3)
    assert "its learning rate, the best of 0.001, 0.003 for all but ours." in page_of_the_study()


def test_rows_of_different_data_are_said_to_be(here):
    """Guards: "the same data in the same order", and the passes over the shorter of two texts."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax", "ours"]})
    for i, row in enumerate(("softmax", "ours")):
        fake_run(f"{row}-seed0")
        record = {"data": {"fingerprint": f"1f{i}", "train": {"tokens": 100 + 300 * i}}}
        Path(f"runs/study-tiny/{row}-seed0/environment.json").write_text(json.dumps(record))
    text = page_of_the_study()
    note = "different data (1f0: softmax-seed0; 1f1: ours-seed0): their losses compare these, too"
    assert f"- the runs were trained on {note}" in text
    assert "same data" not in text and "passes over" not in text
    assert "What differs is the attention, the text." in text


def test_a_run_that_was_resumed_elsewhere_is_said_to_be(here):
    """Guards: times and versions of two machines under the name of the last."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    first = {"hardware": {"name": "NVIDIA A100", "world_size": 8}, "versions": {"torch": "2.9.0"}}
    last = {"hardware": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "earlier": [first, 3]}
    Path("runs/study-tiny/softmax-seed0/environment.json").write_text(json.dumps(last))
    text = page_of_the_study()
    assert "- softmax-seed0 was resumed on other cards (8 × NVIDIA A100, then 1 × NVIDIA H200): its" in text
    assert "torch 2.9.0" in text and "torch 2.11.0" in text and "not all made alike" in text


def test_seeds_on_two_kinds_of_cards_are_not_called_other_data(here):
    """Guards: two H100s and two H200s of one row, whose two means have one name."""
    write(TINY | {"learning_rates": [], "seeds": 4, "suites": [], "attentions": ["softmax"]})
    for seed in range(4):
        fake_run(f"softmax-seed{seed}")
        record = {"hardware": {"name": ("NVIDIA H100", "NVIDIA H200")[seed // 2]}}
        Path(f"runs/study-tiny/softmax-seed{seed}/environment.json").write_text(json.dumps(record))
    text = page_of_the_study()
    assert "softmax ran on different cards (softmax-seed0: 1 × NVIDIA H100, softmax-seed2: 1 ×" in text
    assert "different data" not in text


def test_what_the_runs_cannot_tell_is_of_the_runs_that_are_there(here):
    """Guards: "two seeds" where each row has one, a limit that the scores do not have, less than the paper's
    tokens where it is as many."""
    rows = {"learning_rates": [], "seeds": 2, "suites": ["table2"], "limit": 4, "attentions": ["softmax"]}
    write(TINY | rows)
    fake_run("softmax-seed0")
    entry = {"task": "piqa", "num_fewshot": 0, "limit": None, "documents": 1838, "complete": True}
    entry |= {"prompts": "p", "metrics": {"acc": 0.5, "acc_stderr": 0.01}}
    run = {"run": "softmax-seed0", "attention": "softmax", "step": 4, "model": "demo", "tokens": 512}
    scores = {"checkpoint": run | {"parameters": None}, "scores": {"piqa (0-shot)": entry}}
    write_json(Path("runs/study-tiny/softmax-seed0/eval/step-00000004.json"), scores)
    text = page_of_the_study()
    assert "- One seed: " in text and "2 seeds" not in text.partition("cannot tell")[2]
    assert "documents were asked" not in text and "512 tokens a run; the paper's recipe has 3 B." in text
    scores["scores"] = {"piqa (0-shot, first 4)": entry | {"limit": 4}}
    text = entry | {
        "task": "bits_per_byte",
        "texts": "novels",
        "metrics": {"bits_per_byte": 1.0, "xz_bits_per_byte": 2.0},
    }
    scores["scores"]["bits_per_byte (novels)"] = text  # it has no limit
    write_json(Path("runs/study-tiny/softmax-seed0/eval/step-00000004.json"), scores)
    assert "Of each benchmark only the first 4 documents were asked." in page_of_the_study()
    paper = replace(read_study(Path("study-tiny.yaml")), tokens=3_000_000_000)
    assert "the paper's recipe has" not in what_it_cannot_tell(paper, RateSearch({}, {}), [], [])


def test_a_run_that_is_not_scored_is_named(here):
    """Guards: a damaged checkpoint, say, and the run vanished from the scores without a line. The page also
    says what else than the attention its rows set."""
    rows = {"softmax": {}, "wide": {"model.attention": "softmax", "model.intermediate_size": 96}}
    write(TINY | {"learning_rates": [], "seeds": 1, "attentions": rows})
    fake_run("softmax-seed0")
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert re.search("^- no scores of the last step, .* not whole: softmax-seed0; to score one", page, re.M)
    assert "What differs is the attention, and where a row says so model.intermediate_size." in page


def test_only_scores_of_the_last_step_are_the_run_s(here):
    """Guards: a run of 4 steps in the tables with the scores of its second one, without a word."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": ["table2"], "attentions": ["softmax", "ours"]})
    entry = {"task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
    entry |= {"metrics": {"acc": 0.5, "acc_stderr": 0.1}}
    for name, steps in (("softmax-seed0", (2, 4, 8)), ("ours-seed0", (2,))):
        fake_run(name)
        for step in steps:
            write_scores(name, step, **{"piqa (0-shot)": entry})
    text = page_of_the_study()
    assert "softmax-seed0, step 4" in text and not re.search("step (2|8)", text)
    assert re.search("^- no scores of the last step, .*: ours-seed0;", text, re.M)


def test_scores_of_another_run_are_left_out(here):
    """Guards: a row with the scores of another attention, whose file was copied there, without a word."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": ["table2"], "attentions": ["softmax", "ours"]})
    entry = {"task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
    entry |= {"metrics": {"acc": 0.5, "acc_stderr": 0.1}}
    for name in ("softmax-seed0", "ours-seed0"):
        fake_run(name)
        write_scores(name, 4, **{"piqa (0-shot)": entry})
    file = Path("runs/study-tiny/ours-seed0/eval/step-00000004.json")
    shutil.copy("runs/study-tiny/softmax-seed0/eval/step-00000004.json", file)
    text = page_of_the_study()
    assert f"- {file} is left out: it has scores of softmax-seed0 (softmax); remove it to" in text
    assert "ours-seed0, step 4" not in text and "softmax-seed0, step 4" in text


def test_tables_of_an_earlier_page_do_not_stay(here):
    """Guards: the picture of scores that are gone, still on the page; tables of a suite that the study no
    longer has, still published."""
    values = TINY | {"learning_rates": [], "seeds": 1, "attentions": ["softmax"]}
    folder = Path("runs/study-tiny")
    same = {"num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
    piqa = same | {"task": "piqa", "metrics": {"acc": 0.5, "acc_stderr": 0.1}}
    bits = same | {"task": "bits_per_byte", "texts": "words"}
    bits |= {"metrics": {"bits_per_byte": 1.5, "xz_bits_per_byte": 2.5}}
    positions = same | {"task": "loss_by_position", "texts": "words", "train_length": 32, "metrics": {}}
    positions |= {"positions": [{"from": 0, "to": 32, "loss": 4.0, "stderr": 0.1}]}
    every = {"piqa (0-shot)": piqa, "bits_per_byte (words)": bits, "loss_by_position (words)": positions}

    def written(suites, *keys):
        write(values | {"suites": suites})
        write_scores("softmax-seed0", 4, **{key: every[key] for key in keys})
        shown = "positions.png" in page_of_the_study()
        found = {path.stem for path in folder.iterdir()} & {"table2", "suites", "positions"}
        assert shown == ("positions" in found)
        return found

    write(values)
    fake_run("softmax-seed0")
    assert written(["table2", "language"], *every) == {"table2", "suites", "positions"}
    assert written(["language"], "bits_per_byte (words)") == {"suites"}
    (folder / "reading.md").write_text("A person's.")
    assert written(["language"]) == set() and (folder / "reading.md").exists()


def test_scores_that_come_later_are_no_trouble(here, monkeypatch):
    """Guards: `--stages runs page` that named each run for the scores that nobody had asked for."""
    write(TINY | {"learning_rates": [], "seeds": 1, "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    file, line = Path("runs/study-tiny/README.md"), "- no scores of the last step: softmax-seed0\n"
    monkeypatch.setattr(StudyRun, "has_weights", lambda run: True)
    for words, named in ((["runs", "page"], False), (["page"], True)):
        assert main(["study", "--config", "study-tiny.yaml", "--stages", *words]) == 0
        assert (line in file.read_text()) == named


def test_what_a_loss_at_equal_time_is_a_loss_of(here):
    """Guards: a loss before the end of a schedule beside one at the end, as if the two were alike."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax", "ours"]})
    for name in ("softmax-seed0", "ours-seed0"):
        fake_run(name)
    page, said = Path("runs/study-tiny/README.md"), "the fastest row is at the end of its schedule"
    assert main([*COMMAND, "--stages", "page"]) == 0
    assert said not in page.read_text()
    metrics = Path("runs/study-tiny/ours-seed0/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"train_time": 4.0', '"train_time": 9.0'))
    assert main([*COMMAND, "--stages", "page"]) == 0
    assert said in page.read_text()


def test_a_row_whose_first_validation_is_too_late_has_no_loss_at_equal_time(here):
    """Guards: the loss of a later time stood there as that at equal time."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax", "ours"]})
    for name in ("softmax-seed0", "ours-seed0"):
        fake_run(name)
    metrics = Path("runs/study-tiny/ours-seed0/metrics.jsonl")
    metrics.write_text(re.sub(r'"train_time": (\d)', r'"train_time": 1\1', metrics.read_text()))
    assert main([*COMMAND, "--stages", "page"]) == 0
    rows = json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"]
    assert [row["loss_at_equal_time"] for row in rows] == [4.0, None] and rows[1]["equal_time"] == 4.0
    assert re.search(r"^\| ours .*\| – +\| 14 s", Path("runs/study-tiny/README.md").read_text(), re.M)


@pytest.mark.parametrize(
    "content",
    [
        '{"checkpoint": ',
        "[3]",
        '{"checkpoint": {"run": 3}, "scores": {}}',
        {"task": 3},
        {"documents": "many"},
        {"metrics": {"acc": "high"}},
        {"metrics": None},
        {"correct": {"acc": "!"}},
        {"correct": ["acc"]},
        {"task": "loss_by_position", "texts": "words", "train_length": 32, "positions": [{"to": "32"}]},
        {
            "task": "bits_per_byte",
            "texts": "words",
            "metrics": {"bits_per_byte": 1, "xz_bits_per_byte": 2},
            "per_document": {"nats": [1.0], "bytes": [3]},
        },
        {
            "task": "loss_by_position",
            "texts": "words",
            "train_length": 32,
            "positions": [{"to": 32, "loss": 4}],
            "per_document": {"losses": [[4.0] * 7 + [None]]},
        },
        {"documents": 0, "correct": {}},
        {"prompts": ["p"]},
    ],
)
def test_an_odd_result_file_is_named_and_the_rest_is_shown(here, content):
    """Guards: a file of another version, hand-edited or cut short was a traceback instead of a page."""
    write(
        TINY
        | {
            "learning_rates": [],
            "seeds": 1,
            "suites": ["table2", "language"],
            "attentions": ["softmax", "ours"],
        }
    )
    good = {"task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
    good |= {"metrics": {"acc": 0.5, "acc_stderr": 0.1}, "correct": {"acc": "AA=="}}
    for name, scores in (("softmax", good), ("ours", content)):
        fake_run(f"{name}-seed0")
        file = Path(f"runs/study-tiny/{name}-seed0/eval/step-00000004.json")
        file.parent.mkdir()
        if isinstance(scores, dict):
            about = {"run": f"{name}-seed0", "attention": name, "step": 4, "model": "demo", "tokens": 512}
            scores = json.dumps({"checkpoint": about, "scores": {"piqa (0-shot)": good | scores}})
        file.write_text(scores)
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert len(re.findall("ours-seed0/eval/step-00000004.json is damaged, or of another version", page)) == 1
    assert page.count("ours-seed0/eval/step-00000004.json") == 1
    assert "softmax-seed0, step 4" in page and "50.00 ± 10.00" in page and "ours-seed0, step 4" not in page


@pytest.mark.parametrize("baseline", ["softmax", "high"])
def test_all_tables_compare_with_one_softmax(here, baseline):
    """Guards: losses less those of one softmax row, and scores less those of another, of another rate."""
    high = {"model.attention": "softmax", "train.learning_rate": 4e-3}
    rows = {"softmax": {}, "ours": {}, "high": high}
    write(
        TINY
        | {
            "learning_rates": [],
            "seeds": 1,
            "attentions": rows,
            "suites": ["table2"],
            "baselines": [baseline],
        }
    )
    for row in rows:
        changes = {"learning_rate": 4e-3} if row == "high" else {}
        fake_run(f"{row}-seed0", rows[row].get("model.attention"), **changes)
        entry = {"task": "piqa", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
        entry |= {"metrics": {"acc": 0.5, "acc_stderr": 0.1}, "correct": {"acc": "AA=="}}
        attention = rows[row].get("model.attention", row)
        about = {"run": f"{row}-seed0", "attention": attention, "step": 4, "model": "demo", "tokens": 512}
        file = Path(f"runs/study-tiny/{row}-seed0/eval/step-00000004.json")
        write_json(file, {"checkpoint": about, "scores": {"piqa (0-shot)": entry}})
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    other = {"softmax": "high", "high": "softmax"}[baseline]
    assert f"minus {baseline}" in page
    compared = re.search("^Compared with (.*)-seed0, step 4: (.*)\\.$", page, re.M)
    assert compared[1] == baseline and set(compared[2].split(", ")) == {"ours-seed0", f"{other}-seed0"}
    assert f"× {baseline}'s time" in page


def test_rows_that_are_trained_alike_are_two_rows(here):
    """Guards: a page that ended in a traceback where two rows differ in what they save alone, or where a
    line of a run has no speed."""
    rows = {"softmax": {}, "again": {"model.attention": "softmax", "train.save_interval": 7}}
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": rows})
    for name in ("softmax-seed0", "again-seed0"):
        fake_run(name)
    metrics = Path("runs/study-tiny/again-seed0/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"tokens_per_second"', '"speed"'))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    table = json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"]
    assert [row["row"] for row in table] == ["softmax", "again"] and table[1]["tokens_per_second"] is None


def test_rows_are_compared_over_their_seeds(here, pictures, monkeypatch):
    """Mean, standard deviation, the difference to the named rows and its standard error; shared cards have no
    speed, and what is not drawn is in the table all the same.
    """
    rows, keys = (
        ["gla", "ours", "softmax"],
        {"baselines": ["softmax", "gla"], "plotted_rows": ["gla", "ours"]},
    )
    write(
        TINY
        | {"learning_rates": [], "seeds": 3, "attentions": rows, "runs_per_device": 2, "row_by_row": True}
        | keys
    )
    folder = Path("runs/study-tiny")
    for row, losses in {"softmax": (4.0, 4.1, 4.2), "gla": (3.9, 3.9, 4.2), "ours": (5.0, 5.0)}.items():
        for seed, loss in enumerate(losses):
            fake_run(f"{row}-seed{seed}")
            metrics = folder / f"{row}-seed{seed}" / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace('"loss": 4.0', f'"loss": {loss}'))
    study = read_study(Path("study-tiny.yaml"))
    assert [name for _, name, _ in study.run_names()][:4] == [
        *(f"gla-seed{i}" for i in range(3)),
        "ours-seed0",
    ]
    monkeypatch.setattr("lingpt.plots.figures.FORMATS", ("svg",))  # text in it can be read
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = (folder / "README.md").read_text()
    assert "| 4.1000 ± 0.1000 | +0.1000 ± 0.1155 | –                |" in page  # √(0.01/3 + 0.03/3)
    assert "| 4.0000 ± 0.1732 | –                | −0.1000 ± 0.1155 |" in page
    assert "| 5.0000 ± 0.0000 | +1.0000 ± 0.1000 | +0.9000 ± 0.0577 |" in page
    assert "Tokens/s" not in page and "2 runs shared a GPU" in page and "ours-seed2: not trained\n" in page
    assert "the same seeds (gla: 0, 1, 2; ours: 0, 1; softmax: 0, 1, 2): their differences are of the" in page
    picture = (folder / "curves.svg").read_text()
    assert "ours" in picture and "softmax" not in picture and "training time" not in picture


def test_times_and_losses_are_compared_with_the_row_that_is_named(here, capsys):
    """Guards: time to a loss relative to softmax, whatever was asked for."""
    tiny = TINY | {"attentions": ["gla", "softmax", "ours"], "learning_rates": [], "seeds": 1, "suites": []}
    write(tiny)
    for row in tiny["attentions"]:
        fake_run(f"{row}-seed0")
    page = [*COMMAND, "--stages", "page"]
    for baselines, words, compared in [
        ([], [], ["softmax"]),
        ([], ["--baseline", "ours"], ["ours"]),
        (["softmax"], [], ["softmax"]),
        (["softmax"], ["--baseline", "ours"], ["ours", "softmax"]),
    ]:
        write(tiny | {"baselines": baselines})
        assert main([*page, *words]) == 0
        text = Path("runs/study-tiny/README.md").read_text()
        assert f"× {compared[0]}'s time" in text
        assert sorted(re.findall(r"minus (\S+)", text)) == sorted(compared)
    capsys.readouterr()
    assert main([*page, "--baseline", "our"]) == 2
    assert capsys.readouterr().err == "lingpt: unknown baseline 'our': did you mean 'ours'?\n"


def test_a_benchmark_without_a_file_is_in_the_plan_and_on_the_page(here, capsys):
    """Guards: HellaSwag left out with a word on stderr alone."""
    Path("eval").mkdir()
    Path("eval/lambada_openai_test.jsonl").write_text("{}")
    lacks = "openbookqa, winogrande, social_iqa, hellaswag"
    tiny = {"learning_rates": [], "seeds": 1, "attentions": ["softmax"], "suites": ["commonsense"]}
    write(TINY | tiny | {"eval_data": "eval"})
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    assert f"\nscores  commonsense; eval has no file for {lacks}\n" in capsys.readouterr().out
    fake_run("softmax-seed0")
    entry = {"task": "lambada_openai", "num_fewshot": 0, "documents": 8, "complete": True, "prompts": "p"}
    entry |= {"metrics": {"acc": 0.5, "acc_stderr": 0.1, "perplexity": 20.0, "perplexity_stderr": 1.0}}
    write_scores("softmax-seed0", 4, **{"lambada_openai (0-shot)": entry})
    assert main([*COMMAND, "--stages", "page"]) == 0
    text = Path("runs/study-tiny/README.md").read_text()
    assert f"- {lacks}: no file in eval\n" in text and "no run has a score" not in text
    shutil.rmtree("eval")  # as on another machine
    assert f"- {lacks}: no run has a score\n" in page_of_the_study()
