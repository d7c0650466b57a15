"""The benchmark of the kernels: oracles, correctness, rounds, the file, the table and the plots."""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lingpt.bench.clock import Clock
from lingpt.bench.environment import warn_if_shared
from lingpt.bench.kernels import forms, inputs, measure, oracles, runner, selftest, traffic, warm
from lingpt.bench.kernels import results as kernel_results
from lingpt.bench.kernels.call import TAIL, BenchCall, Graphs, base_of, interleaved_ratios, relative_errors
from lingpt.bench.kernels.implementations import (
    CHUNKS,
    DECAYS,
    DEFAULT_IMPLEMENTATIONS,
    FORMS,
    IMPLEMENTATIONS,
    Implementation,
)
from lingpt.bench.kernels.results import Results, Row, style
from lingpt.bench.kernels.runner import run_bench
from lingpt.bench.kernels.shapes import (
    BATCH_1,
    CUMSUM,
    FORM_SHAPES,
    LONG,
    QUICK,
    REFERENCE,
    SWEEPS,
    TABLE_1,
    Shape,
)
from lingpt.bench.kernels.warm import WARM_N, warm_up
from lingpt.bench.results import Session, Skipped
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.kernels.numerics import allows_tf32
from lingpt.plots.figures import FORMATS
from lingpt.plots.palette import COLOURS
from lingpt.tests.oracles import simple_gla

CPU = torch.device("cpu")
ON_CPU = ("ours-chunkwise", "torch-cumsum", "spec-dec-la", "sdpa-math")
ON_A_CPU = {"device": "cpu", "dtype": torch.float32}
ENVIRONMENT = {
    "card": "a made-up card", "precision": "bfloat16", "versions": {"torch": "2"}, "source_hash": "0",
    "date": "2026-01-01",
}  # fmt: skip
TINY = {"training": (Shape(2, 65, 2, 16),), "sweep-n": (Shape(2, 65, 2, 16), Shape(2, 130, 2, 16))}


def naive(x: dict, weights) -> torch.Tensor:
    """o_i = Σ_{j≤i} w_ij v_j in float64, w from `weights(q, k, age)`, [B, H, N, N]."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    age = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return ((weights(q, k, age) * (age >= 0)) @ v).transpose(1, 2)


def test_names_of_implementations_and_sweeps() -> None:
    """Guards: everything that the tables compare with is in the registry and runs by default."""
    wanted = "ours torch-cumsum spec-dec-la fla-linear fla-linear-norm fla-fused-linear fla-lightning fla-gla"
    assert (
        {*wanted.split(), "sdpa-flash", "sdpa-cudnn"} <= set(DEFAULT_IMPLEMENTATIONS) <= set(IMPLEMENTATIONS)
    )
    assert {REFERENCE, BATCH_1, CUMSUM} <= set(SWEEPS["training"])
    assert {name for names in DECAYS.values() for name in names} <= set(DEFAULT_IMPLEMENTATIONS)
    assert min(SWEEPS["sweep-n"]).N <= 1100 and max(SWEEPS["sweep-n"]).N == 300_000


@pytest.mark.parametrize("name", ["fla-linear", "fla-fused-linear", "fla-lightning", "fla-linear-norm"])
def test_oracles_of_baselines_that_need_a_gpu(name: str) -> None:
    """Guards: what those baselines are held to is their definition, written out here as a quadratic sum."""
    x = IMPLEMENTATIONS[name].inputs(Shape(2, 70, 3, 16), torch.float64, CPU)
    x = {key: value.detach().double() for key, value in x.items()}
    decay = x.get("log_decay", torch.zeros(3, dtype=torch.float64))[:, None, None]
    expected = naive(x, lambda q, k, age: (q @ k.mT) * torch.exp(decay * age.clamp(min=0)))
    if name == "fla-linear-norm":
        expected = expected / naive(x | {"v": torch.ones_like(x["v"])}, lambda q, k, age: q @ k.mT)
        assert (x["q"] >= 0).all() and (x["k"] >= 0).all()
    torch.testing.assert_close(IMPLEMENTATIONS[name].oracle(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ours-unnormalised", "fla-simple-gla", "mamba2", "mlstm"])
def test_oracles_of_scalar_gates(name: str) -> None:
    """Guards: they are one function, simple GLA's, of the same decays, whatever each calls them."""
    shape = Shape(2, 70, 3, 16)
    x = {n: t.detach().double() for n, t in IMPLEMENTATIONS[name].inputs(shape, torch.float64, CPU).items()}
    log_decay, v, scale = x.get("log_decay"), x["v"], 1.0
    if name == "mamba2":
        log_decay, v = -x["dt"], v * x["dt"][..., None]
    if name == "mlstm":
        log_decay, scale = torch.nn.functional.logsigmoid(x["f"]), 0.25
        v = v * torch.sigmoid(x["i"])[..., None]
    decays = inputs.token_decayed(shape, torch.float64, CPU)["log_decay"].detach().double()
    torch.testing.assert_close(log_decay, decays, rtol=1e-5, atol=1e-7)
    expected = scale * simple_gla(x["q"], x["k"], v, log_decay.exp())
    torch.testing.assert_close(IMPLEMENTATIONS[name].oracle(x), expected, rtol=1e-9, atol=1e-9)


