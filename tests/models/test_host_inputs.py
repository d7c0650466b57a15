"""Blocks' inputs in the host's memory: nothing else holds them, and the gradients stay the same bits."""

import weakref

import pytest
import torch

from lingpt.models import GPT, ModelArgs


def gradients(gpt: GPT, idx: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Of all parameters; and how many blocks' inputs are alive when the backward pass begins."""
    inputs: list[weakref.ref] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
        for block in gpt.blocks
    ]
    gpt.zero_grad()
    loss = gpt(idx).square().sum()
    alive = sum(x() is not None for x in inputs)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [parameter.grad for parameter in gpt.parameters()], alive


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["ours", "hybrid", "hybrid+value_residual"])
def test_inputs_wait_in_the_hosts_memory(form, device):
    sizes = {"n_layer": 6, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    gpt = GPT.create(ModelArgs("demo", form, **sizes).config(), 0, device)
    idx = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(0)).to(device)
    gpt.recompute_blocks = True
    expected, alive = gradients(gpt, idx)
    assert alive == 6
    gpt.inputs_on_host = True
    for _ in range(2):
        found, alive = gradients(gpt, idx)
        assert alive == ("value_residual" in form)  # the embeddings, of which the shared values are made
        assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert torch.isfinite(gpt(idx)).all()
