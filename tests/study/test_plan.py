"""Guards the plan of a study: the time and the cost of what is asked for and left; nothing is done for it."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.eval.recall.mqar import Trial
from lingpt.eval.recall.needle import NEEDLES
from lingpt.study import find_study, plan, read_study, stages
from lingpt.study.jobs import Slot, gpu_slots
from lingpt.study.plan import H200_FLOPS, Cost, mqar_cost, score_costs, stage_seconds, wall_seconds
from lingpt.tests.study.tiny import COMMAND, FOLDER, TINY, fake_run, write, write_scores, write_tiny


@pytest.mark.parametrize("stages", [["data", "runs"], ["rates"], ["scores", "page"]], ids=" ".join)
def test_the_plan_is_of_the_stages_that_are_asked_for(here, capsys, stages):
    """Guards: the time, the cost and the scores of stages that the command would leave out."""
    plans = []
    for more in ([], ["--stages", *stages]):
        assert main([*COMMAND, "--dry_run", "true", *more]) == 0
        plans.append(capsys.readouterr().out)
    timed = [set(re.findall(r"(rates|runs|scores) [\d.]+ (?:s|min|h)", plan)) for plan in plans]
    assert timed == [{"rates", "runs", "scores"}, {"rates", "runs", "scores"} & set(stages)]
    suites = [re.search(r"^scores +(.*)$", plan, re.M)[1] for plan in plans]
    assert suites[0] != "none" and suites[1] == (suites[0] if "scores" in stages else "none")


def test_the_plan_says_which_benchmarks_are_not_there(here, capsys):
    """Guards: a dry run that was refused on a machine without them, where it could plan without the text."""
    write_tiny(seeds=2, suites=["commonsense"], eval_data="nowhere")
    assert main([*COMMAND, "--dry_run", "true"]) == 0
    assert "\nscores  commonsense; NOT FOUND: no folder nowhere (" in capsys.readouterr().out
    assert main(COMMAND) == 2 and "no folder nowhere" in capsys.readouterr().err and not here


def test_the_plan_counts_what_is_left_of_mqar(here, capsys):
    """Guards: MQAR's hours were in no plan. What is trained is not counted."""
    mqar = {"attentions": ["softmax"], "learning_rates": [0.001, 0.01], "widths": [64], "pairs": [4]}
    write_tiny(seeds=2, suites=[], mqar=mqar | {"steps": 2000})
    command = [*COMMAND, "--dry_run", "true"]

    def minutes():
        assert main(command) == 0
        found = re.search(r"mqar ([\d.]+) (s|min|h)", capsys.readouterr().out)
        return found and float(found[1]) * {"s": 1 / 60, "min": 1, "h": 60}[found[2]]

    both = minutes()
    trial = {"attention": "softmax", "width": 64, "pairs": 4, "rate": 0.001, "steps": 2000}
    trial |= {"batch_size": 256, "vocabulary": 8192, "heads": 2, "layers": 2, "seed": 0}
    trial |= {"accuracy": 0.5, "accuracy_stderr": 0.1, "parameters": 1, "curve": [[250, 0.5]]}
    trial |= {"trained_steps": 250, "seconds": 1.0}
    results = FOLDER / "mqar/mqar.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps({"results": [trial]}))
    assert minutes() == pytest.approx(both / 2, rel=0.05)
    results.write_text(json.dumps({"results": [trial, trial | {"rate": 0.01}]}))
    assert minutes() is None and not here


def test_the_plan_counts_what_is_left_of_the_training(here, capsys, monkeypatch):
    """Guards: all of a row's short runs as left where one was; and GPU hours "in all" that had what is
    trained and not what is scored."""
    write_tiny(learning_rates=[1e-3, 3e-3], rate_tokens=512, attentions=["softmax"])
    monkeypatch.setattr(plan, "CPU_CORE_FLOPS", 1e6)
    monkeypatch.setattr(plan, "H200_FLOPS", 1e6)

    def look():
        assert main([*COMMAND, "--dry_run", "true", "--stages", "rates", "runs"]) == 0
        text = capsys.readouterr().out
        hours = re.search(r"cost +(.*) GPU hours on H200s for what is left,", text)[1]
        return hours, re.search(r"\(.*rates ([\d.]+ \w+)|$", text)[1], re.search(r"what is left .*", text)[0]

    first, rates, _ = look()
    fake_run("softmax-rate0.001")
    second, half, _ = look()
    number, unit = rates.split()
    assert float(half.split()[0]) == pytest.approx(float(number) / 2, rel=0.05) and half.split()[1] == unit
    assert float(second) == pytest.approx(float(first) * 2 / 3, rel=0.05)  # three runs of 512 tokens
    fake_run("softmax-rate0.003")
    fake_run("softmax-seed0")
    hours, rates, left = look()
    assert (hours, rates) == ("under 0.01", None) and "(nothing)" in left and not here


