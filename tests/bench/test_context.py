"""The rows of `lingpt bench context`: what fails is a line, and the others are kept, beside the plan."""

import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lingpt.bench import context, context_results, processes
from lingpt.bench.context_results import Results, Row
from lingpt.bench.processes import Processes
from lingpt.bench.trace import draw_trace, read_trace
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.common.run_folder import METRICS
from lingpt.data import DataConfig
from lingpt.train.planning.plan import Estimate
from lingpt.train.recipe import parse_recipe
from lingpt.train.start import check_recipe

OPTIONS: dict[str, Any] = {
    "base_len": 128, "check_len": 256, "devices": 2, "accelerator": "cpu", "steps": 3, "budget": 60.0,
    "options": "--train.activation_checkpointing true --train.learning_rate 1e-4", "append": False,
}  # fmt: skip
FAILS = {1024: "lingpt: out of memory: try a smaller model", 2048: "lingpt: no network"}


def gpu_trace() -> list[dict[str, Any]]:
    """Two steps of a rank on a GPU, µs: kernels run after the calls that launch them, beside each other."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events, call = [{"ph": "M", "name": "process_name"}], 0

    def launch(at: float, tid: int, name: str, ts: float, dur: float) -> None:
        nonlocal call
        call += 1
        cat = "cuda_driver" if tid == 2 else "cuda_runtime"
        events.append(event(cat, "cudaLaunchKernel", at, 1, tid, correlation=call))
        events.append(event("kernel", name, ts, dur, 7, correlation=call))

    for t in (0, 1000):
        events.append(event("user_annotation", "step", t, 1000))
        events.append(event("user_annotation", "sends states", t + 100, 50))
        events.append(event("user_annotation", "sends heads", t + 500, 50, tid=2))
        for name, start, end in (("forward", 300, 600), ("backward", 600, 1100), ("optimizer", 1100, 1200)):
            events.append(event("gpu_user_annotation", name, t + start, end - start, 7))
        launch(t + 110, 1, "ncclDevKernel_AllGather_RING_LL", t + 400, 30)
        launch(t + 510, 2, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", t + 700, 20)
        # another thread's, which runs after the step
        launch(t + 520, 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", t + 1150, 100 if t else 50)
        launch(t + 120, 1, "gemm", t + 300, 900)
    return events


def write_trace(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": gpu_trace()}, file)


class FakeProcesses:
    """Checks that the command is one of `lingpt train`, with a recipe that so many devices can train."""

    def __init__(self, n: int, logs: Path) -> None:
        self.n = n

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, words: list[str], seconds: float) -> str | None:
        recipe = parse_recipe(words[1:])
        check_recipe(recipe)
        assert words[0] == "train" and recipe.train.devices == self.n and recipe.train.keep_checkpoints == 0
        assert recipe.train.activation_checkpointing and recipe.train.learning_rate == 1e-4, "the options"
        if recipe.data.seq_len in FAILS:
            return FAILS[recipe.data.seq_len]
        if recipe.train.profile:
            write_trace(recipe.run_folder / "profile/trace.json.gz")
        recipe.run_folder.mkdir(parents=True, exist_ok=True)
        lines = ['{"kind": "val", "step": 0, "loss": 9.0}']
        for step in range(1, recipe.train.max_steps + 1):
            rate, memory = (50.0, 1e9) if step < recipe.train.max_steps else (100.0, 1.5e9)
            line = {"kind": "train", "tokens": 1, "train_time": 1.0, "step": step, "loss": 8.0 - step}
            line |= {"tokens_per_second": rate * recipe.train.devices, "peak_memory": memory}
            lines.append(json.dumps(line))
        (recipe.run_folder / METRICS).write_text("\n".join(lines) + "\n")
        return None


def bench(folder: Path, seq_lens: Sequence[int] = (512,), **options: Any) -> Results:
    save_to = folder / "context.json"
    return context.bench_context("demo", ["ours"], seq_lens, **OPTIONS | options, save_to=save_to)


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(context, "Processes", FakeProcesses)
    results = bench(tmp_path, [2048, 512, 1024])
    rows = results.rows
    assert [row.kind for row in rows] == ["one", "ddp", "first", "first", *["pieces"] * 3]
    assert [row.batch for row in rows] == [8, 16, 1, 1, 4, 2, 1]
    assert [(row.status, row.reason) for row in rows[5:]] == [("oom", FAILS[1024]), ("error", FAILS[2048])]
    for row in rows[:5]:
        assert row.status == "ok" and row.peak_memory == 1.5e9
        assert row.losses == ([7.0] if row.kind == "first" else [7.0, 6.0, 5.0])
    assert [results.of_one(row) for row in rows] == [1.0, 1.0, None, None, 1.0, None, None]
    assert all(row.planned_tokens_per_second and row.planned_memory for row in rows)
    assert rows[4].planned_sending and rows[4].sending["states"] == pytest.approx(0.03)
    assert not (tmp_path / "runs").is_dir() or not list((tmp_path / "runs").iterdir())
    results.report(tmp_path)
    assert (tmp_path / "pieces-ours-512-2.png").exists() and (tmp_path / "context.png").exists()
    table = (tmp_path / "context.md").read_text()
    assert "out of memory" in table and "states 3.0%" in table
    assert Results.load(tmp_path / "context.json").rows == rows
    monkeypatch.setattr(context, "Processes", None)  # nothing is left to measure
    assert bench(tmp_path, append=True).rows == rows
    with pytest.raises(UserError, match=r"was measured with --options .*: measure again, without --append"):
        bench(tmp_path, append=True, options="")


def test_a_row_that_the_budget_does_not_hold_is_shorter_or_left_out(tmp_path: Path, monkeypatch):
    """One step instead of three; none, if the plan says that not even one fits. Guards: its processes, which
    waited until the last row was measured."""
    waiting: set[Path] = set()

    class Counted(FakeProcesses):
        def __init__(self, n: int, logs: Path) -> None:
            super().__init__(n, logs)
            self.logs = logs
            waiting.add(logs)
            assert len(waiting) <= 2

        def __exit__(self, *_: object) -> None:
            waiting.discard(self.logs)

    monkeypatch.setattr(context, "Processes", Counted)
    seconds = {"one": 1.0, "ddp": 1.0, "first": 1.0, "pieces": 10.0}

    def estimate(recipe, *_):
        row = recipe.run_name.partition("-")[0]
        return Estimate(recipe.tokens_per_step / seconds[row], "", 0.01, 1)

    monkeypatch.setattr(context, "estimate", estimate)
    for budget, status, steps in ((100.0, "ok", 3), (44.0, "ok", 1), (15.0, "skipped", 1)):
        results = bench(tmp_path / f"{budget}", budget=budget)
        assert (results.rows[-1].status, results.rows[-1].steps) == (status, steps)
        assert results.rows[-1].planned_tokens_per_second == 512 / 10 / 2
    assert "a step takes 10 s by the plan" in results.rows[-1].reason and not waiting


def test_a_row_that_does_not_fit_offloads(tmp_path: Path, monkeypatch):
    """On a GPU, and only where its plan says so."""
    offloaded = []

    class Noted(FakeProcesses):
        def run(self, words: list[str], seconds: float) -> str | None:
            offloaded.append(parse_recipe(words[1:]).train.offload_activations)
            return "not here"

    def on_a_gpu(recipe):
        gpt, machine, cards = check_recipe(recipe)
        return gpt, replace(machine, accelerator="cuda"), cards

    monkeypatch.setattr(context, "Processes", Noted)
    monkeypatch.setattr(context, "check_recipe", on_a_gpu)
    monkeypatch.setattr(context, "estimate", lambda *_: Estimate(1e6, "", 0.01, 1))
    monkeypatch.setattr(context, "fits_here", lambda machine, gpt, recipe: recipe.data.seq_len < 512)
    results = bench(tmp_path)
    assert offloaded == [bool(row.options) for row in results.rows] == [False] * 4 + [True]


def test_each_model_has_its_line(tmp_path: Path, monkeypatch):
    """Guards: one line through the rates of two models."""
    drawn: list[Any] = []
    monkeypatch.setattr(context_results, "save_formats", lambda figure, *_: drawn.append(figure))
    rows = [
        Row(model, "pieces", "ours", n, devices, tokens_per_second=1e3 * rate, planned_tokens_per_second=5e3)
        for model, devices, rate in (("a", 2, 1.0), ("b", 2, 2.0), ("b", 4, 3.0))
        for n in (1024, 512)
    ]
    head = {"card": "GPU", "precision": "bf16-mixed", "versions": {}, "date": "today"}
    for own, labels in ((rows, ["a ours on 2", "b ours on 2", "b ours on 4"]), (rows[:2], ["ours on 2"])):
        Results(head, own).draw(tmp_path)
        measured, planned = drawn[-1].axes[0].lines[::2], drawn[-1].axes[0].lines[1::2]
        assert [line.get_label() for line in measured] == labels
        assert [line.get_ydata()[0] for line in measured] == [1.0, 2.0, 3.0][: len(labels)]
        assert all(list(line.get_xdata()) == [512, 1024] for line in measured)
        assert all(set(line.get_ydata()) == {5.0} for line in planned)
    looks = {(line.get_linestyle(), line.get_marker()) for line in drawn[0].axes[0].lines[::2]}
    assert len(looks) == 3 and "A point is missing" not in drawn[-1].get_supxlabel()
    Results(head, [*rows, Row("a", "pieces", "ours", 2048, 2, status="oom")]).draw(tmp_path)
    assert "A point is missing" in drawn[-1].get_supxlabel()


def test_a_row_stands_beside_its_plan():
    row = Row("a", "pieces", "ours", 512, 2, losses=[7.0], tokens_per_second=1e3, sending={"states": 0.03})
    row.planned_tokens_per_second, row.planned_sending = 5e3, 0.01
    row.peak_memory, row.planned_memory = 2e9, 10**9
    one = replace(row, kind="one", tokens_per_second=2e3)
    head = {"card": "GPU", "precision": "bf16-mixed", "versions": {}, "date": "today"}
    table = Results(head, [one, row, replace(row, kind="first")]).table()
    assert "| 7.00000 | 1,000 | 0.500 | 5,000 | 0.20 | 2.0 | 1.0 | 2.00 | states 3.0% | 1.0% |" in table
    assert f"| a | first | ours | 512 | 2 | 7.00000 |{' |' * 9}" in table
    said = "first loss 7.00000, 1,000 tokens/s a device, sending 3.0% (planned 1.0%)"
    assert row.line() == f"pieces ours N = 512 on 2: {said}"


@pytest.mark.parametrize(("missing", "status"), [(0, "ok"), (1, "skipped")])
def test_a_row_whose_steps_are_whole_counts_when_the_budget_ends(
    tmp_path: Path, monkeypatch, missing: int, status: str
):
    """Guards: a run stopped in its last validation counts; of one stopped before, nothing is kept."""

    folders: list[Path] = []

    class Stopped(FakeProcesses):
        def run(self, words: list[str], seconds: float) -> str | None:
            failed, recipe = super().run(words, seconds), parse_recipe(words[1:])
            folders.append(recipe.run_folder)
            if recipe.data.seq_len == 512:
                lines = (recipe.run_folder / METRICS).read_text().splitlines(keepends=True)
                (recipe.run_folder / METRICS).write_text("".join(lines[: len(lines) - missing]))
                raise TimeoutError
            return failed

    monkeypatch.setattr(context, "Processes", Stopped)
    results = bench(tmp_path)
    assert results.rows[-1].status == status and "the rest of the budget" in results.rows[-1].reason
    assert results.rows[-1].tokens_per_second == (None if missing else 100.0)
    assert folders and not [folder for folder in folders if folder.exists()]


def test_an_unknown_name_is_one_line(tmp_path: Path, capsys):
    """Guards: a table of rows that are all refused, and no failure."""
    for option, name in (("--model", "dmo"), ("--attentions", "softmx")):
        assert main(["bench", "context", "--accelerator", "cpu", option, name, "--out", str(tmp_path)]) == 2
        assert f"'{name}' (did you mean" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "out").touch()
    (tmp_path / "validation.txt").mkdir()
    options = ["--accelerator", "cpu", "--model", "demo", "--attentions", "ours"]
    for out in (tmp_path / "out", tmp_path):
        assert main(["bench", "context", *options, "--out", str(out)]) == 2
        assert f"cannot write to {out}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_it_is_one_line(tmp_path: Path, capsys):
    """Guards: rows that are all refused, as the default model does not fit a CPU."""
    for words, said in (
        ([], "PyTorch finds no CUDA device: use cpu"),
        (["--accelerator", "auto"], "pythia-1.4b needs a GPU"),
    ):
        assert main(["bench", "context", "--out", str(tmp_path), *words]) == 2
        assert said in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("factor", "status"), [(1 + 1e-6, "ok"), (1 + 1e-4, "wrong")])
def test_another_first_loss_is_wrong(tmp_path: Path, monkeypatch, factor: float, status: str):
    """Guards: a row of a loss that its table says is that of one device, and is not."""

    class Scaled(FakeProcesses):
        def run(self, words: list[str], seconds: float) -> str | None:
            failed, path = super().run(words, seconds), parse_recipe(words[1:]).run_folder / METRICS
            if self.n > 1:
                path.write_text(path.read_text().replace('"loss": 7.0', f'"loss": {7 * factor}'))
            return failed

    monkeypatch.setattr(context, "Processes", Scaled)
    results = bench(tmp_path)
    assert [row.status for row in results.rows] == ["ok", "ok", "ok", status, "ok"]
    said = "wrong: the loss is 7.00070, that of one device 7.00000"
    assert (f"| {said} |" in results.table()) == (status == "wrong")


def test_a_trace_that_cannot_be_read_leaves_no_folder(tmp_path: Path, monkeypatch):
    """Guards: a run's folder beside a row that `--append` does not measure again."""

    class WithoutSteps(FakeProcesses):
        def run(self, words: list[str], seconds: float) -> str | None:
            found, trace = super().run(words, seconds), "profile/trace.json.gz"
            if (path := parse_recipe(words[1:]).run_folder / trace).exists():
                path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
            return found

    monkeypatch.setattr(context, "Processes", WithoutSteps)
    results = bench(tmp_path)
    assert (results.rows[-1].status, results.rows[-1].kind) == ("refused", "pieces")
    assert "has no step" in results.rows[-1].reason and not list((tmp_path / "runs").iterdir())


