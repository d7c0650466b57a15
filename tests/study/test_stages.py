"""Guards a study by one command, and by one call: planned, trained, scored, shown; gone on with; and what
does not stop it.

The children run in this process, where a start costs nothing; test_jobs.py has the processes.
"""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lingpt.cli.main import main
from lingpt.common.errors import Interrupted, UserError
from lingpt.common.run_folder import read_metrics
from lingpt.study import find_study, read_study, run_study, stages, with_rows
from lingpt.study.jobs import Failure, Slot, Stopped
from lingpt.study.runs import StudyRun, rate_runs, read_rate_search
from lingpt.tests.study.tiny import COMMAND, FOLDER, PAGE, TINY, fake_run, tiny_study, write, write_tiny


@pytest.mark.slow
def test_a_study_from_the_plan_to_the_page(here, tmp_path, capsys, pictures):
    """Plan; rates; two runs of each of two rows at their rates; scores; the page. Again: none is trained."""
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    plan = capsys.readouterr().out
    assert "2 rows, 2 seeds" in plan and "0 of 2" in plan and "GPU hours" in plan and not here
    assert main(COMMAND) == 0
    tried = ["softmax-rate0.003", "mixed-rate0.003"]
    trained = ["softmax-seed0", "mixed-seed0", "softmax-seed1", "mixed-seed1"]
    assert here == ["data", *tried, *trained, "scores"]
    assert not any((FOLDER / name / "checkpoints").exists() for name in tried)
    config = yaml.safe_load((FOLDER / "mixed-seed1" / "config.yaml").read_text())
    study = tiny_study()
    chosen = read_rate_search(rate_runs(study, FOLDER, None)).chosen
    assert config["train"]["learning_rate"] == chosen["mixed"] == 3e-3
    assert config["train"]["min_learning_rate"] == pytest.approx(chosen["mixed"] / 10)  # as in the recipe
    assert (config["train"]["seed"], config["train"]["wandb_group"]) == (1, "study-tiny")
    page = (FOLDER / "README.md").read_text()
    for words in ("mean of 2 seeds", "## Time to a loss", "## Learning rates", "## Bits per byte", "A test."):
        assert words in page
    assert "Not in the tables" not in page
    assert "softmax, step 4, 2 seeds" in page and "softmax-seed0, step 4" not in page
    for name in ("curves.png", "curves.pdf", "positions.pdf", "suites.tex", "summary.json"):
        assert (FOLDER / name).stat().st_size > 100
    here.clear()
    again = ["--stages", "data", "rates", "runs", "scores", "--publish", str(tmp_path / "docs")]
    assert main([*COMMAND, *again]) == 0
    assert here == ["data", "scores"] and "computed before" in capsys.readouterr().out
    kept = {path.name for path in (tmp_path / "docs" / "softmax-seed0").iterdir()}
    assert kept == {"config.yaml", "environment.json", "metrics.jsonl", "eval"}


def test_a_study_from_a_notebook(here, capsys):
    """Guards: a study that only the command could start. A call plans it, runs it, goes on and refuses."""
    study = read_study(find_study("study-tiny.yaml"), {"learning_rates": [], "seeds": 1, "suites": []})
    folder = run_study(study, "out", dry_run=True)
    assert folder == Path("out/study-tiny") and not folder.exists() and not here
    assert "2 rows, 1 seed, 512 tokens each" in capsys.readouterr().out
    assert run_study(with_rows(study, ["softmax"]), "out", publish="copy") == folder
    assert here == ["data", "softmax-seed0"] and Path("copy/softmax-seed0/metrics.jsonl").exists()
    assert run_study(study, "out", stages=["page", "runs"]) == folder
    assert here[2:] == ["mixed-seed0"]
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["softmax", "mixed"] and (folder / "README.md").exists()
    for mistake, message in [
        ({"stages": ["score"]}, "did you mean 'scores'"),
        ({"minutes": 0}, "give more than 0"),
        ({"devices": 0}, "give at least 1"),
    ]:
        with pytest.raises(UserError, match=message):
            run_study(study, "out", **mistake)


