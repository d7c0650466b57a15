"""FLOPs as the model declares them: what MFU and every time estimate stand on."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lingpt.models import GPT, Config
from lingpt.models.attention.gla import GLAAttention
from lingpt.models.attention.ours_gated import OursGatedAttention
from lingpt.models.attention.unified import UnifiedAttention


def counted(model: GPT, seq_len: int) -> float:
    """FLOPs per token of forward and backward, as PyTorch counts the operations that ran."""
    idx = torch.zeros(2, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx).sum().backward()
    return counter.get_total_flops() / idx.numel()


@pytest.mark.parametrize("seq_len", [64, 96])
def test_an_attention_declares_what_runs(small, variant, seq_len):
    """An operator without a formula counts as zero, and MFU lies. Of softmax PyTorch counts the whole N × N
    square; a causal model needs half of it, or MFU exceeds 100 %. So it is with the squares in the chunks of
    `unified`, whose backward pass is three forward ones. Nor are the zeros counted that fill a gated
    projection's rows, or the columns of `gla`'s input gate."""
    model = small(**variant)
    half = 3 * 2 * seq_len * model.config.n_embd  # q·k and p·v over half of the square, forward and backward
    layers = [block.attn for block in model.blocks]
    gated = [layer for layer in layers if isinstance(layer, OursGatedAttention)]
    filled = sum(layer.row_fill() for layer in gated if layer.is_packed)
    input_gates = [layer.input_gate for layer in layers if isinstance(layer, GLAAttention)]
    filled += sum(-gate.out_features % 8 for gate in input_gates if gate is not None)
    softmax_layers = model.config.attention_per_layer.count("softmax")
    before = max(0, seq_len - variant.get("softmax_window", seq_len))  # the tokens that a window leaves out
    undeclared = softmax_layers * (half + half * before**2 // seq_len**2)
    undeclared += 3 * 2 * model.config.n_embd * filled
    for layer in layers:
        if isinstance(layer, UnifiedAttention):
            H, D, padded = layer.config.n_head, layer.config.head_size, 64 * -(-seq_len // 64)
            undeclared += 4 * H * (4 * D * D + 4 * 64 * D) * padded / seq_len - 3 * layer.flops_per_token(
                seq_len
            )
    assert model.flops_per_token(seq_len) + undeclared == counted(model, seq_len)


def test_a_hybrid_is_the_sum_of_its_layers(small):
    """Each layer counts its own attention."""
    pure = [small(name).flops_per_token(96) for name in ("softmax", "ours", "gla")]
    assert 3 * small(["softmax", "ours", "gla"]).flops_per_token(96) == sum(pure)


def test_pythia_1_4b_is_about_six_flops_a_parameter():
    """The rule of thumb, 6 per parameter without the embedding; and only softmax grows with the length."""
    with torch.device("meta"):
        ours, softmax = (GPT(Config.from_name("pythia-1.4b", attention=a)) for a in ("ours", "softmax"))
    n_weights = ours.num_parameters() - 50304 * 2048
    assert 6 * n_weights < ours.flops_per_token(8192) < 6.5 * n_weights
    assert ours.flops_per_token(8192) == ours.flops_per_token(2048)
    assert softmax.flops_per_token(8192) - softmax.flops_per_token(2048) == 3 * 24 * 2 * (8192 - 2048) * 2048


@pytest.mark.gpu
def test_the_cuda_path_counts_the_same(small):
    """MFU must not depend on the backend that runs."""
    model = small("ours").cuda().bfloat16()
    idx = torch.zeros(2, 96, dtype=torch.long, device="cuda")
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(idx).flatten(0, 1), idx.flatten()).backward()
    assert counter.get_total_flops() / idx.numel() == model.flops_per_token(96)