def test_oracle_of_spec_dec_la() -> None:
    """Guards: a weight is q̂·k̂ plus, of the 32 last tokens, what the head's convolution gives their age."""
    x = inputs.augmented(Shape(2, 70, 3, 16), torch.float64, CPU)
    x = {name: t.detach() for name, t in x.items()}
    x |= {name: torch.nn.functional.normalize(x[name], dim=-1) for name in "qk"}
    convolution = x["kernel"].transpose(1, 2)

    def weights(q: torch.Tensor, k: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return q @ k.mT + convolution[..., 31 - age.clamp(0, 31)] * (age < 32)

    oracle = IMPLEMENTATIONS["spec-dec-la"].oracle
    torch.testing.assert_close(oracle(x), naive(x, weights), rtol=1e-9, atol=1e-9)
    scaled = x | {"q": 3 * x["q"], "k": x["k"] / 2}
    torch.testing.assert_close(oracle(scaled), oracle(x), rtol=1e-9, atol=1e-9)


def test_oracle_of_the_delta_rule() -> None:
    """Guards: the chunkwise form is the recurrence, S_t = γ S_{t−1} + β k (v − γ S_{t−1}ᵀ k)ᵀ."""
    x = inputs.delta_rule(Shape(2, 150, 3, 16), torch.float64, CPU)
    x = {name: t.detach().double() for name, t in x.items()}
    S, rows = torch.zeros(2, 3, 16, 16, dtype=torch.float64), []
    for t in range(150):
        q, k, v, g, beta = (x[name][:, t] for name in ("q", "k", "v", "log_decay", "beta"))
        S = g.exp()[..., None, None] * S
        written = beta[..., None] * (v - (k[..., None] * S).sum(-2))
        S = S + k[..., None] * written[:, :, None]
        rows.append((q[..., None] * S).sum(-2) / 4)
    found = IMPLEMENTATIONS["fla-delta-rule"].oracle(x)
    torch.testing.assert_close(found, torch.stack(rows, 1), rtol=1e-9, atol=1e-9)


def measured(implementation: Implementation, shape: Shape) -> Row:
    """A row of the first round of an implementation that takes another's name."""
    row = Row(implementation.name, shape, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPLEMENTATIONS, implementation.name, implementation)
        measure.first_round(row, Clock(CPU), seconds=0.01)
    return row


def test_gates_are_checked_too() -> None:
    """Guards: the slices that are checked of values of a token and head, [B, N, H]."""
    call = IMPLEMENTATIONS["ours-chunkwise"].call
    row = measured(
        dataclasses.replace(IMPLEMENTATIONS["ours-gated"], call=call, needs=()), Shape(3, 66, 4, 16)
    )
    assert row.status == "ok" and row.errors["dlog_decay"] < 1e-4


def test_without_a_backward_pass_forward_is_measured() -> None:
    """Guards: what cannot run backward here is timed forward, and its row says why; no number is made up."""
    chunkwise = IMPLEMENTATIONS["ours-chunkwise"]
    forward_only = dataclasses.replace(chunkwise, backward_needs=(lambda *_: "no backward pass: too old",))
    row = measured(forward_only, Shape(2, 65, 3, 16))
    assert (row.status, row.reason, set(row.errors)) == ("ok", "no backward pass: too old", {"o"})
    assert row.forward_ms > 0 and row.backward_ms is row.both_ms is None
    assert row.is_correct("forward_ms") and not row.is_correct("backward_ms")


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * math.nan


def test_a_gradient_of_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: `lingpt kernels test` passing, or the table showing o's error, where a gradient is NaN."""
    right = IMPLEMENTATIONS["ours-chunkwise"]
    spoilt = dataclasses.replace(right, call=lambda x: right.call(x) + NanGradient.apply(x["k"]))
    row = measured(spoilt, Shape(2, 65, 2, 16))
    assert row.errors["o"] < 1e-5 and row.reason == "dk is off by nan (relative RMS)"
    results = Results(ENVIRONMENT, [row], copy_bandwidth=1e12)
    assert line(results, row.implementation, row.shape).endswith("| – |")
    monkeypatch.setitem(IMPLEMENTATIONS, "ours-chunkwise", spoilt)
    monkeypatch.setattr(selftest, "SHAPES", (Shape(2, 65, 2, 16),))
    assert not any(check.passed for check in selftest.self_test(("ours-chunkwise",), "cpu"))


@pytest.mark.parametrize(
    ("triton", "why"), [("3.6.0", "needs Triton 3.7.1"), ("3.7.1", None), ("3.10.0", None)]
)
def test_fla_s_scalar_gates_need_a_triton_that_is_right(monkeypatch, triton: str, why: str | None) -> None:
    """Guards: on Hopper an older Triton makes their gradients wrong."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton)
    found = IMPLEMENTATIONS["fla-simple-gla"].backward_unsupported_reason()
    assert found is None if why is None else why in found


def test_oracle_of_softmax_takes_the_last_rows() -> None:
    """Guards: the rows before the tail are not needed, and the mask starts in the right place."""
    x = IMPLEMENTATIONS["sdpa-math"].inputs(Shape(2, 40, 3, 16), torch.float64, CPU)
    whole = IMPLEMENTATIONS["sdpa-math"].call(x)
    tail = IMPLEMENTATIONS["sdpa-math"].oracle(x | {"q": x["q"][:, -7:]})
    torch.testing.assert_close(tail, whole[:, -7:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("N", [1, 65, TAIL + 50])
def test_an_implementation_on_the_cpu_is_timed_and_correct(name: str, N: int) -> None:
    """Guards: each one in PyTorch computes its function, forward and backward, and its row says so."""
    row = measured(IMPLEMENTATIONS[name], Shape(2, N, 3, 16))
    leaves = {"q", "k", "v", "kernel"} if name == "spec-dec-la" else set("qkv")
    assert set(row.errors) == {"o", *(f"d{leaf}" for leaf in leaves)}
    # one token: dq = dk = 0, no relative error
    exact = set(row.errors) - ({"dq", "dk"} if N == 1 else set())
    assert all(row.errors[key] < 1e-5 for key in exact)
    assert N == 1 or row.status == "ok"
    assert row.forward_ms > 0 and row.backward_ms > 0 and row.both_ms > 0 and row.repeats >= 3


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("where", ["first", "last", "gradient", "nan"])
def test_a_wrong_result_is_detected(name: str, where: str) -> None:
    """Guards: a wrong head, the last batch and head (offsets), a wrong gradient and NaN are not "ok"."""
    right = IMPLEMENTATIONS[name]

    def call(x: dict) -> torch.Tensor:
        o = right.call(x)
        spoil = torch.ones_like(o)
        outermost = -1 if where == "last" else 0
        spoil[outermost, -8:, outermost] = 1.5
        if where == "gradient":
            return o + (x["k"] * 0.1 - (x["k"] * 0.1).detach())
        return o * (spoil * torch.nan if where == "nan" else spoil)

    row = measured(dataclasses.replace(right, call=call), Shape(3, 66, 4, 16))
    assert row.status == "wrong" and "is off by" in row.reason
    assert (row.errors["o"] < 1e-5) == row.is_correct("forward_ms") == (where == "gradient")
    assert where != "gradient" or (row.errors["dk"] > row.tolerance and "dk" in row.reason)
    assert not row.is_correct("backward_ms")


def test_what_an_implementation_does_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards: one that is missing, runs out of memory or breaks does not end the run; the row says why,
    in the file and in the table."""

    def out_of_memory(x: dict) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(x: dict) -> torch.Tensor:
        raise ValueError("head_dim 16 | not supported\nmore")

    for name, call in (("torch-cumsum", out_of_memory), ("sdpa-math", broken)):
        monkeypatch.setitem(IMPLEMENTATIONS, name, dataclasses.replace(IMPLEMENTATIONS[name], call=call))
    names, path = ("fla-gla", "torch-cumsum", "sdpa-math", "ours-chunkwise"), tmp_path / "results.json"
    results = run_bench(only=["training"], implementations=names, sweeps=TINY, save_to=path, **ON_A_CPU)
    assert [row.status for row in results.rows] == ["skipped", "oom", "error", "ok"]
    assert "CUDA" in results.rows[0].reason
    assert results.rows[2].reason == "ValueError: head_dim 16 | not supported"
    assert Results.load(path) == results
    table = results.table()
    assert "| sdpa-math | error: ValueError: head_dim 16 / not supported | | | | | | |" in table
    assert "\n- fla-gla: skipped: needs a CUDA device\n" in table and "| fla-gla |" not in table


def test_a_lost_gpu_is_one_line_and_its_row_is_kept(tmp_path: Path, monkeypatch) -> None:
    """Guards: after an illegal access of a peer's kernel the rows before it, and that it was the one."""
    results = run_bench(implementations=["ours-chunkwise"], sweeps=TINY, **ON_A_CPU)
    session = Session(results, torch.device("cuda"), 60, tmp_path / "r.json")

    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    with pytest.raises(UserError, match=r"illegal memory access.*--append true"):
        session.turn(kernel_results.Row("mamba2", Shape(1, 8, 1, 16), "float32"), lost)
    last = Results.load(tmp_path / "r.json").rows[-1]
    assert (last.implementation, last.status) == ("mamba2", "error")


def test_a_shape_with_two_head_dimensions_is_for_those_that_take_it(tmp_path: Path, monkeypatch) -> None:
    """Guards: GLA's own layer, whose v is twice as wide as q and k, with errors of all inputs."""
    gla = dataclasses.replace(IMPLEMENTATIONS["ours-gla"], call=oracles.gated, needs=())
    monkeypatch.setitem(IMPLEMENTATIONS, "ours-gla", gla)
    sweeps = {"gla-layer": (Shape(2, 65, 2, 16, 32),)}
    names = ("ours-gla", "ours-chunkwise")
    (row,) = run_bench(implementations=names, sweeps=sweeps, save_to=tmp_path / "r.json", **ON_A_CPU).rows
    assert row.status == "ok" and set(row.errors) == {"o", "dq", "dk", "dv", "dg"}
    results = Results.load(tmp_path / "r.json")
    assert results.rows == [row] and "B=2 N=65 H=2 D=16 Dv=32" in results.table()


@pytest.mark.parametrize(
    "content", ['{"rows": [', "[]", "{}", '{"rows": [3]}', '{"rows": [{"shape": {}, "both_ms": 1}]}']
)
def test_damaged_results_are_named(tmp_path: Path, content: str) -> None:
    """Guards: a traceback of `lingpt bench --redraw`."""
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"results\.json (is damaged|holds no)"):
        Results.load(path)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Guards: `append` measures what lacks or was skipped, a shape of two sweeps once, keeps the rest and
    refuses another source's rows; the file says on what they were measured."""
    path = tmp_path / "results.json"
    options = ON_A_CPU | {"sweeps": TINY, "save_to": path, "append": True}
    run_bench(implementations=("sdpa-math",), only=("training",), **options)
    kept = Results.load(path).rows[0]
    run_bench(implementations=("sdpa-math", "ours-chunkwise"), budget=0, **options)
    whole = run_bench(implementations=("sdpa-math", "ours-chunkwise"), **options)
    assert len({row.session for row in whole.rows}) == 2
    assert kept in whole.rows and len(whole.rows) == 4 and {row.status for row in whole.rows} == {"ok"}
    assert Results.load(path) == whole and whole.copy_bandwidth > 1e8
    assert {"card", "driver", "versions", "source_hash", "source", "date"} <= set(whole.environment)
    whole.environment["source_hash"] = "another"
    whole.save(path)
    with pytest.raises(UserError, match="another source_hash"):
        run_bench(implementations=("sdpa-math",), **options)


