"""The benchmark on a CPU: correct implementations pass, wrong ones are detected; rounds, plots, targets."""

import dataclasses
import importlib.metadata
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lingpt.bench.clock import Clock
from lingpt.bench.environment import used_by_others
from lingpt.bench.kernels import (
    DEFAULT_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    SWEEPS,
    Results,
    Row,
    Shape,
    draw,
    inputs,
    run_bench,
    runner,
    targets_table,
    warm_up,
)
from lingpt.bench.kernels import measure as measuring
from lingpt.bench.kernels.correctness import TAIL
from lingpt.bench.kernels.graphs import Graphs, base_of, interleaved_ratios
from lingpt.bench.kernels.measure import measure, measure_again, over_rounds
from lingpt.bench.kernels.plots import style
from lingpt.bench.kernels.results import OLD_FIELDS
from lingpt.bench.kernels.selftest import SHAPES, self_test
from lingpt.bench.kernels.shapes import BATCH_1, CUMSUM, LONG, REFERENCE
from lingpt.bench.kernels.targets import TARGETS
from lingpt.bench.kernels.traffic import parse_counts
from lingpt.bench.kernels.warm import WARM_N
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.plots.figures import FORMATS
from lingpt.plots.palette import COLOURS
from lingpt.tests.oracles import simple_gla

CPU = torch.device("cpu")
ON_CPU = ("ours-chunkwise", "torch-cumsum", "sdpa-math")
ON_A_CPU = {"device": "cpu", "dtype": torch.float32, "progress": False}
TINY = {"training": (Shape(2, 65, 2, 16),), "sweep-n": (Shape(2, 65, 2, 16), Shape(2, 130, 2, 16))}


