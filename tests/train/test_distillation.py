"""A model that imitates a teacher: each new attention its outputs, then the whole model its distribution."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lingpt.cli.linearize import parse
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.common.files import read_yaml
from lingpt.common.run_folder import read_metrics
from lingpt.data import Batch
from lingpt.models import GPT, ModelArgs, save_model
from lingpt.train import train
from lingpt.train.distillation import (
    AttentionTransferLoss,
    LogitsLoss,
    divergence_and_gradient,
    training_loss,
)
from lingpt.train.loss import NextTokenLoss
from lingpt.train.runs.replay import replay
from lingpt.train.start import check_recipe


def tiny(attention, seed=0):
    args = ModelArgs("demo", attention, n_layer=6, n_embd=32, n_head=2, vocab_size=60, block_size=40)
    return GPT.create(args.config(), seed, dtype=torch.float64)


@pytest.fixture
def batch():
    return torch.randint(60, (2, 20), generator=torch.Generator().manual_seed(0))


def test_the_divergence_is_pytorchs_and_so_is_its_gradient():
    logits, teacher = torch.randn(2, 5, 11, dtype=torch.float64)
    logits.requires_grad_()
    expected = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="sum")
    loss, gradient = divergence_and_gradient(logits, teacher)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_logits_are_fitted_to_the_teachers(batch):
    model, teacher = tiny("ours", seed=1), tiny("softmax").requires_grad_(False)
    loss = LogitsLoss(model, teacher)(batch)
    log_p, log_t = model(batch[:, :-1]).log_softmax(-1), teacher(batch[:, :-1]).log_softmax(-1)
    expected = F.kl_div(log_p, log_t, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(*gradients)
    assert LogitsLoss(tiny("softmax"), teacher)(batch) == 0


def test_blocks_outputs_are_fitted_ever_less(batch):
    """Twice the mean squared error of normalised outputs, per token, beside the divergence; none at the
    end."""
    model, teacher = tiny("ours", seed=1), tiny("softmax").requires_grad_(False)
    loss = LogitsLoss(model, teacher, blocks=True)
    outputs = []
    for gpt in (model, teacher):
        x, seen = gpt.transformer["wte"](batch[:, :-1]), []
        for block in gpt.blocks:
            x = block(x, gpt.cos[:19], gpt.sin[:19])
            seen.append((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0))
        outputs.append(torch.stack(seen))
    error = (outputs[0] - outputs[1]).square().mean() * 38
    alone = LogitsLoss(model, teacher)(batch)
    for progress, weight in ((0.0, 2.0), (0.75, 0.5), (1.0, 0.0)):
        loss.progress = progress
        torch.testing.assert_close(loss(batch), alone + weight * error, rtol=1e-4, atol=0)
    assert LogitsLoss(tiny("softmax"), teacher, blocks=True)(batch) == 0


def test_an_attention_is_fitted_to_the_teachers_inputs_and_outputs(batch):
    """Guards: layers that keep their attention are not trained, nor is anything but attentions."""
    model, teacher = tiny("ours", seed=1), tiny("softmax").requires_grad_(False)
    loss = AttentionTransferLoss(model, teacher)(batch)
    x, errors = teacher.transformer["wte"](batch[:, :-1]), []
    tables = teacher.cos[:19], teacher.sin[:19]
    for own, other in zip(model.blocks, teacher.blocks, strict=True):
        wanted = other.attn(other.norm_1(x), *tables)
        errors.append((own.attn(other.norm_1(x), *tables) - wanted).square().sum() / wanted.square().sum())
        x = other(x, *tables)
    torch.testing.assert_close(loss, torch.stack(errors).mean() * 38, check_dtype=False, rtol=1e-5, atol=0)

    hybrid = tiny(["ours", "softmax", "ours", "ours", "ours", "ours"])
    AttentionTransferLoss(hybrid, teacher)(batch).backward()
    trained = {name for name, p in hybrid.named_parameters() if p.grad is not None}
    assert trained == {
        name for name, _ in hybrid.named_parameters() if ".attn." in name and ".h.1." not in name
    }
    assert trained == {name for name, p in hybrid.named_parameters() if p.requires_grad}  # DDP waits for all
    assert 0 < AttentionTransferLoss(model, tiny("softmax+value_residual"))(batch) < math.inf


def test_an_attention_is_fitted_with_its_own_rotary_embedding(batch):
    """Guards: the teacher's tables, for which a student of another rope_base then learned."""
    model, teacher = tiny("ours", seed=1), tiny("softmax")
    before = AttentionTransferLoss(model, teacher)(batch)
    model.cos.fill_(1.0)
    model.sin.fill_(0.0)
    assert AttentionTransferLoss(model, teacher)(batch) != before