Turn = tuple[str, int, int]  # of an implementation, at N, in round


def made_up_rounds(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Row, int], None]) -> list[Turn]:
    """Rounds of 5, 1 and 2 ms, each after `spoil(row, n)`; the list notes turns."""
    turns: list[Turn] = []
    monkeypatch.setattr(runner, "ROUNDS", 3)

    def one_round(row: Row, call, clock: Clock, graphs: bool, check: bool = False) -> None:
        n = 1 + sum(turn[:2] == (row.implementation, row.shape.N) for turn in turns)
        turns.append((row.implementation, row.shape.N, n))
        assert check == (n == 1)
        spoil(row, n)
        row.add_round(**dict.fromkeys(("forward_ms", "backward_ms", "both_ms"), (5.0, 1.0, 2.0)[n - 1]))

    monkeypatch.setattr(measure, "_time", one_round)
    return turns


@pytest.mark.parametrize("bound", [0.0, 1e9])
def test_short_calls_are_timed_in_graphs(monkeypatch: pytest.MonkeyPatch, bound: float) -> None:
    """Guards: eager calls that are bound by the host are all that a sweep has of small shapes."""
    found: list[bool] = []
    monkeypatch.setattr(measure, "HOST_BOUND_SECONDS", bound)
    monkeypatch.setattr(measure, "_time", lambda row, call, clock, graphs, check: found.append(graphs))
    row = Row("ours-chunkwise", Shape(1, 33, 1, 8), "float32")
    measure.first_round(row, Clock(CPU))
    assert found == [bound > 0]


