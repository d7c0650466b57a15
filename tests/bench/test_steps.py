"""A training step of each attention: the rows, their file and table, and what happens to those that fail."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lingpt.bench import steps
from lingpt.bench.results import in_k
from lingpt.bench.step_results import IDENTITIES, Results, Row, _speed_up, _throughput
from lingpt.bench.steps import Identity, Shape, bench_steps, choose_shapes
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.data import Batch, DataConfig
from lingpt.kernels import gated_linear_attention
from lingpt.models import GPT, Config, ModelArgs
from lingpt.models.attention import gla
from lingpt.train import Recipe, TrainConfig, compilation, model
from lingpt.train.planning.machine import choose_machine
from lingpt.train.planning.memory_fit import memory_needed
from lingpt.train.runs.environment import git_revision, package_hash

ON_A_CPU = {"tokens_per_step": 64, "accelerator": "cpu"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps a turn: one that warms up, one that is timed."""
    for name, value in (("WARMUP_STEPS", 1), ("MIN_STEPS", 1), ("MIN_SECONDS", 0.0)):
        monkeypatch.setattr(steps, name, value)


@pytest.mark.slow
def test_packed_documents_are_timed_beside_the_same_without(tmp_path: Path):
    names = ["hybrid", "hybrid-packed"]
    sizes = ON_A_CPU | {"tokens_per_step": 3200}
    results = bench_steps(["demo"], [1600], names, rounds=1, **sizes)
    assert [(row.attention, row.status) for row in results.rows] == [(name, "ok") for name in names]


def test_every_attention_takes_its_turn(tmp_path: Path, monkeypatch, capsys):
    """Two rounds over all attentions of a shape; one that cannot run, or breaks, is a row with its reason."""
    turns, trained = [], steps.Trained

    def broken(recipe, attention, parallel):
        turns.append(attention)
        if attention == "ours-gated":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trained(recipe, attention, parallel)

    monkeypatch.setattr(steps, "Trained", broken)
    names = ["identity", "softmax-best+value_residual", "softmax-flash", "ours-gated", "softmax-cudnn"]
    path = tmp_path / "bench.json"
    results = bench_steps(["demo"], [16], names, save_to=path, **ON_A_CPU)
    # A kernel that is not there builds no model; what failed is left out.
    rounds = [*names[:4], *names[:3]]
    assert turns == rounds
    assert [row.status for row in results.rows] == ["ok", "ok", "ok", "oom", "refused"]
    refused = results.rows[4]
    assert refused.ms is None and refused.reason.startswith("model.sdpa cudnn cannot train on cpu")
    for row in results.rows[:3]:
        assert (row.micro_batch_size, row.tokens, row.steps, len(row.by_round["ms"])) == (4, 64, 2, 2)
        assert row.fastest_ms <= min(row.by_round["ms"]) <= row.ms <= max(row.by_round["ms"])
        assert row.tokens_per_second == pytest.approx(64e3 / row.ms)
        assert row.mfu is None and row.peak_memory is None, "of a GPU alone"
        assert (row.estimated_memory is None) == (row.attention == "identity")
    assert results.rows[2].kernel == "flash"
    assert Results.load(path) == results, "the file holds everything"
    shares = [row["share_of_identity"] for row in json.loads(path.read_text())["rows"]]
    rounds_of = [row.by_round["ms"] for row in results.rows[:2]]
    ratios = [identity / ours for identity, ours in zip(*rounds_of, strict=True)]
    assert shares[0] == 1.0 and min(ratios) <= shares[1] <= max(ratios) and shares[3] is None
    text = results.table()
    assert text.count("| demo | 16 | 4 |") == 5 and "| oom: out of memory |" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {12}
    assert "demo N = 16, ours" in capsys.readouterr().out