def naive(x: dict, weights) -> torch.Tensor:
    """o_i = Σ_{j≤i} w_ij v_j in float64, w from `weights(q, k, age)`, [B, H, N, N]."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    age = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return ((weights(q, k, age) * (age >= 0)) @ v).transpose(1, 2)


def test_names_of_implementations_and_sweeps() -> None:
    """Guards: everything that the tables compare with is in the registry and runs by default."""
    wanted = {
        "ours",
        "torch-cumsum",
        "fla-linear",
        "fla-linear-norm",
        "fla-fused-linear",
        "fla-lightning",
        "fla-gla",
    }
    assert wanted | {"sdpa-flash", "sdpa-cudnn"} <= set(DEFAULT_IMPLEMENTATIONS) <= set(IMPLEMENTATIONS)
    assert {REFERENCE, BATCH_1, CUMSUM} <= set(SWEEPS["training"])
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
        log_decay, v, scale = (
            torch.nn.functional.logsigmoid(x["f"]),
            v * torch.sigmoid(x["i"])[..., None],
            0.25,
        )
    decays = inputs.token_decayed(shape, torch.float64, CPU)["log_decay"].detach().double()
    torch.testing.assert_close(log_decay, decays, rtol=1e-5, atol=1e-7)
    expected = scale * simple_gla(x["q"], x["k"], v, log_decay.exp())
    torch.testing.assert_close(IMPLEMENTATIONS[name].oracle(x), expected, rtol=1e-9, atol=1e-9)


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


def test_gates_are_checked_too() -> None:
    """Guards: the slices that are checked of values of a token and head, [B, N, H]."""
    name, backend = "ours-gated", IMPLEMENTATIONS["ours-chunkwise"]
    gated = dataclasses.replace(IMPLEMENTATIONS[name], call=backend.call, needs=())
    row = measure(gated, Shape(3, 66, 4, 16), torch.float32, Clock(CPU), seconds=0.01)
    assert row.status == "ok" and row.errors["dlog_decay"] < 1e-4


def test_without_a_backward_pass_forward_is_measured() -> None:
    """Guards: what cannot run backward here is timed forward, and its row says why; no number is made up."""
    forward_only = dataclasses.replace(
        IMPLEMENTATIONS["ours-chunkwise"], backward_needs=(lambda *_: "no backward pass: too old",)
    )
    row = measure(forward_only, Shape(2, 65, 3, 16), torch.float32, Clock(CPU), seconds=0.01)
    assert (row.status, row.reason, set(row.errors)) == ("ok", "no backward pass: too old", {"o"})
    assert row.forward_ms > 0 and row.backward_ms is row.both_ms is None
    assert row.is_correct("forward_ms") and not row.is_correct("backward_ms")
    again = over_rounds([row, measure_again(row, forward_only, torch.float32, Clock(CPU))])
    assert again.rounds == 2 and again.backward_ms is None and "forward_ms" in again.by_round


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
    row = measure(IMPLEMENTATIONS[name], Shape(2, N, 3, 16), torch.float32, Clock(CPU), seconds=0.01)
    gradients = (
        {"o", "dv"} if N == 1 else {"o", "dq", "dk", "dv"}
    )  # one token: dq = dk = 0, no relative error
    assert all(row.errors[key] < 1e-5 for key in gradients) and set(row.errors) == {"o", "dq", "dk", "dv"}
    assert N == 1 or row.status == "ok"
    assert row.forward_ms > 0 and row.backward_ms > 0 and row.both_ms > 0 and row.repeats >= 3


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("where", ["first", "last", "gradient", "nan"])
def test_a_wrong_result_is_detected(name: str, where: str) -> None:
    """Guards: a wrong head, the last batch and head (offsets), a wrong gradient and NaN are not "ok"."""

    def call(x: dict) -> torch.Tensor:
        o = IMPLEMENTATIONS[name].call(x)
        spoil = torch.ones_like(o)
        outermost = -1 if where == "last" else 0
        spoil[outermost, -8:, outermost] = 1.5
        if where == "gradient":
            return o + (x["k"] * 0.1 - (x["k"] * 0.1).detach())
        return o * (spoil * torch.nan if where == "nan" else spoil)

    wrong = dataclasses.replace(IMPLEMENTATIONS[name], call=call)
    row = measure(wrong, Shape(3, 66, 4, 16), torch.float32, Clock(CPU), seconds=0.01)
    assert row.status == "wrong" and "is off by" in row.reason
    assert (row.errors["o"] < 1e-5) == (where == "gradient")
    assert where != "gradient" or (row.errors["dk"] > row.tolerance and "dk" in row.reason)


def test_what_an_implementation_does_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: one that is missing, runs out of memory or breaks does not end the run; the row says why."""

    def out_of_memory(x: dict) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(x: dict) -> torch.Tensor:
        raise ValueError("head_dim 16 not supported\nmore")

    shape, clock, softmax = Shape(1, 8, 1, 16), Clock(CPU), IMPLEMENTATIONS["sdpa-math"]
    rows = [
        measure(implementation, shape, torch.float32, clock)
        for implementation in (
            IMPLEMENTATIONS["fla-gla"],
            dataclasses.replace(softmax, call=out_of_memory),
            dataclasses.replace(softmax, call=broken),
        )
    ]
    assert [row.status for row in rows] == ["skipped", "oom", "error"]
    assert "CUDA" in rows[0].reason and rows[2].reason == "ValueError: head_dim 16 not supported"


def test_a_run_keeps_its_rows_and_comes_back_from_disk(tmp_path: Path) -> None:
    """Guards: a shape of two sweeps is measured once, the file holds everything, head included."""
    results = run_bench(implementations=ON_CPU, sweeps=TINY, **ON_A_CPU)
    assert len(results.rows) == len(ON_CPU) * 2 and {row.status for row in results.rows} == {"ok"}
    assert [row.rounds for row in results.rows] == [runner.ROUNDS] * len(ON_CPU) + [1] * len(ON_CPU)
    results.save(tmp_path / "a" / "results.json")
    again = Results.load(tmp_path / "a" / "results.json")
    assert again == results and again.rows[0].shape.N == 65
    assert {"card", "driver", "versions", "source_hash", "date"} <= set(again.environment)
    assert again.copy_bandwidth > 1e8