@pytest.mark.slow
def test_a_study_begins_with_its_plan(here, capsys, monkeypatch):
    """Guards: a study that said what it would take only if asked by `--dry_run`. Once, before the first child
    starts; on resuming, of what is left; of a page alone there is none."""
    write_tiny(seeds=2, suites=[])
    run_jobs, before = stages.run_jobs, []

    def first(jobs, *args, **options):
        before.append(capsys.readouterr().out)
        return run_jobs(jobs, *args, **options)

    monkeypatch.setattr(stages, "run_jobs", first)
    assert main([*COMMAND, "--attentions", "softmax"]) == 0
    assert re.search(r"^softmax .* 0 of 2 ", before[0], re.M) and "(runs " in before[0]
    assert "dry run" not in before[0] and not any("GPU hours" in text for text in before[1:])
    before.clear()
    assert main(COMMAND) == 0
    for row, done in (("softmax", 2), ("mixed", 0)):
        assert re.search(rf"^{row} .* {done} of 2 ", before[0], re.M)
    before.clear()
    assert main(COMMAND) == 0 and "study tiny: nothing is left to train or to score" in before[0]
    assert main([*COMMAND, "--stages", "page"]) == 0 and "nothing is left" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "rates", "message"),
    [
        ({"train.min_learning_rate": 1e9}, [], "train.min_learning_rate is 1000000000.0; it must be"),
        ({"train.min_learning_rate": 0.5}, [], "train.min_learning_rate is 0.5, above the peak"),
        ({"train.min_learning_rate": 0.5}, [1e-3], "train.min_learning_rate is 0.1"),
        ({"train.micro_batch_size": 3}, [], "micro_batch_size 3"),
        ({"data.seq_len": 64}, [], "data.seq_len 64 is longer than the block size 32"),
        ({"train.learnin_rate": 1e-3}, [], "learnin_rate"),
        ({"train.grad_clip": "much"}, [], "grad_clip"),
    ],
)
def test_a_row_that_cannot_work_is_refused_before_any_other_trains(here, capsys, options, rates, message):
    """Guards: what was found only in that row's turn, perhaps hours later. By the dry run, too."""
    rows = {"softmax": {}, "wrong": {"model.attention": "ours", **options}}
    write_tiny(attentions=rows, learning_rates=rates, suites=[])
    for command in (COMMAND, [*COMMAND, "--dry_run", "true"]):
        assert main(command) == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith("lingpt: wrong: ") and message in line and "\n" not in line
    assert not here and not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train.init_from": "nowhere"}, "no model in nowhere: there is no such folder"),
        ({"model.attention": "softmax", "model.sdpa": "cudnn"}, "model.sdpa cudnn cannot train on cpu"),
        ({"model.backend": "cuda"}, "model.backend: "),
    ],
    ids=["weights", "sdpa", "backend"],
)
def test_what_a_row_lacks_here_is_said_before_any_other_trains(here, capsys, monkeypatch, options, message):
    """Guards: weights that do not exist and a kernel that cannot run, found only in the row's turn. The dry
    run may be for another machine; and where that row is not to be trained, it lacks nothing."""
    rows = {"softmax": {}, "wrong": {"model.attention": "ours", **options}}
    write_tiny(attentions=rows, suites=[])
    assert main(COMMAND) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("lingpt: wrong: ") and message in line and "\n" not in line
    assert not here and not Path("runs").exists()
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    fake_run("wrong-seed0", steps=2)
    monkeypatch.setattr(stages, "run_jobs", lambda *_: [])
    assert main([*COMMAND, "--attentions", "softmax"]) == main([*COMMAND, "--stages", "page"]) == 0
    fake_run("wrong-seed0")
    assert main(COMMAND) == 0


@pytest.mark.parametrize(
    ("lacking", "other"),
    [
        ({"options": TINY["options"] | {"data.source": "gone"}}, "scores"),
        ({"texts": {"words": "gone"}}, "runs"),
    ],
    ids=["data", "texts"],
)
def test_files_that_are_gone_are_missed_before_any_training(here, capsys, monkeypatch, lacking, other):
    """Guards: a text of the scores that is missed when all has been trained. A dry run may be for another
    machine; and a stage misses only what it reads."""
    write_tiny(suites=["language"], **lacking)
    assert main(COMMAND) == 2
    line = capsys.readouterr().err.strip()
    assert "gone" in line and "\n" not in line and not here and not Path("runs").exists()
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    monkeypatch.setattr(stages, "run_jobs", lambda *_: [])
    assert main([*COMMAND, "--stages", other]) == 0


