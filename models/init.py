"""Initial weights: GPT-NeoX's scheme, as for Pythia (`small_init` and `wang_init` of gpt-neox).

Each parameter has its own random generator, seeded by (seed, name), on the CPU in fp32: a seed gives the same
weights on any device and in any order, and parameters that two attentions share are initially equal.
"""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from lingpt.common.devices import available_cores
from lingpt.models.attention import Attention
from lingpt.models.config import Config


@torch.no_grad()
def init_weights(
    model: nn.Module, config: Config, seed: int, loaded: Callable[[nn.Parameter], bool] = lambda _: False
) -> None:
    """Initialises every parameter of a `GPT` but those that are `loaded`. NotImplementedError names one that
    no rule covers."""
    to_draw, seen = [], set()
    attentions = [(name, m) for name, m in model.named_modules() if isinstance(m, Attention)]
    constants = {f"{at}.{name}": x for at, m in attentions for name, x in m.initial_constants().items()}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}"
            if loaded(parameter) or parameter in seen:  # tied ones are one parameter
                continue
            seen.add(parameter)
            if full_name in constants:
                set_weight(parameter, torch.as_tensor(constants[full_name]))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                parameter.fill_(1.0 if name == "weight" else 0.0)
            elif isinstance(module, nn.Linear) and name == "bias":
                parameter.zero_()
            elif isinstance(module, nn.Linear | nn.Embedding):
                to_draw.append((parameter, _std(full_name, parameter, config), seed, full_name))
            else:
                raise NotImplementedError(
                    f"no initialisation is declared for {full_name}: "
                    "its module's `initial_constants` gives it"
                )
    with ThreadPoolExecutor(min(8, available_cores())) as pool:  # 1.4 B normals take a core half a minute
        list(pool.map(_draw, *zip(*to_draw, strict=True)))


def _std(name: str, weight: torch.Tensor, config: Config) -> float:
    """The standard deviation: `wang_init`, 2/(L√d), for layers that write to the residual stream, else
    `small_init`, √(2/(5d))."""
    if name.endswith((".attn.proj.weight", ".mlp.proj.weight")):
        return 2.0 / (config.n_layer * math.sqrt(config.n_embd))
    return math.sqrt(2.0 / (5.0 * weight.shape[1]))  # what a linear layer reads, what an embedding gives


@torch.no_grad()
def _draw(parameter: nn.Parameter, std: float, seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    normal = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    set_weight(parameter, normal.normal_(0.0, std, generator=generator))


def set_weight(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrites a weight with `value`; if it is sharded, the part that this process has."""
    if hasattr(weight, "placements"):  # a DTensor, whose import takes a second
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(weight, DTensor)
        value = value.to(weight.device).expand(weight.shape)
        # No communication: each process takes its part of its own copy.
        value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
        weight = weight.to_local()
    weight.copy_(value)