def test_a_process_that_ends_before_its_command_says_why(tmp_path: Path, monkeypatch):
    """Guards: `Broken pipe` instead of the error of an import."""
    monkeypatch.setattr(processes, "_WAIT", "raise SystemExit('no such library')")
    with Processes(1, tmp_path) as waiting:
        waiting._ranks[0].wait()
        assert waiting.run(["train"], 10) == "no such library"


def test_communication_is_summed_by_what_it_sends(tmp_path: Path):
    """On a GPU by the call that launched it, whose thread and time are those of a named range."""
    write_trace(tmp_path / "profile/trace.json.gz")
    trace = read_trace(tmp_path / "profile/trace.json.gz")
    assert trace.seconds == 1e-3
    assert trace.shares() == pytest.approx({"states": 0.03, "heads": 0.02, "gradients": 0.1})
    assert trace.kernels == [(1300, 900)]
    assert trace.parts == {"forward": [(1300, 300)], "backward": [(1600, 500)], "optimizer": [(2100, 100)]}
    draw_trace(trace, "a step", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").exists()


@pytest.mark.slow
def test_processes_are_the_ranks_of_a_run(tmp_path: Path, monkeypatch, corpus: DataConfig):
    """Started ahead, they train a divided hybrid, whose trace tells what it sends; failures are one line."""
    options = {
        "model.attention": "hybrid", "model.n_layer": 4, "model.n_embd": 32, "model.n_head": 2,
        "data.source": corpus.source, "data.val_source": corpus.val_source, "data.seq_len": 64,
        "data.tokenizer": corpus.tokenizer, "data.cache_dir": corpus.cache_dir,
        "train.global_batch_size": 1, "train.micro_batch_size": 1, "train.eval_tokens": 64,
        "train.max_steps": 3, "train.devices": 2, "train.context_parallel": 2, "train.accelerator": "cpu",
        "train.profile": "true", "train.keep_checkpoints": 0, "train.sample_tokens": 0,
        "train.wandb": "false", "train.out_dir": tmp_path, "train.name": "run",
    }  # fmt: skip
    words = ["train", "--config", "demo", *(f"--{name}={value}" for name, value in options.items())]
    monkeypatch.setattr(processes, "GRACE", 1.0)
    with Processes(2, tmp_path / "a") as good, Processes(1, tmp_path / "b") as bad:
        assert good.run(words, 300) is None
        assert "no recipe" in (bad.run(["train", "--config", "nothing-like-it"], 60) or "")
    began = time.monotonic()
    with Processes(2, tmp_path / "c") as slow, pytest.raises(TimeoutError):
        slow.run([*words, "--train.name=slow"], 0.5)
    assert time.monotonic() - began < 30
    trace = read_trace(tmp_path / "run/profile/trace.json.gz")
    assert set(trace.shares()) == {"states", "heads", "last tokens", "gradients"}
    assert set(trace.parts) == {"forward", "backward", "optimizer"} and not trace.kernels
    assert "validation loss" in (tmp_path / "a/0.out").read_text()