def test_the_plan_knows_how_far_a_run_is(here, capsys, monkeypatch):
    """Guards: a run at three steps of four that counted whole, a diverged one that was to be scored, and no
    hours to train all where the stages were others."""
    write_tiny(attentions=["softmax"])
    monkeypatch.setattr(plan, "H200_FLOPS", 1e6)

    def look(*stages):
        assert main([*COMMAND, "--dry_run", "true", "--stages", *stages]) == 0
        text = capsys.readouterr().out
        cost = re.search(r"cost +(?:under )?([\d.]+) GPU hours", text)[1]
        return float(cost), re.search(r"^softmax .* ([\d.]+)$", text, re.M)[1], text

    whole, all_hours, _ = look("runs")
    assert look("scores")[1] == all_hours
    fake_run("softmax-seed0", steps=3)
    assert look("runs")[0] == pytest.approx(whole / 4, rel=0.05)
    fake_run("softmax-seed0", last={"kind": "diverged", "step": 4, "tokens": 512, "train_time": 4.0})
    assert "(nothing)" in look("scores")[2]


def test_the_plan_counts_each_score_that_is_left(here, capsys, monkeypatch):
    """Guards: a suite with one score of several that counted as done."""
    questions = {"arc_easy": 2376, "arc_challenge": 1172, "piqa": 1838}
    row = {"learning_rates": [], "seeds": 1, "attentions": ["softmax"]}
    write(TINY | row | {"suites": ["table2"], "tasks": [*questions]})
    fake_run("softmax-seed0")
    monkeypatch.setattr(plan, "H200_FLOPS", 1e6)
    hours, scores = [], {}
    for task in questions:
        assert main([*COMMAND, "--dry_run", "true"]) == 0
        hours.append(float(re.search(r"cost +([\d.]+) GPU hours", capsys.readouterr().out)[1]))
        score = {"task": task, "num_fewshot": 0, "documents": 8, "complete": True, "metrics": {}}
        scores[f"{task} (0-shot)"] = score
        write_scores("softmax-seed0", 4, **scores)
    left = [2376 + 1172 + 1838, 1172 + 1838, 1838]
    assert hours == pytest.approx([hours[0] * questions / left[0] for questions in left], rel=0.01)
    monkeypatch.setattr(stages, "check_scoring", lambda *_: None)
    assert main(COMMAND) == 0 and "nothing is left to train or to score" in capsys.readouterr().out


def test_a_plan_is_refused_where_the_study_would_be(here, capsys):
    """Guards: `--dry_run` approved, with nothing left, what the command then refused."""
    write_tiny(suites=[], attentions=["softmax"])
    fake_run("softmax-seed0")
    assert main([*COMMAND, "--stages", "page"]) == 0
    assert main([*COMMAND, "--tokens", "256", "--dry_run", "true"]) == 2
    assert "holds a study with another `tokens` (512, now 256)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("jobs", "slots", "seconds"),
    [
        ([60, 60, 60], gpu_slots(8, 1), 60),  # five cards have nothing to do
        ([60] * 9, gpu_slots(8, 1), 120),
        ([60] * 3, gpu_slots(8, None), 3 * 60 / 8),  # one after the other, on all cards
        ([60] * 3, gpu_slots(8, 4), 2 * 60 / 4),
        ([60] * 2, gpu_slots(2, 1, sharing=3), 60),  # a card each
        ([60] * 6, gpu_slots(2, 1, sharing=3), 3 * 60),
        ([60] * 3, [Slot("CPU process 0"), Slot("CPU process 1")], 120),
        ([], gpu_slots(8, 1), 0),
    ],
)
def test_a_run_is_not_sooner_done_for_cards_that_it_has_not(jobs, slots, seconds):
    """Guards: three runs on eight cards were to take three eighths of one."""
    assert wall_seconds([Cost(flops) for flops in jobs], slots, peak=1.0) == pytest.approx(seconds)


def test_the_hosts_seconds_are_those_of_a_gpu():
    times = [wall_seconds([Cost(60, 5)], slots, peak=1.0) for slots in (gpu_slots(1, 1), [Slot("CPU")])]
    assert times == [65, 60]


