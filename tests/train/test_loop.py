"""The loop: exact accumulation, exact resume, an honest clock, and an end that loses nothing."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
import weakref
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from lingpt.common.errors import UserError
from lingpt.common.run_folder import read_manifest, read_metrics, write_manifest
from lingpt.data import BatchSampler, growing, prepare, stream
from lingpt.models import ATTENTIONS, ModelArgs
from lingpt.train import loop, loss, report, train
from lingpt.train.runs.replay import replay
from lingpt.train.runs.resume import refusal, schedule_jump
from lingpt.train.signals import Stop
from lingpt.train.step import learning_rates
from lingpt.train.validation import validate

from .conftest import start


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step-{step:08d}/model.safetensors")


def without_clock(folder: Path) -> list[dict]:
    """The run's metrics without times and memory, which differ from run to run."""
    differ = {"train_time", "tokens_per_second", "peak_memory"}
    return [{k: v for k, v in line.items() if k not in differ} for line in read_metrics(folder)]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Sends the process a SIGINT in the middle of an optimiser step."""
    original = loop.Run.step

    def step_and_interrupt(self, stop):
        if self.progress.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, stop)

    monkeypatch.setattr(loop.Run, "step", step_and_interrupt)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_accumulation_gives_the_loss_and_gradients_of_one_large_batch(make_recipe, micro_batch_size):
    """Against a plain mean over all tokens of the global batch, however it is cut."""
    run = start(make_recipe(micro_batch_size=micro_batch_size, grad_clip=1e9))
    run.optimizer.step = lambda: None
    line = run.step(Stop())
    gradients = {name: p.grad.clone() for name, p in run.gpt.named_parameters()}
    run.gpt.zero_grad()
    block = run.batches.get(0, range(8))
    expected = F.cross_entropy(run.gpt(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
    expected.backward()
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
    for name, p in run.gpt.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-7)


def test_clips_to_the_norm_and_reports_the_one_before(make_recipe):
    run = start(make_recipe(grad_clip=1e-3))
    run.optimizer.step = lambda: None
    line = run.step(Stop())
    after = torch.nn.utils.get_total_norm([p.grad for p in run.gpt.parameters()])
    assert line["grad_norm"] > 0.1 and after.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_resume_is_bitwise_equal_to_never_having_stopped(make_recipe, monkeypatch):
    """Stopped by a signal at a step that saves nothing by itself: weights, optimizer, every number, also the
    random ones, which dropout would draw."""
    micro_batch = loop.Run.micro_batch
    monkeypatch.setattr(loop.Run, "micro_batch", lambda run, i: (torch.rand(1), micro_batch(run, i))[1])
    whole = train(make_recipe(name="whole"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=4)
        with pytest.raises(
            KeyboardInterrupt, match="stopped and saved at step 4 of 6; the same command resumes it"
        ):
            train(make_recipe(name="parts"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was left behind"
    parts = train(make_recipe(name="parts"))
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(tensor, weights(parts, 6)[name]), name
    states = [torch.load(f / "checkpoints/step-00000006/train_state.pt") for f in (whole, parts)]
    for index, moments in states[0]["optimizer"]["state"].items():
        assert all(torch.equal(v, states[1]["optimizer"]["state"][index][k]) for k, v in moments.items())
    assert torch.equal(states[0]["random"][0]["torch"], states[1]["random"][0]["torch"])
    assert without_clock(whole) == without_clock(parts)
    assert [line["step"] for line in read_metrics(parts) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_resume_says_what_it_found_and_cuts_lines_after_the_checkpoint(make_recipe, monkeypatch, capsys):
    """A crash after step 5 leaves lines 4 and 5 beyond the checkpoint of step 3: not written twice."""

    def crash(self, stop):
        if self.progress.step == 5:
            raise RuntimeError("power cut")
        return original(self, stop)

    original = loop.Run.step
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", crash)
        with pytest.raises(RuntimeError):
            train(make_recipe())
    assert "new run" in capsys.readouterr().out
    folder = make_recipe().run_folder
    times = [line["train_time"] for line in read_metrics(folder)]
    train(make_recipe())
    assert "step-00000003, step 3 of 6" in capsys.readouterr().out
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3]["train_time"] > lines[2]["train_time"] == times[2], "the clock does not go on"
    train(make_recipe())
    assert "nothing to train" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_mixture_resumes_bit_for_bit_and_reports_each_validation(make_recipe, monkeypatch, capsys):
    """Its sources repeat, which is said; the losses of `val_sources` are in metrics and log. A step at which
    it stops is logged, whatever the log's interval."""

    def recipe(name: str):
        made = make_recipe(name=name, eval_interval=2, log_interval=2)
        text = made.data.source
        made.data = replace(made.data, source=f"{text}*0.6,embedded*0.4", val_sources=f"t={text},e=embedded")
        return made

    whole = train(recipe("whole"))
    out = capsys.readouterr().out
    assert re.search(r"validation \d\.\d{4}, t \d\.\d{4}, e \d\.\d{4} ·", out)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=3)
        with pytest.raises(KeyboardInterrupt, match=r"stopped and saved at step 3 of 6"):
            train(recipe("parts"))
    lines = without_clock(train(recipe("parts")))
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 3, 4, 6]
    assert without_clock(whole) == [line for line in lines if line["step"] != 3]
    last = [line for line in read_metrics(whole) if line["kind"] == "val"][-1]
    assert list(last["losses"]) == ["t", "e"] and last["losses"]["t"] != last["loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_stream_that_is_stopped_and_resumed_is_the_undisturbed_run(make_recipe, monkeypatch, tmp_path):
    """Of `--data.stream`, bit for bit: the parts train on tokens still being written, and the process
    that writes them ends between; the other run's process writes all. It is forked, as a fresh Python
    takes seconds, and knows nothing of what is patched here. The run ends although what it reads ahead is
    not written."""
    parent, all_of_it, flush = os.getpid(), tmp_path / "all", stream.StreamWriter._flush

    def flush_and_wait(self):
        flush(self)
        waits = os.getpid() != parent and self.path.name == "train.arrow" and len(self.checksums) == 4
        until = time.monotonic() + 60 * waits
        while time.monotonic() < until and not all_of_it.exists():
            time.sleep(0.01)

    def recipe(name: str):
        made = make_recipe(name=name)
        made.data = replace(made.data, stream=True, cache_dir=str(tmp_path / name))
        return made

    monkeypatch.setattr(stream.StreamWriter, "_flush", flush_and_wait)
    monkeypatch.setattr(growing, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(growing, "WINDOW", 32 * 8 * 3)  # three steps
    for module in (growing, stream):
        monkeypatch.setattr(module, "ROWS", 512)

    for stops in (True, False):
        with monkeypatch.context() as patch:
            if stops:
                interrupt_at(patch, step=2)
            with pytest.raises(KeyboardInterrupt) if stops else contextlib.nullcontext():
                parts = train(recipe("parts"))
        (tokenising,) = multiprocessing.active_children()
        tokenising.terminate()
        tokenising.join()
    entries = [path.parent.name for path in tmp_path.glob("parts/tokens/*/manifest.json")]
    all_of_it.touch()
    whole = train(recipe("whole"))
    assert len(entries) == 1 and len(list(tmp_path.glob("whole/tokens/*/manifest.json"))) == 2
    assert without_clock(whole) == without_clock(parts)
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(tensor, weights(parts, 6)[name]), name


def test_an_interrupted_run_waits_for_no_text(make_recipe, monkeypatch):
    """Guards: an exit, after the second Ctrl-C, that took until a window of `--data.stream` was there."""
    process, reading = SimpleNamespace(is_alive=lambda: True), []

    def interrupted(run):
        reading.append(run.micro_batches._thread.submit(run.batches.get, 0, [0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(growing.GrowingDataset, "_start", lambda self: setattr(self, "_process", process))
    monkeypatch.setattr(loop.Run, "warm_up", interrupted)
    recipe = make_recipe()
    recipe.data = replace(recipe.data, stream=True, cache_dir=recipe.train.out_dir)
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    try:
        assert isinstance(reading[0].exception(timeout=20), CancelledError)
    finally:
        process.is_alive = lambda: False


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("step", [3, 6])
def test_a_signal_in_a_validation_is_agreed_on_there(make_recipe, monkeypatch, step):
    """A validation may take long: it is left, all of its texts, and comes first when the run goes on, also
    after others, and where no step is left."""

    def recipe(name=None):
        made = make_recipe(name=name)
        made.data = replace(made.data, val_sources="e=embedded")
        return made

    def validate_and_interrupt(run, blocks, stop):
        if run.progress.step == step and blocks is not run.dataset.val:
            os.kill(os.getpid(), signal.SIGINT)
        return validate(run, blocks, stop)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", validate_and_interrupt)
        with pytest.raises(KeyboardInterrupt, match=f"stopped and saved at step {step} of 6"):
            train(recipe())
    validated = [line["step"] for line in read_metrics(recipe().run_folder) if line["kind"] == "val"]
    assert validated == list(range(3, step, 3))
    parts, whole = train(recipe()), train(recipe("whole"))
    assert without_clock(parts) == without_clock(whole), "the validation that was left is not made up for"


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_weights_in_bf16_train_like_those_in_fp32(make_recipe, attention):
    """In "bf16-true" the default dtype is bf16 while a model runs: sums that rely on it would show."""
    losses = []
    for precision in ("bf16-true", "32-true"):
        recipe = make_recipe(precision=precision, name=precision)
        recipe.model = ModelArgs(name="demo", attention=attention, n_layer=2)
        losses.append([line["loss"] for line in read_metrics(train(recipe)) if line["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], abs=0.1) and losses[0][-1] < losses[0][0] - 1


@pytest.mark.slow
def test_the_clock_stands_while_validating_and_saving(make_recipe, monkeypatch):
    def slow(*_):
        time.sleep(0.5)
        return 1.0, [1.0]

    monkeypatch.setattr(loop, "validate", slow)
    began = time.perf_counter()
    folder = train(make_recipe(eval_interval=1))
    wall = time.perf_counter() - began
    assert read_metrics(folder)[-1]["train_time"] < wall - 6 * 0.5


def test_validation_is_the_mean_over_the_same_tokens_every_time(make_recipe):
    run = start(make_recipe(eval_tokens=7 * 32, micro_batch_size=4))
    block = torch.stack([run.dataset.val[i] for i in range(7)])
    with torch.no_grad():
        expected = F.cross_entropy(run.gpt(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten()).item()
    first, again = (validate(run, run.dataset.val, Stop()) for _ in range(2))
    assert first == again and first[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("what", ["loss", "gradient", "both"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(make_recipe, monkeypatch, what):
    """Two of them end a run here, but not with a good one between."""
    monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 2)
    poison(monkeypatch, {2, 5}, what)
    folder = train(make_recipe(save_interval=1, keep_checkpoints=9))
    assert all(torch.equal(t, weights(folder, 2)[n]) for n, t in weights(folder, 1).items())
    assert not all(torch.equal(t, weights(folder, 3)[n]) for n, t in weights(folder, 2).items())
    line = next(line for line in read_metrics(folder) if line["step"] == 2)
    assert line["skipped"] is True
    assert (line["loss"] is None, line["grad_norm"] is None) == (what != "gradient", what != "loss")
    assert json.loads((folder / "checkpoints/step-00000006/manifest.json").read_text())["skipped"] == 2


def test_the_share_of_the_peak_is_that_of_all_devices(make_recipe):
    run = start(make_recipe())
    run.machine = replace(run.machine, accelerator="cuda", name="NVIDIA H100", devices=8, num_nodes=2)
    run.progress = loop.Progress(tokens=1200, train_time=3.0)
    found = run.throughput(loop.Progress(tokens=200, train_time=1.0))
    assert found["tokens_per_second"] == 500
    assert found["mfu"] == pytest.approx(500 * run.flops_per_token / (16 * run.machine.peak))
    said = report.speed(found | {"peak_memory": 2e9}, run.recipe, step=1)
    assert said == " · 500 tokens/s · MFU 0% · 2.0 GB · 3 s left", "of five steps of 256 tokens"


@pytest.mark.slow
def test_lines_say_how_far_it_is(make_recipe, monkeypatch, capsys):
    """The first step and the tenth are said at once. Guards: a run that said nothing for its first minute."""
    lines = []
    for every in (600.0, 0.0):
        monkeypatch.setattr(report.StatusLine, "EVERY", every)
        train(make_recipe(max_steps=12, eval_interval=3, log_interval=100, name=f"every-{every}"))
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        lines.append([line.split(" · ")[0] for line in found if "validation" not in line])
        assert all("tokens/s" in line and "left" in line for line in found)
    assert lines == [[f"step {step}/12" for step in steps] for steps in ((1, 10), range(1, 13))]


def test_a_diverged_run_is_not_burnt_again(make_recipe, monkeypatch, capsys):
    """It ends with one line; the same command names the ways from here, and does no step; a named checkpoint
    insists."""
    recipe = make_recipe(max_steps=50, save_interval=3, keep_checkpoints=1, eval_interval=50)
    with monkeypatch.context() as patch:
        poison(patch, steps=range(4, 99))
        line = r"not finite for 10 steps up to step 13; the newest .*step-00000012"
        with pytest.raises(UserError, match=line):
            train(recipe)
    assert "step 4: the loss or the gradient is not finite; the step is skipped" in capsys.readouterr().out
    folder, good = recipe.run_folder, recipe.run_folder / "checkpoints/step-00000003"
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as refused:
        train(recipe)
    for way in ("--train.learning_rate", f"--train.init_from {good}", f"lingpt replay {folder} --step 4"):
        assert way in str(refused.value)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert good.exists(), "the last good checkpoint was rotated away by those of skipped steps"
    recipe.train.resume, recipe.train.max_steps = str(good), 6
    assert read_metrics(train(recipe))[-1]["step"] == 6


def test_a_skipped_step_is_logged_and_can_be_replayed(make_recipe, monkeypatch):
    """Whatever the log's interval: which blocks it had, and what they say. A line's rate is that since the
    line before."""
    with monkeypatch.context() as patch:
        poison(patch, steps={4})
        folder = train(make_recipe(log_interval=5))
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [4, 5, 6], "skipped, the interval's, and the last"
    for before, line in pairwise([{"tokens": 0, "train_time": 0.0}, *lines]):
        rate = (line["tokens"] - before["tokens"]) / (line["train_time"] - before["train_time"])
        assert line["tokens_per_second"] == pytest.approx(rate)
    (line,) = [line for line in lines if line.get("skipped")]
    dataset = prepare(make_recipe().data, progress=False)
    batches = BatchSampler(dataset.train, make_recipe().train.seed, 8)
    assert line["step"] == 4 and line["blocks"] == batches.indices(3)
    text = replay(folder, 4, samples=2, device="cpu")
    assert "weights of step-00000003" in text and "not finite, and skipped" in text
    shown = [row for row in text.splitlines() if "position" in row]
    position = int(shown[0].split("position ")[1].split(",")[0])
    assert len(shown) == 2 and f"block {line['blocks'][position]}:" in shown[0]
    words = " ".join(dataset.tokenizer.decode(batches.get(3, [position])[0].tolist()).split())
    assert shown[0].split(": ")[1].removesuffix(" …") in words
    with pytest.raises(UserError, match="no checkpoint before step 1: its oldest is of step 3"):
        replay(folder, 1)
    with pytest.raises(UserError, match="typo is not a run folder"):
        replay(folder.with_name("typo"), 4)
    with pytest.raises(UserError, match="--samples 0: show at least 1"):
        replay(folder, 4, samples=0)
    (folder / "config.yaml").write_text("model: {na")  # the checkpoint has the recipe too
    assert replay(folder, 4, samples=2, device="cpu") == text
    corpus = make_recipe().data
    monkeypatch.setattr("lingpt.train.runs.replay.prepare", lambda data: prepare(replace(corpus, seq_len=16)))
    with pytest.raises(UserError, match="was trained on other data"):
        replay(folder, 4)


def test_a_step_that_was_not_trained_is_not_replayed(make_recipe):
    """Guards: losses of a step that the run does not have, or of damaged weights. A step of the metrics alone
    counts."""
    folder = train(make_recipe(max_steps=4))
    with pytest.raises(UserError, match=r"--step 5: .* has 4 steps"):
        replay(folder, 5, device="cpu")
    shutil.rmtree(folder / "checkpoints/step-00000004")
    assert "step 4, with the weights of step-00000003" in replay(folder, 4, device="cpu")
    state = folder / "checkpoints/step-00000003/train_state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"train_state.pt"):
        replay(folder, 4, device="cpu")


@pytest.mark.parametrize("segments", [1, 4])
def test_replay_gives_the_loss_and_the_norm_of_training(make_recipe, segments):
    """Guards: whole sequences for a run in segments, whose softmax layers see less. The samples are the
    seed's, the worst first, and their mean is the step's."""
    recipe = make_recipe(save_interval=4, grad_clip=1e-9, segments=segments, seed=3, z_loss=0.01)
    recipe.model.attention = ["ours", "softmax"]
    folder = train(recipe)
    line = next(line for line in read_metrics(folder) if line["step"] == 5)
    text = replay(folder, 5, device="cpu")
    loss, norm = (float(text.split(f"{name} ")[1].split()[0]) for name in ("loss", "gradient norm"))
    assert loss == pytest.approx(line["loss"], abs=1e-4)
    assert norm == pytest.approx(line["grad_norm"], rel=1e-3)
    assert "not as it was trained" not in text
    shown = [float(row.split()[0]) for row in text.splitlines() if "position" in row]
    assert shown == sorted(shown, reverse=True) and sum(shown) / 8 == pytest.approx(loss, abs=1e-3)


@pytest.mark.slow
def test_replay_says_in_what_it_is_not_as_the_step_was_trained(make_recipe, monkeypatch):
    """Guards: another device, precision or kernel, and weights of an earlier step, without a word. Steps that
    were skipped, and what an earlier start was trained on, count."""
    with monkeypatch.context() as patch:
        poison(patch, steps={5})
        folder = train(make_recipe(save_interval=2, keep_checkpoints=9, max_steps=8))
    shutil.rmtree(folder / "checkpoints/step-00000006")

    def said(step):
        return [line for line in replay(folder, step, device="cpu").splitlines() if line.startswith("not as")]

    assert said(6) == []  # of the checkpoint of step 4, and step 5 was skipped
    between = "of training between these weights and those that it met"
    assert said(4) == [f"not as it was trained: 1 step {between}"]
    assert said(8) == [f"not as it was trained: 2 steps {between}"]
    record = folder / "environment.json"
    start = json.loads(record.read_text())
    card = {
        "hardware": {"name": "NVIDIA H200", "precision": "bf16-mixed"},
        "attention_kernels": {"ours": "cuda"},
    }
    record.write_text(json.dumps(start | {"earlier": [card]}))
    here = "CPU in 32-true (ours by chunkwise)"
    assert said(5) == [
        f"not as it was trained: on NVIDIA H200 in bf16-mixed (ours by cuda) then, on {here} now"
    ]
    record.unlink()
    assert said(5) == [f"not as it was trained: {record} does not say on what then, on {here} now"]


@pytest.mark.parametrize(
    ("attention", "by"),
    [
        ("softmax", "softmax by flash"),
        (["ours", "softmax"], "ours by chunkwise, softmax by flash"),
        ("gla", "gla by chunkwise"),
    ],
)
def test_a_run_of_a_kernel_that_has_no_fp32_can_be_replayed(make_recipe, attention, by):
    """Guards: "model.sdpa cudnn cannot train on cpu", and no way on, of a run that a GPU trained with it; and
    the same of FLA's kernels. The first line says what the replay computed with."""
    recipe = make_recipe(max_steps=3, save_interval=2)
    recipe.model.attention = attention
    folder = train(recipe)
    line = next(line for line in read_metrics(folder) if line["step"] == 3)
    start = folder / "checkpoints/step-00000002"
    config, manifest = json.loads((start / "config.json").read_text()), read_manifest(start)
    of_a_gpu = {"sdpa": "cudnn", "gla_backend": "fla"}
    manifest["config"]["model"] |= of_a_gpu
    (start / "config.json").write_text(json.dumps(config | of_a_gpu))
    write_manifest(start, manifest)
    text = replay(folder, 3, device="cpu")
    first = f"{folder.name}, step 3, with the weights of step-00000002, in fp32 ({by})"
    assert text.splitlines()[0] == first and "not as it was trained" not in text
    loss, norm = (float(text.split(f"{name} ")[1].split()[0]) for name in ("\nloss", "gradient norm"))
    assert loss == pytest.approx(line["loss"], abs=1e-4)
    assert norm == pytest.approx(line["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_extending_a_run_says_what_its_learning_rate_does(make_recipe, capsys):
    train(make_recipe())
    train(make_recipe(max_steps=12))
    out = capsys.readouterr().out
    assert "6 steps are now 12, and at step 7 the learning rate goes from 5e-05 to" in out
    assert "--train.schedule wsd" in out
    before = {"config": make_recipe().to_dict(), "step": 3}
    rates = (learning_rates(make_recipe().train, steps)(step) for steps, step in ((6, 2), (12, 3)))
    was, now = (f"{rate:.3g}" for rate in rates)
    assert f"at step 4 the learning rate goes from {was} to {now}:" in schedule_jump(
        make_recipe(max_steps=12), before
    )
    assert schedule_jump(make_recipe(max_steps=3), before) is None, "no step is left"
    assert schedule_jump(make_recipe(), before) is None, "the same cosine"


def test_a_trial_saves_nothing(make_recipe, capsys):
    """Its losses are those of any run, and it ends like one."""
    losses = []
    for name, keep in (("trial", 0), ("run", 2)):
        folder = train(make_recipe(name=name, keep_checkpoints=keep, save_interval=1, max_steps=3))
        losses.append([(line["kind"], line["loss"]) for line in read_metrics(folder)])
        assert (folder / "checkpoints").exists() == (keep > 0)
    assert losses[0] == losses[1] and "validation loss" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"keep_best saves, and train\.keep_checkpoints 0 does not"):
        train(make_recipe(keep_checkpoints=0, keep_best=True))
    stopped = report.stopped_message(make_recipe(keep_checkpoints=0), 1)
    assert stopped == "stopped at step 1 of 6; nothing is saved, as train.keep_checkpoints is 0"


@pytest.mark.slow
def test_a_run_of_warm_up_stable_decay_is_extended_bit_by_bit(make_recipe, capsys):
    """From the checkpoint where the decay began, which the message names. Guards: that it was kept until the
    run was extended, and then rotated away."""
    wsd = {"schedule": "wsd", "decay_steps": 2, "keep_checkpoints": 1, "save_interval": 100}
    whole = train(make_recipe(name="whole", max_steps=9, **wsd))
    folder = train(make_recipe(max_steps=6, **wsd))
    start = folder / "checkpoints/step-00000004"
    assert start.exists()
    shorter = read_metrics(folder)
    capsys.readouterr()
    train(make_recipe(max_steps=9, resume=str(start), **wsd))
    out = capsys.readouterr().out
    assert "schedule:" not in out, "nothing jumps"
    left = (folder / "abandoned-metrics.jsonl").read_text().splitlines()
    assert [*map(json.loads, left)] == shorter, "the losses of the end that is left are kept"
    for name, tensor in weights(whole, 9).items():
        assert torch.equal(tensor, weights(folder, 9)[name]), name
    train(make_recipe(max_steps=12, **wsd))
    out = capsys.readouterr().out
    assert "the decay is undone" in out and "--train.resume" in out and "step-00000007" in out
    kept = [path.name for path in sorted((folder / "checkpoints").glob("step-*"))]
    assert kept == [f"step-{step:08d}" for step in (4, 7, 10, 12)], "each decay's start, and the newest"
    from_the_start = {**wsd, "decay_steps": 4}
    before = {"config": make_recipe(max_steps=4, **from_the_start).to_dict(), "step": 4}
    line = schedule_jump(make_recipe(max_steps=6, **from_the_start), before)
    assert "no checkpoint from where it began, at step 0" in line and "--train.resume" not in line
    steeper = make_recipe(max_steps=12, **(wsd | {"decay_steps": 8}))
    before = {"config": make_recipe(max_steps=12, **wsd).to_dict(), "step": 9}
    assert "--train.decay_steps is now 8, and at step 10 the learning rate" in schedule_jump(steeper, before)
    assert schedule_jump(make_recipe(max_steps=12, **wsd), before) is None


def test_a_run_that_fails_before_its_first_step_has_not_taken_its_name(make_recipe, monkeypatch):
    """Another recipe may have it: nothing was trained that it could destroy."""

    def fail(*_):
        raise UserError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", fail)
        with pytest.raises(UserError, match="no memory"):
            train(make_recipe())
    assert not make_recipe().run_folder.exists()
    with monkeypatch.context() as patch:  # as after kill -9
        patch.setattr("lingpt.train.start.give_back_name", lambda folder: None)
        patch.setattr(loop.Run, "step", fail)
        with pytest.raises(UserError, match="no memory"):
            train(make_recipe())
    assert (make_recipe().run_folder / "config.yaml").exists()
    other = make_recipe(learning_rate=0.5)
    assert refusal(other, other.model.config()) is None
    train(other)


@pytest.mark.slow
def test_deterministic_runs_of_a_seed_are_equal_bit_by_bit(make_recipe, monkeypatch):
    """And PyTorch is told so while they train, and as before afterwards."""
    asked = []
    original = loop.Run.step

    def step(self, stop):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return original(self, stop)

    monkeypatch.setattr(loop.Run, "step", step)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    one, two = (train(make_recipe(name=name, deterministic=True)) for name in ("one", "two"))
    assert all(asked) and not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert without_clock(one) == without_clock(two)
    assert all(torch.equal(tensor, weights(two, 6)[name]) for name, tensor in weights(one, 6).items())


def poison(monkeypatch, steps, what="both") -> None:
    """Makes the loss of these (1-based) steps infinite, or its gradient, or both."""
    step, exact, now = loop.Run.step, loss.cross_entropy_sum, [0]

    def noted(self, stop):
        now[0] = self.progress.step + 1
        return step(self, stop)

    def cross_entropy_sum(*args, **options):
        value = exact(*args, **options)
        if now[0] not in steps or not torch.is_grad_enabled():
            return value
        if what != "loss":
            value.register_hook(lambda gradient: gradient * float("inf"))
        return value if what == "gradient" else value + float("inf")

    monkeypatch.setattr(loop.Run, "step", noted)
    monkeypatch.setattr(loss, "cross_entropy_sum", cross_entropy_sum)


def test_a_run_records_what_it_is_made_of(make_recipe, picture, capsys):
    recipe = make_recipe(sample_tokens=300)  # more than fit
    recipe.model.attention, recipe.model.sdpa, recipe.model.block_size = ["ours", "softmax"], "math", 32
    folder = train(recipe)
    by, out = "ours by chunkwise, softmax by math", capsys.readouterr().out
    assert f"demo with ours + sdpa=math + softmax_every=2 ({by}):" in out
    assert f"validation loss {read_metrics(folder)[-1]['loss']:.4f} nats/token after 6 steps" in out
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] and environment["command"] and environment["hardware"]["name"]
    assert environment["data"]["fingerprint"]
    assert environment["attention_kernels"] == {"ours": "chunkwise", "softmax": "math"}
    assert (folder / "samples.txt").read_text().count("⟨…⟩") == 2
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    line = read_metrics(folder)[0]
    assert line.keys() == {
        "kind", "step", "tokens", "train_time", "loss", "lr", "grad_norm", "tokens_per_second", "mfu",
        "peak_memory",
    }  # fmt: skip
    assert line["tokens"] == 8 * 32


def test_a_kernel_that_cannot_run_is_refused_before_there_is_a_run(make_recipe):
    recipe = make_recipe()
    recipe.model.attention, recipe.model.sdpa = "softmax", "cudnn"
    with pytest.raises(UserError, match=r"model.sdpa cudnn cannot train on cpu in float32 with heads of 32"):
        train(recipe)
    assert not recipe.run_folder.exists()


def test_the_report_finds_the_memory_free(make_recipe, monkeypatch):
    """Guards: a GPU that holds model and optimizer twice when the samples are made."""
    kept, alive, init = [], [], loop.Run.__init__

    def remember(self, *args):
        init(self, *args)
        kept.extend(weakref.ref(x) for x in (self.gpt, self.gpt.lm_head.weight, self.optimizer))

    monkeypatch.setattr(loop.Run, "__init__", remember)
    monkeypatch.setattr(report, "final_report", lambda *_: alive.extend(ref() for ref in kept))
    train(make_recipe(max_steps=1))
    assert alive == [None] * 3


def test_samples_that_find_no_memory_are_left_out(make_recipe, monkeypatch, capsys):
    """Guards: a traceback at the end of a run that is done and saved."""

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(report, "generate", fail)
    folder = train(make_recipe(max_steps=1, sample_tokens=8))
    out = capsys.readouterr().out
    assert f"no samples: out of memory; `lingpt generate {folder} --device cpu`" in out
    assert "validation loss" in out and not (folder / "samples.txt").exists()


def test_a_model_that_cannot_sample_leaves_the_samples_out(make_recipe, capsys):
    """Guards: a run that diverged in its last steps ended with an error, and without its report."""
    folder = train(make_recipe(learning_rate=1e3, max_steps=8, sample_tokens=8, grad_clip=1e9))
    out = capsys.readouterr().out
    assert "no samples: the model's logits are not finite" in out and not (folder / "samples.txt").exists()
    assert f"run   {folder}" in out


def test_a_metrics_line_without_its_kind_does_not_end_the_run(make_recipe, monkeypatch, capsys):
    """Guards: a KeyError after the last step."""
    close = loop.Run.close

    def close_and_damage(self):
        close(self)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3}\n{"step": 3, "kind": "val"}\n')

    monkeypatch.setattr(loop.Run, "close", close_and_damage)
    train(make_recipe())
    assert "validation loss" in capsys.readouterr().out


def test_init_from_another_attention_says_what_it_took(make_recipe, capsys):
    """`softmax` starts from `ours`: the same keys, another model; the report names what was taken. Guards: a
    run's folder, which has no config.json of its own, was refused."""
    run = train(make_recipe())
    source = run / "checkpoints/step-00000006"
    recipe = make_recipe(init_from=str(run), max_steps=1, learning_rate=1e-12, min_learning_rate=1e-12)
    recipe.model.attention = "softmax"
    folder = train(recipe)
    assert f"init_from: weights from {source} (" in (out := capsys.readouterr().out) and "taken" in out
    taken = weights(folder, 1)["lm_head.weight"]
    torch.testing.assert_close(taken, load_file(source / "model.safetensors")["lm_head.weight"])
    config = json.loads((folder / "checkpoints/step-00000001/config.json").read_text())
    assert config["attention"] == "softmax"


def test_init_from_weights_of_other_tokens_says_so(make_recipe, tmp_path, capsys):
    """Guards: embeddings of another tokenizer were taken without a word where the sizes fitted."""
    run = train(make_recipe(max_steps=1))
    train(make_recipe(name="same", init_from=str(run), max_steps=1))
    assert "of this run's" not in capsys.readouterr().out
    saved = json.loads((run / "checkpoints/step-00000001/tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "swapped.json").write_text(json.dumps(saved))
    other = make_recipe(name="other", init_from=str(run), max_steps=1)
    other.data = replace(other.data, tokenizer=str(tmp_path / "swapped.json"))
    train(other)
    assert "init_from: 2 of this run's " in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads through /proc")
def test_closing_ends_the_process_group_where_it_is_said(make_recipe):
    """Held by DDP, it would end later, with the GIL: now and then gloo's thread waited for that, for ever."""

    def gloo_threads() -> set[Path]:
        tasks = Path("/proc/self/task").glob("*")
        return {task for task in tasks if (task / "comm").read_text().startswith("pt_gloo")}

    run = start(make_recipe())
    others = gloo_threads()  # of an earlier test in this process
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    run.model = torch.nn.parallel.DistributedDataParallel(run.model)
    assert gloo_threads() - others
    run.close()
    assert not gloo_threads() - others