@pytest.mark.parametrize("kind", ["attention", "blocks", "logits"])
def test_what_has_no_target_does_not_count(kind, batch):
    """Packed rows that end in padding, and a prompt alone: the loss and gradient of their targets. A document
    sees no other, in the teacher, too.

    Guards: losses summed over padding and prompts, and divided by the number of targets.
    """
    teacher, found = tiny("softmax").requires_grad_(False), []
    idx, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
    idx[:, 12:], targets[:, 12:] = 0, -100
    borders = torch.tensor([0, 12, 19, 31, 38], dtype=torch.int32)
    one_row = Batch(idx.view(1, -1), targets.view(1, -1), borders)
    for packed in (Batch(idx, targets, borders), batch[:, :13], one_row):
        model = tiny("ours", seed=1)
        if kind == "attention":
            loss = AttentionTransferLoss(model, teacher)(packed)
        else:
            loss = LogitsLoss(model, teacher, blocks=kind == "blocks")(packed)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        teacher = tiny("softmax").requires_grad_(False)  # without hooks
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-5)
    nothing = Batch(idx, torch.full_like(targets, -100), borders)
    loss = AttentionTransferLoss(model, teacher) if kind == "attention" else LogitsLoss(model, teacher)
    assert loss(nothing) == 0


def test_shared_values_are_no_part_of_an_attention(make_recipe, tmp_path):
    """Guards: the error only after the text was tokenised and the softmax layers were placed."""
    recipe = make_recipe(teacher=str(tmp_path), imitate="attention")
    recipe.model.value_residual = True
    with pytest.raises(UserError, match="value_residual has a part outside of them: imitate blocks"):
        check_recipe(recipe)


@pytest.mark.parametrize("kind", ["attention", "blocks", "logits"])
def test_a_teacher_computes_by_any_kernel(make_recipe, tmp_path, batch, kind):
    """Guards: a run that ended at its first step where the kernel that trained the teacher cannot run."""
    save_model(tiny("softmax+sdpa=cudnn"), tmp_path)
    loss = training_loss(make_recipe(teacher=str(tmp_path), imitate=kind), tiny("ours"), compiled=False)
    assert loss(batch).isfinite()
    assert isinstance(loss, AttentionTransferLoss if kind == "attention" else LogitsLoss)
    assert getattr(loss, "blocks", False) == (kind == "blocks")


def test_a_teacher_that_cannot_teach_is_told_before_any_work(make_recipe):
    """Guards: a typo, or other sizes, after hours of tokenising."""
    teacher = train(make_recipe(name="teacher", max_steps=1))
    wrong: list[tuple[str, str, dict, int, str]] = [
        ("attention", str(teacher), {}, 32, "its teacher's attention in every layer"),
        ("blocks", str(teacher), {"n_layer": 1}, 32, "has n_layer 2, this model 1"),
        ("logits", str(teacher), {"padded_vocab_size": 640}, 32, "has padded_vocab_size 320, this model 640"),
        ("logits", str(teacher), {}, 512, "longer than the teacher's block size 256: lower it"),
        ("logits", "typo", {}, 32, "no model in typo: there is no such folder"),
    ]
    for imitate, chosen, model, seq_len, message in wrong:
        student = make_recipe(imitate=imitate, teacher=chosen, eval_tokens=512)
        student.model = replace(student.model, block_size=seq_len, **model)
        student.data = replace(student.data, seq_len=seq_len)
        with pytest.raises(UserError, match=message):
            check_recipe(student)
    student = make_recipe(imitate="logits", teacher=str(teacher))
    student.data = replace(student.data, seq_len=256)
    for n_layer, n_embd in ((1, 64), (2, None)):
        student.model = replace(student.model, n_layer=n_layer, n_embd=n_embd, block_size=256)
        check_recipe(student)  # its sequences are as long as the teacher's can be; its layers are its own


