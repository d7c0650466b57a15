"""A model small enough for every test, with any attention."""

from collections.abc import Callable

import pytest
import torch

from lingpt.models import ATTENTIONS, GPT, Config

SMALL = {"name": "small", "block_size": 96, "n_layer": 3, "n_embd": 64, "n_head": 4}
SMALL |= {"vocab_size": 120, "padding_multiple": 64}
HYBRID = ["softmax", "ours", "gla"]


@pytest.fixture(params=[*ATTENTIONS, HYBRID], ids=[*ATTENTIONS, "hybrid"])
def attention(request: pytest.FixtureRequest) -> str | list[str]:
    """Every mechanism, and a model with a different one in each layer."""
    return request.param


@pytest.fixture
def small() -> Callable[..., GPT]:
    """`small(attention, seed=0, **overrides)`: a model of three layers with its initial weights."""

    def build(attention: str | list[str] = "ours", seed: int = 0, **overrides) -> GPT:
        model = GPT(Config(**(SMALL | {"attention": attention} | overrides)))
        model.init_weights(seed)
        return model

    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 120, (2, 70), generator=torch.Generator().manual_seed(1))
