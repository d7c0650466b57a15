"""A PyTorch that has lost a private name: the operators give the same, by its dispatcher."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_with_state,
    operator,
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
    tree, found = ast.parse(Path(operator.__file__).read_text()), {}
    imports = next(node for node in tree.body if isinstance(node, ast.Try))
    exec(compile(ast.Module([imports], []), "imports", "exec"), found)
    assert found["HAS_SHORTCUTS"] is not bool(missing)


def results() -> list[torch.Tensor]:
    """Outputs, states and gradients, eager and compiled."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(2, 70, 2, 8, generator=generator).requires_grad_() for _ in range(4))
    S = torch.randn(2, 2, 8, 8, generator=generator).requires_grad_()

    def linear(q, k, v, gate, S):
        initial = LinearAttentionState(S, S[..., 0], S[..., 1], S[..., 2, 2].square())
        b, log_decay = gate[0, 0, :, 0].tanh(), -gate[..., 1].square()
        return linear_attention_with_state(q, k, v, b, log_decay=log_decay, initial_state=initial)

    def plain(q, k, v, gate, S):
        return linear_attention(q, k, v), (gate * S.sum()).sum()

    found: list[torch.Tensor] = []
    for attention in (linear, plain, torch.compile(linear, fullgraph=True, backend="aot_eager")):
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
from lingpt.kernels.linear_attention import operator
setattr(torch._C, name, hidden)  # PyTorch itself needs it
assert not operator.HAS_SHORTCUTS
from lingpt.tests.kernels.linear_attention.test_operator import results
torch.save(results(), sys.argv[1])
"""


@pytest.mark.slow
def test_without_shortcuts_results_and_gradients_are_the_same(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDDEN, tmp_path / "results.pt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for without, x in zip(torch.load(tmp_path / "results.pt"), results(), strict=True):
        assert torch.equal(without, x)
