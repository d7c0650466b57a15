"""`lingpt kernels`, with and without a compiler and a GPU."""

import math
import sys
from pathlib import Path

import pytest
import torch

from lingpt.bench.kernels.selftest import SHAPES, self_test
from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention.cuda import channel_decay, recurrence, tf32, wide_rows
from lingpt.models.architecture import MODELS


def test_the_self_test_judges(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Guards: `lingpt kernels test` passes a correct operator at every length, no wrong or missing one."""
    checks = self_test(("ours-chunkwise",), "cpu")
    assert len(checks) == len(SHAPES) * 2 and all(check.passed and 0 < check.worst < 1e-2 for check in checks)
    assert not checks[0]._replace(worst=math.nan).passed and not checks[0]._replace(worst=0.1).passed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr("lingpt.bench.kernels.selftest.self_test", lambda: checks[:2])
    assert main(["kernels", "test"]) == 0
    checks[0] = checks[0]._replace(worst=math.nan)
    with pytest.raises(SystemExit, match="1"):
        main(["kernels", "test"])
    assert "1 passed, 1 failed on some GPU" in capsys.readouterr().out
    monkeypatch.undo()
    missing = self_test(("ours",), "cpu")
    assert not any(check.passed for check in missing) and "CUDA" in missing[0].reason


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
    from lingpt.kernels.linear_attention.cuda import variants
    from lingpt.kernels.linear_attention.cuda.compile import KernelSpec

    source = tmp_path / "noop.cu"
    source.write_text('extern "C" __global__ void noop(float* x) { x[threadIdx.x] = WIDTH; }')
    spec = KernelSpec(str(source), ("noop",), {"WIDTH": 64}, architectures=("sm_80", "sm_90a"))
    monkeypatch.setattr(variants, "specs", lambda: [spec])
    for others in (channel_decay, recurrence, tf32, wide_rows):
        monkeypatch.setattr(others, "specs", lambda: [])
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path))
    assert main(["kernels", "compile", "--arch", "sm_90a"]) == 0
    assert "noop" in capsys.readouterr().out
    assert main(["kernels", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in lines[1:3]] == [["sm_80", "not", "compiled"], ["sm_90a", "cached"]]
    assert main(["kernels", "list", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[0], lines[2]]
    for action in ("list", "compile"):
        assert main(["kernels", action, "--arch", "sm_75"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "there are kernels for sm_80, sm_90a" in err


@pytest.mark.nvrtc
def test_what_gla_trains_with_is_compiled_ahead(capsys: pytest.CaptureFixture) -> None:
    """Guards: a first step of a model of ours that compiles for itself; lines that no one can tell apart."""
    assert main(["kernels", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(set(lines)) == len(lines)
    ours = [line for line in lines if line.split()[0] == channel_decay.SOURCE and " sm_90a " in line]
    for shape in MODELS.values():
        Dk, Dv = (max(32, shape["n_embd"] // parts) for parts in (8, 4))  # of four heads; padded
        if Dk <= channel_decay.MOST_KEYS:
            assert any(f"bf16, gates bf16, Dk = {Dk}, Dv = {Dv} " in line for line in ours), shape


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