def test_a_notebook_may_change_the_recipe_between_two_calls(here, capsys, monkeypatch):
    """Guards: a plan, and a comparison with what was trained, by a recipe as it was in the first call. Each
    is for the cards that are asked for."""
    plans, asked, find = [], [], stages.find_slots
    monkeypatch.setattr(stages, "find_slots", lambda *given: asked.append(given) or find(*given))
    for batch in (4, 8):
        write({"model": {"attention": "ours"}, "train": {"global_batch_size": batch}}, "own.yaml")
        options = {key: TINY["options"][key] for key in TINY["options"] if "batch_size" not in key}
        write_tiny(seeds=2, recipe="own.yaml", options=options)
        study = replace(tiny_study(), devices_per_run=4, runs_per_device=3)
        run_study(study, devices=2, dry_run=True)
        plans.append(capsys.readouterr().out)
    assert "4 × 128" in plans[0] and "2 × 256" in plans[1] and asked == [(2, 4, 3)] * 2


@pytest.mark.parametrize(
    ("runs", "gpus", "used"),
    [(1, 4, ["0,1,2,3"]), (3, 8, ["0,1", "2,3", "4,5"]), (5, 4, ["0", "1", "2", "3"])],
)
def test_cards_share_the_questions_where_runs_are_fewer(here, monkeypatch, runs, gpus, used):
    """Guards: one run on eight cards was scored by one of them, and seven waited. A run without a result, or
    without its weights, is left out."""
    options = {"mqar": {}, "eval_data": "benchmarks", "limit": 7, "text_key": "body"}
    write_tiny(seeds=runs + 2, attentions=["softmax"], **options)
    study, folder = tiny_study(), Path("runs")
    monkeypatch.setattr(StudyRun, "has_result", lambda self: self.seed != runs)
    monkeypatch.setattr(StudyRun, "has_weights", lambda self: self.seed != runs + 1)
    asked = []
    monkeypatch.setattr(stages, "run_jobs", lambda jobs, slots, *_, **__: asked.append((jobs, slots)) or [])
    work = stages._Stages(study, study, folder, [Slot(f"GPU {i}", (i,)) for i in range(gpus)])
    assert [run.options["train.devices"] for run in work.runs] == [1] * (runs + 2)
    work.run(["scores", "mqar"], None)
    ((mqar,), (all_cards,)), (jobs, slots) = asked
    assert [",".join(map(str, slot.gpus)) for slot in slots][: len(used)] == used and len(jobs) == len(used)
    assert len({job.log for job in jobs}) == len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = " ".join(job.arguments)
        assert f"--suite language --tasks {' '.join(study.tasks)} --texts words=held-out.jsonl " in words
        assert "--text_key body --max_length_factor 2 --data benchmarks --limit 7 --device cuda " in words
        assert words.endswith(f"--devices {len(slots[0].gpus)} --dtype bfloat16")
    scored = [Path(word).name for job in jobs for word in job.arguments if "-seed" in word]
    assert sorted(scored) == [f"softmax-seed{seed}" for seed in range(runs)]
    assert all_cards.gpus == tuple(range(gpus)) and mqar.arguments[-2:] == ["--out", "runs/mqar"]


def test_without_data_nothing_begins(here, monkeypatch, capsys):
    """Guards: a failure of each run, hours later, in place of the one of the data."""
    write_tiny(suites=[])
    fail = lambda jobs, *_: here.extend(job.name for job in jobs) or [Failure("data", "no room")]  # noqa: E731
    monkeypatch.setattr(stages, "run_jobs", fail)
    assert main(COMMAND) == 2 and here == ["data"]
    assert capsys.readouterr().err == "lingpt: the data cannot be prepared: no room\n"


def test_a_failure_is_named_at_the_end(here, monkeypatch, capsys):
    """The others are trained; the exit code and the last line say which was not."""
    write_tiny(suites=[])
    run_jobs = stages.run_jobs

    def sick(jobs, slots, deadline=None, report=print):
        well = [job for job in jobs if job.name != "mixed-seed0"]
        missing = [Failure(job.name, "ended by SIGKILL", job.log) for job in jobs if job not in well]
        return run_jobs(well, slots, deadline, report) + missing

    monkeypatch.setattr(stages, "run_jobs", sick)
    assert main(COMMAND) == 2
    out, err = capsys.readouterr()
    again = "1 failed, all else is kept, and the same command tries again: mixed-seed0: ended by SIGKILL"
    assert f"{again} (runs/study-tiny/logs/mixed-seed0.log)\n" in err
    page = PAGE.read_text()
    assert "mixed-seed0: failed: ended by SIGKILL (logs/mixed-seed0.log)\n" in page
    assert "not trained" not in page
    assert (FOLDER / "softmax-seed0/checkpoints").is_dir() and "page " in out