def run_in_rounds(*names: str, **options) -> list[Row]:
    return run_bench(implementations=names, **({"sweeps": TINY} | ON_A_CPU | options)).rows


def test_training_shapes_are_timed_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: all implementations and shapes have their turn before the next round, at other shapes there is
    one round; a time is the median of the rounds'."""
    turns = made_up_rounds(monkeypatch, lambda row, n: None)
    sweeps = {"sweep-n": (Shape(1, 9, 1, 8),), "training": (Shape(1, 33, 1, 8), Shape(1, 17, 1, 8))}
    rows = run_in_rounds(*ON_CPU, sweeps=sweeps)
    assert turns == [(name, N, n) for n in (1, 2, 3) for N in (33, 17) for name in ON_CPU] + [
        (name, 9, 1) for name in ON_CPU
    ]
    trained = 2 * len(ON_CPU)
    for row in rows[:trained]:
        assert row.forward_ms == row.backward_ms == row.both_ms == 2 and row.by_round["both_ms"] == [5, 1, 2]
        assert row.status == "ok" and row.reason == "" and row.errors and row.repeats >= 3
    assert [row.both_ms for row in rows[trained:]] == [5] * len(ON_CPU)
    turns.clear()
    sweeps["sweep-n"] += sweeps["training"][:1]
    run_in_rounds(*ON_CPU, sweeps=sweeps, only=["sweep-n"])
    assert turns == [(name, N, 1) for N in (9, 33) for name in ON_CPU], (
        "the training shapes were not asked for"
    )


@pytest.mark.parametrize(("failing", "begun", "ms"), [(1, 1, None), (2, 2, 5), (3, 3, 3)])
def test_a_round_that_fails(monkeypatch, tmp_path: Path, failing: int, begun: int, ms: float | None) -> None:
    """Guards: what earlier rounds found stays, the row says what happened, it has no further turn, and the
    other row is not touched."""

    def spoil(row: Row, n: int) -> None:
        if (row.implementation, n) == ("sdpa-math", failing):
            raise ValueError("broken\nmore")

    turns = made_up_rounds(monkeypatch, spoil)
    path = tmp_path / "results.json"
    spoilt, other = run_in_rounds("sdpa-math", "ours-chunkwise", only=["training"], save_to=path)
    assert (spoilt.status, spoilt.reason, spoilt.both_ms) == ("error", "ValueError: broken", ms)
    assert not spoilt.is_correct("both_ms") and spoilt.errors
    assert (len(other.by_round["both_ms"]), other.both_ms, other.reason) == (3, 2, "")
    assert [turn[0] for turn in turns].count("sdpa-math") == begun
    assert Results.load(path).rows == [spoilt, other]


@pytest.mark.parametrize(("budget", "rounds"), [(1.5, [1, 1]), (2.5, [2, 1]), (3.5, [2, 2]), (9, [3, 3])])
def test_no_round_begins_after_the_deadline(monkeypatch, budget: float, rounds: list[int]) -> None:
    """Guards: of two implementations, a second a round, what fits is timed and nothing found is lost."""
    turns = made_up_rounds(monkeypatch, lambda row, n: None)
    clock = SimpleNamespace(perf_counter=lambda: float(len(turns)))
    monkeypatch.setattr("lingpt.bench.results.time", clock)
    rows = run_in_rounds("sdpa-math", "ours-chunkwise", only=["training"], budget=budget)
    assert [len(row.by_round["both_ms"]) for row in rows] == rounds and len(turns) == sum(rounds)
    assert [(row.status, row.reason) for row in rows] == [("ok", "")] * 2


def test_a_card_that_others_use_is_noticed(monkeypatch: pytest.MonkeyPatch, recwarn) -> None:
    """Guards: memory of another process is seen, our own and a context's share are not taken for it."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * gib)
    for used, lines in ((21, 0), (24, 1)):
        free = (140 - used) * gib
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 140 * gib))
        warn_if_shared(torch.device("cuda"))
        assert len(recwarn) == lines
    assert "another process holds 4.0 GiB" in str(recwarn[0].message)


def test_time_is_bounded() -> None:
    """Guards: a spent budget and a shape that would take too long are rows that say so, and cost nothing."""
    spent = run_bench(implementations=ON_CPU, sweeps=TINY, budget=0, **ON_A_CPU)
    assert all("budget" in row.reason and row.status == "skipped" for row in spent.rows)
    grown = {"training": (Shape(1, 64, 1, 16), Shape(1, 10**9, 1, 16))}
    run = run_bench(implementations=("sdpa-math",), sweeps=grown, **ON_A_CPU)
    assert run.rows[0].status == "ok" and "would take about" in run.rows[1].reason


@pytest.mark.parametrize("name", FORMS)
def test_the_time_of_a_form_is_predicted(name: str) -> None:
    """Guards: at 32 times the length and as many tokens, a quadratic form predicted as fast as before."""
    short, long = Shape(32, 512, 12, 64), Shape(1, 16384, 12, 64)
    row = Row(name, short, "bfloat16", both_ms=4.0)
    grows = name in ("sdpa-flash", "form-quadratic", "form-blocks", "form-recurrent")
    predicted = runner._predict([row], Row(name, long, "bfloat16"))
    assert predicted == pytest.approx(4e-3 * (32 if grows else 1))


def test_compiling_beforehand_keeps_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a cache on disk with the first configuration as the fastest, as none was timed."""
    for name in ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "1")
    environments = []

    def run(command, env, **options):
        environments.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(warm.subprocess, "run", run)
    assert warm._warm_in_process("fla-gla", Shape(1, WARM_N, 1, 64), dtype="bfloat16") is None
    assert {environments[0][name] for name in ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")} == {"0"}


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ({"implementations": ["triton"]}, "unknown implementation 'triton': use one of: ours, "),
        (
            {"only": ["trainnig"]},
            r"unknown sweep 'trainnig' \(did you mean 'training'\?\): use one of: training, s",
        ),
    ],
)
def test_an_unknown_name_suggests_the_known(names: dict, line: str) -> None:
    for command in (lambda: run_bench(**names, device="cpu"), lambda: warm_up(**names)):
        with pytest.raises(UserError, match=line):
            command()


