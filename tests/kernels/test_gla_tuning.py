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
from lingpt.kernels.gla_tuning import Autotuning, Size, compile_in_processes, configurations, is_tuned

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
    assert compile_in_processes(command(f"open({str(done)!r}, 'a').write(line)"), 3) == (20, 20)
    assert sorted(map(int, done.read_text().split())) == list(range(20))


def test_a_process_that_dies_says_why():
    """Its last line is the reason: what it could not import, for instance."""
    with pytest.raises(RuntimeError, match="no such kernel"):
        compile_in_processes(command("sys.exit('no such kernel') if line == '7\\n' else None"), 2)


def test_a_piece_that_takes_too_long_is_left_out():
    """The process that has it ends with what it has started, and the others do the rest."""
    hangs = "__import__('subprocess').run(['sleep', '600']) if line == '7\\n' else None"
    assert compile_in_processes(command(hangs), 2, seconds=3.0) == (19, 20)


@pytest.mark.parametrize("fails", [False, True])
def test_tunes_after_compiling_or_without_it(monkeypatch, fails):
    """Where the parallel compiling fails, one line says so, and Triton compiles by itself."""
    calls, lines = [], []
    monkeypatch.setattr(gla_tuning, "keep_triton_cache", lambda: None)
    monkeypatch.setattr(gla_tuning, "triton_cache_env", dict)
    monkeypatch.setattr(gla_tuning, "is_tuned", lambda _: False)
    monkeypatch.setattr(
        gla_tuning, "timing_briefly", lambda *counts: calls.append(counts) or contextlib.nullcontext()
    )
    monkeypatch.setattr(gla_tuning, "call", lambda *_: calls.append("call"))
    monkeypatch.setattr(gla_tuning, "_worker", lambda _: command("sys.exit('full')" if fails else "pass"))
    tuning = Autotuning(SIZE, torch.device("cpu"))
    for _ in range(2):
        tuning.finish(lines.append)
    assert calls == [(None if fails else 20, 0), "call"], "once"
    assert ("full" in lines[1]) == fails and ("20 of 20 configurations" in lines[1]) != fails


def test_says_how_many_are_left_out(monkeypatch):
    """And as many may be missing where the others are timed."""
    counts, lines = [], []
    monkeypatch.setattr(gla_tuning, "keep_triton_cache", lambda: None)
    monkeypatch.setattr(gla_tuning, "triton_cache_env", dict)
    monkeypatch.setattr(gla_tuning, "is_tuned", lambda _: False)
    monkeypatch.setattr(gla_tuning, "compile_in_processes", lambda *_, **__: (17, 20))
    monkeypatch.setattr(
        gla_tuning, "timing_briefly", lambda *found: counts.append(found) or contextlib.nullcontext()
    )
    monkeypatch.setattr(gla_tuning, "call", lambda *_: None)
    Autotuning(SIZE, torch.device("cpu")).finish(lines.append)
    assert counts == [(20, 3)]
    assert "17 of 20 configurations are compiled (3 took longer than 50 s: left out)" in lines[1]


def autotuned(configs: int = 3, compiled: tuple[int, ...] = (16, 32, 64)):
    """Triton's Autotuner over a kernel that notes its runs; the second configuration is the fastest.

    compiled: those BLOCKs that Triton would find in its cache.
    """
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    def kernel(x, BLOCK): ...

    runs: list[tuple[int, bool]] = []

    def run(x, *, BLOCK, warmup=False, **_):
        if BLOCK not in compiled:
            pytest.importorskip("triton.compiler").ASTSource.make_ir(None)
        runs.append((BLOCK, warmup))

    stand_in = SimpleNamespace(fn=kernel, run=run)

    def bench(kernel_call, quantiles):
        kernel_call()
        return [abs(runs[-1][0] - 32)] * 3

    options = [autotuner.Config({"BLOCK": 16 << i}, num_warps=1 << i) for i in range(configs)]
    tuner = autotuner.Autotuner(stand_in, ["x", "BLOCK"], options, ["x"], None, None, do_bench=bench)
    return tuner, runs


def test_records_what_triton_would_tune_and_compiles_it():
    """One compilation a configuration, many warps first, nothing launched, and the autotuner is as it was."""
    tuner, runs = autotuned()
    found = configurations(lambda: tuner.run(1))
    assert len(found) == 3 and runs == []
    for compile_it in found:
        compile_it()
    assert runs == [(64, True), (32, True), (16, True)]
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


def test_passes_over_what_was_not_compiled_in_time(monkeypatch):
    """The next of those that are compiled takes its place. More than were left out are compiled."""
    for left_out, chosen in ((1, 16), (0, 32)):
        tuner, runs = autotuned(compiled=(16, 64))
        compiled = []
        monkeypatch.setattr("triton.compiler.ASTSource.make_ir", lambda _, done=compiled: done.append(1))
        with gla_tuning.timing_briefly(3, left_out):
            tuner.run(1)
        assert runs[-1] == (chosen, False) and bool(compiled) == (left_out == 0)


def test_what_is_far_slower_is_not_timed_again(monkeypatch):
    """Than the fastest of the same call; the others have Triton's clock."""
    now, benched, bench = [0.0], [], [2.0, 2.0, 2.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self): ...

        def elapsed_time(self, end):
            return end.at - self.at

    def runs(ms: float):
        return lambda: now.__setitem__(0, now[0] + ms)

    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(testing, "do_bench", lambda kernel, quantiles, **_: benched.append(1) or bench)
    clock, quantiles = gla_tuning._Clock(), (0.5, 0.2, 0.8)
    call = {}
    clock.times(call)
    assert [clock(runs(ms), quantiles)[0] for ms in (2.5, 7.0, 5.0)] == [2.0, 7.0, 2.0]
    clock.times(call)
    assert clock(runs(7.0), quantiles) == [7.0] * 3
    bench[0] = 0.1
    assert clock(runs(2.5), quantiles)[0] == 0.1
    assert [clock(runs(ms), quantiles)[0] for ms in (0.75, 1.25)] == [0.1, 1.25], "short: measured in full"
    bench[0] = 2.0
    clock.times({})
    assert clock(runs(7.0), quantiles)[0] == 2.0 and len(benched) == 5


def test_a_kernel_of_which_nothing_is_compiled_is_compiled_when_it_runs(monkeypatch):
    """By its first configuration."""
    tuner, runs = autotuned(compiled=())
    monkeypatch.setattr("triton.compiler.ASTSource.make_ir", lambda _: None)
    with gla_tuning.timing_briefly(3, 3):
        tuner.run(1)
    assert runs == [(16, False)]


def test_other_processes_look_for_the_same_entries(monkeypatch, tmp_path):
    """Also once inductor has named another ptxas: this process has asked for the version before."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    driver = pytest.importorskip("triton.runtime").driver
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90))
    monkeypatch.setattr(type(driver), "active", target)
    before = compiler.get_ptxas_version(90)
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.0'\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    version_in_another = compiler.get_ptxas_version.__wrapped__
    assert version_in_another(90) != before
    for name, value in gla_tuning.triton_cache_env().items():
        monkeypatch.setenv(name, value)
    assert version_in_another(90) == before
