"""GLA's kernels before the first step: compiled in parallel, timed briefly, and only where nothing is known.

Triton's autotuner is the real one, where Triton is installed; it needs no GPU for a kernel that stands in.
"""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from lingpt.kernels import gla_tuning
from lingpt.kernels.gla_tuning import Size, Tuning, compile_in_processes, configurations, is_tuned

SIZE = Size(1, 128, 1, 16, 16, torch.bfloat16)
WORKER = """
import sys
print(20, flush=True)
for line in sys.stdin:
    {each}
    print(line.strip(), flush=True)
"""


def command(each: str = "pass") -> list[str]:
    return [sys.executable, "-S", "-c", WORKER.format(each=each)]


def test_processes_share_the_work(tmp_path):
    """Each piece is done once, and the number of all of them comes back."""
    done = tmp_path / "done"
    assert compile_in_processes(command(f"open({str(done)!r}, 'a').write(line)"), 3) == 20
    assert sorted(map(int, done.read_text().split())) == list(range(20))


def test_a_process_that_dies_says_why():
    """Its last line is the reason: what it could not import, for instance."""
    with pytest.raises(RuntimeError, match="no such kernel"):
        compile_in_processes(command("sys.exit('no such kernel') if line == '7\\n' else None"), 2)


@pytest.mark.parametrize("fails", [False, True])
def test_tunes_after_compiling_or_without_it(monkeypatch, fails):
    """Where the parallel compiling fails, one line says so, and Triton compiles by itself."""
    calls, lines = [], []
    monkeypatch.setattr(gla_tuning, "keep_triton_cache", lambda: None)
    monkeypatch.setattr(gla_tuning, "is_tuned", lambda _: False)
    monkeypatch.setattr(
        gla_tuning, "timing_briefly", lambda total: calls.append(total) or contextlib.nullcontext()
    )
    monkeypatch.setattr(gla_tuning, "call", lambda *_: calls.append("call"))
    monkeypatch.setattr(gla_tuning, "_worker", lambda _: command("sys.exit('full')" if fails else "pass"))
    tuning = Tuning(SIZE, torch.device("cpu"))
    for _ in range(2):
        tuning.finish(lines.append)
    assert calls == [None if fails else 20, "call"], "once"
    assert ("full" in lines[1]) == fails and ("20 configurations" in lines[1]) != fails


def autotuned(configs: int = 3):
    """Triton's Autotuner over a kernel that notes its runs; the second configuration is the fastest."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    def kernel(x, BLOCK): ...

    runs: list[tuple[int, bool]] = []
    stand_in = SimpleNamespace(
        fn=kernel, run=lambda x, *, BLOCK, warmup=False, **_: runs.append((BLOCK, warmup))
    )

    def bench(kernel_call, quantiles):
        kernel_call()
        return [abs(runs[-1][0] - 32)] * 3

    options = [autotuner.Config({"BLOCK": 16 << i}) for i in range(configs)]
    tuner = autotuner.Autotuner(stand_in, ["x", "BLOCK"], options, ["x"], None, None, do_bench=bench)
    return tuner, runs


def test_records_what_triton_would_tune_and_compiles_it():
    """One compilation a configuration, nothing launched, and the autotuner is as it was."""
    tuner, runs = autotuned()
    found = configurations(lambda: tuner.run(1))
    assert len(found) == 3 and runs == []
    for compile_it in found:
        compile_it()
    assert runs == [(16, True), (32, True), (64, True)]
    tuner.run(1)
    assert runs[-1] == (32, False)


def test_triton_keeps_its_cache(monkeypatch):
    """Where inductor names another folder for itself, the choices would be lost."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    own = knobs.cache.dir
    gla_tuning.keep_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == own
    monkeypatch.setenv("TRITON_CACHE_DIR", "/named")
    gla_tuning.keep_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/named"


def test_knows_what_is_tuned():
    """A start with all choices in the cache begins no processes."""
    tuner, runs = autotuned()
    calls = lambda: tuner.run(1)  # noqa: E731
    assert not is_tuned(calls) and runs == []
    with gla_tuning.timing_briefly():
        calls()
    assert runs[-1] == (32, False) and len(runs) == 4
    assert is_tuned(calls) and len(runs) == 5