def made_up(scale: float = 1.0) -> Results:
    """Results of a card that does not exist: ours at `scale` × the lower bound, baselines slower."""
    slower = {"ours": scale, "ours-decay": scale * 1.02, "ours-packed": scale, "torch-cumsum": 90.0}
    slower |= {"fla-linear": 3.0, "fla-fused-linear": 4.0, "fla-lightning": 3.5, "fla-linear-norm": 8.0}
    slower |= {"fla-gla": 12.0, "sdpa-flash": 25.0, "sdpa-cudnn": 13.0}
    results = Results(dict(ENVIRONMENT), copy_bandwidth=4e12)
    for shape in dict.fromkeys(s for sweep in SWEEPS.values() for s in sweep):
        for name, factor in slower.items():
            growth = shape.N / 8192 if IMPLEMENTATIONS[name].quadratic else 1
            forward, backward = (factor * growth * results.lower_bound_ms(shape, units) for units in (4, 8))
            row = Row(name, shape, "bfloat16", forward_memory=1.1, both_memory=4.4)
            row.add_round(forward_ms=forward, backward_ms=backward, both_ms=forward + backward)
            if name == "torch-cumsum" and shape not in (CUMSUM, *SWEEPS["sweep-n"][:2]):
                row = Row(name, shape, "bfloat16", status="oom", reason="out of memory")
            if IMPLEMENTATIONS[name].quadratic and shape.N > 70_000:
                row = Row(name, shape, "bfloat16", status="skipped", reason="would take about 9 s a call")
            results.rows.append(row)
    return results


def line(results: Results, name: str, shape: Shape) -> str:
    (found,) = [x for x in results.table().splitlines() if x.startswith(f"| {shape} | {name} |")]
    return found


def test_the_table_holds_what_was_measured() -> None:
    """Guards: a ratio to ours of other rounds or another session, or of a result that is wrong."""
    results = made_up()
    assert "at the speed of a copy, here 4 TB/s." in results.table()
    assert "| 12.00 / 12.00 | 9.60 / 9.60 | 1.10 / 4.40 | – |" in line(results, "fla-gla", REFERENCE)
    assert line(results, "torch-cumsum", REFERENCE).endswith(
        "| torch-cumsum | oom: out of memory | | | | | | |"
    )
    gla, ours = (results.row(name, REFERENCE) for name in ("fla-gla", "ours"))
    for row, times in ((ours, [1.0, 2.0, 2.0]), (gla, [10.0, 12.0, 24.0])):
        row.by_round = {"forward_ms": times, "backward_ms": times}
    assert "| 10.00 / 10.00 |" in line(results, "fla-gla", REFERENCE)
    gla.session = "later"
    assert "| – | 9.60 / 9.60 |" in line(results, "fla-gla", REFERENCE)
    gla.session, gla.status, gla.reason = "", "wrong", "dk is off by 1.0e+00"
    gla.tolerance, gla.errors = 2e-2, {"o": 1e-3, "dk": 1.0}
    found = line(results, "fla-gla", REFERENCE)
    assert "wrong: dk is off" in found and "| 10.00 / – | 9.60 / – |" in found, "its forward pass is correct"
    gla.graph_reason = "RuntimeError: a | b"
    assert "| RuntimeError: a / b | – |" in line(results, "fla-gla", REFERENCE)
    ours.status, ours.errors = "wrong", {"o": 1.0}
    assert "| – | 9.60 / – |" in line(results, "fla-gla", REFERENCE)


def test_a_table_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards: a traceback on a full disk, behind hours of measuring."""
    made_up().save(tmp_path / "results.json")
    (tmp_path / "results.md").mkdir()
    assert main(["bench", "--redraw", "--out", str(tmp_path)]) == 2
    assert f"lingpt: cannot write to {tmp_path / 'results.md'} (" in capsys.readouterr().err


def test_a_variant_is_interleaved_with_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: where each run takes 1 % longer, the ratio is off by what passes within a turn, not by more."""
    drift = itertools.count()
    graphs, base = (
        Graphs(*(SimpleNamespace(replay=lambda ms=ms: ms) for ms in times))
        for times in ((2.1, 4.4), (2.0, 4.0))
    )

    def time(self, work, before=None, repeats=1) -> list[float]:
        return [work() * 1.01 ** next(drift) for _ in range(repeats)]

    monkeypatch.setattr(Clock, "time", time)
    per_turn = 1.01 ** (2 * 5)  # the base comes two spans of five later
    found = interleaved_ratios(graphs, base, Clock(CPU), turns=25)
    assert found == pytest.approx([2.1 / 2 / per_turn, 4.4 / 4 / per_turn])


