"""Guards the runs of a study: the rates that they get and keep, and those that are none of its runs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.study import runs
from lingpt.study.runs import rate_runs, read_rate_search, study_runs
from lingpt.tests.study.tiny import (
    COMMAND,
    FOLDER,
    PAGE,
    TINY,
    fake_run,
    first_run,
    tiny_study,
    write,
    write_tiny,
)


def test_the_best_rate_is_chosen(here):
    """By the loss at the end, when all of a row's runs are over; one that diverged counts for nothing. The
    short runs log no curves elsewhere. Guards: the best of those that were left, where others had failed."""
    write_tiny(seeds=2, learning_rates=[1e-3, 3e-3, 1e-2], attentions=["softmax", "gla"], rate_tokens=512)
    study, folder = tiny_study(), Path("runs")
    tried = rate_runs(study, folder, None)
    assert read_rate_search(tried).chosen == {}
    for name, steps in (("softmax-rate0.001", 4), ("softmax-rate0.01", 3)):
        fake_run(name, steps=steps, root="runs")
    fake_run("softmax-rate0.003", root="runs")
    assert read_rate_search(tried).chosen == {}
    end = {"kind": "diverged", "step": 3, "tokens": 384, "train_time": 3.0, "skipped": 10}
    fake_run("softmax-rate0.01", steps=3, last=end, root="runs")
    assert read_rate_search(tried).chosen == {"softmax": 1e-3}
    text = (folder / "softmax-rate0.003" / "metrics.jsonl").read_text()
    (folder / "softmax-rate0.003" / "metrics.jsonl").write_text(text.replace('"loss": 4.0', '"loss": 3.5'))
    assert read_rate_search(tried).chosen == {"softmax": 3e-3}
    assert study_runs(study, folder, {"softmax": 3e-3}, None)[0].options["train.learning_rate"] == 3e-3
    logged = replace(study, options=study.options | {"train.wandb": True})
    changed = rate_runs(replace(logged, rate_tokens=256, rate_options={"train.z_loss": 0.5}), folder, None)
    assert (changed[0].recipe.total_steps, changed[0].recipe.train.z_loss) == (2, 0.5)
    assert not changed[0].recipe.train.wandb and study_runs(logged, folder, {}, None)[0].recipe.train.wandb
    fake_run("softmax-rate0.001", seed=1, root="runs")  # of another study
    assert read_rate_search(tried).unfinished["softmax"] == ["softmax-rate0.001"]


def test_a_run_gets_the_cards_of_its_slot(here):
    """And no CPU in their place if they die, unless the study asks for one."""
    auto = {key: value for key, value in TINY["options"].items() if key != "train.accelerator"}
    for options, accelerator in ((auto, "cuda"), (TINY["options"], "cpu")):
        write(TINY | {"options": options})
        study = tiny_study()
        for run in (*rate_runs(study, Path("runs"), 4), *study_runs(study, Path("runs"), {}, 4)):
            assert run.options["train.devices"] == 4
            assert run.recipe.train.accelerator == accelerator


def test_a_rate_without_a_dot_is_a_number(here):
    """Guards: `train.learning_rate: 1e-3`, a word to YAML, was a traceback in a study that has rates, and the
    runs that had begun with it were taken for those of another study."""
    write_tiny(learning_rates=[2e-3], attentions=["softmax"])
    text = Path("study-tiny.yaml").read_text()
    both = "options:\n  train.learning_rate: 1e-3\n  train.min_learning_rate: 1e-4\n"
    Path("study-tiny.yaml").write_text(text.replace("options:\n", both))
    study = tiny_study()
    assert study.options["train.learning_rate"] == "1e-3"
    train = study_runs(study, FOLDER, {"softmax": 2e-3}, None)[0].recipe.train
    assert (train.learning_rate, train.min_learning_rate) == (2e-3, pytest.approx(2e-4))
    fake_run("softmax-seed0")
    run = study_runs(study, FOLDER, {"softmax": 2e-3}, None)[0]
    assert run.recipe.train.learning_rate == 1e-3 and run.has_result()


def test_only_a_validation_at_the_last_step_is_a_result(here):
    """Guards: a run that was killed before its last validation, or whose loss is no number, was done."""
    write_tiny()
    early = {"kind": "val", "step": 3, "tokens": 384, "train_time": 3.0, "loss": 5.0}
    fake_run("softmax-seed0", steps=3, last=early)
    run = first_run()
    assert run.exclusion_reason() == "unfinished, at step 3 of 4" and not run.is_finished()
    fake_run("softmax-seed0")
    metrics = run.folder / "metrics.jsonl"
    *before, val = metrics.read_text().splitlines()
    for line in ("", *(val.replace("4.0}", f"{loss}}}") for loss in ("null", "NaN", "Infinity", '"low"'))):
        metrics.write_text("\n".join([*before, line]) + "\n")
        assert run.exclusion_reason().startswith("no validation loss at its last step") and run.loss is None
        assert not run.is_finished()


def test_runs_keep_the_rate_that_they_were_begun_with(here):
    """A short run that ends later and chooses another rate changes neither the runs nor what is printed. The
    first seed decides; a rate that is not one of the study's is no rate of its runs."""
    write_tiny(seeds=2, learning_rates=[1e-3, 3e-3], suites=[], attentions=["softmax"], rate_tokens=512)
    fake_run("softmax-rate0.001")
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    fake_run("softmax-rate0.003")
    metrics = FOLDER / "softmax-rate0.003/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 4.0', '"loss": 3.5'))
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = PAGE.read_text()
    assert re.search(r"\| softmax \| \S+ k +\| 0.001 +\| 0 +\| 4.0000", page)
    assert "softmax-seed0:" not in page and "| 3.5000 | 0.003 | 0.001 |" in page  # the best, and the one used
    fake_run("softmax-seed1", learning_rate=3e-3, min_learning_rate=3e-4)
    otherwise = r"trained otherwise than the study now says \(train.learning_rate: "
    assert main([*COMMAND, "--stages", "page"]) == 0
    page = PAGE.read_text()
    assert re.search(rf"^- softmax-seed1: {otherwise}0.003 → 0.001", page, re.M)
    fake_run("softmax-seed0", learning_rate=2e-3)
    study = tiny_study()
    found = study_runs(study, FOLDER, {"softmax": 1e-3}, None)
    assert found[1].recipe.train.learning_rate == 3e-3 and re.match(otherwise, found[0].exclusion_reason())
    (FOLDER / "softmax-seed0" / "config.yaml").write_text("train: 3")
    found = study_runs(study, FOLDER, {"softmax": 1e-3}, None)
    assert "does not say what it was trained with" in found[0].exclusion_reason()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decay_steps": 2}, "train.decay_steps: 2 → None"),
        ({"segments": 2}, "train.segments: 2 → 1"),
        ({"init_from": "runs/other"}, "train.init_from: runs/other → runs/first"),
        ({"max_tokens": 256}, "steps: 2 → 4"),
        ({"init_from": "/a/runs/first"}, "train.init_from: /a/runs/first → runs/first"),
        ({"init_from": "runs/first", "micro_batch_size": 2, "wandb": True}, None),
    ],
)
def test_what_may_change_in_a_run_that_resumes_may_not_in_a_study(here, change, said):
    """Guards: a row whose segments had changed kept the run with the old ones. What leaves the losses alone
    may change."""
    options = TINY["options"] | {"train.init_from": "runs/first"}
    write_tiny(options=options)
    fake_run("softmax-seed0", **change)
    run = first_run()
    found = run.exclusion_reason()
    assert found is None if said is None else f"({said})" in found


