"""The weights that a run starts from: GPT-NeoX's statistics on every parameter, decided by the seed alone."""

import math

import pytest
import torch
from torch import nn

from lingpt.models import ATTENTIONS, GPT, Attention, Config
from lingpt.tests.models.conftest import SMALL


def test_every_parameter_starts_as_gpt_neox_has_it(variant):
    """small_init √(2/5d), wang_init 2/(L√d) for what writes to the residual stream, biases 0, norms 1.

    A parameter of the mechanism's own starts at the constant that the mechanism declares.
    """
    model = GPT(Config.from_name("demo", n_layer=3, **variant))
    model.init_weights(0)
    L, d = 3, 128
    checked = set()
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    own = {f"{at}.{name}": x for at, layer in layers for name, x in layer.initial_constants().items()}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            checked.add(full_name := f"{module_name}.{parameter_name}")
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                assert (parameter == (1 if parameter_name == "weight" else 0)).all(), full_name
            elif parameter_name in ("bias", "b_offset"):
                assert not parameter.any(), full_name
            elif full_name in own:
                assert (parameter == own[full_name]).all(), full_name
            else:
                if full_name.endswith(("attn.proj.weight", "mlp.proj.weight")):
                    std = 2 / (L * math.sqrt(d))
                else:  # of the dimensions that it reads: 16 in the gate of `gla`, d elsewhere
                    assert parameter.shape[1] == (16 if full_name.endswith("gate_up.weight") else d)
                    std = math.sqrt(2 / (5 * parameter.shape[1]))
                n = parameter.numel()
                assert parameter.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n)), full_name
                assert abs(parameter.mean().item()) < 4 * std / math.sqrt(n), full_name
                fourth = (parameter / std).pow(4).mean().item()
                assert fourth == pytest.approx(3, abs=4 * math.sqrt(96 / n)), full_name  # normal, not uniform
    assert checked == {parameter_name for parameter_name, _ in model.named_parameters()}


def test_all_of_a_model_is_built_on_the_device_that_is_current(variant):
    """Guards: `with torch.device("cuda")`, under which a module is expected to be on the card as a whole."""
    with torch.device("meta"):
        model = GPT(Config(**(SMALL | variant)))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert not [name for name, x in tensors if not x.is_meta]


def test_the_seed_decides_the_weights(small, attention):
    """Same seed, same bits, whatever was drawn before; another seed, other weights; no two tensors alike."""
    torch.manual_seed(7)
    first = small(attention, seed=3).state_dict()
    torch.manual_seed(8)
    again, other = small(attention, seed=3).state_dict(), small(attention, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])
    assert not torch.equal(first["transformer.h.0.mlp.fc.weight"], first["transformer.h.1.mlp.fc.weight"])
    assert not torch.equal(first["transformer.wte.weight"], first["lm_head.weight"])


def test_attentions_share_their_start(small):
    """What two attentions have in common starts equal: their curves differ by the attention alone."""
    weights = {name: small(name).state_dict() for name in ATTENTIONS}
    assert list(weights["ours"]) == list(weights["ours-decay"]) == list(weights["softmax"])
    for own in weights.values():
        shared = own.keys() & weights["softmax"].keys()
        assert {"lm_head.weight", "transformer.h.0.attn.proj.weight"} <= shared
        assert "transformer.h.2.mlp.fc.weight" in shared
        assert all(torch.equal(own[key], weights["softmax"][key]) for key in shared)


def test_create_is_the_same_model(small, tokens):
    """Built on the meta device or on the CPU, in bf16 or cast to it: the same weights."""
    direct = small("ours-decay")
    created = GPT.create(direct.config, seed=0)
    assert torch.equal(created(tokens), direct(tokens))
    half = GPT.create(direct.config, seed=0, dtype=torch.bfloat16)
    assert torch.equal(half(tokens), direct.bfloat16()(tokens))


def test_a_parameter_without_a_rule_is_an_error(small):
    """A mechanism that forgets to declare how a parameter starts would train from uninitialised memory."""
    model = small()
    model.transformer.h[1].attn.temperature = nn.Parameter(torch.ones(4))
    with pytest.raises(NotImplementedError, match=r"h\.1\.attn\.temperature"):
        model.init_weights(0)


@pytest.mark.gpu
def test_the_gpu_starts_from_the_cpus_weights(small):
    """The same seed gives the same bits on the card."""
    model = small()
    on_card = GPT.create(model.config, seed=0, device="cuda")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), on_card.parameters(), strict=True))
