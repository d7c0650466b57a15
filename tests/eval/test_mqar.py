"""Guards MQAR: the task is solvable, by recall alone; a model learns it; what is shown is what was found."""

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from threading import Thread

import pytest
import torch

from lingpt.cli import mqar
from lingpt.cli.main import main, parse
from lingpt.common.errors import UserError
from lingpt.eval.recall import results as mqar_results
from lingpt.eval.recall import runs as mqar_runs
from lingpt.eval.recall.mqar import (
    ENOUGH,
    TRIALS_PER_GPU,
    Trained,
    Trial,
    accuracy,
    make_batch,
    make_trials,
    rate_factor,
    train_trial,
)
from lingpt.eval.recall.options import DEFAULT, asked_trials
from lingpt.eval.recall.results import best, mqar_table, save_mqar
from lingpt.eval.recall.runs import Worker, in_processes
from lingpt.models import GPT, ModelArgs

DEADLY = 1.0  # a learning rate
TINY = {"steps": 2, "batch_size": 32, "vocabulary": 32}


def trained(trial: Trial, accuracy: float = 0.5, **values) -> Trained:
    """The trial's result."""
    known = {"accuracy_stderr": 0.1, "parameters": 1, "curve": (), "trained_steps": 2, "seconds": 1.0}
    return Trained(**asdict(trial), accuracy=accuracy, **(known | values))


class FakeWorker(Worker):
    """Trains nothing; its process dies at the rate `DEADLY`, and is of no use from then on."""

    def _new_pool(self):
        return FakePool()


class FakePool:
    dead = False

    def submit(self, train, trial: Trial, device: str) -> Future[Trained]:
        future = Future[Trained]()
        self.dead |= trial.rate == DEADLY
        if self.dead:
            future.set_exception(BrokenProcessPool("a process was terminated"))
        else:
            future.set_result(trained(trial))
        return future


def test_every_query_has_its_value_in_the_pairs():
    """Keys and values do not repeat; each key comes again once, at an even place; the answer is its value."""
    batch = make_batch(50, pairs=8, length=64, vocabulary=256, seed=3)
    for tokens, positions, values in zip(*batch, strict=True):
        keys, stored = tokens[:16:2], tokens[1:16:2]
        assert len(set(keys.tolist())) == len(set(stored.tolist())) == len(set(positions.tolist())) == 8
        assert keys.min() >= 1 and keys.max() < 128 <= stored.min() and stored.max() < 256
        assert positions.min() >= 16 and positions.max() < 64 and not (positions % 2).any()
        answers = dict(zip(keys.tolist(), stored.tolist(), strict=True))
        assert [answers[tokens[p].item()] for p in positions] == values.tolist()
    assert all(map(torch.equal, batch, make_batch(50, 8, 64, 256, seed=3)))
    assert not torch.equal(batch.tokens, make_batch(50, 8, 64, 256, seed=4).tokens)


def test_short_gaps_are_likelier():
    """Zoology's power law: the gap g with a probability that falls as g^(0.01 − 1)."""
    gaps = (make_batch(4000, 1, 34, 16, seed=0).positions[:, 0] - 2) // 2
    share = torch.bincount(gaps, minlength=16) / 4000
    wanted = torch.arange(1, 17) ** (0.01 - 1.0)
    torch.testing.assert_close(share, wanted / wanted.sum(), atol=0.03, rtol=0)


def test_a_small_model_learns_to_recall():
    """Linear attention with the short convolution, seconds on a CPU: from chance to most of the queries."""
    trial = Trial("ours+short_conv", width=32, pairs=2, rate=3e-2, steps=75, batch_size=32, vocabulary=16)
    fresh = accuracy(GPT.create(trial.config(), 0), trial, torch.device("cpu"))
    found = train_trial(trial)
    assert fresh[0] < 0.3 and found.accuracy > 0.75 and 0 < found.accuracy_stderr < 0.02
    assert found.curve == ((75, round(found.accuracy, 5)),)


@pytest.mark.parametrize("curve", [((2, 0.1), (4, 0.2), (5, 0.3)), ((2, 0.1), (4, 1.0))])
def test_the_last_step_is_scored_and_training_ends_where_all_is_recalled(monkeypatch, curve):
    """Guards: the accuracy of an earlier step, as that of the trained model."""
    found = iter(curve)
    monkeypatch.setattr("lingpt.eval.recall.mqar.EVERY", 2)
    monkeypatch.setattr("lingpt.eval.recall.mqar.accuracy", lambda *_: (next(found)[1], 0.1))
    result = train_trial(Trial("ours", 32, 2, 1e-3, **TINY | {"steps": 5}))
    assert result.curve == curve and (result.trained_steps, result.accuracy) == curve[-1]