def test_one_attention_breaks_no_graph_of_another(monkeypatch):
    """FLA's kernels break a block's graph. Guards: `gla`, timed after them in the same process, ran in their
    pieces, 3 % slower at pythia-1.4b."""
    graphs: dict[str, list[int]] = {}
    run: list[torch.fx.GraphModule] = []

    def counting(graph, inputs):
        return lambda *args: run.append(graph) or graph.forward(*args)

    def turn(session, row, work):
        run.clear()
        work(row)
        graphs.setdefault(row.attention, []).append(len(run))

    def choose(name, q, Dv):
        return {"auto": "chunkwise"}.get(name, name)

    monkeypatch.setattr(compilation, "compile_options", lambda: {"dynamic": False, "backend": counting})
    monkeypatch.setattr(model, "compiles", lambda recipe, device: True)
    monkeypatch.setattr(gated_linear_attention, "fla_attention", gated_linear_attention._chunkwise)
    monkeypatch.setattr(gated_linear_attention, "choose", choose)
    monkeypatch.setattr(gla, "choose", choose)
    monkeypatch.setattr(steps.Session, "turn", turn)
    bench_steps(["demo"], [16], ["gla", "gla-fla"], rounds=2, **ON_A_CPU)
    assert graphs["gla"][0] == graphs["gla"][1] < graphs["gla-fla"][0] == graphs["gla-fla"][1]


def test_a_benchmark_goes_on_where_it_stopped(tmp_path: Path):
    """--append measures what the budget left out, keeps what is there, and refuses another machine's or
    code's; guards: a JSON that did not say of which code it is."""
    path = tmp_path / "bench.json"
    options = ON_A_CPU | {"save_to": path, "append": True, "rounds": 1}
    kept = bench_steps(["demo"], [32], ["identity"], **options).rows[0]
    skipped = bench_steps(["demo"], [32], ["identity", "ours"], budget=0, **options).rows
    assert skipped[0] == kept and skipped[1].status == "skipped" and "budget of 0 s" in skipped[1].reason
    whole = bench_steps(["demo"], [32], ["ours", "identity"], micro_batch_tokens=32, **options)
    assert whole.rows[0] == kept and whole.rows[1].status == "ok" and whole.rows[1].micro_batch_size == 1
    with pytest.raises(UserError, match="has steps of 64 tokens"):
        bench_steps(["demo"], [32], ["gla"], **options | {"tokens_per_step": 128})
    assert whole.environment["source"] == package_hash() and whole.environment["git"] == git_revision()
    for key in ("card", "source"):
        Results(whole.environment | {key: "another"}, whole.rows).save(path)
        with pytest.raises(UserError, match=f"of another {key}: measure again"):
            bench_steps(["demo"], [32], ["ours"], **options)


def test_a_step_has_all_its_micro_batches(monkeypatch):
    """Guards: a part of the tokens, timed as all of them; steps that train nothing, timed as real ones."""
    sizes = []

    def step(norm, training, micro_batches, n):
        sizes.append((n, [len(micro_batch) for micro_batch in micro_batches]))
        return SimpleNamespace(wait=lambda: [1.0, norm])

    for norm, status in ((1.0, "ok"), (math.nan, "error")):
        monkeypatch.setattr(steps, "optimizer_step", functools.partial(step, norm))
        (row,) = bench_steps(["demo"], [16], ["identity"], micro_batch_tokens=32, rounds=1, **ON_A_CPU).rows
        assert row.status == status and sizes[-1] == (2, [2, 2])
    assert row.reason == "RuntimeError: the loss or the gradient is not finite"


def test_a_token_of_packed_documents_attends_within_its_own():
    """Guards: the FLOPs of documents of the mean length, half of those of random ones."""
    tokens = torch.zeros(2, 100, dtype=torch.long)
    assert steps._sequence_length(torch.zeros(2, 101)) == 100
    for borders, length in (([0, 100, 200], 100), ([0, 20, 100, 100, 200], (20**2 + 80**2 + 100**2) / 200)):
        batch = Batch(tokens, tokens, torch.tensor(borders, dtype=torch.int32))
        assert steps._sequence_length(batch) == length


