"""Decoding over the context: times and bytes, their file, table and picture, and what becomes of failures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lingpt.bench import decoding, decoding_results
from lingpt.bench.decoding import FORMS, Decoder, bench_decoding, choose_configs, measure
from lingpt.bench.decoding_results import COLUMNS, DecodeResults, DecodeRow
from lingpt.bench.step_results import SHORT_CONV
from lingpt.cli import generate as generate_verb
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.models import Config
from lingpt.models.attention import ALIASES
from lingpt.train.runs.environment import git_revision, package_hash

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARMUP_TOKENS", 1), ("TIMED_TOKENS", 3), ("DRAWS", 2)):
        monkeypatch.setattr(decoding, name, value)


@pytest.mark.slow
def test_the_command_measures_every_attention(tmp_path: Path, capsys):
    """Guards: the claim that what linear attention carries does not grow with the context, by the bytes."""
    options = ["--model", "demo", "--contexts", "16", "64", "--batch_sizes", "1", "2", "--device", "cpu"]
    assert main(["bench", "decode", *options, "--out", str(tmp_path)]) == 0
    out, results = capsys.readouterr().out, DecodeResults.load(tmp_path / "decode.json")
    assert len(results.rows) == len(FORMS) * 2 * 2
    for row in results.rows:
        assert row.status == "ok" and row.tokens == 3 and row.peak_memory is None, "memory is a GPU's alone"
        assert 0 < row.fastest_ms <= row.ms and row.draw_ms > 0
        assert row.line() in out
    saved = json.loads((tmp_path / "decode.json").read_text())
    assert saved["environment"]["source"] == package_hash() and saved["environment"]["git"] == git_revision()
    assert saved["environment"]["precision"] == "float32" and saved["rows"][0]["attention"] == "softmax"
    assert not any(row["graph"] for row in saved["rows"]), "a CPU has no CUDA graphs"

    sizes = {
        form: [
            results.row("demo", form, batch, n, False, False).state_bytes
            for batch in (1, 2)
            for n in (16, 64)
        ]
        for form in FORMS
    }
    token = 2 * 4 * 128 * 4  # keys and values of 4 layers, 128 dimensions of 4 bytes
    assert sizes["softmax"] == [16 * token, 64 * token] * 2
    assert all(len(set(sizes[form])) == 1 for form in ("ours", SHORT_CONV, "gla"))
    growth = sizes["hybrid"][1] - sizes["hybrid"][0]
    assert growth == 48 * token // 4, "one of the four layers is softmax"

    text = (tmp_path / "decode.md").read_text()
    assert text in out and text == results.table()
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {len(COLUMNS) + 1}
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG") and "decode.pdf" in out
    (tmp_path / "decode.md").unlink()
    assert main(["bench", "decode", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "decode.md").read_text() == text


@pytest.mark.parametrize("form", FORMS)
def test_a_state_is_that_of_a_prompt_as_long(form):
    """Guards: a state that was made without its prompt, and is not of the size, or not at the place, that
    decoding has it."""
    (config,) = choose_configs("demo", [form], 64).values()
    decoder = Decoder(config, torch.float32, CPU)
    made, real = decoder.state_after(40, 2, 64), decoder.model.new_state(2, 64)
    decoder.model.step(torch.zeros(2, 40, dtype=torch.long), real)
    assert made.num_bytes() == real.num_bytes() and made.position == real.position == 40
    lengths = [[getattr(layer, "length", None) for layer in state.layers] for state in (made, real)]
    assert lengths[0] == lengths[1]
    assert decoder.model.step(torch.zeros(2, 1, dtype=torch.long), made).isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_captured_before_a_token_is_timed(form, monkeypatch):
    """Guards: captures in the times, eager steps that are called graphs, and graphs that are called eager."""
    (config,) = choose_configs("demo", [form], 64).values()
    decoder, events = Decoder(config, torch.float32, CPU), []

    class Noted(decoding.DecodingGraph):
        def prepare(self, length: int) -> None:
            events.append((length, self.state.position))
            super().prepare(length)

        def __call__(self, idx_BN: torch.Tensor) -> torch.Tensor:
            events.append("token")
            return super().__call__(idx_BN)

    monkeypatch.setattr(decoding, "DecodingGraph", Noted)
    row = DecodeRow("demo", form, 2, 64, graph=True)
    measure(row, decoder)
    assert events == [(64, 60), *["token"] * 4]  # one to warm up
    assert row.tokens == 3 and row.line().endswith("of state a sequence") and ", graph: " in row.line()
    eager = DecodeRow("demo", form, 2, 64)
    measure(eager, decoder)
    assert len(events) == 5 and eager.state_bytes == row.state_bytes and ", eager: " in eager.line()


def test_eager_steps_stand_beside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two rows of one cell otherwise, in the table and as two lines of the picture."""
    rows = [DecodeRow("demo", "ours", 1, n, g, ms=1.0, fastest_ms=1.0, state_bytes=8) for g in (True, False)
            for n in (16, 64)]  # fmt: skip
    rows.append(DecodeRow("demo", "gla", 1, 16, True, ms=2.0, fastest_ms=1.0, state_bytes=3 * 10**6))
    results = bench_decoding("demo", ["ours"], [16], [1], device="cpu", graph=True)
    for row in rows:
        results.put(row)
    assert [row.graph for row in results.rows] == [False, True, True, False, True]
    assert "| demo | ours | 1 | 16 | graph | 1.00 (1.00) |" in results.table()
    assert "| demo | ours | 1 | 16 | eager | 1.00 (1.00) |" in results.table()
    drawn: list[Any] = []
    monkeypatch.setattr(decoding_results, "save_formats", lambda figure, *_: drawn.append(figure))
    results.draw(tmp_path)
    times, states = drawn[0].axes
    lines = ["ours, batch 1, eager", "ours, batch 1, graph", "gla, batch 1, graph"]
    assert [line.get_label() for line in times.lines] == lines, "what was not measured has none"
    assert "A point is missing" not in drawn[0].get_supxlabel()
    results.put(DecodeRow("demo", "gla", 1, 64, True, status="oom", reason="out of memory"))
    results.draw(tmp_path)
    assert "A point is missing" in drawn[1].get_supxlabel()
    assert "| demo | gla | 1 | 16 | graph | 2.00 (1.00) | 500 | – | 3.00 | – |" in results.table()
    assert len(states.lines) == 2 and list(states.lines[1].get_ydata()) == [3.0], "one for each attention"


