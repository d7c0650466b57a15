"""Guards a study by one command: planned, trained, scored, shown; gone on with; and what does not stop it.

The children run in this process, where a start costs nothing; test_jobs.py has the processes.
"""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lingpt.cli import study as verb
from lingpt.cli.jobs import Failure, Slot
from lingpt.cli.main import main
from lingpt.cli.study import studies
from lingpt.cli.study_plan import _mqar_seconds
from lingpt.cli.study_runs import StudyRun, chosen_rates, rate_runs, study_runs
from lingpt.common.errors import UserError
from lingpt.configs import recipe_path
from lingpt.data.tokenizer import train_bpe
from lingpt.eval.mqar import Trial
from lingpt.eval.study import read_study
from lingpt.models import ATTENTIONS
from lingpt.train import report

TINY = {
    "recipe": "demo",
    "tokens": 512,
    "seeds": 2,
    "attentions": {"softmax": {}, "mixed": {"model.attention": ["ours", "softmax"]}},
    "options": {
        "model.n_layer": 2, "model.n_embd": 64, "model.block_size": 32,
        "data.source": "train.jsonl", "data.tokenizer": "tokenizer.json", "data.seq_len": 32,
        "data.cache_dir": "cache", "train.global_batch_size": 4, "train.micro_batch_size": 4,
        "train.warmup_steps": 1, "train.eval_interval": 2, "train.eval_tokens": 128,
        "train.sample_tokens": 0, "train.accelerator": "cpu", "train.wandb": False,
    },
    "rates": [3.0e-3],
    "rate_tokens": 256,
    "suites": ["language"],
    "longest": 2,
    "texts": {"words": "held-out.jsonl"},
    "about": "A test.",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Children in this process; each command that ran is in `ran`."""
    ran = []

    def run_jobs(jobs, slots, deadline=None, report=print, given_up=None):
        failures = []
        for job in jobs:
            ran.append(job.name)
            if main(job.arguments) != 0:
                failures.append(Failure(job.name, "it failed"))
        return failures

    monkeypatch.setattr(verb, "run_jobs", run_jobs)
    monkeypatch.setattr(report, "draw_curves", lambda *_: [])  # each run's own: seconds, and not looked at
    monkeypatch.chdir(tmp_path)
    words = "the sun warms stone cold water runs under old bridges birds sing rain"
    rows = [json.dumps({"text": f"{words} {number} " * 40}) for number in range(30)]
    Path("train.jsonl").write_text("\n".join(rows[4:]))
    Path("held-out.jsonl").write_text("\n".join(rows[:4]))
    train_bpe(rows, 300).save(Path("."))
    write(TINY)
    return ran


def write(values, name="study-tiny.yaml"):
    Path(name).write_text(yaml.safe_dump(values, sort_keys=False))
    return name


def test_a_study_from_the_plan_to_the_page(here, tmp_path, capsys):
    """Plan; rates; two runs of each of two rows at their rates; scores; the page. Again: none is trained."""
    command = ["study", "--config", "study-tiny.yaml"]
    assert main([*command, "--dry_run", "true"]) == 0
    plan = capsys.readouterr().out
    assert "2 rows, 2 seeds" in plan and "0 of 2" in plan and "card hours" in plan and not here
    assert main(command) == 0
    tried = ["softmax-rate0.003", "mixed-rate0.003"]
    trained = ["softmax-seed0", "mixed-seed0", "softmax-seed1", "mixed-seed1"]
    assert here == ["data", *tried, *trained, "scores"]
    folder = Path("runs/study-tiny")
    assert not any((folder / name / "checkpoints").exists() for name in tried)
    config = yaml.safe_load((folder / "mixed-seed1" / "config.yaml").read_text())
    study = read_study(Path("study-tiny.yaml"))
    chosen = chosen_rates(rate_runs(study, folder, None))
    assert config["train"]["learning_rate"] == chosen["mixed"] == 3e-3
    assert config["train"]["min_learning_rate"] == pytest.approx(chosen["mixed"] / 10)  # as in the recipe
    assert (config["train"]["seed"], config["train"]["wandb_group"]) == (1, "study-tiny")
    page = (folder / "README.md").read_text()
    for words in ("mean of 2 seeds", "## Time to a loss", "## Learning rates", "## Bits per byte", "A test."):
        assert words in page
    assert "Not in the tables" not in page
    assert "softmax, step 4, 2 seeds" in page and "softmax-seed0, step 4" not in page
    for name in ("curves.png", "curves.svg", "curves.pdf", "positions.svg", "suites.tex", "summary.json"):
        assert (folder / name).stat().st_size > 100
    here.clear()
    again = ["--stages", "data", "rates", "runs", "scores", "--publish", str(tmp_path / "docs")]
    assert main([*command, *again]) == 0
    assert here == ["data", "scores"] and "computed before" in capsys.readouterr().out
    kept = {path.name for path in (tmp_path / "docs" / "softmax-seed0").iterdir()}
    assert kept == {"config.yaml", "environment.json", "metrics.jsonl", "eval"}


@pytest.mark.parametrize("stages", [["data", "runs"], ["rates"], ["scores", "page"]], ids=" ".join)
def test_the_plan_is_of_the_stages_that_are_asked_for(here, capsys, stages):
    """Guards: the time, the cost and the scores of stages that the command would leave out."""
    plans = []
    for more in ([], ["--stages", *stages]):
        assert main(["study", "--config", "study-tiny.yaml", "--dry_run", "true", *more]) == 0
        plans.append(capsys.readouterr().out)
    timed = [set(re.findall(r"(rates|runs|scores) [\d.]+ (?:s|min|h)", plan)) for plan in plans]
    assert timed == [{"rates", "runs", "scores"}, {"rates", "runs", "scores"} & set(stages)]
    suites = [re.search(r"^scores +(.*)$", plan, re.M)[1] for plan in plans]
    assert suites[0] != "none" and suites[1] == (suites[0] if "scores" in stages else "none")


def test_the_plan_counts_what_is_left_of_mqar(here, capsys):
    """Guards: MQAR's hours were in no plan. What is trained is not counted."""
    tiny = {"attentions": ["softmax"], "rates": [0.001, 0.01], "widths": [64], "pairs": [4], "steps": 2000}
    write(TINY | {"rates": [], "suites": [], "mqar": tiny})
    command = ["study", "--config", "study-tiny.yaml", "--dry_run", "true"]

    def minutes():
        assert main(command) == 0
        found = re.search(r"mqar ([\d.]+) (s|min|h)", capsys.readouterr().out)
        return found and float(found[1]) * {"s": 1 / 60, "min": 1, "h": 60}[found[2]]

    both = minutes()
    trial = {
        "attention": "softmax",
        "width": 64,
        "pairs": 4,
        "rate": 0.001,
        "steps": 2000,
    }
    trial |= {"batch_size": 256, "vocabulary": 8192, "heads": 2, "layers": 2, "seed": 0, "accuracy": 0.5}
    results = Path("runs/study-tiny/mqar/mqar.json")
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps({"results": [trial]}))
    assert minutes() == pytest.approx(both / 2, rel=0.05)
    results.write_text(json.dumps({"results": [trial, trial | {"rate": 0.01}]}))
    assert minutes() is None and not here