@pytest.mark.slow
def test_a_run_that_was_trained_otherwise_is_named(here, capsys):
    """A row whose options changed, a run of another rate or length: in no table, not trained over, and named
    with the mend; more seeds and more rows are no change.
    """
    write_tiny(suites=[], attentions=["softmax", "gla"])
    fake_run("softmax-seed0")
    fake_run("gla-seed0", max_tokens=1024)
    assert main([*COMMAND, "--stages", "page"]) == 0
    assert "gla-seed0: trained otherwise than the study now says (steps: 8 → 4): give" in PAGE.read_text()
    wider = {"softmax": {"model.intermediate_size": 128}, "gla": {}, "ours": {}}
    write_tiny(seeds=2, suites=[], attentions=wider)
    assert main([*COMMAND, "--stages", "data", "runs", "page"]) == 2
    assert here == ["data", "ours-seed0", "softmax-seed1", "gla-seed1", "ours-seed1"]
    assert "2 failed" in capsys.readouterr().err
    line = "softmax-seed0: trained otherwise than the study now says (model.intermediate_size: None → 128): "
    assert line + "give the study another --name, or remove the folder of the run" in PAGE.read_text()
    assert json.loads((FOLDER / "summary.json").read_text())["rows"][0]["seeds"] == [1]


def test_runs_with_one_reason_are_one_line(here, capsys):
    """Guards: a page of a published study, without its --source, was as many long lines as it has runs."""
    write_tiny(seeds=2, suites=[], attentions=["softmax", "gla"])
    named = [f"{row}-seed{seed}" for seed in (0, 1) for row in ("softmax", "gla")]
    for name in named:
        fake_run(name, max_tokens=1024)
    assert main([*COMMAND, "--stages", "runs", "page"]) == 2
    error = capsys.readouterr().err
    line = f"{', '.join(named)}: trained otherwise than the study now says (steps: 8 → 4): give the study"
    assert error.count("trained otherwise") == 1 and "4 failed, all else is kept" in error and line in error
    assert main([*COMMAND, "--stages", "page"]) == 0
    assert capsys.readouterr().out.count(f"not in the tables: {line}") == 1
    page = PAGE.read_text()
    assert f"- {line}" in page and page.count("trained otherwise") == 1