@pytest.mark.slow
def test_an_export_decodes_with_the_same_state(tmp_path: Path):
    """Guards: the comparison with transformers' `generate` is of the same model, tokens and context."""
    options = ["--model", "demo", "--contexts", "16", "--batch_sizes", "2", "--device", "cpu"]
    for more in ([], ["--transformers", "true", "--append", "true"]):
        assert main(["bench", "decode", *options, "--out", str(tmp_path), *more]) == 0
    rows = DecodeResults.load(tmp_path / "decode.json").rows
    own, exported = (
        {r.attention: r for r in rows if r.transformers is is_export} for is_export in (False, True)
    )
    assert own.keys() == exported.keys() and len(own) == len(FORMS)
    for form, row in exported.items():
        assert row.status == "ok" and 0 < row.fastest_ms <= row.ms and row.tokens == own[form].tokens
        assert row.step == "transformers"
        if form in ("ours", SHORT_CONV, "gla"):  # a cache of keys and values has room for more
            assert row.state_bytes == own[form].state_bytes


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_a_graph_where_that_is_asked_for():
    rows = [
        bench_decoding("demo", ["hybrid"], [64, 1024], [2], device="cuda", graph=graph).rows
        for graph in (True, False)
    ]
    assert [[(row.status, row.graph) for row in part] for part in rows] == [
        [("ok", True)] * 2,
        [("ok", False)] * 2,
    ]


