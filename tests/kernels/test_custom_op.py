"""A PyTorch that has lost a private name: the operators give the same, by its dispatcher."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lingpt.kernels import custom_op
from lingpt.kernels.gated_linear_attention import gated_linear_attention_with_state
from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_with_state,
)

SHORTCUTS = (
    "torch._is_functional_tensor",
    "torch._C._are_functorch_transforms_active",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._is_tracing",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._autograd._profiler_enabled",
)


@pytest.mark.parametrize("missing", [None, *SHORTCUTS])
def test_without_any_one_of_the_names_there_are_no_shortcuts(missing, monkeypatch):
    """Guards: an import that fails under a PyTorch that pyproject.toml allows."""
    if missing:
        monkeypatch.delattr(missing)
    spec = importlib.util.spec_from_file_location("again", custom_op.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.HAS_SHORTCUTS is not bool(missing)


def results() -> list[torch.Tensor]:
    """Outputs, states and gradients of both operators, eager and compiled."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(2, 70, 2, 8, generator=generator).requires_grad_() for _ in range(4))
    S = torch.randn(2, 2, 8, 8, generator=generator).requires_grad_()

    def linear(q, k, v, gate, S):
        initial = LinearAttentionState(S, S[..., 0], S[..., 1], S[..., 2, 2].square())
        b, log_decay = gate[0, 0, :, 0].tanh(), -gate[..., 1].square()
        return linear_attention_with_state(q, k, v, b, log_decay=log_decay, initial_state=initial)

    def gated(q, k, v, gate, S):
        return gated_linear_attention_with_state(q, k, v, -gate.square(), initial_state=S)

    def plain(q, k, v, gate, S):
        return linear_attention(q, k, v), (gate * S.sum()).sum()

    found: list[torch.Tensor] = []
    for attention in (linear, gated, plain, torch.compile(linear, fullgraph=True, backend="aot_eager")):
        o, end = attention(q, k, v, gate, S)
        outputs = [o, *(end if isinstance(end, tuple) else (end,))]
        loss = sum(x.square().sum() for x in outputs)
        found += [*outputs, *torch.autograd.grad(loss, (q, k, v, gate, S))]
    return [x.detach() for x in found]


HIDDEN = """
import sys, torch
name = "_are_functorch_transforms_active"
hidden = getattr(torch._C, name)
delattr(torch._C, name)
from lingpt.kernels import custom_op
setattr(torch._C, name, hidden)  # PyTorch itself needs it
assert not custom_op.HAS_SHORTCUTS
from lingpt.tests.kernels.test_custom_op import results
torch.save(results(), sys.argv[1])
"""


def test_without_shortcuts_results_and_gradients_are_the_same(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDDEN, tmp_path / "results.pt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for without, x in zip(torch.load(tmp_path / "results.pt"), results(), strict=True):
        assert torch.equal(without, x)