@pytest.mark.slow
def test_a_study_goes_on_where_its_data_has_moved(here, capsys):
    """The same text and tokenizer at another place are the same data, by the hashes in a run's record; other
    text at that place is not: the runs trained on the old are named, and their page stays."""
    write_tiny(suites=[])
    only = ["--stages", "data", "runs", "page", "--attentions"]
    assert main([*COMMAND, *only, "softmax"]) == 0
    Path("moved").mkdir()
    for name in ("train.jsonl", "tokenizer.json"):
        shutil.move(name, f"moved/{name}")
    moved = ["--source", "moved/train.jsonl", "--tokenizer", "moved/tokenizer.json"]
    assert main([*COMMAND, *moved, *only, "softmax", "mixed"]) == 0
    assert here == ["data", "softmax-seed0", "data", "mixed-seed0"]
    assert "Not in the tables" not in PAGE.read_text()
    text = Path("moved/train.jsonl").read_text()
    Path("other.jsonl").write_text(text.replace("sun", "moon"))
    before = PAGE.read_text()
    assert main([*COMMAND, "--source", "other.jsonl", *moved[2:], "--stages", "page"]) == 0
    change = "(data.source: moved/train.jsonl → other.jsonl)"
    mend = "give its --source and --tokenizer (its config.yaml has them); else give the"
    printed = capsys.readouterr().out
    assert f"mixed-seed0: trained otherwise than the study now says {change}: {mend}" in printed
    assert PAGE.read_text() == before and f"{PAGE} is left as it is: no run has results" in printed
    assert main([*COMMAND, "--source", "nowhere.jsonl", *moved[2:], "--stages", "page"]) == 0
    assert "moved/train.jsonl → nowhere.jsonl" in capsys.readouterr().out
    wider = {"softmax": {"model.intermediate_size": 96}}
    write_tiny(suites=[], attentions=wider)
    assert main([*COMMAND, *moved, "--stages", "page", "--attentions", "softmax"]) == 0
    assert "trained otherwise than the study now says (model.intermediate_size: " in capsys.readouterr().out


def test_metrics_are_read_once(here, monkeypatch):
    """Guards: a file of megabytes that was parsed for every property of the run, five times a second. What is
    written since is seen."""
    write_tiny()
    fake_run("softmax-seed0", steps=2)
    read, folders = runs.read_metrics, []
    monkeypatch.setattr(runs, "read_metrics", lambda folder: folders.append(folder) or read(folder))
    runs.clear_caches()
    study = tiny_study()
    run, again = (study_runs(study, FOLDER, {}, None)[0] for _ in range(2))
    assert (run.step, run.loss, run.diverged, again.step) == (2, None, False, 2)
    assert run.exclusion_reason() == "unfinished, at step 2 of 4"
    assert run.status() == "at step 2 of 4, loss 6.000" and len(folders) == 1
    fake_run("softmax-seed0")
    assert (run.step, run.loss, run.is_finished()) == (4, 4.0, True) and len(folders) == 2
    assert study_runs(study, FOLDER, {}, None)[1].status() == "at step 0 of 4"