@pytest.mark.parametrize(
    "content", ['{"rows": [', "[]", "{}", '{"rows": [3]}', '{"rows": [{"shape": {}, "both_ms": 1}]}']
)
def test_damaged_results_are_named(tmp_path: Path, content: str) -> None:
    """Guards: a traceback of `lingpt bench --redraw`."""
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"results\.json (is damaged|holds no)"):
        Results.load(path)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Guards: `append` measures what lacks or was skipped, keeps the rest, refuses another source's rows."""
    path = tmp_path / "results.json"
    options = ON_A_CPU | {"sweeps": TINY, "save_to": path, "append": True}
    run_bench(implementations=("sdpa-math",), only=("training",), **options)
    kept = Results.load(path).rows[0]
    run_bench(implementations=("sdpa-math", "ours-chunkwise"), budget=0, **options)
    whole = run_bench(implementations=("sdpa-math", "ours-chunkwise"), **options)
    assert len({row.session for row in whole.rows}) == 2
    assert kept in whole.rows and len(whole.rows) == 4 and {row.status for row in whole.rows} == {"ok"}
    assert Results.load(path) == whole
    whole.environment["source_hash"] = "another"
    whole.save(path)
    with pytest.raises(UserError, match="another source_hash"):
        run_bench(implementations=("sdpa-math",), **options)


Turn = tuple[str, int, int]  # of an implementation, at N, in round


def made_up_rounds(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Row, int], None]) -> list[Turn]:
    """Rounds of 5, 1 and 2 ms and replays of half that, each after `spoil(row, n)`; the list notes turns."""
    turns: list[Turn] = []
    monkeypatch.setattr(runner, "ROUNDS", 3)

    def one_round(row: Row, call, clock: Clock, graphs: bool, check: bool = False) -> None:
        n = 1 + sum(turn[:2] == (row.implementation, row.shape.N) for turn in turns)
        turns.append((row.implementation, row.shape.N, n))
        assert check == (n == 1)
        spoil(row, n)
        row.forward_ms = row.backward_ms = row.both_ms = (5.0, 1.0, 2.0)[n - 1]
        row.rounds = 1
        if graphs and not row.graph_reason:
            row.forward_graph_ms = row.backward_graph_ms = row.both_ms / 2

    monkeypatch.setattr(measuring, "time_round", one_round)
    return turns


def run_in_rounds(*names: str, **options) -> list[Row]:
    return run_bench(implementations=names, **({"sweeps": TINY} | ON_A_CPU | options)).rows


def test_training_shapes_are_timed_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: all implementations have their turn before the next round, at other shapes there is one round;
    a time is the median of the rounds', replays included, and the rest of the row is the first round's."""
    turns = made_up_rounds(monkeypatch, lambda row, n: None)
    rows = run_in_rounds(*ON_CPU)
    assert turns == [(name, 65, n) for n in (1, 2, 3) for name in ON_CPU] + [(n, 130, 1) for n in ON_CPU]
    for row in rows[:3]:
        assert (row.forward_ms, row.backward_ms, row.both_ms, row.rounds) == (2, 2, 2, 3)
        assert row.forward_graph_ms == row.backward_graph_ms == 1
        assert row.status == "ok" and row.reason == "" and row.errors and row.repeats >= 3
    assert [(row.both_ms, row.rounds, row.forward_graph_ms) for row in rows[3:]] == [(5, 1, None)] * 3


def test_a_round_is_over_all_training_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: ratios of two shapes come from one round, and a bad minute is no one shape's."""
    turns = made_up_rounds(monkeypatch, lambda row, n: None)
    sweeps = {"sweep-n": (Shape(1, 9, 1, 8),), "training": (Shape(1, 33, 1, 8), Shape(1, 17, 1, 8))}
    run_in_rounds("sdpa-math", sweeps=sweeps)
    assert [turn[1:] for turn in turns] == [(N, n) for n in (1, 2, 3) for N in (33, 17)] + [(9, 1)]