def test_what_does_not_fit_is_a_row(tmp_path: Path, monkeypatch):
    """Out of memory, or another failure, is its row's reason; the rest is measured."""
    state_after = Decoder.state_after

    def limited(self: Decoder, tokens: int, batch_size: int, max_seq_len: int):
        if self.config.attention == "softmax" and batch_size * max_seq_len > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.config.attention == "gla":
            raise RuntimeError("broken | here\nand there")
        return state_after(self, tokens, batch_size, max_seq_len)

    monkeypatch.setattr(Decoder, "state_after", limited)
    results = bench_decoding("demo", ["softmax", "gla", "ours"], [16, 32], [1, 2], device="cpu")
    assert [row.status for row in results.rows] == ["ok"] * 2 + ["ok", "oom"] + ["error"] * 4 + ["ok"] * 4
    text = results.table()
    assert "| demo | softmax | 2 | 32 | eager | oom: out of memory | | | | |" in text
    assert "| error: RuntimeError: broken / here | | | | |" in text
    assert results.rows[3].line().endswith("context 32, eager: oom: out of memory")
    assert results.draw(tmp_path)
    assert DecodeResults(results.environment, results.rows[3:5]).draw(tmp_path) == [], "nothing to draw"


def test_a_benchmark_goes_on_where_it_stopped(tmp_path: Path):
    """--append measures what the budget left out, keeps what is there, by whichever name a form has; and
    refuses another machine's."""
    path = tmp_path / "decode.json"
    options = {"contexts": [16], "batch_sizes": [1], "device": "cpu", "save_to": path, "append": True}
    kept = bench_decoding("demo", ["hybrid"], **options).rows[0]
    rows = bench_decoding("demo", [ALIASES["hybrid"], "ours"], budget=0, **options).rows
    assert rows[0] == kept and rows[1].status == "skipped" and "budget of 0 s" in rows[1].reason
    whole = bench_decoding("demo", ["ours", "hybrid"], **options)
    assert whole.rows[0] == kept and whole.rows[1].status == "ok" and DecodeResults.load(path) == whole
    DecodeResults(whole.environment | {"card": "another"}, whole.rows).save(path)
    with pytest.raises(UserError, match="of another card: measure again"):
        bench_decoding("demo", ["ours"], **options)
    with pytest.raises(UserError, match="of another precision"):
        DecodeResults(whole.environment, whole.rows).save(path)
        bench_decoding("demo", ["ours"], dtype="bfloat16", **options)


def test_a_token_is_drawn_as_the_command_draws_it():
    """Guards: a benchmark of another draw than that of `lingpt generate` without options."""
    options = generate_verb.Options("model")
    assert (options.temperature, options.top_k) == (decoding.TEMPERATURE, decoding.TOP_K)


def test_the_block_size_has_room_for_the_longest_context():
    configs = choose_configs("demo", (), 4096)
    assert list(configs) == list(FORMS) and {config.block_size for config in configs.values()} == {4096}
    assert isinstance(configs["hybrid"], Config) and configs["hybrid"].attention.count("softmax") == 1


def test_mistakes_are_one_line(tmp_path: Path, capsys):
    for options, line in (
        (["--model", "dmo"], "unknown model 'dmo' (did you mean 'demo'?): use one of: "),
        (["--attentions", "softmx"], "did you mean 'softmax'?"),
        (["--contexts", "2"], "a list, each a whole number from 4 to 1,000,000,000"),
        (["--batch_sizes", "0"], "a list, each a whole number from 1 to 1,000,000"),
        (["--dtype", "fp8", "--model", "demo"], "unknown dtype 'fp8': use one of: float32"),
        (["--device", "meta"], "use --device auto"),
        (["--budget", "-1"], "budget is -1; it must be a number of at least 0"),
        (["--redraw", "--out", str(tmp_path)], "run `lingpt bench decode` first"),
    ):
        assert main(["bench", "decode", "--budget", "0", *options]) == 2
        assert line in capsys.readouterr().err