@pytest.mark.parametrize("lost", [["0.001", "0.003"], ["0.003"]], ids=["all", "some"])
@pytest.mark.slow
def test_a_row_waits_until_its_rates_are_tried(here, monkeypatch, capsys, lost):
    """Guards: a row whose short runs had failed was trained, for good, at a rate that was not the best of all
    that were asked for, beside rows that had theirs. It is left out, named, and trained by the next start."""
    write_tiny(learning_rates=[1e-3, 3e-3], suites=[])
    run_jobs, gone = stages.run_jobs, {f"mixed-rate{rate}" for rate in lost}

    def sick(jobs, *args, **options):
        failed = [Failure(job.name, "ended by SIGKILL") for job in jobs if job.name in gone]
        return run_jobs([job for job in jobs if job.name not in gone], *args, **options) + failed

    monkeypatch.setattr(stages, "run_jobs", sick)
    assert main(COMMAND) == 2
    assert "softmax-seed0" in here and "mixed-seed0" not in here
    line = capsys.readouterr().err.strip()
    why = f"it waits for its learning rate, until the stage `rates` is done with {', '.join(sorted(gone))}"
    assert f"mixed-seed0: {why}" in line and "\n" not in line
    assert f"- mixed-seed0: failed: {why}\n" in PAGE.read_text()
    table = PAGE.read_text().partition("## Learning rates")[2]
    assert re.search(r"^\| mixed .*\| – +\|$", table, re.M)
    here.clear()
    monkeypatch.setattr(stages, "run_jobs", run_jobs)
    assert main(COMMAND) == 0 and here == ["data", *sorted(gone), "mixed-seed0"]
    assert "waits" not in PAGE.read_text()
    study = tiny_study()
    trained = yaml.safe_load((FOLDER / "mixed-seed0" / "config.yaml").read_text())["train"]
    assert trained["learning_rate"] == read_rate_search(rate_runs(study, FOLDER, None)).chosen["mixed"]


def test_what_waits_for_a_rate(here, monkeypatch):
    """Who leaves the stage `rates` out of the whole study has the recipe's rate in all rows. Once a rate is
    tried, a row without all of its own waits; a run that has begun goes on."""
    write_tiny(learning_rates=[1e-3, 3e-3], suites=[], rate_tokens=512)
    asked = []
    monkeypatch.setattr(stages, "run_jobs", lambda jobs, *_, **__: asked.append([j.name for j in jobs]) or [])
    runs = [*COMMAND, "--stages", "runs"]
    assert main(runs) == 0
    fake_run("softmax-rate0.001", steps=2)
    assert main(runs) == 2
    end = {"kind": "diverged", "step": 2, "tokens": 256, "train_time": 2.0, "skipped": 10}
    fake_run("softmax-rate0.001", steps=2, last=end)
    fake_run("softmax-rate0.003")
    assert main(runs) == 2
    fake_run("mixed-seed0", steps=2)
    assert main(runs) == 0
    both = ["softmax-seed0", "mixed-seed0"]
    assert asked == [both, [], ["softmax-seed0"], both[::-1]]  # rows that have begun come first
    assert not PAGE.exists()  # which the stage `page` writes


def test_minutes_that_are_over_and_a_signal_end_it(here, monkeypatch, capsys):
    """With what has failed until then, and with the page; a signal's number is that of the exit code."""
    write_tiny(suites=[])
    left, ends = [], [Stopped([Failure("mixed-seed0", "it failed")])]

    def end(jobs, slots, deadline):
        left.append(deadline and deadline - time.monotonic())
        raise ends[-1]

    monkeypatch.setattr(stages, "run_jobs", end)
    assert main([*COMMAND, "--minutes", "3"]) == 2 and 120 < left[0] <= 180
    out, err = capsys.readouterr()
    assert "stopped after 3 minutes; the same command resumes" in out and "mixed-seed0: it failed" in err
    assert "failed: it failed" in PAGE.read_text()
    for stop, number in ((Interrupted(signal.SIGTERM), signal.SIGTERM), (KeyboardInterrupt(), signal.SIGINT)):
        ends.append(stop)
        with pytest.raises(Interrupted, match="the same command resumes") as raised:
            run_study(tiny_study())
        assert raised.value.number == number and left[-1] is None