def test_mqars_time_on_a_card_is_what_was_measured():
    """Of the trials in docs/results, eight side by side on one H200: within a half."""
    measured = Path(__file__).parents[2] / "docs" / "results" / "gate" / "learning" / "mqar.json"
    found = json.loads(measured.read_text())["results"]
    names = [field.name for field in fields(Trial)]
    trials = [Trial(**{n: r[n] for n in names if n in r} | {"steps": r["trained_steps"]}) for r in found]
    planned = _mqar_seconds(trials, [Slot("GPU 0", (0,))])
    assert planned == pytest.approx(sum(r["seconds"] for r in found) / 8, rel=0.5)


def fake_run(
    name, attention=None, steps=4, last=None, file="study-tiny.yaml", root="runs/study-tiny", **changes
):
    """A run's folder as training leaves it, without weights; `changes` are not what the study says."""
    study, folder = read_study(Path(file)), Path(root)
    every = [*rate_runs(study, folder, None), *study_runs(study, folder, {}, None)]
    run = next(run for run in every if run.name == name)
    config = run.recipe.to_dict()
    config["model"]["attention"] = attention or config["model"]["attention"]
    for key, value in changes.items():
        config["train"][key] = value
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(1, steps + 1):
        clock = {"step": step, "tokens": 128 * step, "train_time": float(step)}
        lines += [{"kind": "train", **clock, "loss": 8.0 - step, "tokens_per_second": 128.0, "mfu": None}]
        lines += [{"kind": "val", **clock, "loss": 8.0 - step}] if step % 2 == 0 else []
    lines += [last] if last else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_goes_wrong_is_named_and_the_rest_is_shown(here):
    """A run missing, unfinished, diverged, of another attention; scores damaged: a line each."""
    rows = ["softmax", "ours", "gla", "ours-decay", "ours-gated"]
    write(TINY | {"rates": [], "seeds": 1, "attentions": rows})
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
    page = (folder / "README.md").read_text()
    for line in (
        "ours-seed0 is unfinished: step 3 of 4",
        "gla-seed0 diverged at step 4: its loss was not finite",
        "ours-decay-seed0 is missing: it has not been trained",
        "ours-gated-seed0 was trained with ours, and its row is ours-gated: give the study another --name",
        "step-00000004.json is damaged",
    ):
        assert f"- {line}" in page or line in page
    assert re.search(r"\| softmax \| \S+ k +\| 0.003 \| 1     \| 4.0000", page) and not here