def test_the_table_names_the_code():
    """And says nothing of it where the file is of before it was recorded."""
    results, commit = made_up(), {"revision": "5123394abc", "dirty": True}
    for known, said in (
        ({}, "bf16-mixed, ; today."),
        ({"source": "0a1b"}, "bf16-mixed, ; source 0a1b, today."),
        ({"source": "0a1b", "git": commit}, "bf16-mixed, ; commit 5123394 with changes, today."),
    ):
        results.environment |= known
        assert f"GPU, {said}" in results.table()


def test_the_identity_mixes_nothing():
    """o = v between the same linear layers, whatever the other tokens are, and no FLOPs but theirs."""
    config = Config.from_name("demo", attention="softmax", n_layer=1)
    softmax = GPT.create(config, seed=0).blocks[0].attn
    identity, x = Identity(softmax), torch.randn(2, 5, 128, requires_grad=True)
    values = torch.nn.functional.linear(x, softmax.qkv.weight[256:], softmax.qkv.bias[256:])
    torch.testing.assert_close(identity(x, None, None), softmax.proj(values))
    assert dict(identity.named_parameters()).keys() == dict(softmax.named_parameters()).keys()
    assert identity.flops_per_token(100) == 0


def test_the_dense_identity_has_no_gradient_of_zeros():
    """The same output, also compiled; q's and k's weights have v's gradient, where the other's have none."""
    softmax = GPT.create(Config.from_name("demo", attention="softmax", n_layer=1), seed=0).blocks[0].attn
    x, weight = torch.randn(2, 5, 128), softmax.qkv.weight
    plain, dense = Identity(softmax), Identity(softmax, dense=True)
    gradients = []
    for attention in (plain, dense, torch.compile(dense, backend="aot_eager", fullgraph=True)):
        o = attention(x, None, None)
        torch.testing.assert_close(o, plain(x, None, None))
        (gradient,) = torch.autograd.grad(o.square().sum(), weight)
        gradients.append(gradient.unflatten(0, (3, 128)))
    assert not gradients[0][:2].any() and gradients[0][2].any()
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0][2].expand(3, 128, 128))


def made_up() -> Results:
    """Three lengths of two attentions; ours is 2, 4 and 6 times faster than FlashAttention-2, but for a round
    in which the machine was busy."""
    rows = []
    for n, factor in ((2048, 2.0), (4096, 4.0), (8192, 6.0)):
        for name, ms in (("identity", 0.9), ("ours", 1.0), ("softmax-flash", factor)):
            rounds = [100 * ms, 150 * ms, 900.0]
            row = Row("pythia-160m", n, name, ms=125 * ms, fastest_ms=100 * ms, by_round={"ms": rounds})
            row.tokens_per_second, row.peak_memory, row.estimated_memory = 1e6, 2 * 10**9, 10**9
            rows.append(row)
    return Results({"card": "GPU", "precision": "bf16-mixed", "versions": {}, "date": "today"}, rows)