@pytest.mark.parametrize(
    ("failing", "graph", "counted", "begun", "ms"),
    [(2, False, 1, 2, 5), (3, False, 2, 3, 3), (2, True, 2, 3, 3.5)],
)
def test_a_later_round_that_fails(
    monkeypatch, tmp_path: Path, failing: int, graph: bool, counted: int, begun: int, ms: float
) -> None:
    """Guards: what earlier rounds found stays, the row says what happened, the other row is not touched."""

    def spoil(row: Row, n: int) -> None:
        if (row.implementation, n) == ("sdpa-math", failing):
            if not graph:
                raise ValueError("broken\nmore")
            row.graph_reason = "ValueError: broken"

    turns = made_up_rounds(monkeypatch, spoil)
    path = tmp_path / "results.json"
    spoilt, other = run_in_rounds("sdpa-math", "ours-chunkwise", only=["training"], save_to=path)
    assert (spoilt.status, spoilt.reason) == ("ok", f"round {failing}: ValueError: broken")
    assert (spoilt.rounds, spoilt.both_ms, spoilt.forward_graph_ms) == (counted, ms, ms / 2)
    assert spoilt.errors and spoilt.graph_reason == ""
    assert (other.rounds, other.both_ms, other.reason) == (3, 2, "")
    assert [turn[0] for turn in turns].count("sdpa-math") == begun
    assert Results.load(path).rows == [spoilt, other]