def test_the_rate_rises_and_falls():
    factors = [rate_factor(step, 100) for step in range(100)]
    assert factors[0] == 0.1 and max(factors) == factors[9] == 1.0 and factors[-1] < 0.001


def test_a_process_that_dies_takes_no_other_model_along():
    """Guards: all that were left failed with the process of one (the system had no memory, say)."""
    trials = make_trials(["softmax"], [32], [2], [DEADLY, 1e-2, 1e-1], **TINY)
    found = dict(in_processes(trials, [FakeWorker("cpu")]))
    assert [isinstance(found[trial], Trained) for trial in trials] == [False, True, True]
    assert isinstance(found[trials[0]], BrokenProcessPool)


def test_an_attention_with_its_options_is_one_word():
    """As recipes, studies and tables have it; an attention in two spellings is trained once."""
    trials = make_trials(["softmax", "gla+short_conv+gla_expand_k=1"], [32], [2], [1e-3], **TINY)
    config = trials[1].config()
    assert (config.gla_n_head, config.gla_expand_k, config.short_conv) == (2, 1.0, True)
    alike = ["ours-gated + output_gate", "ours-gated+output_gate=true", "ours-gated+output_gate"]
    assert [t.attention for t in make_trials(alike, [32], [2], [1e-3], **TINY)] == [alike[2]]
    (free,) = make_trials(["ours-gated+output_gate+short_conv+normalize=false"], [32], [2], [1e-3], **TINY)
    config = free.config()
    assert (config.output_gate, config.normalize, config.short_conv) == (True, False, True)


def test_a_trial_s_model_is_that_of_a_recipe():
    """A hybrid's layers among it; GLA has the trial's heads, or those that its options say."""
    for form, heads in (("hybrid", None), ("gla+softmax_every=2", 2), ("gla+gla_n_head=1", 1)):
        config = Trial(form, 32, 2, 1e-3, layers=6).config()
        sizes = {"n_layer": 6, "n_embd": 32, "n_head": 2, "vocab_size": 8192, "block_size": 16}
        option = {} if heads is None or "gla_n_head" in form else {"gla_n_head": heads}
        assert config == ModelArgs("mqar", form, **sizes, **option).config()
        assert heads is None or config.gla_n_head == heads
    with pytest.raises(UserError, match="softmax_every=9 makes no hybrid"):
        make_trials(["ours+softmax_every=9"], [32], [2], [1e-3], layers=2)


def test_the_default_has_each_with_and_without_the_convolution():
    found = asked_trials(parse("mqar", mqar, []))
    names = list(dict.fromkeys(trial.attention for trial in found))
    assert names == list(DEFAULT) and "ours-gated+output_gate+short_conv" in names
    assert [name for name in names if "short_conv" in name] == [f"{name}+short_conv" for name in names[1::2]]