def test_the_switch_of_tf32_is_on_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a backward pass, or the next implementation, with the other's switch."""
    seen = []

    def call(x: inputs.Inputs) -> torch.Tensor:
        o = IMPLEMENTATIONS["ours-chunkwise"].call(x)
        o.register_hook(lambda do: seen.append(allows_tf32()))
        seen.append(allows_tf32())
        return o

    for name in ("ours-tf32", "ours"):
        implementation = dataclasses.replace(IMPLEMENTATIONS[name], call=call)
        BenchCall(implementation, Shape(1, 8, 1, 8), torch.float32, CPU).both()
    assert seen == [True, True, False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert IMPLEMENTATIONS["ours-tf32"].unsupported_reason() == "float32 only"
    assert IMPLEMENTATIONS["ours-tf32"].unsupported_reason(dtype=torch.float32) is None


def test_replays_are_timed_checked_and_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a graph that computes something else, and ratios of a variant without its base."""
    chunkwise = IMPLEMENTATIONS["ours-chunkwise"]
    for name in ("ours", "ours-decay"):
        monkeypatch.setitem(
            IMPLEMENTATIONS, name, dataclasses.replace(IMPLEMENTATIONS[name], call=chunkwise.call, needs=())
        )

    def capture(call, device) -> Graphs:
        call.both()
        return Graphs(SimpleNamespace(replay=call.forward), SimpleNamespace(replay=call.backward))

    monkeypatch.setattr(measure, "capture", capture)
    row = measured(IMPLEMENTATIONS["ours-decay"], Shape(2, 65, 3, 16))
    call = BenchCall(IMPLEMENTATIONS["ours-decay"], row.shape, torch.float32, CPU)
    times = measure._time_graphs(row, call, Clock(CPU), check=True)
    assert times.keys() == {"forward_graph_ms", "backward_graph_ms"} and min(times.values()) > 0
    assert len(row.ratio_to_base) == 2 and min(row.ratio_to_base) > 0 and row.graph_reason == ""
    row.tolerance = 0.0
    assert measure._time_graphs(row, call, Clock(CPU), check=True) == {}
    assert row.graph_reason == "a replay gives another result"


def test_what_is_interleaved() -> None:
    """Guards: a variant with its base at its own shape, our long sequences with the reference, no other."""
    ours, decay = IMPLEMENTATIONS["ours"], IMPLEMENTATIONS["ours-decay"]
    assert base_of(decay, LONG[0]) == (ours, LONG[0])
    assert [base_of(ours, shape) for shape in (LONG[1], BATCH_1)] == [(ours, REFERENCE), None]
    assert base_of(IMPLEMENTATIONS["fla-linear"], LONG[0]) is None


@pytest.mark.slow
def test_plots_hold_every_correct_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the plots come from the results alone, bytes where they were counted; of a size to read."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    results = made_up(scale=1.4)
    figures = ("forward", "backward", "decays", "batch-32", "traffic", "bytes", "movement")
    names = [f"{name}.{kind}" for name in figures for kind in FORMATS]
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).touch())
        patch.setattr("lingpt.plots.figures._reduce_colours", lambda png: None)
        assert [path.name for path in results.draw(tmp_path)] == names[:-4]
    results.bytes_moved = {"ours": {"forward": 5e8, "backward": 2e9}, "fla-linear": {"forward": 5e8}}
    savefig = Figure.savefig

    def save_pictures(figure, path, format, **options):  # tests/plots draws PDFs, which take as long again
        savefig(figure, path, format=format, **options) if format == "png" else Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", save_pictures)
    paths = results.draw(tmp_path)
    assert [path.name for path in paths] == names
    for path in paths[::2]:
        picture = imread(path)
        assert picture.shape[1] > 1000 and picture.std() > 0.05
    assert Results(made_up().environment, copy_bandwidth=4e12).draw(tmp_path / "empty") == []


def test_the_paper_s_figures_have_its_panels() -> None:
    """Guards: a sweep drawn over the wrong axis, a point of another batch or of the table's length in it, a
    variant in two figures."""
    results = made_up(scale=1.4)
    for name in ("ours-linear", "ours-gla", "fla-gla"):
        results.rows += [
            dataclasses.replace(row, implementation=name)
            for row in results.rows
            if row.implementation == "ours"
        ]
    axes = kernel_results._sweeps(results, "forward_ms", "forward_memory").axes
    assert [axis.get_xlabel()[0] for axis in axes] == ["N", "N", "D", "D"]
    lines = {tuple(line.get_xdata()): line.get_color() for line in axes[0].lines if line.get_linewidth() > 2}
    lengths = {s.N for shapes in SWEEPS.values() for s in shapes if (s.B, s.H, s.D, s.Dv) == (4, 16, 128, 0)}
    assert lines.keys() == {tuple(sorted(lengths - {TABLE_1.N}))}
    titles = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    assert IMPLEMENTATIONS["fla-gla"].title in titles and IMPLEMENTATIONS["ours-linear"].title not in titles
    decays = kernel_results._decays(results).axes
    drawn = [len(axis.lines) for axis in decays[:3]]
    assert drawn == [4, 2, 3], "ours-linear and two of FLA's; FLA's; both GLA; each with the least traffic"
    assert {axis.get_xticks()[-1] for axis in kernel_results._batch_32(results).axes} == {16384}


def test_the_share_of_moving_data() -> None:
    """Guards: figure 4 with the time of another direction or of a baseline that was not counted."""
    results = made_up(scale=2.0)
    results.bytes_moved = {"ours": {"forward": 4 * REFERENCE.unit_bytes()}}
    share, ms = kernel_results._movement(results).axes
    assert [bar.get_width() for bar in share.patches] == pytest.approx([0.5])
    assert [bar.get_width() for bar in ms.patches] == pytest.approx([results.lower_bound_ms(REFERENCE, 4)])


def test_table_1_counts_the_inputs() -> None:
    """Guards: the paper's memory, of inputs, outputs and what is between them, without the inputs."""
    table = made_up().table().partition("## The paper's table 1")[2]
    gb = TABLE_1.unit_bytes() / 1e9
    assert f" {(3 + 1.1) * gb:.2f} |" in next(x for x in table.splitlines() if x.startswith("| ours |"))
    assert f" {(4 + 1.1) * gb:.2f} |" in next(x for x in table.splitlines() if x.startswith("| FLA GLA |"))
    assert "| PyTorch, cumulative sums | oom: out of memory | |" in table


def test_an_attention_has_one_colour() -> None:
    """Guards: ours, GLA and softmax look as in the loss curves, and no two attentions look the same."""
    drawn = {"ours": "ours", "ours-decay": "ours-decay", "fla-gla": "gla", "sdpa-flash": "softmax"}
    assert {name: style(name)["color"] for name in drawn} == {n: COLOURS[a] for n, a in drawn.items()}
    attentions = {i.colour_of or name for name, i in IMPLEMENTATIONS.items()}
    assert len({style(name)["color"] for name in IMPLEMENTATIONS}) == len(attentions)


def test_bytes_are_summed_over_kernels() -> None:
    """Guards: the profiler's table is found below its chatter, both directions of DRAM count, each range is
    its implementation's, and one that ended early has none."""
    output = (
        "==PROF== Connected to process 7\nrange: ours forward\nrange: ours backward\n==PROF== Disconnected\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","spin_kernel(long)","dram__bytes_read.sum","byte","7"\n'
        '"0","spin_kernel(long)","dram__bytes_write.sum","byte","7"\n'
        '"1","scan","dram__bytes_read.sum","byte","402,653,184"\n'
        '"1","scan","dram__bytes_write.sum","byte","134217728"\n'
        '"2","other","dram__bytes_read.sum","byte","16"\n"2","other","sm__cycles.sum","cycle","99"\n'
        '"3","spin_kernel(long)","dram__bytes_read.sum","byte","7"\n'
    )
    assert traffic.parse_counts(output) == {"ours": {"forward": 402653184 + 134217728 + 16}}
    backward = '"4","scan","dram__bytes_read.sum","byte","5"\n'
    assert traffic.parse_counts(output + backward)["ours"]["backward"] == 5
    assert traffic.parse_counts("==ERROR== no permission\n") == {}


def test_bytes_are_counted_in_the_dtype_of_the_times(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Guards: bytes of bf16 over the least of fp32, and a pass that breaks while the counters stay on."""
    chunkwise, log = IMPLEMENTATIONS["ours-chunkwise"], []

    def call(x: inputs.Inputs) -> torch.Tensor:
        log.append(x["q"].dtype)
        if len(log) == 3:  # the untimed pass, the counters, the counted one
            raise torch.OutOfMemoryError("CUDA out of memory")
        return chunkwise.call(x)

    on_cpu = SimpleNamespace(
        **{name: lambda *_: None for name in ("synchronize", "empty_cache", "_sleep")},
        cudart=lambda: SimpleNamespace(
            cudaProfilerStart=lambda: log.append("on"), cudaProfilerStop=lambda: log.append("off")
        ),
    )
    monkeypatch.setattr(torch, "cuda", on_cpu)
    monkeypatch.setattr(traffic, "DEVICE", CPU)
    monkeypatch.setattr(traffic, "REFERENCE", Shape(1, 64, 1, 8))
    monkeypatch.setitem(IMPLEMENTATIONS, "ours-chunkwise", dataclasses.replace(chunkwise, call=call))
    traffic.run_all(["ours-chunkwise"], "float16")
    assert log == [torch.float16, "on", torch.float16, "off"]
    assert "not counted: ours-chunkwise: CUDA out of memory" in capsys.readouterr().err


def test_what_cannot_be_counted_is_said_before_anything_is_timed(monkeypatch, tmp_path: Path, capsys) -> None:
    """Guards: twenty minutes of measuring that end without a table, as `ncu` is missing."""
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    options = ["--device", "cpu", "--ncu", "true", "--out", str(tmp_path)]
    assert main(["bench", *options]) == 2
    assert "NVIDIA's profiler `ncu` on the PATH" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["bench", *options, "--implementations", "triton"]) == 2
    assert "unknown implementation 'triton'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards: `lingpt bench` from the command line to the files, and drawing again without measuring."""
    out = str(tmp_path / "out")
    names = ["--implementations", "ours-chunkwise", "fla-gla"]
    assert main(["bench", "--device", "cpu", *names, "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "- fla-gla: skipped: needs a CUDA device" in shown and "results.md" in shown
    assert "None" not in shown
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {row["implementation"] for row in rows if row["status"] == "ok"} == {"ours-chunkwise"}
    assert main(["bench", "--redraw", "--out", out]) == 0
    assert main(["bench", "--redraw", "--out", str(tmp_path / "none")]) == 2
    assert "run `lingpt bench` first" in capsys.readouterr().err


def test_the_options_reach_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an option of the command line that is measured without."""
    calls, saved, out = [], [], str(tmp_path)
    path, counted = tmp_path / "results.json", {"ours": {"forward": 5e8}}
    results = SimpleNamespace(bytes_moved={}, save=saved.append, report=saved.append)
    path.write_text("an earlier one")
    monkeypatch.setattr(runner, "run_bench", lambda *a, **options: calls.append((a, options)) or results)
    monkeypatch.setattr(warm, "warm_up", lambda *a: calls.append(a) or {})
    monkeypatch.setattr(traffic, "count_bytes", lambda *a: calls.append(a) or counted)
    words = "--only training --implementations ours --quick --dtype float16 --append --ncu"
    limits = ["--max_round_seconds", "2", "--budget", "9", "--out", out]
    assert main(["bench", *words.split(), *limits]) == 0
    given = {"quick": True, "budget": 9, "limit": 2, "append": True, "save_to": path, "sweeps": None}
    ran = (("training",), ("ours",)), given | {"device": "cuda", "dtype": torch.float16}
    assert calls == [(("ours",), ("training",), "float16", QUICK), (("ours",), "float16"), ran]
    assert results.bytes_moved == counted and saved == [path, tmp_path]
    assert main(["bench", "--warm", "only", "--out", out]) == 0
    assert calls[3:] == [((), (), "bfloat16", SWEEPS)]
    assert main(["bench", "--warm", "skip", "--out", out]) == 0
    assert [options["limit"] for _, options in calls[4:]] == [6.0]
    assert main(["bench", "forms", "--append", *limits]) == 0
    assert calls[5][1].items() >= {"budget": 9, "limit": 2, "append": True, "save_to": path}.items()


def test_forms_are_one_function() -> None:
    """Guards: a form that is fast as it computes something else; N is more than a block and a chunk."""
    x = inputs.random(Shape(2, 640, 2, 8), torch.float64, CPU)
    do = torch.randn(2, 640, 2, 8, dtype=torch.float64)
    whole = [oracles.linear(x), *torch.autograd.grad(oracles.linear(x), list(x.values()), do)]
    chunked = functools.partial(forms.chunked, chunk=64)
    for form in (forms.quadratic, forms.quadratic_in_blocks, forms.recurrent, forms.all_states, chunked):
        o = form(x)
        for found, expected in zip((o, *torch.autograd.grad(o, list(x.values()), do)), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", [forms.recurrent, forms.all_states], ids=lambda form: form.__name__)
def test_states_of_bf16_inputs_are_fp32(form: Callable[[inputs.Inputs], torch.Tensor]) -> None:
    """Guards: sums of 1,024 states in bf16, whose error grows with N, here and in the backward pass."""
    x = inputs.random(Shape(1, 1024, 1, 16), torch.bfloat16, CPU)
    do = torch.randn(1, 1024, 1, 16).bfloat16()
    results = []
    for compute, leaves in ((form, x), (oracles.linear, {name: t.double() for name, t in x.items()})):
        o = compute(leaves)
        results.append((o, *torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() < 6e-3 * expected.norm()


def test_a_form_is_checked_at_more_tokens_than_the_tail_of_a_softmax() -> None:
    """Guards: "q, k and log_gate must be [B, N, H, Dk]" instead of a row of the recurrent form."""
    call = BenchCall(IMPLEMENTATIONS["form-recurrent"], Shape(1, TAIL + 8, 1, 8), torch.float32, CPU)
    call.both()
    assert max(relative_errors(call).values()) < 1e-5


def test_the_figure_of_the_forms() -> None:
    """Guards: another chunk than the best, a time that is wrong, a form that failed without a word."""
    results = Results(dict(ENVIRONMENT), copy_bandwidth=4e12)
    for shape in FORM_SHAPES[:2]:
        for ms, name in enumerate(FORMS, start=1):
            row = Row(name, shape, "bfloat16")
            row.add_round(both_ms=float(ms))
            results.rows.append(row)
    figure = kernel_results._forms(results)
    times, chunks = (
        {line.get_label(): list(line.get_ydata()) for line in panel.lines} for panel in figure.axes
    )
    own = {
        IMPLEMENTATIONS[name].title: [ms, ms]
        for ms, name in enumerate(FORMS, start=1)
        if "chunks" not in name
    }
    best = next(ms for ms, name in enumerate(FORMS, start=1) if "chunks" in name)
    assert times == own | {"chunks, the best size": [best, best]} and not figure.get_supxlabel()
    assert list(chunks.values()) == [[CHUNKS[0]] * 2]
    results.row(FORMS[best - 1], FORM_SHAPES[1]).status = "wrong"
    figure = kernel_results._forms(results)
    assert list(figure.axes[1].lines[0].get_ydata()) == list(CHUNKS[:2])
    assert "A point is missing" in figure.get_supxlabel()


@pytest.mark.slow
def test_the_forms_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards: `lingpt bench forms` from the command line to the figure."""
    assert main(["bench", "forms", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "form-chunks-256: skipped: 256 tokens do not divide N" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    ran = {row["implementation"] for row in rows if row["status"] == "ok"}
    assert {"form-quadratic", "form-blocks", "form-recurrent", "form-states", "form-chunks-64"} <= ran
    assert (tmp_path / "forms.png").exists()
    assert main(["bench", "forms", "--redraw", "--out", str(tmp_path / "none")]) == 2
    assert "run `lingpt bench forms` first" in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a traceback for `--device cuda:1` on a machine with one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"device 'cuda:99': .*; use --device cuda$"):
        run_bench(device="cuda:99")


def test_on_a_cpu_there_is_nothing_to_compile(tmp_path: Path) -> None:
    """Guards: `--warm only` that measures."""
    assert main(["bench", "--device", "cpu", "--warm", "only", "--out", str(tmp_path / "out")]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEFAULT_IMPLEMENTATIONS)
def test_an_implementation_on_the_gpu_is_timed_and_correct(name: str) -> None:
    """Guards: each one that is installed computes its own function, with its memory and its graph."""
    shape, clock = Shape(2, WARM_N, 16, 128), Clock(torch.device("cuda"))
    row = Row(name, shape, "bfloat16")
    try:
        measure.first_round(row, clock, limit=120, graphs=True)
    except Skipped as reason:
        pytest.skip(f"{name}: {reason}")
    assert row.status == "ok", row.reason
    assert row.forward_memory >= 1 and math.isfinite(row.forward_ms)
    if row.reason:  # forward alone
        assert "backward" in row.reason and row.both_memory is None and row.both_ms is None
    else:
        assert row.both_memory >= row.forward_memory and math.isfinite(row.both_ms)
    first = dict(row.by_round)
    measure.next_round(row, clock)
    assert row.by_round.keys() == first.keys() and {len(times) for times in row.by_round.values()} == {2}
    assert len(row.ratio_to_base) == (2 if IMPLEMENTATIONS[name].variant_of else 0)
    assert all(0.5 < x < 3 for x in row.ratio_to_base)