def test_another_study_in_the_same_folder_is_refused(here, capsys):
    write_tiny(suites=[])
    command = [*COMMAND, "--stages", "page"]
    assert main(command) == 0 and main([*command, "--seeds", "3"]) == 0
    assert main([*command, "--tokens", "1024"]) == 2
    assert (
        "holds a study with another `tokens` (512, now 1024): give the new one a --name"
        in capsys.readouterr().err
    )
    assert main([*command, "--tokens", "1024", "--name", "longer"]) == 0


@pytest.mark.slow
def test_a_study_without_tasks_is_scored(here):
    """Guards: `tasks: []` ended, after all training, with a line on the arguments of a child."""
    write_tiny(tasks=[], attentions=["softmax"])
    assert main(COMMAND) == 0 and here == ["data", "softmax-seed0", "scores"]
    assert "## Bits per byte" in PAGE.read_text()


def test_nothing_to_score_is_said(here, capsys):
    """Guards: `--stages scores` before any run is finished ended without a word."""
    write_tiny(seeds=2)
    assert main([*COMMAND, "--stages", "scores"]) == 0 and not here
    plan, _, out = capsys.readouterr().out.partition("\nscores: ")
    assert plan.startswith("study tiny: 2 rows") and out.startswith("nothing to score: no run is finished")


def test_fewer_rows_and_seeds_leave_the_others_in_the_study(here):
    """What is asked for is trained; page, study.json and summary.json have all that the folder has.

    Guards: the text of a row that is not asked for, which was missed."""
    rows = {"gla": {"data.source": "gone"}, "softmax": {}, "ours": {}}
    write_tiny(seeds=2, suites=[], attentions=rows)
    for name in ("softmax-seed0", "gla-seed0", "gla-seed1"):
        fake_run(name)
    assert main([*COMMAND, "--stages", "page"]) == 0
    less = ["--attentions", "softmax", "--seeds", "1", "--stages", "data", "runs", "page"]
    assert main([*COMMAND, *less]) == 0 and here == ["data"]
    kept = json.loads((FOLDER / "study.json").read_text())
    assert (list(kept["attentions"]), kept["seeds"]) == (["gla", "softmax"], 2)
    rows = json.loads((FOLDER / "summary.json").read_text())["rows"]
    assert [(row["row"], row["seeds"]) for row in rows] == [("gla", [0, 1]), ("softmax", [0])]


def test_a_row_of_the_folder_whose_options_are_gone_is_refused_first(here, capsys):
    """Guards: what the page found, after all training; and a dry run that said nothing of it."""
    write_tiny(suites=[], attentions=["softmax", "gla"])
    fake_run("gla-seed0")
    assert main([*COMMAND, "--stages", "page"]) == 0
    path = FOLDER / "study.json"
    study = json.loads(path.read_text())
    study["attentions"]["gla"] = {"model.gone": 1}
    path.write_text(json.dumps(study))
    for dry_run in ("true", "false"):
        assert main([*COMMAND, "--attentions", "softmax", "--dry_run", dry_run]) == 2 and not here
        assert re.match("lingpt: gla: .*model.gone", capsys.readouterr().err)