def test_ratios_are_taken_within_a_round(tmp_path: Path, capsys):
    """And the picture and the table come from the file alone."""
    results = made_up()
    ours = results.row("pythia-160m", 4096, "ours")
    assert results.times_faster(ours, "softmax-flash") == pytest.approx(4.0)
    assert results.times_faster(ours, "identity") == pytest.approx(0.9)
    assert results.times_faster(ours, "gla") is None
    assert "| 0.900 | 4.00 | 2.0 | 0.50 |" in results.table()
    results.save(tmp_path / "bench.json")
    assert main(["bench", "train", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "bench.md").read_text() == results.table()
    assert (tmp_path / "speed-up.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "softmax-flash" not in results.rows[0].line() and "speed-up.pdf" in shown
    assert results.table() in shown and ours.line().endswith("ours: 125.0 ms, 1000.0 k tokens/s")
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG") and "throughput.pdf" in shown
    results.rows = results.rows[:3]
    assert results.draw(tmp_path / "one length") == [], "no line has two points"


def test_a_figure_says_that_points_are_missing():
    """Guards: rows that failed, or of a session without FlashAttention-2, left out without a word."""
    results = made_up()
    figures = (_speed_up, _throughput)
    for line, ratios in zip(
        _speed_up(results).axes[0].lines, ([20 / 9, 40 / 9, 60 / 9], [2, 4, 6]), strict=False
    ):
        assert line.get_ydata() == pytest.approx(ratios)
    assert [missing_in(figure(results)) for figure in figures] == [False, False]
    results.row("pythia-160m", 4096, "ours").session = "later"
    assert [missing_in(figure(results)) for figure in figures] == [True, False]
    results.put(Row("pythia-160m", 4096, "ours", status="oom", reason="out of memory"))
    assert [missing_in(figure(results)) for figure in figures] == [True, True]


def missing_in(figure) -> bool:
    return "A point is missing" in figure.get_supxlabel()


def test_lengths_are_in_k():
    """Guards: 512 as 512k, the paper's 300,000 as 300,000 or 293k."""
    assert list(map(in_k, (512, 1000, 1024, 131072, 300_000))) == ["512", "1k", "1k", "128k", "300k"]


def test_throughput_is_over_length_and_micro_batch():
    """Guards: tokens drawn as memory, a length under another's micro-batch."""
    results = made_up()
    for row in results.rows:
        row.micro_batch_size = 32768 // row.seq_len
    throughput, memory = _throughput(results).axes
    assert {tuple(line.get_ydata()) for line in throughput.lines} == {(1e3,) * 3}
    assert {tuple(line.get_ydata()) for line in memory.lines} == {(2.0,) * 3}
    assert [text.get_text() for text in memory.get_xticklabels()] == ["2k×16", "4k×8", "8k×4"]


def test_ratios_are_taken_within_a_session(tmp_path: Path):
    """Guards: rounds of an earlier session, hours or another load of the card away, paired with those of the
    rows that --append has added."""
    options = ON_A_CPU | {"save_to": tmp_path / "bench.json", "append": True}
    first = bench_steps(["demo"], [16], ["identity", "ours"], **options)
    assert first.times_faster(first.row("demo", 16, "ours"), "identity") and "sessions" not in first.table()
    both = bench_steps(["demo"], [16], ["identity", "ours", "gla"], **options)
    ours, gla = (both.row("demo", 16, name) for name in ("ours", "gla"))
    assert both.times_faster(ours, "identity") and both.times_faster(gla, "identity") is None
    assert gla.ms and gla.session != ours.session and "several sessions" in both.table()


def test_a_row_that_failed_later_says_so():
    """Guards: a later round that broke, of which the table said nothing, as its times are kept."""
    results = made_up()
    ours = results.row("pythia-160m", 8192, "ours")
    ours.mfu, ours.status, ours.reason = 0.44, "error", "RuntimeError: a | b"
    said = "| ours | 125.0 (100.0), then error: RuntimeError: a / b | 1000.0 | 0.440 |"
    assert said in results.table()


@pytest.mark.slow
def test_the_memory_estimate_is_what_was_measured():
    """Guards: today's estimate, within 10 % of what steps on an H200 have used, in the committed results."""
    folder, ratios = Path(__file__).parents[2] / "docs/results/training", {}
    files = [json.loads((folder / f"{name}.json").read_text()) for name in ("bench", "earlier")]
    for row in [row for file in files for row in file["rows"]]:
        model, seq_len, attention = row["model"], row["seq_len"], row["attention"]
        if row["peak_memory"] is None or attention in IDENTITIES:
            continue
        train = TrainConfig(
            global_batch_size=row["tokens"] // seq_len,
            micro_batch_size=row["micro_batch_size"],
            activation_checkpointing=row.get("activation_checkpointing", False),
        )
        args = ModelArgs(name=model, block_size=seq_len, **steps.COMPARED[attention])
        recipe = Recipe(args, DataConfig(seq_len=seq_len), train)
        need = memory_needed(GPT.on_meta(args.config()), recipe, "bf16-mixed")["total"]
        ratios[row.get("commit"), model, seq_len, attention] = need / row["peak_memory"]
    sizes = {"pythia-70m", "pythia-160m", "pythia-410m", "pythia-1.4b"}
    assert {model for _, model, _, _ in ratios} == sizes and len(ratios) > 15
    assert not {row: ratio for row, ratio in ratios.items() if not 0.9 <= ratio <= 1.1}


@pytest.mark.slow
def test_a_length_that_does_not_fit_is_recomputed():
    """Guards: pythia-1.4b at N = 131072 ran out of an H200's memory with every attention; and at 65536, where
    some fit, all were recomputed."""
    machine, shape = choose_machine(TrainConfig(accelerator="cpu")), Shape("pythia-14m", 65536)
    recipes = {
        memory: steps._recipes(shape, 131072, None, replace(machine, memory=memory))
        for memory in (20e9, 10e9, 7e9, 6e9, 1e9)
    }
    chosen = {
        memory: {(r.train.micro_batch_size, r.train.activation_checkpointing) for r in of_memory.values()}
        for memory, of_memory in recipes.items()
    }
    # At 7 GB one sequence fits with `ours`, and not with a short convolution.
    fits = {20e9: (2, False), 10e9: (1, False), 7e9: (1, False), 6e9: (2, True), 1e9: (1, True)}
    assert chosen == {memory: {settings} for memory, settings in fits.items()}
    results = made_up()
    assert "recomputed" not in results.table()
    results.rows[0].micro_batch_size, results.rows[0].activation_checkpointing = 8, True
    assert "| 2048 | 8, recomputed | identity |" in results.table()
    assert "At N = 2,048 blocks are recomputed (activation checkpointing), as one sequence" in results.table()


def test_shapes_and_mistakes(tmp_path: Path, capsys, monkeypatch):
    """Guards, beside mistakes: all of a CPU's memory taken where a GPU was expected."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = ("pythia-70m", "pythia-160m", "pythia-410m", "pythia-1.4b")
    shapes = choose_shapes((), (), 131072)
    assert shapes[:4] == [Shape(size, 8192) for size in sizes] and len(shapes) == 4 + 2 * 6
    assert choose_shapes(["demo"], (), 8192) == [Shape("demo", 8192)]
    for options, line in (
        (["--models", "dmo"], "unknown model 'dmo' (did you mean 'demo'?): use one of: "),
        (["--attentions", "softmax-flsh"], "did you mean 'softmax-flash'?"),
        (
            ["--attentions", "hybrid+valu", "--models", "demo", "--accelerator", "cpu"],
            "'hybrid+valu': 'valu' is not an option of ours-gated, which has",
        ),
        (
            ["--seq_lens", "48", "--tokens_per_step", "64"],
            "--tokens_per_step 64 is not a multiple of the length 48",
        ),
        (["--redraw", "--out", str(tmp_path)], "run `lingpt bench train` first"),
        (["--tokens_per_step", "-64"], "tokens_per_step is -64; it must be a whole number from 1 to"),
        (["--seq_lens", "64", "0"], "it must be a list, each a whole number from 1 to"),
        (["--micro_batch_tokens", "-1"], "micro_batch_tokens is -1; it must be"),
        (["--rounds", "0"], "rounds is 0; it must be"),
        (["--budget", "-1"], "budget is -1; it must be"),
        (["--accelerator", "gpu"], "accelerator is gpu; it must be one of auto, cpu, cuda"),
        ([], "accelerator cuda, but PyTorch finds no CUDA device: use cpu or auto"),
    ):
        assert main(["bench", "train", *options]) == 2
        assert line in capsys.readouterr().err