def test_the_help_says_what_is_done(capsys):
    """Guards: "once all answers are right" of training that ends before; the number of processes twice."""
    assert main(["mqar", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"once {100 * ENOUGH:g} % of answers are right" in text and f"{TRIALS_PER_GPU} per GPU" in text


def test_what_is_no_trial_is_refused():
    for form, message in [
        ("ours+gate", "'gate' is not an option of ours, which has learnable_b"),
        ("softmax+conv", "'conv' is not an option of softmax, which has sdpa"),
        ("gla+gla_expand_k=half", "gla_expand_k is half; it must be a number"),
        ("gla+gla_expand_k=0", "gla_expand_k is 0; it must be a number above 0"),
    ]:
        with pytest.raises(UserError, match=message):
            make_trials([form], [32], [2], [1e-3], **TINY)
    with pytest.raises(UserError, match="normalize=False needs output_gate"):
        make_trials(["ours+normalize=false"], [32], [2], [1e-3], **TINY)
    with pytest.raises(UserError, match="unknown attention 'sofmax'"):
        make_trials(["sofmax"], [32], [2], [1e-3], **TINY)
    with pytest.raises(UserError, match="20 pairs need"):
        make_trials(["ours"], [32], [20], [1e-3], **TINY)


def test_two_commands_at_the_same_moment_keep_each_other_s_results(tmp_path, at_the_same_moment):
    """Guards: both had read the file, and the second to write it lost what the first had written."""
    ours, softmax = ([*make_trials([name], [32], [2], [1e-3], **TINY)] for name in ("ours", "softmax"))
    beside = Thread(target=mqar_runs.run_mqar, args=(softmax, tmp_path))
    at_the_same_moment(mqar_runs, beside)
    mqar_runs.run_mqar(ours, tmp_path)
    beside.join()
    results = json.loads((tmp_path / "mqar.json").read_text())["results"]
    assert {result["attention"] for result in results} == {"softmax", "ours"}


@pytest.mark.slow
def test_the_command_goes_on_and_draws(tmp_path, capsys, monkeypatch):
    """Trained once each; the best rate counts; a damaged file is kept aside; a model that fails is named."""
    sizes = "--widths 16 --pairs 2 --steps 2 --batch_size 4 --vocabulary 32 --workers 1"
    trials = "--attentions softmax ours ours+short_conv --learning_rates 1e-3 1e-2"
    command = ["mqar", *sizes.split(), "--out", str(tmp_path), *trials.split()]
    assert main(command) == 0
    assert "6 models, 6 to train" in capsys.readouterr().out
    results = json.loads((tmp_path / "mqar.json").read_text())["results"]
    assert [r["attention"] for r in results] == ["softmax"] * 2 + ["ours"] * 2 + ["ours+short_conv"] * 2
    trained = []
    monkeypatch.setattr(mqar_runs, "train_trial", lambda trial, device: trained.append(trial) or 1 / 0)
    assert main(command) == 0 and not trained
    assert main([*command, "0.1"]) == 2
    err = capsys.readouterr().err
    assert len(trained) == 3
    assert "3 of 9 models failed, the same command tries again: softmax, width 16" in err
    kept = json.loads((tmp_path / "mqar.json").read_text())["results"]
    monkeypatch.undo()
    wider = [*command[:2], "32", *command[3:]]
    assert main(wider) == 0
    both = json.loads((tmp_path / "mqar.json").read_text())["results"]
    assert both[:6] == kept and [r["width"] for r in both[6:]] == [32] * 6  # nothing of another width is lost
    capsys.readouterr()
    for option in ("--steps=0", "--batch_size=0", "--learning_rates=-1"):
        assert main([*command, option]) == 2
        assert "; it must be a " in capsys.readouterr().err
    monkeypatch.setattr(mqar_runs, "train_trial", lambda trial, device: trained.append(trial) or 1 / 0)
    (tmp_path / "mqar.json").write_text("{")
    assert main(command) == 2
    assert "kept as damaged-mqar.json" in capsys.readouterr().out


def test_the_best_rate_counts(tmp_path, monkeypatch):
    """In the table and the figure, whose caption names the devices."""
    trials = make_trials(["softmax"], [16], [2], [1e-3, 1e-2], **TINY)
    results = [trained(trials[0], 0.25, device="cpu"), trained(trials[1], 0.5, device="cpu")]
    assert best(results, "softmax", 16, 2) is results[1]
    rows = {row[0]: row[1] for row in mqar_table(results).rows}
    assert rows == {"softmax": "50.00 ± 10.00 (0.01)", "A guess among the values": "50.00"}
    said = []
    monkeypatch.setattr(mqar_results, "add_caption", lambda *drawn: said.append(drawn))
    names = {"mqar-table.md", "mqar-table.tex", "mqar.png", "mqar.pdf"}
    assert {path.name for path in save_mqar(results, tmp_path)} == names
    ((figure, text),) = said
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[16, 50]] and text.endswith("q, k and v. cpu.")


def test_cells_that_lack_a_rate_are_named(tmp_path, monkeypatch):
    """Guards: "the best of the rates 0.001, 0.01" of a cell whose trial of one of them had failed."""
    trials = make_trials(["softmax", "ours"], [16, 32], [2], [1e-3, 1e-2], **TINY)
    results = [trained(trial) for trial in trials]
    assert len(mqar_table(results).notes) == 1
    gone = [("softmax", 32, 1e-2), ("ours", 16, 1e-3)]
    left = [r for r in results if (r.attention, r.width, r.rate) not in gone]
    note = (
        "Of fewer rates, as the others have no result: ours at 2 pairs, width 16: 0.01; "
        "softmax at 2 pairs, width 32: 0.001."
    )
    assert mqar_table(left).notes[1:] == [note]
    said = []
    monkeypatch.setattr(mqar_results, "add_caption", lambda figure, text: said.append(text))
    save_mqar(left, tmp_path)
    assert said[0].endswith(note)