def test_a_second_command_in_the_folder_is_refused(here, monkeypatch, capsys):
    """Guards: both trained everything, and the second reported failures made from the first's progress. What
    the first leaves behind is no obstacle; a dry run works beside it."""
    write_tiny(suites=[])
    first, second = ([*COMMAND, "--attentions", row] for row in ("softmax", "mixed"))
    run_jobs, codes = stages.run_jobs, []

    def with_the_other(jobs, *args, **options):
        monkeypatch.setattr(stages, "run_jobs", run_jobs)
        codes.extend(main([*second, *more]) for more in ([], ["--stages", "page"], ["--dry_run", "true"]))
        return run_jobs(jobs, *args, **options)

    monkeypatch.setattr(stages, "run_jobs", with_the_other)
    assert main(first) == 0 and codes == [2, 2, 0] and here == ["data", "softmax-seed0"]
    line = (
        f"lingpt: runs/study-tiny is in use by process {os.getpid()} on .*: wait .*, or choose another --name"
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(re.fullmatch(line, one) for one in lines)
    assert main(second) == 0 and here == ["data", "softmax-seed0", "data", "mixed-seed0"]
    rows = json.loads((FOLDER / "summary.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["softmax", "mixed"]


def test_a_folder_that_was_moved_meanwhile_gets_no_page(here, monkeypatch, capsys):
    """What now has its name is another command's."""
    write_tiny(suites=[])

    def move(jobs, *_):
        if not Path("moved").exists():
            FOLDER.rename("moved")
            FOLDER.mkdir()
            (FOLDER / ".lock").touch()
        return []

    monkeypatch.setattr(stages, "run_jobs", move)
    assert main(COMMAND) == 2 and "runs/study-tiny was deleted or moved" in capsys.readouterr().err
    assert os.listdir(FOLDER) == [".lock"]


def test_a_rate_that_diverged_is_a_result(here):
    """Its start is not tried again, its checkpoints go, and the study goes on without an error; so it does
    from a copy, which has no training losses of short runs, and which needs no page."""
    write_tiny(learning_rates=[1e-3, 3e-3], suites=[], attentions=["softmax"], rate_tokens=512)
    fake_run("softmax-rate0.001")
    end = {"kind": "diverged", "step": 2, "tokens": 256, "train_time": 2.0, "skipped": 10}
    fake_run("softmax-rate0.003", steps=2, last=end)
    fake_run("softmax-seed0", learning_rate=1e-3, min_learning_rate=1e-3 * (3e-4 / 3e-3))
    weights = FOLDER / "softmax-rate0.003/checkpoints"
    weights.mkdir()
    stages = ["--stages", "rates", "runs"]
    assert main([*COMMAND, *stages, "--publish", "copy/study-tiny"]) == 0 and not here
    assert main([*COMMAND, *stages, "--out", "copy"]) == 0 and not here
    short = read_metrics(Path("copy/study-tiny/softmax-rate0.003"))
    assert [line["kind"] for line in short] == ["val", "diverged"]
    assert main([*COMMAND, *stages, "page"]) == 0 and not here
    assert "| softmax | 4.0000 | –     | 0.001 | 0.001 |" in PAGE.read_text()
    assert not weights.exists()


def test_a_run_that_diverged_is_a_result(here, monkeypatch):
    """Guards: every later start of the command ended with an error. It is named, not trained again, and the
    rest goes on; without its folder it is trained again."""
    write_tiny(suites=[], attentions=["softmax", "gla"])
    fake_run("softmax-seed0")
    end = {"kind": "diverged", "step": 2, "tokens": 256, "train_time": 2.0, "skipped": 10}

    def diverge(jobs, *args, **options):
        here.extend(job.name for job in jobs)
        if "gla-seed0" in here[-1:]:
            fake_run("gla-seed0", steps=2, last=end)
        return [Failure(job.name, "the loss or the gradient was not finite") for job in jobs]

    monkeypatch.setattr(stages, "run_jobs", diverge)
    train = [*COMMAND, "--stages", "runs", "page"]
    assert main(train) == 0 and main(train) == 0
    assert here == ["gla-seed0"]
    page = PAGE.read_text()
    line = "- gla-seed0: diverged at step 2, its loss was not finite: remove the folder of the run"
    assert line in page and "gla-seed0: failed" not in page
    shutil.rmtree("runs/study-tiny/gla-seed0")
    assert main(train) == 0 and here == ["gla-seed0"] * 2


@pytest.mark.parametrize("content", ["{", "[3]", "{}"])
def test_a_damaged_study_says_what_to_do(here, capsys, content):
    """Guards: a line that names the damage and not the way out."""
    FOLDER.mkdir(parents=True)
    (FOLDER / "study.json").write_text(content)
    assert main([*COMMAND, "--stages", "page"]) == 2
    line = capsys.readouterr().err.strip()
    assert line.endswith(": remove it, and the same command writes it anew") and "\n" not in line
    assert line.count("study.json") == 1
