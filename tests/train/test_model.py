"""The model that a run trains is compiled once for all layers."""

import pytest
import torch

from lingpt.models import ATTENTIONS, GPT
from lingpt.train.compilation import compile_blocks


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_compilation_serves_all_layers(make_recipe, attention):
    """Something that differs by layer would compile each again, and past PyTorch's limit none at all."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    recipe = make_recipe()
    recipe.model.attention = attention
    gpt, counter = GPT.create(recipe.model.config(), seed=0), CompileCounter()
    keys = set(gpt.state_dict())
    compile_blocks(gpt, backend=counter, fullgraph=True)
    gpt(torch.zeros(2, 32, dtype=torch.long))
    assert counter.frame_count == 1
    assert set(gpt.state_dict()) == keys