def test_what_the_first_round_did_not_time_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: rows that are skipped, out of memory or in error stay as they are, in their place."""

    def spoil(row: Row, n: int) -> None:
        if row.implementation == "sdpa-math":
            raise torch.OutOfMemoryError("CUDA out of memory")

    turns = made_up_rounds(monkeypatch, spoil)
    rows = run_in_rounds("fla-gla", "sdpa-math", "ours-chunkwise", only=["training"])
    assert [(row.status, row.rounds) for row in rows] == [("skipped", 0), ("oom", 0), ("ok", 3)]
    assert [turn[0] for turn in turns].count("sdpa-math") == 1 and rows[1].reason == "out of memory"


@pytest.mark.parametrize(("budget", "rounds"), [(1.5, [1, 1]), (2.5, [2, 1]), (3.5, [2, 2]), (9, [3, 3])])
def test_no_round_begins_after_the_deadline(monkeypatch, budget: float, rounds: list[int]) -> None:
    """Guards: of two implementations, a second a round, what fits is timed and nothing found is lost."""
    turns = made_up_rounds(monkeypatch, lambda row, n: None)
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: float(len(turns))))
    rows = run_in_rounds("sdpa-math", "ours-chunkwise", only=["training"], budget=budget)
    assert [row.rounds for row in rows] == rounds and len(turns) == sum(rounds)
    assert [(row.status, row.reason) for row in rows] == [("ok", "")] * 2
    assert [row.both_ms for row in rows] == [{1: 5, 2: 3, 3: 2}[n] for n in rounds]


def test_rows_of_older_files(tmp_path: Path) -> None:
    """Guards: a file without rounds, with older names of fields, loads and gives its table, as do the results
    in this repository."""
    results = made_up()
    results.save(tmp_path / "results.json")
    fields = json.loads((tmp_path / "results.json").read_text())
    for row in fields["rows"]:
        del row["rounds"]
        row |= {old: row.pop(name) for old, name in OLD_FIELDS.items()}
    (tmp_path / "results.json").write_text(json.dumps(fields))
    old = Results.load(tmp_path / "results.json")
    assert all(row.rounds == (row.both_ms is not None) for row in old.rows)
    assert targets_table(old) == targets_table(results) and "D = 128; medians, L2" in targets_table(old)
    for path in (Path(__file__).parents[2] / "docs/results/kernels").rglob("results.json"):
        assert "medians" in targets_table(Results.load(path))
    for row in old.rows:
        row.rounds *= 3
    assert "medians over 3 interleaved rounds" in targets_table(old)
    old.correct_row("ours", REFERENCE).rounds = 2
    assert "medians over 2 to 3 interleaved rounds" in targets_table(old)


def test_a_card_that_others_use_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: memory of another process is seen, our own and a context's share are not taken for it."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * gib)
    for used, line in ((21, None), (24, "another process holds 4.0 GiB")):
        free = (140 - used) * gib
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 140 * gib))
        found = used_by_others(torch.device("cuda"))
        assert found is line or line in found


def test_time_is_bounded() -> None:
    """Guards: a spent budget and a shape that would take too long are rows that say so, and cost nothing."""
    spent = run_bench(implementations=ON_CPU, sweeps=TINY, budget=0, **ON_A_CPU)
    assert all("budget" in row.reason and row.status == "skipped" for row in spent.rows)
    grown = {"training": (Shape(1, 64, 1, 16), Shape(1, 10**9, 1, 16))}
    run = run_bench(implementations=("sdpa-math",), sweeps=grown, **ON_A_CPU)
    assert run.rows[0].status == "ok" and "would take about" in run.rows[1].reason


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ({"implementations": ["triton"]}, "unknown implementation 'triton': use one of: ours, "),
        ({"only": ["trainnig"]}, r"unknown sweep 'trainnig': did you mean 'training'\?"),
    ],
)
def test_an_unknown_name_suggests_the_known(names: dict, line: str) -> None:
    for command in (lambda: run_bench(**names, device="cpu", progress=False), lambda: warm_up(**names)):
        with pytest.raises(UserError, match=line):
            command()


def made_up(scale: float = 1.0) -> Results:
    """Results of a card that does not exist: ours at `scale` × the floor, baselines known factors slower."""
    slower = {"ours": scale, "ours-decay": scale * 1.02, "ours-packed": scale, "torch-cumsum": 90.0}
    slower |= {"fla-linear": 3.0, "fla-fused-linear": 4.0, "fla-lightning": 3.5, "fla-linear-norm": 8.0}
    slower |= {"fla-gla": 12.0, "sdpa-flash": 25.0, "sdpa-cudnn": 13.0}
    env = {"card": "a made-up card", "driver": "CUDA 13.0", "nvrtc": "13.0", "versions": {"torch": "2"}}
    results = Results(env | {"source_hash": "0", "date": "2026-01-01"}, copy_bandwidth=4e12)
    for shape in dict.fromkeys(s for sweep in SWEEPS.values() for s in sweep):
        for name, factor in slower.items():
            growth = shape.N / 8192 if IMPLEMENTATIONS[name].quadratic else 1
            forward, backward = (factor * growth * results.floor_ms(shape, units) for units in (4, 8))
            row = Row(
                name, shape, "bfloat16", forward_ms=forward, backward_ms=backward, both_ms=forward + backward
            )
            row.forward_memory, row.both_memory = 1.1, 4.4
            if name == "ours-decay":
                row.forward_graph_ms, row.ratio_to_base = forward, [1.03, 1.06]
            if name == "ours" and shape in LONG:
                tokens = shape.B * shape.N / (REFERENCE.B * REFERENCE.N)
                row.forward_graph_ms, row.ratio_to_base = forward, [1.1 * tokens, 1.2 * tokens]
            if name == "torch-cumsum" and shape not in (CUMSUM, *SWEEPS["sweep-n"][:2]):
                row = Row(name, shape, "bfloat16", "oom", "out of memory")
            if IMPLEMENTATIONS[name].quadratic and shape.N > 70_000:
                row = Row(name, shape, "bfloat16", "skipped", "would take about 9 s a call")
            results.rows.append(row)
    results.empty_node_ms = [results.floor_ms(BATCH_1, units) / 4 for units in (4, 8)]
    return results


def column(table: str, what: str, index: int) -> str:
    line = next(line for line in table.splitlines() if what in line)
    return line.split("|")[index].strip()


def test_targets_are_computed_from_the_rows() -> None:
    """Guards: each row holds the ratio that it names, judged against the right side of its bound."""
    table = targets_table(made_up())
    assert len(table.splitlines()) == len(TARGETS) + 4
    # Decay, and the same eager.
    assert table.index("1.03× / 1.06×") < table.index("| 1.02× / 1.02× | reported")
    for what, reached, verdict in (
        ("4 U floor", "1.00×", "aim met"),
        ("8 U floor", "1.00×", "aim met"),
        ("FLA GLA", "12.00× / 12.00×", "aim met"),
        ("FLA normalised", "8.00× / 8.00×", "aim met"),
        ("without normaliser", "3.00× / 3.00×", "aim met"),
        ("N=131072", "1.10× / 1.20×", "**not met**"),
        ("the same, eager", "1.00× / 1.00×", "reported"),
        ("empty autograd node", "25% / 25%", "reported"),
        ("decay", "1.03× / 1.06×", "**not met**"),
        ("do, forward |", "1.10 U", "met"),
        ("forward + backward", "4.40 U", "met"),
        ("cumulative sums", "90.00×", "met"),
    ):
        assert (column(table, what, 4), column(table, what, 5)) == (reached, verdict), what
    slow = targets_table(made_up(scale=4.0))
    assert column(slow, "4 U floor", 5) == column(slow, "FLA GLA", 5) == "**not met**"
    assert column(slow, "FLA GLA", 4) == "3.00× / 3.00×"


def test_ratios_are_of_a_round() -> None:
    """Guards: where a machine halves its speed between rounds, what is compared is of one round."""
    results = made_up()
    for name, times in (("ours", [1.0, 2.0, 2.0]), ("fla-gla", [10.0, 12.0, 24.0])):
        row = results.correct_row(name, REFERENCE)
        row.by_round = {field: times for field in ("forward_ms", "backward_ms")}
    assert column(targets_table(results), "FLA GLA", 4) == "10.00× / 10.00×"
    long = results.correct_row("ours", LONG[0])
    long.by_round = {field: [1.1, 2.1, 2.0] for field in ("forward_ms", "backward_ms")}
    assert column(targets_table(results), "the same, eager", 4) == "1.05× / 1.05×"


def test_ratios_are_of_a_session() -> None:
    """Guards: rounds of an earlier session, under another load of the card, paired with those of the rows
    that --append has added."""
    results = made_up()
    results.correct_row("fla-gla", REFERENCE).session = "later"
    table = targets_table(results)
    assert column(table, "FLA GLA", 4).startswith("not measured: fla-gla at B=") and "in one session" in table
    assert column(table, "FLA normalised", 4) == "8.00× / 8.00×"


@pytest.mark.parametrize("reason", ["the budget of 9 s is spent", None])
def test_the_fastest_is_of_all_that_are_named(reason: str | None) -> None:
    """Guards: "faster than the fastest FLA", met by what was timed, while one that may be faster was skipped
    or was not asked for."""
    results = made_up()
    rows = [row for row in results.rows if row.implementation == "fla-lightning"]
    for row in rows:
        row.status, row.reason, row.forward_ms = "skipped", reason or "", None
    if reason is None:
        results.rows = [row for row in results.rows if row not in rows]
    table = targets_table(results)
    for what, shape in (("without normaliser", REFERENCE), ("fastest FLA, each (eager)", BATCH_1)):
        missing = f"not measured: fla-lightning at {shape}: {reason or 'no row'}"
        assert (column(table, what, 4), column(table, what, 5)) == (missing, "–")
    assert column(table, "FLA GLA", 5) == "aim met"


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


def test_what_is_interleaved() -> None:
    """Guards: a variant with its base at its own shape, our long sequences with the reference, no other."""
    ours, decay = IMPLEMENTATIONS["ours"], IMPLEMENTATIONS["ours-decay"]
    assert base_of(decay, LONG[0]) == (ours, LONG[0])
    assert [base_of(ours, shape) for shape in (LONG[1], BATCH_1)] == [(ours, REFERENCE), None]
    assert base_of(IMPLEMENTATIONS["fla-linear"], LONG[0]) is None


def test_no_ratio_of_a_wrong_result() -> None:
    """Guards: "a speed-up is never reported on a red gate", of ours or of the baseline."""
    results = made_up()
    for row in results.rows:
        if row.implementation in ("fla-gla", "ours-decay") and row.shape == REFERENCE:
            row.status, row.reason = "wrong", "o is off by 1.0e+00"
    table = targets_table(results)
    assert "not measured" in column(table, "FLA GLA", 4) and "off by 1" in column(table, "decay", 4)
    decay = next(row for row in results.rows if (row.implementation, row.shape) == ("ours-decay", REFERENCE))
    decay.reason, decay.tolerance, decay.errors = "dk is off", 2e-2, {"o": 1e-3, "dk": 1.0}
    assert "dk is off" in column(targets_table(results), "decay", 4)
    cumsum = next(row for row in results.rows if (row.implementation, row.shape) == ("torch-cumsum", CUMSUM))
    cumsum.status, cumsum.tolerance, cumsum.errors = "wrong", 2e-2, {"o": 1e-3, "dk": 1.0}
    assert cumsum.is_correct("forward_ms") and not cumsum.is_correct("backward_ms")
    # of its forward pass, which is correct
    assert column(targets_table(results), "cumulative sums", 4) == "90.00×"
    for row in results.rows:
        row.status = "wrong" if row.implementation == "ours" else row.status
    assert sum("not measured" in line for line in targets_table(results).splitlines()) == len(TARGETS)


def test_the_self_test_judges() -> None:
    """Guards: `lingpt kernels test` passes a correct operator at every length, no wrong or missing one."""
    checks = self_test(("ours-chunkwise",), "cpu")
    assert len(checks) == len(SHAPES) * 2 and all(check.passed and 0 < check.worst < 1e-2 for check in checks)
    assert not checks[0]._replace(worst=math.nan).passed and not checks[0]._replace(worst=0.1).passed
    missing = self_test(("ours",), "cpu")
    assert not any(check.passed for check in missing) and "CUDA" in missing[0].reason


def test_plots_hold_every_correct_implementation(tmp_path: Path) -> None:
    """Guards: the plots come from the results alone, bytes where they were counted; of a size to read."""
    from matplotlib.image import imread

    results = made_up(scale=1.4)
    names = [f"{name}.{kind}" for name in ("sweep-n", "sweep-d", "traffic", "bytes") for kind in FORMATS]
    assert [path.name for path in draw(results, tmp_path)] == names[:-2]
    results.bytes_moved = {name: {"forward": 5e8, "backward": 2e9} for name in ("ours", "fla-linear")}
    paths = draw(results, tmp_path)
    assert [path.name for path in paths] == names
    for path in paths[::2]:
        picture = imread(path)
        assert picture.shape[1] > 1000 and picture.std() > 0.05
    assert draw(Results(made_up().environment, copy_bandwidth=4e12), tmp_path / "empty") == []


def test_an_attention_has_one_colour() -> None:
    """Guards: ours, GLA and softmax look as in the loss curves, and no two attentions look the same."""
    drawn = {"ours": "ours", "ours-decay": "ours-decay", "fla-gla": "gla", "sdpa-flash": "softmax"}
    assert {name: style(name)["color"] for name in drawn} == {n: COLOURS[a] for n, a in drawn.items()}
    attentions = {i.colour_of or name for name, i in IMPLEMENTATIONS.items()}
    assert len({style(name)["color"] for name in IMPLEMENTATIONS}) == len(attentions)


def test_bytes_are_summed_over_kernels() -> None:
    """Guards: the profiler's table is found below its chatter, and both directions of DRAM count."""
    output = (
        "==PROF== Connected to process 7\n==PROF== Disconnected\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","scan","dram__bytes_read.sum","byte","402,653,184"\n'
        '"0","scan","dram__bytes_write.sum","byte","134217728"\n'
        '"1","other","dram__bytes_read.sum","byte","16"\n"1","other","sm__cycles.sum","cycle","99"\n'
    )
    assert parse_counts(output) == 402653184 + 134217728 + 16
    assert parse_counts("==ERROR== no permission\n") == 0