@pytest.mark.parametrize("kind", [AttentionTransferLoss, LogitsLoss])
def test_a_validation_is_of_the_next_token(kind, batch):
    model, teacher = tiny("ours", seed=1), tiny("softmax")
    with torch.no_grad():
        assert kind(model, teacher)(batch) == NextTokenLoss(model)(batch)


def test_a_student_takes_no_option_of_its_teacher_that_it_cannot_have(make_recipe):
    """Guards: "leave it out" for an option that only the teacher's run was given, or for a rate of linear
    attentions without any; Muon's whole rate; a decay longer than the student's run; a quarter of a
    micro-batch that does not divide that of the batch; and a traceback for a damaged recipe."""
    options = {"optimizer": "muon", "muon_learning_rate": 4e-3, "schedule": "wsd", "decay_steps": 1}
    teacher = train(make_recipe(max_steps=1, z_loss=1e-4, segments=2, **options))
    config = teacher / "config.yaml"
    text = config.read_text().replace("context_parallel: 1", "context_parallel: 2")
    config.write_text(re.sub(r"micro_batch_size: \d+", "micro_batch_size: 2", text))
    (student,) = parse([str(teacher), "--model.attention=ours-gated"])
    t = student.train
    assert (t.z_loss, t.segments, t.context_parallel) == (0.0, 1, 1)
    assert (t.schedule, t.decay_steps) == ("wsd", None)
    assert (t.optimizer, t.muon_learning_rate, t.learning_rate) == ("muon", 2e-3, 5e-4)
    assert t.attention_learning_rate == 2e-3
    # The command line is over the teacher's recipe, and --config in its place.
    given = ["--train.learning_rate=3e-4", "--train.global_batch_size", "4", "--train.max_tokens=4096"]
    (student,) = parse([str(teacher), "--model.attention=ours-gated", *given])
    t = student.train
    assert (t.learning_rate, t.attention_learning_rate, t.global_batch_size) == (3e-4, None, 4)
    assert (t.muon_learning_rate, student.total_steps) == (2e-3, 4096 // (4 * student.data.seq_len))
    assert student.train.max_tokens is None and student.train.micro_batch_size >= 1
    two = ["--train.imitate=attention", "--train.max_steps=9"]
    first, second = (x.train for x in parse([str(teacher), "--model.attention=ours-gated", *two]))
    assert (first.imitate, first.init_from, first.max_steps) == ("attention", str(teacher), 2)
    assert (second.imitate, Path(second.init_from).name, second.max_steps) == ("logits", first.name, 7)
    (student,) = parse([str(teacher), "--model.attention=ours-gated", "--config", "demo"])
    assert (student.train.optimizer, student.data.seq_len) == ("adamw", 256)
    for given, rate in (
        ((), None),
        (("--train.attention_learning_rate=0.1",), 0.1),
    ):  # refused when it starts
        (student,) = parse([str(teacher), "--model.attention=softmax+softmax_window=16", *given])
        assert student.train.attention_learning_rate == rate
    for teachers, own in (((20, 10), (5, 1)), ((16, 8), (4, 2)), ((2, 1), (1, 1))):
        found = read_yaml(config)
        found["train"] |= dict(zip(("global_batch_size", "micro_batch_size"), teachers, strict=True))
        config.write_text(json.dumps(found))
        (student,) = parse([str(teacher), "--model.attention=ours-gated"])
        assert (student.train.global_batch_size, student.train.micro_batch_size) == own
    for damaged in ("", "model: {name: demo}", "train: 3"):
        config.write_text(damaged)
        with pytest.raises(UserError, match=r"recipe|how long to train"):
            parse([str(teacher), "--model.attention=ours-gated"])


def test_a_replay_says_that_the_run_had_a_teacher(make_recipe, monkeypatch):
    """Guards: the loss of the next token beside that of imitation, as if both were the same. The loss knows
    how much of the run is done."""
    done, forward = [], LogitsLoss.forward
    monkeypatch.setattr(LogitsLoss, "forward", lambda x, batch: done.append(x.progress) or forward(x, batch))
    teacher = train(make_recipe(name="teacher", max_steps=1))
    student = train(make_recipe(name="student", max_steps=2, save_interval=1, teacher=str(teacher)))
    assert done[:4] == [0.0, 0.0, 0.5, 0.5]  # two micro-batches a step
    said = f"not as it was trained: to imitate {teacher} then, the loss of the next token now"
    assert said in replay(student, 2, device="cpu").splitlines()


@pytest.mark.slow
def test_linearize(make_recipe, capsys):
    """One run, or two of a quarter and three quarters of the steps; the same command again trains nothing."""
    recipe = make_recipe(max_steps=4)
    recipe.model = ModelArgs(name="demo", attention="softmax", n_layer=2)
    teacher = train(recipe)
    out = Path(recipe.train.out_dir)
    assert main(["linearize", str(teacher), "--model.attention=ours", "--train.name=student"]) == 0
    assert f"\nlearns from {teacher}: only the validation loss is that of" in capsys.readouterr().out
    old, new = (read_yaml(run / "config.yaml")["train"] for run in (teacher, out / "student"))
    assert (new["teacher"], new["init_from"], new["imitate"]) == (str(teacher), str(teacher), "blocks")
    assert new["global_batch_size"] == old["global_batch_size"] // 4
    rates = new["learning_rate"], new["attention_learning_rate"], new["min_learning_rate"]
    assert rates == (old["learning_rate"] / 2, 2 * old["learning_rate"], 0)
    assert new["max_steps"] == 2  # a tenth of the tokens of 4 steps four times as large

    command = ["linearize", str(teacher), "--model.attention=ours", "--train.max_steps=8"]
    command += ["--train.imitate=attention"]
    for _ in range(2):  # the second time of what is there
        assert main([*command, "--train.dry_run=true"]) == 0
        plans = capsys.readouterr().out.split("this is a dry run")
        assert len(plans) == 3 and "such folder" not in plans[2] and "another config" not in plans[2]
        assert main(command) == 0, capsys.readouterr().err
    runs = out / "demo-ours-n_layer_2-linearized-transfer", out / "demo-ours-n_layer_2-linearized"
    steps = [[line["step"] for line in read_metrics(run) if line["kind"] == "train"] for run in runs]
    assert steps == [[1, 2], [1, 2, 3, 4, 5, 6]]
    last = json.loads(sorted((runs[1] / "checkpoints").iterdir())[-1].joinpath("manifest.json").read_text())
    assert last["config"]["train"]["init_from"] == str(runs[0])
    first = next(line["loss"] for line in read_metrics(runs[1]) if line["kind"] == "train")
    assert 0 < first < 1  # a divergence: the loss of the next token is above 5 here

    few = ["--train.imitate=attention", "--train.max_steps=3"]
    assert main(["linearize", str(teacher), "--model.attention=ours", *few]) == 2
    assert "3 steps are too few for two runs" in capsys.readouterr().err
    assert main(["linearize"]) == 2
    assert "needs a teacher first" in capsys.readouterr().err
    wider = ["train", "--config=demo", "--model.n_embd=64", "--train.max_steps=1", f"--train.out_dir={out}"]
    assert main([*wider, f"--train.teacher={teacher}", "--train.imitate=attention"]) == 2
    assert "has n_layer 2, this model 4" in capsys.readouterr().err
