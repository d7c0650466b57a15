"""A model small enough for every test, with any attention."""

from collections.abc import Callable
from typing import Any

import litgpt
import pytest
import torch

from lingpt.models import ATTENTIONS, GPT, Config

SMALL = {"name": "small", "block_size": 96, "n_layer": 3, "n_embd": 64, "n_head": 4}
SMALL |= {"vocab_size": 120, "padding_multiple": 64}
HYBRID = ["softmax", "ours-gated", "gla"]
LLAMA = {"n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
LLAMA |= {"parallel_residual": False, "rotary_percentage": 1.0, "tie_embeddings": True, "norm_qk": True}


def switched(name: str) -> dict[str, bool]:
    """The options of an attention that are switches, each turned to what is not its default."""
    options = ATTENTIONS[name].options().items()
    return {option: not o.default for option, o in options if isinstance(o.default, bool)}


def litgpt_config(config: Config) -> litgpt.Config:
    """LitGPT's configuration of the same model."""
    fields = litgpt.Config.__dataclass_fields__
    return litgpt.Config(**{key: value for key, value in config.to_dict().items() if key in fields})


VARIANTS = {name: {"attention": name} for name in ATTENTIONS}
VARIANTS |= {f"{n}-switched": {"attention": n} | switched(n) for n in ATTENTIONS if switched(n)}
VARIANTS |= {"window": {"attention": "softmax", "softmax_window": 24}}
VARIANTS |= {"hybrid": {"attention": HYBRID, "output_gate": True, "short_conv": True}}
VARIANTS |= {"llama": VARIANTS["hybrid"] | LLAMA}


@pytest.fixture(params=[*ATTENTIONS, HYBRID], ids=[*ATTENTIONS, "hybrid"])
def attention(request: pytest.FixtureRequest) -> str | list[str]:
    """Every mechanism, and a model with a different one in each layer."""
    return request.param


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    """As `attention`, and each mechanism with its options switched, too: `small(**variant)`."""
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