def test_the_page_says_how_often_the_text_is_read(here):
    """Guards: four passes over a small corpus that looked like as much text."""
    write(TINY | {"rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    record = {"hardware": {"name": "CPU", "precision": "32-true"}, "data": {"train": {"tokens": 150}}}
    Path("runs/study-tiny/softmax-seed0/environment.json").write_text(json.dumps(record))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert "512 tokens each" in page and "That is 3.4 passes over the text of 150 tokens." in page


def test_runs_that_were_not_made_alike_are_said(here):
    """Guards: times of one card beside the speed of two; the first run's card and versions for all; a page
    that fell over a record that does not say them."""
    write(TINY | {"rates": [], "seeds": 2, "suites": [], "attentions": ["softmax", "ours"]})
    cards = ["NVIDIA H200", "NVIDIA H100"]
    for seed, card in enumerate(cards):
        for row in ("softmax", "ours"):
            fake_run(f"{row}-seed{seed}")
            record = {"hardware": {"name": card, "precision": "bf16-mixed"}} if row == "softmax" else {}
            Path(f"runs/study-tiny/{row}-seed{seed}/environment.json").write_text(json.dumps(record))
    metrics = Path("runs/study-tiny/softmax-seed1/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"tokens_per_second": 128.0', '"tokens_per_second": 64.0'))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    named = ", ".join(f"softmax-seed{seed}: {card}" for seed, card in enumerate(cards))
    assert f"- softmax ran on different cards ({named}): curve and times are the first's" in page
    rows = json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"]
    assert [row["tokens_per_second"] for row in rows] == [128.0, 128.0] and rows[0]["seeds"] == 2
    how = page.partition("## How it was made")[2]
    assert "The runs were not all made alike:" in how and all(card in how for card in cards)
    assert "unknown hardware" in how


def test_rates_that_were_not_tried_are_not_claimed(here):
    """Guards: "the best of 0.001, 0.003" on the page of a study whose stage `rates` was left out."""
    write(TINY | {"rates": [1e-3, 3e-3], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    page = ["study", "--config", "study-tiny.yaml", "--stages", "page"]
    assert main(page) == 0
    text = Path("runs/study-tiny/README.md").read_text()
    assert "What differs is the attention alone." in text and "none was tuned" in text
    assert "best of" not in text and "Learning rates" not in text
    fake_run("softmax-rate0.003")
    assert main(page) == 0
    text = Path("runs/study-tiny/README.md").read_text()
    assert "the best of 0.003" in text and "none was tuned" not in text


def test_a_run_that_is_not_scored_is_named(here):
    """Guards: a damaged checkpoint, say, and the run vanished from the scores without a line. The page also
    says what else than the attention its rows set."""
    rows = {"softmax": {}, "wide": {"model.attention": "softmax", "model.intermediate_size": 96}}
    write(TINY | {"rates": [], "seeds": 1, "attentions": rows})
    fake_run("softmax-seed0")
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert "- softmax-seed0 is in no table of scores: it has none, and its checkpoint of step 4" in page
    assert "What differs is the attention, and where a row says so model.intermediate_size." in page


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
        {"task": "bits_per_byte", "texts": "words"},
        {"task": "loss_by_position", "texts": "words", "train_length": 32, "positions": []},
        {"task": "recall_phrases"},
        {"documents": 0, "correct": {}},
        {"prompts": ["p"]},
    ],
)
def test_an_odd_result_file_is_named_and_the_rest_is_shown(here, content):
    """Guards: a file of another version, hand-edited or cut short was a traceback instead of a page."""
    write(
        TINY | {"rates": [], "seeds": 1, "suites": ["table2", "language"], "attentions": ["softmax", "ours"]}
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
    assert "softmax-seed0, step 4" in page and "50.00 ± 10.00" in page and "ours-seed0, step 4" not in page


def test_a_key_without_a_value_is_none(here):
    """Guards: `rates:` with nothing behind it was a traceback."""
    write(TINY | {"rates": None, "options": None, "suites": None})
    study = read_study(Path("study-tiny.yaml"))
    assert (study.rates, study.options, study.suites) == ((), {}, ("table2",))


def test_rows_that_are_trained_alike_are_two_rows(here):
    """Guards: a page that ended in a traceback where two rows differ in what they save alone, or where a
    line of a run has no speed."""
    rows = {"softmax": {}, "again": {"model.attention": "softmax", "train.save_interval": 7}}
    write(TINY | {"rates": [], "seeds": 1, "suites": [], "attentions": rows})
    for name in ("softmax-seed0", "again-seed0"):
        fake_run(name)
    metrics = Path("runs/study-tiny/again-seed0/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"tokens_per_second"', '"speed"'))
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    table = json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"]
    assert [row["row"] for row in table] == ["softmax", "again"] and table[1]["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suites": "language"}, "`suites` is 'language'; it must be a list"),
        ({"suites": ["langauge"]}, "did you mean 'language'"),
        ({"rates": 1e-3}, "`rates` is 0.001; it must be a list"),
        ({"rates": ["fast"]}, "`rates` has 'fast'"),
        ({"rate_tokens": "many"}, "`rate_tokens` is 'many'; it must be a whole number"),
        ({"options": 3}, "`options` is 3; it must be `key: value`"),
        ({"options": {"train.seed": 3}}, "leave out train.seed"),
        ({"attentions": {"ours": {"train.max_steps": 3}}}, "leave out train.max_steps"),
        ({"against": "softmax"}, "`against` is 'softmax'; it must be a list"),
        ({"limit": -1}, "limit is -1; it must be at least 1"),
        ({"seeds": None}, "seeds is None; it must be at least 1"),
        ({"longest": "x"}, "`longest` is 'x'"),
        ({"recipe": 5}, "`recipe` is 5"),
        ({"mqar": 3}, "`mqar` is 3; it must be `key: value`"),
        ({"mqar": {"step": 3}}, "the study's `mqar`: unknown key 'step' (did you mean 'steps'?)"),
        ({"mqar": {"steps": "many"}}, "the study's `mqar`: steps is many; it must be a whole number"),
        ({"mqar": {"widths": [0]}}, "--widths is 0: give more than 0"),
        ({"mqar": {"attentions": ["our"]}}, "unknown attention 'our'"),
        ({"eval_data": "nowhere"}, "no folder nowhere"),
        ({"eval_data": 3}, "`eval_data` is 3; it must be a folder"),
        ({"suites": ["table2"], "tasks": ["arc_eazy"], "eval_data": "."}, "a task 'arc_eazy'"),
        ({"suites": ["table2"], "tasks": ["piqa"], "eval_data": "."}, "has no piqa_valid.jsonl"),
        ({"suites": ["table2"], "tasks": ["mmlu:five"]}, "after the colon stands the number of examples"),
        ({"suites": ["table2"], "tasks": [5]}, "`tasks` has 5; it must be a word"),
        ({"texts": {"words": "gone.jsonl"}}, "there are no documents at gone.jsonl"),
        ({"texts": {"words": 3}}, "`texts` has 3"),
        ({"options": TINY["options"] | {"data.source": "gone.jsonl"}}, "there are no documents at gone"),
        ({"options": TINY["options"] | {"data.tokenizer": "gone.json"}}, "there is no tokenizer at gone"),
    ],
)
def test_a_mistake_in_the_file_is_refused_before_anything_is_trained(here, change, message, capsys):
    """Guards: each of them was found after hours of training, or was a traceback."""
    write(TINY | change)
    assert main(["study", "--config", "study-tiny.yaml"]) == 2 and not here
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err


def test_the_best_rate_is_chosen(here):
    """By the loss at the end; a rate whose run diverged or stopped counts for nothing."""
    write(TINY | {"rates": [1e-3, 3e-3, 1e-2], "attentions": ["softmax", "gla"], "rate_tokens": 512})
    study, folder = read_study(Path("study-tiny.yaml")), Path("runs")
    tried = rate_runs(study, folder, None)
    assert chosen_rates(tried) == {}
    for name, steps in (("softmax-rate0.001", 4), ("softmax-rate0.01", 3)):
        fake_run(name, steps=steps, root="runs")
    assert chosen_rates(tried) == {"softmax": 1e-3}
    fake_run("softmax-rate0.003", root="runs")
    text = (folder / "softmax-rate0.003" / "metrics.jsonl").read_text()
    (folder / "softmax-rate0.003" / "metrics.jsonl").write_text(text.replace('"loss": 4.0', '"loss": 3.5'))
    assert chosen_rates(tried) == {"softmax": 3e-3}
    assert study_runs(study, folder, {"softmax": 3e-3}, None)[0].options["train.learning_rate"] == 3e-3


def test_rows_are_compared_over_their_seeds(here):
    """Mean, standard deviation, the difference to the named rows and its standard error; shared cards have no
    speed, and what is not drawn is in the table all the same.
    """
    rows, keys = ["gla", "ours", "softmax"], {"against": ["softmax", "gla"], "drawn": ["gla", "ours"]}
    write(
        TINY | {"rates": [], "seeds": 3, "attentions": rows, "runs_per_device": 2, "row_by_row": True} | keys
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
    assert main(["study", "--config", "study-tiny.yaml", "--stages", "page"]) == 0
    page = (folder / "README.md").read_text()
    assert "| 4.1000 ± 0.1000 | +0.1000 ± 0.1155 | –                |" in page  # √(0.01/3 + 0.03/3)
    assert "| 4.0000 ± 0.1732 | –                | −0.1000 ± 0.1155 |" in page
    assert "| 5.0000 ± 0.0000 | +1.0000 ± 0.1000 | +0.9000 ± 0.0577 |" in page
    assert "Tokens/s" not in page and "2 runs shared a GPU" in page and "ours-seed2 is missing" in page
    picture = (folder / "curves.svg").read_text()
    assert "ours" in picture and "softmax" not in picture and "training time" not in picture


@pytest.mark.parametrize(
    ("runs", "gpus", "gone", "used"),
    [
        (1, 4, (), ["0,1,2,3"]),
        (3, 8, (), ["0,1", "2,3", "4,5"]),
        (3, 8, (0,), ["1,2", "3,4", "5,6"]),
        (5, 4, (), ["0", "1", "2", "3"]),
    ],
)
def test_cards_share_the_questions_where_runs_are_fewer(here, monkeypatch, runs, gpus, gone, used):
    """Guards: one run on eight cards was scored by one of them, and seven waited."""
    write(TINY | {"rates": [], "seeds": runs, "attentions": ["softmax"]})
    study, folder = read_study(Path("study-tiny.yaml")), Path("runs")
    monkeypatch.setattr(StudyRun, "is_done", lambda self: True)
    monkeypatch.setattr(StudyRun, "has_weights", lambda self: True)
    asked = []
    monkeypatch.setattr(verb, "run_jobs", lambda jobs, slots, *_, **__: asked.append((jobs, slots)) or [])
    work = verb._Work(study, folder, [Slot(f"GPU {i}", (i,)) for i in range(gpus)], None, ["scores"])
    work.given_up = {(card,) for card in gone}
    work.score(study_runs(study, folder, {}, 1))
    ((jobs, slots),) = asked
    assert [",".join(map(str, slot.gpus)) for slot in slots][: len(used)] == used and len(jobs) == len(used)
    for job in jobs:
        at = job.arguments.index("--devices")
        assert job.arguments[at + 1] == str(len(slots[0].gpus))


def test_a_failure_is_named_at_the_end(here, monkeypatch, capsys):
    """The others are trained; the exit code and the last line say which was not."""
    write(TINY | {"rates": [], "seeds": 1, "suites": []})
    run_jobs = verb.run_jobs

    def sick(jobs, slots, deadline=None, report=print, given_up=None):
        well = [job for job in jobs if job.name != "mixed-seed0"]
        missing = [Failure(job.name, "ended by SIGKILL") for job in jobs if job not in well]
        return run_jobs(well, slots, deadline, report) + missing

    monkeypatch.setattr(verb, "run_jobs", sick)
    assert main(["study", "--config", "study-tiny.yaml"]) == 2
    out, err = capsys.readouterr()
    assert (
        "1 failed, all else is kept, and the same command tries again: mixed-seed0: ended by SIGKILL" in err
    )
    assert "mixed-seed0 failed: ended by SIGKILL" in Path("runs/study-tiny/README.md").read_text()
    assert Path("runs/study-tiny/softmax-seed0/checkpoints").is_dir() and "page " in out


def test_another_study_in_the_same_folder_is_refused(here, capsys):
    write(TINY | {"rates": [], "seeds": 1, "suites": []})
    command = ["study", "--config", "study-tiny.yaml", "--stages", "page"]
    assert main(command) == 0 and main([*command, "--seeds", "3"]) == 0
    assert main([*command, "--tokens", "1024"]) == 2
    assert (
        "holds a study with another `tokens` (512, now 1024): give the new one a --name"
        in capsys.readouterr().err
    )
    assert main([*command, "--tokens", "1024", "--name", "longer"]) == 0


COMMAND = ["study", "--config", "study-tiny.yaml"]


def test_a_run_that_was_trained_otherwise_is_named(here, capsys):
    """A row whose options changed, a run of another rate or length: in no table, not trained over, and named
    with the mend; more seeds and more rows are no change.
    """
    write(TINY | {"rates": [], "seeds": 1, "suites": [], "attentions": ["softmax", "gla"]})
    fake_run("softmax-seed0")
    fake_run("gla-seed0", max_tokens=1024)
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md")
    assert "gla-seed0 was trained otherwise than the study now says (steps: 8 → 4): give" in page.read_text()
    wider = {"softmax": {"model.intermediate_size": 128}, "gla": {}, "ours": {}}
    write(TINY | {"rates": [], "seeds": 2, "suites": [], "attentions": wider})
    assert main([*COMMAND, "--stages", "data", "runs", "page"]) == 2
    assert here == ["data", "ours-seed0", "softmax-seed1", "gla-seed1", "ours-seed1"]
    assert "2 failed" in capsys.readouterr().err
    line = (
        "softmax-seed0 was trained otherwise than the study now says (model.intermediate_size: None → 128): "
    )
    assert line + "give the study another --name, or remove runs/study-tiny/softmax-seed0" in page.read_text()
    assert json.loads(Path("runs/study-tiny/summary.json").read_text())["rows"][0]["seeds"] == 1


def test_runs_keep_the_rate_that_they_were_begun_with(here):
    """A short run that ends later and chooses another rate changes neither the runs nor what is printed."""
    write(TINY | {"rates": [1e-3, 3e-3], "suites": [], "attentions": ["softmax"], "rate_tokens": 512})
    fake_run("softmax-rate0.001")
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    fake_run("softmax-rate0.003")
    metrics = Path("runs/study-tiny/softmax-rate0.003/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"loss": 4.0', '"loss": 3.5'))
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = Path("runs/study-tiny/README.md").read_text()
    assert re.search(r"\| softmax \| \S+ k +\| 0.001 \| 1     \| 4.0000", page)
    assert "softmax-seed0 was" not in page
    assert "softmax's runs were begun with 0.001, and keep it" in page


def test_fewer_rows_and_seeds_leave_the_others_in_the_study(here):
    """What is asked for is trained; page, study.json and summary.json have all that the folder has."""
    write(TINY | {"rates": [], "suites": [], "attentions": ["softmax", "gla", "ours"]})
    for name in ("softmax-seed0", "gla-seed0", "gla-seed1"):
        fake_run(name)
    assert main([*COMMAND, "--stages", "page"]) == 0
    less = ["--attentions", "softmax", "--seeds", "1", "--stages", "runs", "page"]
    assert main([*COMMAND, *less]) == 0 and not here
    folder = Path("runs/study-tiny")
    kept = json.loads((folder / "study.json").read_text())
    assert (list(kept["attentions"]), kept["seeds"]) == (["softmax", "gla"], 2)
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert [(row["row"], row["seeds"]) for row in rows] == [("softmax", 1), ("gla", 2)]


def test_a_rate_that_diverged_is_a_result(here):
    """Its start is not tried again, its checkpoints go, and the study goes on without an error."""
    write(
        TINY
        | {"rates": [1e-3, 3e-3], "suites": [], "attentions": ["softmax"], "rate_tokens": 512, "seeds": 1}
    )
    fake_run("softmax-rate0.001")
    end = {"kind": "diverged", "step": 2, "tokens": 256, "train_time": 2.0, "skipped": 10}
    fake_run("softmax-rate0.003", steps=2, last=end)
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    weights = Path("runs/study-tiny/softmax-rate0.003/checkpoints")
    weights.mkdir()
    assert main([*COMMAND, "--stages", "rates", "runs", "page"]) == 0 and not here
    assert "| softmax | 4.0000 | –     | 0.001  |" in Path("runs/study-tiny/README.md").read_text()
    assert not weights.exists()


def test_a_run_that_diverged_is_a_result(here, monkeypatch):
    """Guards: every later start of the command ended with an error. It is named, not trained again, and the
    rest goes on; without its folder it is trained again."""
    write(TINY | {"rates": [], "suites": [], "attentions": ["softmax", "gla"], "seeds": 1})
    fake_run("softmax-seed0")
    end = {"kind": "diverged", "step": 2, "tokens": 256, "train_time": 2.0, "skipped": 10}

    def diverge(jobs, *args, **options):
        here.extend(job.name for job in jobs)
        if "gla-seed0" in here[-1:]:
            fake_run("gla-seed0", steps=2, last=end)
        return [Failure(job.name, "the loss or the gradient was not finite") for job in jobs]

    monkeypatch.setattr(verb, "run_jobs", diverge)
    train = [*COMMAND, "--stages", "runs", "page"]
    assert main(train) == 0 and main(train) == 0
    assert here == ["gla-seed0"]
    page = Path("runs/study-tiny/README.md").read_text()
    line = "- gla-seed0 diverged at step 2: its loss was not finite; remove runs/study-tiny/gla-seed0"
    assert line in page and "gla-seed0 failed" not in page
    shutil.rmtree("runs/study-tiny/gla-seed0")
    assert main(train) == 0 and here == ["gla-seed0"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": 3}, "unknown key 'token' (did you mean 'tokens'?)"),
        ({"tokens": 0}, "tokens is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"attentions": 3}, "`attentions` is a list of names"),
        ({"attentions": ["ours/x"]}, "cannot name a run's folder"),
        ({"attentions": ["softmx"]}, "unknown attention 'softmx'"),
        ({"options": {"train.warm_up": 3}}, "warm_up"),
        ({"rate_tokens": 0}, "`rates` need `rate_tokens`"),
        ({"stopped_halfway": "gla"}, "which is no row of it"),
        ({"against": ["gla"]}, "against names 'gla', which is no row of it"),
        ({"runs_per_device": 0}, "runs_per_device is 0"),
        ({"runs_per_device": 2, "devices_per_run": None}, "is for runs on one card each"),
    ],
)
def test_mistakes_in_the_file(here, capsys, change, message):
    """One line, before anything is trained."""
    write(TINY | change)
    assert main(["study", "--config", "study-tiny.yaml"]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err and not here


def test_mistakes_on_the_command_line(here, capsys):
    for words, message in [
        (["--model", "pythia-14m"], "no study 'study-pythia-14m' (did you mean 'study-pythia-1"),
        (
            ["--config", "study-tiny.yaml", "--attentions", "our"],
            "unknown attention 'our' (did you mean 'ours'?)",
        ),
        (["--config", "study-tiny.yaml", "--stages", "score"], "did you mean 'scores'"),
        (
            ["--config", "study-tiny.yaml", "--devices_per_run", "some"],
            "a number of GPUs, at least 1, or `all`",
        ),
        (["--config", "study-tiny.yaml", "--devices_per_run", "0"], "a number of GPUs, at least 1"),
        (["--config", "study-tiny.yaml", "--minutes", "-1"], "--minutes -1: give more than 0"),
    ]:
        assert main(["study", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", studies())
def test_the_studies_that_ship(name, tmp_path):
    """Each run's options make a recipe; a paper's own numbers; a hybrid has as many layers as its model."""
    study = read_study(recipe_path(name))
    for one in [
        *study_runs(study, tmp_path, {}, 1)[: len(study.attentions)],
        *rate_runs(study, tmp_path, 1)[:1],
    ]:
        assert one.recipe.model.config().attention_per_layer
    first = study_runs(study, tmp_path, {}, 1)[0].recipe
    if name == "study-pythia-1.4b":
        assert (first.train.max_tokens, first.data.seq_len, first.data.source) == (3 * 10**9, 8192, "wiki40b")
        assert (first.train.global_batch_size, first.train.learning_rate) == (256, 1e-3)
    if name == "study-pythia-1.4b-short":
        assert first.data.seq_len == 8192 and study.tokens >= 100e6
        assert 250_000 <= first.tokens_per_step <= 500_000
    if name == "study-gate":  # the setting of the first runs, in all that decides a loss
        runs = Path(__file__).parents[2] / "docs" / "results" / "first-runs" / "runs"
        before = yaml.safe_load((runs / "pythia-70m-softmax" / "config.yaml").read_text())
        where = {
            "out_dir",
            "name",
            "resume",
            "devices",
            "num_nodes",
            "accelerator",
            "max_tokens",
            "sample_tokens",
        }
        same = set(before["train"]) - where
        given = {**vars(first.train), "max_steps": first.total_steps}
        assert {key: given[key] for key in same} == {key: before["train"][key] for key in same}
        assert (first.data.seq_len, first.model.block_size, first.model.name) == (2048, 2048, "pythia-70m")
        names = [run.name for run in study_runs(study, tmp_path, {}, 1)[:4]]
        assert names == ["softmax-seed0", "softmax-seed1", "softmax-seed2", "gla-seed0"]
    if name == "study-pythia-160m":
        assert first.data.seq_len == 2048 and study.tokens >= 250e6 and study.seeds == 2
        assert set(ATTENTIONS) <= set(study.attentions) and len(study.rates) == 3


def test_a_study_that_is_no_study(tmp_path):
    (tmp_path / "study-x.yaml").write_text("recipe: demo\ntokens: 5\n")
    with pytest.raises(UserError, match="does not say `attentions`"):
        read_study(tmp_path / "study-x.yaml")
    (tmp_path / "study-x.yaml").write_text("- 3\n")
    with pytest.raises(UserError, match="is no study"):
        read_study(tmp_path / "study-x.yaml")
    assert json.dumps(read_study(recipe_path("study-demo")).to_dict())
