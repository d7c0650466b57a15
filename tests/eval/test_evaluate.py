"""Guards the whole way from a run's checkpoint to scores on disk, with no network."""

import json
import math
import shutil
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from lingpt.common.devices import find_device
from lingpt.common.errors import UserError
from lingpt.common.run_folder import write_manifest
from lingpt.data import load_tokenizer
from lingpt.eval import harness, scores, scoring
from lingpt.eval.harness import metrics_of, parse_task, requests_hash
from lingpt.eval.lm import LinGPTLM
from lingpt.eval.runs import find_checkpoints
from lingpt.eval.scores import About, read_results, results_path, unpack_bits
from lingpt.eval.texts import prompts_hash
from lingpt.models import load_model

from .conftest import evaluate, score, tiny_model, write_checkpoint, write_run

pytestmark = pytest.mark.usefixtures("no_network")
QUIET = {"device": "cpu", "log": lambda line: None}


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    return find_checkpoints(write_run(tmp_path, "demo-ours", "ours", tokenizer).parent)[0]


def on_disk(checkpoint):
    return read_results(results_path(checkpoint))


def test_scores_are_written(checkpoint, eval_data):
    """Accuracy, its standard error, its normalised form, and everything needed to know what they are of."""
    results = evaluate(checkpoint, ["arc_easy", "piqa"], data=eval_data, **QUIET)
    assert results == on_disk(checkpoint)
    assert results.checkpoint == About(
        run="demo-ours",
        path=str(checkpoint.folder),
        model="demo",
        attention="ours",
        form="ours",
        step=10,
        weights=checkpoint.weights,
        parameters=tiny_model("ours").num_parameters(),
        # The manifest of this test's checkpoint says no tokens, length or seed.
    )
    entry = results.scores["arc_easy (0-shot)"]
    p, n = entry.metrics["acc"], entry.documents
    assert n == 9 and p * 9 == pytest.approx(round(p * 9))
    assert entry.metrics["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    assert {"acc_norm", "acc_norm_stderr"} < entry.metrics.keys()
    assert entry.data.keys() == {"from", "arc_easy_test.jsonl"}
    assert (entry.version, entry.dtype) == (1.0, "float32")
    assert (entry.limit, entry.complete) == (None, False)
    assert len(entry.prompts) == 64 and entry.versions["lm_eval"] and entry.max_length == 64
    assert (entry.device, entry.devices) == ("cpu", 1) and entry.seconds >= 0 and entry.date


def test_no_more_is_read_at_once_than_in_training(checkpoint, eval_data):
    """Guards: a model trained on samples shorter than its block size was scored beyond their length."""
    write_manifest(checkpoint.folder, {"step": 10, "config": {"data": {"seq_len": 32}}})
    entry = evaluate(checkpoint, ["piqa"], data=eval_data, **QUIET).scores["piqa (0-shot)"]
    assert entry.max_length == 32 < tiny_model("ours").config.block_size


def test_accuracy_is_right(checkpoint, eval_data):
    """Recomputed from the model alone: the answer with the highest log-likelihood, also per character."""
    metrics = evaluate(checkpoint, ["piqa"], data=eval_data, **QUIET).scores["piqa (0-shot)"].metrics
    model, tokenizer = load_model(checkpoint.folder), load_tokenizer(checkpoint.folder)
    right, right_norm, rows = 0, 0, [json.loads(line) for line in (eval_data / "piqa_valid.jsonl").open()]
    for row in rows:
        context, scores = tokenizer.encode(f"Question: {row['goal']}\nAnswer:"), []
        for answer in (row["sol1"], row["sol2"]):
            tokens = tokenizer.encode(f"Question: {row['goal']}\nAnswer: {answer}")
            with torch.no_grad():
                logprob = model(torch.tensor([tokens]))[0].log_softmax(-1)
            scores.append(sum(logprob[i - 1, tokens[i]].item() for i in range(len(context), len(tokens))))
        right += scores.index(max(scores)) == row["label"]
        per_character = [s / len(a) for s, a in zip(scores, (row["sol1"], row["sol2"]), strict=True)]
        right_norm += per_character.index(max(per_character)) == row["label"]
    assert (metrics["acc"], metrics["acc_norm"]) == (right / len(rows), right_norm / len(rows))


def test_acc_norm_divides_by_characters_not_bytes(checkpoint, tmp_path, monkeypatch):
    """Guards answers that are not ASCII: −20 over ten ä is −2 a character and −1 a byte; −24 over fifteen a
    is −1.6 of either. As it stands the first answer is likelier; per character it is the second.
    """
    answers = {"ä" * 10: -20.0, "a" * 15: -24.0}
    row = {"goal": "Which?", **dict(zip(("sol1", "sol2"), answers, strict=True)), "label": 1}
    (tmp_path / "piqa_valid.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")

    def loglikelihood(self, requests, disable_tqdm=False):
        return [(answers[request.args[1].strip()], False) for request in requests]

    monkeypatch.setattr(LinGPTLM, "loglikelihood", loglikelihood)
    metrics = evaluate(checkpoint, ["piqa"], data=tmp_path, **QUIET).scores["piqa (0-shot)"].metrics
    assert (metrics["acc"], metrics["acc_norm"]) == (0.0, 1.0)


def test_mmlu_is_weighted_by_size(checkpoint, eval_data):
    """The group is the mean over questions, not over subjects; its 57 parts are kept."""
    entry = evaluate(checkpoint, ["mmlu:2"], data=eval_data, **QUIET).scores["mmlu (2-shot)"]
    subjects = entry.subtasks
    sizes = {name: 3 if name in ("mmlu_abstract_algebra", "mmlu_anatomy") else 2 for name in subjects}
    assert len(subjects) == 57 and entry.documents == sum(sizes.values()) == 116
    right = sum(subjects[name]["acc"] * size for name, size in sizes.items())
    assert entry.metrics["acc"] == pytest.approx(right / 116)


def test_what_is_there_is_not_computed_again(checkpoint, eval_data, monkeypatch):
    """The same weights, task, limit, dtype and data: kept. Any of them different, or redo: computed."""
    ran = []
    run_task = harness.run_task
    monkeypatch.setattr(harness, "run_task", lambda lm, **asked: ran.append(asked) or run_task(lm, **asked))

    def again(tasks=("piqa",), **options):
        ran.clear()
        lines = []
        evaluate(checkpoint, list(tasks), data=eval_data, device="cpu", log=lines.append, **options)
        return len(ran), " ".join(lines)

    assert again()[0] == 1
    count, printed = again()
    assert count == 0 and "computed before; --redo computes it again" in printed
    assert again(redo=True)[0] == 1
    assert again(limit=2)[0] == 1 and again(limit=2)[0] == 0
    assert again()[0] == 0  # the limited score is kept next to the full one
    assert again(tasks=("piqa", "arc_easy", "arc_easy:2", "arc_easy"))[0] == 2  # two suites may have one task
    assert again(dtype="bfloat16")[0] == 1
    assert on_disk(checkpoint).scores.keys() == {
        "piqa (0-shot)", "piqa (0-shot, first 2)", "arc_easy (0-shot)", "arc_easy (2-shot)",
    }  # fmt: skip


def test_a_part_does_not_replace_the_whole(checkpoint, eval_data, monkeypatch):
    """Guards: a complete score that was gone after a trial with a file of a few rows."""
    run_task, complete, lines = harness.run_task, [True, False, True], []
    monkeypatch.setattr(
        harness,
        "run_task",
        lambda *args, **asked: replace(run_task(*args, **asked), complete=complete.pop(0)),
    )
    options = {"data": eval_data, "device": "cpu", "redo": True, "log": lines.append}
    first, second, third = (evaluate(checkpoint, ["piqa"], **options) for _ in range(3))
    dates = [found.scores["piqa (0-shot)"].date for found in (first, second, third)]
    assert dates[0] == dates[1] and second.scores["piqa (0-shot)"].complete
    assert sum("not kept" in line for line in lines) == 1
    assert third.scores == on_disk(checkpoint).scores


def test_weights_that_are_not_finite_have_no_scores(checkpoint, tokenizer, eval_data):
    """Guards: accuracies that look like any, of comparing NaNs."""
    model = tiny_model("ours")
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    write_checkpoint(checkpoint.folder, model, tokenizer)
    name = f"{checkpoint.run.name} step {checkpoint.step}"
    with pytest.raises(UserError, match=f"{name}: a log-likelihood is not finite"):
        evaluate(checkpoint.folder, ["piqa"], **QUIET, data=eval_data)
    assert evaluate(checkpoint.folder, [], **QUIET).scores == {}


def test_a_perplexity_that_is_no_number_does_not_end_the_rest(checkpoint, tokenizer, eval_data, tmp_path):
    """Guards: a traceback of lm-eval's `exp`, and no score of the tasks after it."""
    data, left_out = tmp_path / "data", []
    shutil.copytree(eval_data, data)
    rows = [{"text": "cold water runs under old stone"}, {"text": "birds sing rain"}]
    (data / "lambada_openai_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_model("ours")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    write_checkpoint(checkpoint.folder, model, tokenizer)
    options = QUIET | {"data": data, "left_out": lambda *score: left_out.append(score)}
    scores = evaluate(checkpoint.folder, ["lambada_openai", "piqa"], **options).scores
    assert scores.keys() == {"piqa (0-shot)"} and len(left_out) == 1
    name, reason = left_out[0]
    assert name == "lambada_openai (0-shot)" and "too large for" in reason


def test_changed_data_and_changed_weights_are_computed_again(checkpoint, tokenizer, eval_data, tmp_path):
    """A file with other rows is another measurement; scores of other weights at the same step are dropped."""
    copy = tmp_path / "data"
    shutil.copytree(eval_data, copy)
    evaluate(checkpoint, ["piqa", "arc_easy"], data=copy, **QUIET)
    file = copy / "piqa_valid.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    assert evaluate(checkpoint, ["piqa"], data=copy, **QUIET).scores["piqa (0-shot)"].documents == 4
    write_checkpoint(checkpoint.folder, tiny_model("ours", seed=99), tokenizer)
    results = evaluate(checkpoint.folder, ["piqa"], data=copy, **QUIET)
    assert results.scores.keys() == {"piqa (0-shot)"}


def test_a_damaged_result_file_is_kept_aside(checkpoint, eval_data, capsys):
    """Guards: a file that a person could still repair, written over."""
    evaluate(checkpoint, ["piqa"], data=eval_data, **QUIET)
    path = checkpoint.run / "eval" / "step-00000010.json"
    for number, content in enumerate(
        ('{"checkpoint": {', '{"checkpoint": {"weights": "x"}, "scores": {"a": 1}}')
    ):
        path.write_text(content)
        scores = evaluate(checkpoint, ["piqa"], data=eval_data, **QUIET).scores
        aside = "damaged-step-00000010.json" + (".2" if number else "")
        assert (path.parent / aside).read_text() == content and on_disk(checkpoint).scores == scores
        assert f"{path} is damaged; it is kept as {aside}" in capsys.readouterr().err


def test_each_answer_is_kept(checkpoint, eval_data):
    """As many as questions, and as many right as the accuracy says, also over MMLU's subjects."""
    scores = evaluate(checkpoint, ["arc_easy", "mmlu:1"], data=eval_data, devices=2, **QUIET).scores
    for entry in scores.values():
        assert entry.devices == 2
        for metric, packed in entry.correct.items():
            bits = unpack_bits(packed, entry.documents)
            assert len(bits) == entry.documents and bits.mean() == pytest.approx(entry.metrics[metric])
    assert scores["arc_easy (0-shot)"].correct.keys() == {"acc", "acc_norm"}


def test_two_commands_at_the_same_moment_keep_each_other_s_scores(checkpoint, at_the_same_moment):
    """Guards: two `lingpt eval` of one run had both read the file, and the second to write it lost the
    score of the first."""
    beside = Thread(target=scores.add_score, args=(checkpoint, "b", score("x")))
    at_the_same_moment(scores, beside)
    scores.add_score(checkpoint, "a", score("x"))
    beside.join()
    assert on_disk(checkpoint).scores.keys() == {"a", "b"}


def test_nothing_half_written(checkpoint, eval_data, monkeypatch):
    """Interrupted in the second task: the first one's score is on disk, whole, and no other file is left."""
    run_task = harness.run_task

    def interrupted(lm, *, name, **asked):
        if name == "arc_easy":
            raise KeyboardInterrupt
        return run_task(lm, name, **asked)

    monkeypatch.setattr(harness, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(checkpoint, ["piqa", "arc_easy"], data=eval_data, **QUIET)
    assert on_disk(checkpoint).scores.keys() == {"piqa (0-shot)"}
    assert [file.name for file in (checkpoint.run / "eval").iterdir()] == ["step-00000010.json"]


def test_quiet(checkpoint, eval_data, capfd):
    """No warnings, no bars where stderr is not a terminal: a line a task, and one on each short file."""
    evaluate(checkpoint, ["arc_easy:2", "piqa"], data=eval_data, device="cpu")
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split(": ")[:2] for line in out.splitlines()] == [
        ["demo-ours step 10", "arc_easy (2-shot)"],
        ["demo-ours step 10", "arc_easy (2-shot)"],
        ["demo-ours step 10", "arc_easy (2-shot)"],
        ["demo-ours step 10", "piqa (0-shot)"],
        ["demo-ours step 10", "piqa (0-shot)"],
    ]


def test_mistakes(checkpoint, eval_data):
    """Each is one line that says how to fix it, before a model is loaded."""
    for options, message in [
        ({"tasks": ["mmlu:five"]}, "after the colon"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"device": "cuda:99"}, "use --device auto"),
        ({"tasks": ["arc_eazy"]}, "did you mean 'arc_easy'"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluate(checkpoint, **{"tasks": ["piqa"], "data": eval_data, **QUIET} | options)
    assert parse_task("mmlu:5") == ("mmlu", 5) and parse_task("mmlu", 3) == ("mmlu", 3)
    assert find_device("cpu").type == "cpu"


def test_the_prompts_of_other_questions_have_another_hash():
    """Guards: the difference between two runs, paired over different questions."""

    def hashed(*requests):
        instances = [SimpleNamespace(request_type=kind, args=args) for kind, *args in requests]
        return requests_hash({"piqa": SimpleNamespace(instances=instances)})

    a, b, generated = (("loglikelihood", "Q", "a"), ("loglikelihood", "Q", "b"), ("generate_until", "Q", "a"))
    assert len({hashed(*each) for each in ((a, b), (a, b), (b, a), (a,), (a, a), (generated, b))}) == 5
    pairs = [([1], [2])], [([1], [2])], [([1], [3])], [([2], [2])], [([1], [2])] * 2
    assert len({*map(prompts_hash, pairs)}) == 4


def test_a_metric_that_is_no_number_is_none():
    """Guards: NaN in the file of scores, which was then damaged when it was read, with all other scores."""
    found = {"alias": "x", "acc,none": 1, "acc_stderr,none": "N/A", "f1,none": math.nan, "em,strict": 0.5}
    assert metrics_of(found) == {"acc": 1.0, "acc_stderr": None, "f1": None, "em,strict": 0.5}


def test_cards_follow_the_first(monkeypatch):
    """From the one that is named on; no more than are there. The CPU is repeated."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(scoring, "find_device", torch.device)
    for name, count, expected in (("cuda", 2, [0, 1]), ("cuda:1", 3, [1, 2, 3])):
        assert scoring.find_devices(name, count) == tuple(torch.device("cuda", i) for i in expected)
    with pytest.raises(UserError, match="--devices 3 from cuda:2 on, but this machine has 4 GPUs"):
        scoring.find_devices("cuda:2", 3)
    assert scoring.find_devices("cpu", 2) == (torch.device("cpu"),) * 2


def test_a_line_on_a_score():
    """Shares in per cent, with their errors; the rest as it is; nothing of what is not known."""
    metrics = {"acc": 0.251, "acc_stderr": 0.0088, "perplexity": 30.124, "word_perplexity": None}
    assert scoring.summary(score(metrics=metrics)) == "acc 25.10 ± 0.88, perplexity 30.12"


@pytest.mark.slow
def test_real_benchmarks(checkpoint, real_data):
    """A few real questions of each benchmark through a tiny model: the counts and shots are right."""
    tasks = ["arc_easy", "arc_challenge:5", "piqa", "mmlu:5", "lambada_openai", "openbookqa", "winogrande"]
    tasks += ["social_iqa", "boolq", "copa", "wikitext", "squad_contains"]
    found = evaluate(checkpoint, tasks, data=real_data / "eval", limit=2, **QUIET).scores
    assert [one.documents for one in found.values()] == [2, 2, 2, 114] + [2] * 8
    assert not any(one.complete for one in found.values())
    shares = [one.metrics.get("acc", one.metrics.get("contains", 0)) for one in found.values()]
    assert all(0 <= share <= 1 for share in shares)
    assert found["wikitext (0-shot, first 2)"].metrics["word_perplexity"] > 1
    assert found["squad_contains (0-shot, first 2)"].correct.keys() == {"contains"}
    assert found["mmlu (5-shot, first 2)"].cut_prompts == 114