def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards: `lingpt bench` from the command line to the files, and drawing again without measuring."""
    out = str(tmp_path / "out")
    names = ["--implementations", "ours-chunkwise", "fla-gla"]
    assert main(["bench", "--device", "cpu", *names, "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "fla-gla" in shown and "needs a CUDA device" in shown and "targets.md" in shown
    assert "No target was measured" in shown and "| required |" not in shown and "None" not in shown
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {row["implementation"] for row in rows if row["status"] == "ok"} == {"ours-chunkwise"}
    assert main(["bench", "--redraw", "--out", out]) == 0
    assert main(["bench", "--redraw", "--out", str(tmp_path / "none")]) == 2
    assert "run `lingpt bench` first" in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a traceback for `--device cuda:1` on a machine with one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"device 'cuda:99': .*; use --device cuda$"):
        run_bench(device="cuda:99")


def test_on_a_cpu_there_is_nothing_to_compile(tmp_path: Path) -> None:
    """Guards: `--warm only` that measures."""
    assert main(["bench", "--device", "cpu", "--warm", "only", "--out", str(tmp_path / "out")]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("command", [["bench"], ["kernels", "test"], ["kernels", "frobnicate"]])
def test_mistakes_get_one_line(command: list[str], capsys: pytest.CaptureFixture) -> None:
    """Guards: no GPU or no such action is reported in one line, with exit code 2."""
    assert main(command) == 2
    err = capsys.readouterr().err
    assert err.startswith("lingpt: ") and err.count("\n") == 1


@pytest.mark.nvrtc
def test_kernels_are_listed_and_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Guards: `lingpt kernels` shows each kernel and architecture, compiled or not, with its figures."""
    from lingpt.kernels.linear_attention.cuda import launch
    from lingpt.kernels.linear_attention.cuda.compile import KernelSpec

    source = tmp_path / "noop.cu"
    source.write_text('extern "C" __global__ void noop(float* x) { x[threadIdx.x] = WIDTH; }')
    spec = KernelSpec(str(source), ("noop",), {"WIDTH": 64}, architectures=("sm_80", "sm_90a"))
    monkeypatch.setattr(launch, "specs", lambda: [spec])
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path))
    assert main(["kernels", "compile", "--arch", "sm_90a"]) == 0
    assert "noop" in capsys.readouterr().out
    assert main(["kernels", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in lines[1:3]] == [["sm_80", "not", "compiled"], ["sm_90a", "cached"]]
    assert main(["kernels", "compile", "--arch", "sm_75"]) == 2
    assert "there are kernels for sm_80, sm_90a" in capsys.readouterr().err


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((7, 5), "sm_75: no kernel (it needs an Ampere card"),
        ((8, 7), "sm_87: its kernels are compiled when"),
    ],
)
def test_the_list_agrees_with_the_operator(monkeypatch, capsys, capability: tuple, words: str) -> None:
    """Guards: "no kernel" is said of a card on which linear_attention takes another form, and of no other."""
    from lingpt.kernels.linear_attention import cuda
    from lingpt.kernels.linear_attention.cuda import toolchain

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(toolchain, "driver_for", lambda version: None)
    monkeypatch.setattr(
        cuda, "device_unsupported_reason", cuda.device_unsupported_reason.__wrapped__
    )  # nothing cached of it
    assert main(["kernels", "list"]) == 0
    shown = capsys.readouterr().out
    assert words in shown and "← this GPU" not in shown


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEFAULT_IMPLEMENTATIONS)
def test_an_implementation_on_the_gpu_is_timed_and_correct(name: str) -> None:
    """Guards: each one that is installed computes its own function, with its memory and its graph."""
    shape = Shape(2, WARM_N, 16, 128)  # of the targets' kind: what Triton compiles here, a benchmark need not
    clock = Clock(torch.device("cuda"))
    row = measure(IMPLEMENTATIONS[name], shape, torch.bfloat16, clock, limit=120, graphs=True)
    if row.status == "skipped":
        pytest.skip(f"{name}: {row.reason}")
    assert row.status == "ok", row.reason
    assert row.forward_memory >= 1 and math.isfinite(row.forward_ms)
    if row.reason:  # forward alone
        assert "backward" in row.reason and row.both_memory is None and row.both_ms is None
    else:
        assert row.both_memory >= row.forward_memory and math.isfinite(row.both_ms)
    again = measure_again(row, IMPLEMENTATIONS[name], torch.bfloat16, clock)
    assert (again.status, again.reason, again.graph_reason, again.rounds) == ("ok", "", "", 1)
    assert (again.forward_graph_ms is None) == (row.forward_graph_ms is None)
    assert len(row.ratio_to_base) == (2 if IMPLEMENTATIONS[name].variant_of else 0)
    assert all(0.5 < x < 3 for x in row.ratio_to_base)


@pytest.mark.parametrize("action", ["list", "compile"])
def test_without_a_compiler_the_kernels_verb_says_how_to_get_one(monkeypatch, capsys, action) -> None:
    """Guards: an installation without the extras cuda12 and cuda13 gets a line, not a traceback."""
    from lingpt.kernels.linear_attention.cuda import toolchain

    def missing() -> tuple[int, int]:
        raise UserError("the CUDA kernels need a compiler that is not installed")

    monkeypatch.setattr(toolchain, "compiler_version", missing)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert main(["kernels", action]) == 2
    assert "a compiler that is not installed" in capsys.readouterr().err