def test_the_plan_has_the_disk_that_the_rates_take(here, capsys):
    """Guards: the short runs' checkpoints, all of which are there until the last is over, were forgotten; and
    the one that a run keeps beside the newest two, for `keep_best`."""

    def disk(rates, *more, **options):
        changes = {"options": TINY["options"] | options, "attentions": ["softmax"]}
        write(TINY | {"learning_rates": rates, "seeds": 1} | changes)
        assert main([*COMMAND, "--dry_run", "true", *more]) == 0
        return float(re.search(r"^disk +([\d.]+) M?B", capsys.readouterr().out, re.M)[1])

    one = disk([])
    assert disk([], **{"train.keep_best": True}) == pytest.approx(one * 4 / 3, rel=0.01)
    assert disk([], **{"train.keep_checkpoints": 0}) == 0
    assert disk([1e-3]) == one  # it is gone when the run begins
    assert disk([1e-3, 3e-3, 1e-2]) == pytest.approx(3 * one, rel=0.01)
    assert disk([1e-3, 3e-3, 1e-2], "--stages", "runs") == one
    fake_run("softmax-rate0.003")  # whose weights are gone
    assert disk([1e-3, 3e-3, 1e-2]) == pytest.approx(2 * one, rel=0.01)


def test_the_time_of_scores_is_what_was_measured():
    """Guards: 17 seconds for scores that take 210 on an H200, and 49 minutes for those of the demo that take
    one on a CPU. The mean over the runs, within a third."""
    folder = Path(__file__).parents[2] / "docs" / "results" / "study" / "pythia-160m"
    texts = {"wikipedia": "test.jsonl.xz", "novels": "novels.jsonl.xz"}
    study = read_study(find_study("pythia-160m"), {"texts": texts})
    costs = score_costs(study, 2048)
    files = [json.loads(file.read_text()) for file in folder.glob("*-seed0/eval/*.json")]
    scores = [(key, entry["seconds"]) for file in files for key, entry in file["scores"].items()]
    assert files and {key for key, _ in scores} <= costs.keys() and costs["bits_per_byte (novels)"][0] == 1e6
    planned = sum(costs[key][0] * 2 * 162e6 / H200_FLOPS + costs[key][1] for key, _ in scores)
    assert planned == pytest.approx(sum(seconds for _, seconds in scores), rel=1 / 3)
    demo = score_costs(read_study(find_study("demo")), 256).values()
    assert 0 < sum(tokens for tokens, _ in demo) < 5e5 and sum(seconds for _, seconds in demo) == 0


def test_needles_are_planned():
    """Guards: a KeyError of any study with the suite `needle`."""
    study = replace(read_study(find_study("pythia-160m")), suites=("needle",), max_length_factor=4)
    costs = score_costs(study, 2048)
    assert {key: tokens for key, (tokens, _) in costs.items()} == {
        f"needle ({tokens:,} tokens)": NEEDLES * tokens for tokens in (1024, 2048, 4096, 8192)
    }


def test_a_limit_makes_scoring_shorter():
    """Guards: the time of whole benchmarks for a hundredth of their questions. MMLU has 57 subjects."""
    study = read_study(find_study("pythia-160m"), {"suites": ["table2"], "limit": 10})
    seconds = {key: round(1000 * cost[1]) for key, cost in score_costs(study, 2048).items()}
    arc, mmlu = seconds["arc_easy (0-shot, first 10)"], seconds["mmlu (5-shot, first 10)"]
    assert (arc, mmlu) == (30, 57 * 30) and len(seconds) == 5
    assert score_costs(replace(study, limit=10**6), 2048).keys() != score_costs(study, 2048).keys()
    whole = score_costs(replace(study, limit=10**6), 2048).values()
    assert list(whole) == list(score_costs(replace(study, limit=None), 2048).values())


def test_mqars_time_on_a_card_is_what_was_measured():
    """Of the trials in docs/results, eight side by side on one H200: within a half."""
    measured = Path(__file__).parents[2] / "docs" / "results" / "gate" / "learning" / "mqar.json"
    found = json.loads(measured.read_text())["results"]
    names = [field.name for field in fields(Trial)]
    trials = [Trial(**{n: r[n] for n in names if n in r} | {"steps": r["trained_steps"]}) for r in found]
    planned = sum(mqar_cost(trial).host for trial in trials)
    assert planned == pytest.approx(sum(r["seconds"] for r in found), rel=0.5)


def test_mqar_is_not_sooner_done_for_cards_that_it_has_not():
    """Guards: one trial on eight cards was to take an eighth of one card's time."""
    trial = Trial("softmax", 64, 4, 1e-3, steps=2000)

    def seconds(count, cards):
        left = {"mqar": [mqar_cost(trial)._replace(flops=0.0)] * count}
        return stage_seconds(left, 1, gpu_slots(cards, 1), H200_FLOPS)["mqar"]

    assert seconds(1, 8) == seconds(1, 1) == seconds(8, 1) == seconds(64, 8) > 0  # eight share a card
    assert seconds(64, 1) == pytest.approx(8 * seconds(1, 1))
