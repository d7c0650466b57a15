"""Guards the verb: the defaults are Table 2, and every mistake of a user is one line."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from lingpt.cli.main import main
from lingpt.eval import scoring
from lingpt.models import GPT, export_hf, load_model

from .conftest import write_run

pytestmark = pytest.mark.usefixtures("no_network")
OF_LANGUAGE = ("bits_per_byte (words)", "loss_by_position (words)", "loss_within_documents (words)")


@pytest.fixture
def runs(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVAL_DATA", raising=False)
    for attention in ("ours", "softmax", "gla"):
        write_run(tmp_path / "runs", f"demo-{attention}", attention, tokenizer)
    return tmp_path / "runs"


def test_eval(runs, eval_data, capsys, monkeypatch):
    """Every attention of the model, scored and put into Table 2; EVAL_DATA in the environment is enough."""
    monkeypatch.setenv("EVAL_DATA", str(eval_data))
    assert main(["eval", "--tasks", "arc_easy", "piqa", "--limit", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for attention, row in (("softmax", "Regular Attention"), ("gla", "Gated LA"), ("ours", "Our LA")):
        file = runs / f"demo-{attention}" / "eval" / "step-00000010.json"
        assert {score["limit"] for score in json.loads(file.read_text())["scores"].values()} == {4}
        paper, ours = out.split(row)[1].splitlines()[:2]
        assert "paper" in paper and f"demo-{attention}, step 10" in ours and "±" in ours


def test_an_export_scores_as_its_run_does(runs, eval_data, tmp_path, capsys):
    """Of either kind, stock or our own; its scores lie beside it, and are found there again."""
    for name in ("demo-ours", "demo-softmax"):
        checkpoint = runs / name / "checkpoints/step-00000010"
        export_hf(load_model(checkpoint), tmp_path / name, checkpoint)
        words = ["--tasks", "piqa", "--limit", "4", "--data", str(eval_data), "--device", "cpu"]
        found = []
        for source in (str(runs / name), str(tmp_path / name)):
            assert main(["eval", "--runs", source, *words]) == 0
            (file,) = (tmp_path / source / "eval").glob("*.json")
            found.append(json.loads(file.read_text()))
        ours, theirs = ([s["metrics"] for s in result["scores"].values()] for result in found)
        assert ours == theirs
        assert found[0]["checkpoint"]["parameters"] == found[1]["checkpoint"]["parameters"]
    assert "step 0" not in capsys.readouterr().out
    (tmp_path / "demo-ours/tokenizer.json").unlink()
    assert main(["eval", "--runs", str(tmp_path / "demo-ours"), *words]) == 2
    assert "demo-ours has no tokenizer.json: copy that of the run into it" in capsys.readouterr().err
    (tmp_path / "demo-ours/config.json").write_text('{"model_type": "gemma"}')
    assert main(["eval", "--runs", str(tmp_path / "demo-ours"), *words]) == 2
    assert "holds a gemma model: LinGPT reads its own" in capsys.readouterr().err


def test_suites_and_files(runs, eval_data, tmp_path, capsys):
    """`--suite` measures what it names and nothing else; `--save` leaves the tables as files."""
    words = " ".join(f"{word} stone water" for word in map(str, range(60)))
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"body": f"{i} {words}"}) for i in range(3)))
    suite = "--suite language --texts words=t.jsonl --text_key body --max_length_factor 2 --save tables"
    arguments = ["--runs", "runs/demo-ours", "runs/demo-softmax", "--device", "cpu", *suite.split()]
    assert main(["eval", *arguments]) == 0
    out = capsys.readouterr().out
    assert "Bits per byte" in out and "Loss by position" in out and "Regular Attention" not in out
    saved = {path.name for path in (tmp_path / "tables").iterdir()}
    assert {"suites.md", "positions.pdf"} <= saved and "table2.json" not in saved
    assert main(["eval", *arguments[:5], "--tasks", "piqa", "--data", str(eval_data)]) == 0
    out = capsys.readouterr().out
    assert "piqa_valid.jsonl has 6 rows; the official split has 1,838" in out
    assert "Regular Attention" in out and "Bits per byte" not in out  # measured before, not asked for now
    scores = json.loads((runs / "demo-ours" / "eval" / "step-00000010.json").read_text())["scores"]
    assert scores.keys() == {"piqa (0-shot)", *OF_LANGUAGE}
    positions = scores["loss_by_position (words)"]
    assert positions["positions"][-1]["to"] == 2 * positions["train_length"]


def test_a_limit_of_what_is_measured_whole_is_told(runs, capsys):
    """Guards: `--limit`, silently unused by needles and texts."""
    words = ["eval", "--runs", str(runs / "demo-ours"), "--device", "cpu", "--max_length_factor", "1"]
    said = "--limit is for benchmarks only; measured whole: needle\n"
    main([*words, "--suite", "needle", "--limit", "2"])
    assert capsys.readouterr().err.startswith(said)
    main([*words, "--suite", "needle"])
    assert said not in capsys.readouterr().err


def test_a_checkpoint_is_loaded_once_for_all_suites(runs, eval_data, tmp_path, monkeypatch):
    """Guards: gigabytes hashed and read again for each suite."""
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "the sun warms stone " * 90}) + "\n")
    loaded, load_lm = [], scoring.load_lm
    monkeypatch.setattr(scoring, "load_lm", lambda *args: loaded.append(args[0].attention) or load_lm(*args))
    argv = ["--runs", "runs/demo-ours", "runs/demo-gla", "--suite", "table2", "language", "--tasks", "piqa"]
    texts = f"--texts words=t.jsonl --max_length_factor 1 --data {eval_data} --device cpu".split()
    assert main(["eval", *argv, *texts]) == 0 and loaded == ["ours", "gla"]
    # Again, it measures nothing; with other options, which arrive, all of it.
    assert main(["eval", *argv, *texts]) == 0 and loaded == ["ours", "gla"]
    monkeypatch.setattr(scoring, "load_lm", lambda *args: loaded.append(args[1:]) or load_lm(*args))
    more = ["--devices", "2", "--batch_tokens", "512", "--redo"]
    assert main(["eval", *argv, *texts, *more]) == 0
    assert main(["eval", *argv, *texts, "--dtype", "bfloat16"]) == 0
    cpu = torch.device("cpu")
    assert loaded[2:] == [((cpu, cpu), "float32", 512)] * 2 + [((cpu,), "bfloat16", 16384)] * 2


@pytest.mark.slow
def test_defaults_are_table_2(runs, eval_data, capsys):
    """With no --tasks: the paper's benchmarks, MMLU with no and with five examples."""
    assert main(["eval", "--data", str(eval_data), "--runs", str(runs / "demo-ours"), "--device", "cpu"]) == 0
    row = next(
        line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("demo-ours, step")
    )
    assert row.count("±") == 6 and row.count("–") == 1  # the tokens, which this checkpoint does not say


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "dema"], "no run of dema with a checkpoint in runs (did you mean 'demo'?)"),
        (["--runs_dir", "nowhere"], "no run with a checkpoint in nowhere: train one first"),
        (["--runs", "runs/nope"], "no run at runs/nope"),
        (["--tasks", "piqa", "--num_fewshot", "5"], "piqa_train.jsonl"),
        (["--tasks", "arc_eazy"], "did you mean 'arc_easy'?"),
        (["--data", "nowhere"], "no folder nowhere"),
        (["--device", "cuda:99"], "use --device auto"),
        (["--batch_tokens", "0"], "batch_tokens is 0"),
        (["--tusks", "piqa"], "tusks"),
        (["--suite", "recal"], "did you mean 'recall'?"),
        (["--suite"], "--suite needs one or more of table2, "),
        (["--suite", "language", "--texts", "novels=no.jsonl"], "there are no documents at no.jsonl"),
        (["--config", "table3"], "table3"),
        (["--limit", "some"], "limit"),
    ],
)
def test_mistakes_are_one_line(runs, eval_data, capsys, arguments, message):
    assert main(["eval", "--data", str(eval_data), *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("lingpt: ") and message in err and "\n" not in err


def test_no_network_and_no_data(runs, capsys, monkeypatch):
    """The hub out of reach: what failed, and EVAL_DATA as the way out."""
    import datasets

    def offline(path, *args, **kwargs):
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert main(["eval", "--tasks", "piqa", "arc_easy", "--device", "cpu"]) == 2
    err = capsys.readouterr().err.strip()
    said = "lingpt: piqa (0-shot), arc_easy (0-shot): cannot be loaded from the Hugging Face hub (Offline"
    assert err.startswith(said)
    assert err.count("EVAL_DATA") == 1 and "\n" not in err  # once, not for each task


def test_what_cannot_be_scored_does_not_stop_the_rest(runs, eval_data, tmp_path, capsys):
    """Guards: one mistyped row that costs every later task and all other suites of every run."""
    data = tmp_path / "data"
    shutil.copytree(eval_data, data)
    with (data / "piqa_valid.jsonl").open("a") as file:
        file.write('{"goal": "g", "sol1": "a", "sol2": "b", "label": 7}\n')
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "the sun warms stone " * 90}) + "\n")
    suites = "--suite table2 language --texts words=t.jsonl gone=no.jsonl --max_length_factor 1"
    argv = ["--tasks", "piqa", "arc_easy", "--data", str(data), *suites.split(), "--device", "cpu"]
    assert main(["eval", "--runs", "runs/demo-ours", "runs/demo-gla", *argv]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("lingpt: 2 left out, all else is scored and kept, the same command tries again: ")
    assert "piqa (0-shot): " in line and "; text gone: " in line
    for reason in ("piqa_valid.jsonl:7: 'label' is 7", "there are no documents at no.jsonl"):
        assert (out + err).count(reason) == 1
    assert out.count("demo-gla step 10: piqa (0-shot): left out\n") == 1
    for run in ("demo-ours", "demo-gla"):
        scores = json.loads((runs / run / "eval" / "step-00000010.json").read_text())["scores"]
        assert scores.keys() == {"arc_easy (0-shot)", *OF_LANGUAGE}
    assert "Bits per byte" in out and "unset EVAL_DATA" not in out + err


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_it_at_once(runs, eval_data, capsys, monkeypatch):
    """In the middle of a task: lm-eval does not hold it back, and the tasks before are kept whole."""
    asked, hidden = [], GPT.hidden

    def slow(self, *args):
        asked.append(time.monotonic())
        if len(asked) == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return hidden(self, *args)

    monkeypatch.setattr(GPT, "hidden", slow)
    argv = ["--tasks", "piqa", "mmlu", "--data", str(eval_data), "--batch_tokens", "64"]
    assert main(["eval", *argv, "--runs", str(runs / "demo-ours"), "--device", "cpu"]) == 130
    assert len(asked) == 30 and time.monotonic() - asked[-1] < 2
    assert capsys.readouterr().err.strip() == "lingpt: interrupted; nothing was left half-written"
    (scores,) = (runs / "demo-ours/eval").iterdir()
    assert json.loads(scores.read_text())["scores"].keys() == {"piqa (0-shot)"}


def test_a_run_with_damaged_weights_is_named_and_the_others_are_scored(runs, eval_data, capsys):
    """Its damage shows when it is loaded: the other runs' scores come anyway."""
    file = runs / "demo-gla" / "checkpoints" / "step-00000010" / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert main(["eval", "--tasks", "piqa", "arc_easy", "--data", str(eval_data), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("lingpt: 1 left out, all else is scored and kept")
    assert f"tries again: {file.relative_to(runs.parent)} is damaged: " in line
    assert "demo-ours, step 10" in out and "demo-softmax, step 10" in out and "demo-gla, step" not in out
