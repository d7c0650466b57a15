"""The memory estimate of a dry run, against what a step really keeps."""

import pytest
import torch
from torch import nn

from lingpt.common.errors import UserError
from lingpt.kernels.context_parallel import Context
from lingpt.models import GPT, Config, memory_estimate
from lingpt.models.attention.unified import FORMS

from .conftest import LLAMA

GLA_ALL = {"short_conv": True, "input_gate": True, "gate_activation": "sigmoid"}


def kept_for_backward(model, idx) -> int:
    """Bytes that autograd keeps for backward, each storage once, parameters and constants apart."""
    permanent = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in permanent:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.hidden(idx).sum()
    del loss
    return sum(storage.nbytes() for storage in storages.values())


def kept_in_bf16(model) -> int:
    """The same for 4 x 96 tokens under autocast, whose copies of the weights count as parameters."""
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_for_backward(model, torch.zeros(4, 96, dtype=torch.long))
    matrices = [m.weight for block in model.blocks for m in block.modules() if isinstance(m, nn.Linear)]
    return kept - 2 * sum(weight.numel() for weight in matrices)


def test_activations_are_what_autograd_keeps(small, variant):
    """Too low and a run dies where a dry run promised room; too high and a card that would do is refused."""
    if variant.get("mlp_class_name"):
        pytest.skip("eager SwiGLU and RMS norms keep more; compiled ones are below")
    model = small(n_embd=128, **variant)
    estimate = memory_estimate(model, micro_batch_size=4, seq_len=96, precision="32-true")
    idx = torch.zeros(4, 96, dtype=torch.long)
    assert estimate["activations"] == pytest.approx(kept_for_backward(model, idx), rel=0.15)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_unified_keep_about_what_they_say(small, form):
    """Not among it: copies of eager features and gates, which compiled blocks compute again. A right decay is
    of a kernel in fp32, whatever the precision: there it is bf16 that shows whether this is counted."""
    model = small("unified", form=form, n_embd=128)
    precision = "bf16-mixed" if FORMS[form].right else "32-true"
    estimate = memory_estimate(model, micro_batch_size=4, seq_len=96, precision=precision)
    idx = torch.zeros(4, 96, dtype=torch.long)
    kept = kept_in_bf16(model) if FORMS[form].right else kept_for_backward(model, idx)
    assert 0.7 < estimate["activations"] / kept < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("softmax", {}),
        ("softmax", {"softmax_conv": True, "softmax_gate": True}),
        ("softmax", {"softmax_qk_norm": True}),
        ("ours", {}),
        ("ours-gated", {"output_gate": True, "short_conv": True}),
        ("ours-gated", {"output_gate": True, "short_conv": True, "conv_silu": True}),
        ("ours", {"output_gate": True, "short_conv": True, "conv_silu": True}),
        ("ours", {"input_gate": True}),
        ("ours-gated", {"input_gate": True}),
        ("ours-gated", {"input_gate": True, "output_gate": True, "short_conv": True}),
        ("gla", {}),
        ("gla", {"short_conv": True}),
        ("softmax", {"value_residual": True}),
        ("ours", {"value_residual": True}),
        ("ours-gated", {"value_residual": True, "output_gate": True, "short_conv": True}),
        ("gla", {"value_residual": True, "short_conv": True}),
        ("gla", GLA_ALL | {"value_residual": True}),
        ("gla", GLA_ALL),
        ("gla", GLA_ALL | {"gla_unit_qk": True}),
        ("softmax", LLAMA | {"norm_qk": False}),
        ("softmax", LLAMA),
        ("ours-gated", LLAMA | {"norm_qk": False, "output_gate": True, "short_conv": True}),
        ("ours", LLAMA),
    ],
)
def test_activations_are_what_compiled_blocks_keep(small, attention, options):
    """What torch.compile keeps is what its partitioner says, on any device."""
    torch._dynamo.reset()  # its limit of compilations is one for all tests of the process
    model = small(attention, n_embd=128, **options)
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    estimate = memory_estimate(model, micro_batch_size=4, seq_len=96, precision="bf16-mixed")
    assert estimate["activations"] == pytest.approx(kept_in_bf16(model), rel=0.05)


def test_gradients_stand_beside_the_activations_only_where_they_are_accumulated(small):
    """In a step of one micro-batch they come while the activations go: the larger of the two counts."""
    model = small("ours")
    few, many = (
        [memory_estimate(model, size, 32, "32-true", accumulates=a) for a in (True, False)]
        for size in (1, 64)
    )
    assert many[1]["gradients"] == 0 and few[1]["gradients"] > 0
    assert few[0]["gradients"] == few[1]["total"] - few[1]["parameters"] - few[1]["optimizer"]
    assert many[0]["total"] - many[1]["total"] == many[0]["gradients"]


def test_weights_gradients_and_adamw_are_counted(small):
    """fp32: 4 + 4 + 8 bytes a parameter; bf16-true half of that; bf16-mixed with copies of all but the
    embedding. The head's gradient and its input, with its own, are the loss's."""
    model = small("ours")
    n, embedding = model.num_parameters(), model.lm_head.weight.numel()
    for precision, size, copies in (("32-true", 4, 0), ("bf16-true", 2, 0), ("bf16-mixed", 4, n - embedding)):
        estimate = memory_estimate(model, 1, 32, precision)
        parts = [estimate[part] for part in ("parameters", "gradients", "optimizer", "loss")]
        loss = (2 * 32 * 64 + embedding) * size
        assert parts == [n * size + 2 * copies, n * size, 2 * n * size, loss]
        assert estimate["total"] == sum(value for part, value in estimate.items() if part != "total")
        assert memory_estimate(model, 1, 32, precision, moments=n)["optimizer"] == n * size


def test_a_loss_in_chunks_needs_fewer_logits():
    """At 50304 words the logits of a long batch are as large as the model."""
    model = GPT.on_meta(Config.from_name("pythia-70m"))
    whole, chunked = (memory_estimate(model, 8, 2048, loss_chunk_tokens=c) for c in (None, 1024))
    assert whole["logits"] == 16 * chunked["logits"] > whole["parameters"]
    assert whole["activations"] == chunked["activations"]


@pytest.mark.parametrize("parallel", [True, False])
def test_shards_and_recomputed_blocks_need_less(parallel):
    """FSDP divides what AdamW keeps; a recomputed block leaves its input: 12 B parameters on eight cards."""
    model = GPT.on_meta(config := Config.from_name("pythia-12b", parallel_residual=parallel))
    whole, shards, both, recomputed = (
        memory_estimate(model, 1, 2048, sharded_over=over, activation_checkpointing=recompute)
        for over, recompute in ((1, False), (8, False), (8, True), (1, True))
    )
    assert shards["optimizer"] == pytest.approx(whole["optimizer"] / 8, rel=1e-6)
    assert whole["gradients"] / 8 < shards["gradients"] < whole["gradients"] / 4
    assert shards["activations"] == whole["activations"]
    # of every block its input in fp32, and of one block all
    inputs = 4 * 2048 * config.n_embd * (config.n_layer + 1)
    one = (whole["activations"] - inputs) / config.n_layer
    assert both["activations"] == pytest.approx(inputs + one, rel=1e-6)
    assert both["parameters"] < shards["parameters"] < whole["parameters"] == recomputed["parameters"]


@pytest.mark.parametrize(("options", "left"), [({}, 2), ({"value_residual": True}, 3)])
def test_inputs_in_the_hosts_memory_leave_two_on_the_device(options, left):
    """Those of the block whose turn it is and of the one before; and the embeddings, if values are made of
    them."""
    model = GPT.on_meta(config := Config.from_name("pythia-70m", **options))
    both, offloads = (
        memory_estimate(model, 1, 2048, activation_checkpointing=True, offload_activations=offload)
        for offload in (False, True)
    )
    inputs = 4 * 2048 * config.n_embd * (config.n_layer - left)
    assert both["activations"] - offloads["activations"] == inputs


def test_shards_that_are_gathered_once_a_step_take_more():
    """All weights in fp32 instead of those of two blocks, and a whole gradient where one is accumulated."""
    model = GPT.on_meta(config := Config.from_name("pythia-1.4b"))

    def estimate(**options) -> dict[str, int]:
        return memory_estimate(model, 4, 2048, sharded_over=2, **options)

    always, once = estimate(), estimate(gathers_once=True)
    n = memory_estimate(model, 4, 2048)["gradients"] // 4
    assert once["gradients"] == 4 * n and always["gradients"] < 3 * n
    of_block = 12 * config.n_embd**2
    assert once["parameters"] - always["parameters"] == pytest.approx(4 * 22 * of_block, rel=0.01)
    assert once["optimizer"] == always["optimizer"]
    one = [estimate(gathers_once=gathers, accumulates=False)["gradients"] for gathers in (True, False)]
    assert one[0] == one[1], "divided while the activations go"


class Counting(Context):
    """Collectives that send nothing, and note how many 16-bit elements they would have sent to each rank."""

    def gather(self, x: torch.Tensor, what: str) -> torch.Tensor:
        sent.append(x.nbytes // 2)
        return x.new_zeros(self.size, *x.shape)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        sent.append(x.nbytes // 2 // self.size)
        return x


sent: list[int] = []


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("ours", {"short_conv": True}),
        ("ours-gated", {}),
        ("gla", {"short_conv": True}),
        ("softmax", {}),
        ("softmax", {"softmax_conv": True, "softmax_window": 8}),
    ],
)
def test_what_is_sent_is_counted(small, attention, options):
    """Guards: memory and time of context parallelism for which nothing is sent, or the whole sequence is."""
    model, B, N = small(attention, **options).bfloat16(), 2, 16
    layer = model.blocks[0].attn
    layer.context = Counting(None, 1, 4)
    sent.clear()
    layer(torch.zeros(B, N, 64).bfloat16(), model.cos[:N], model.sin[:N])
    assert sum(sent) == B * layer.sent_elements(N, 4)
    for recompute, kept in ((False, 3), (True, 1)):  # of so many layers
        options = {"precision": "bf16-true", "activation_checkpointing": recompute}
        whole, pieces = (memory_estimate(model, B, N, context_parallel=n, **options) for n in (1, 4))
        assert pieces["activations"] - whole["activations"] == kept * 4 * 2 * sum(sent)


def test_mistakes_are_one_line():
    """A dry run names what it cannot estimate."""
    model = GPT.on_meta(Config.from_name("demo"))
    with pytest.raises(UserError, match="did you mean 'bf16-mixed'"):
        memory_estimate(model, 1, 64, "bf16mixed")
    with pytest.raises(UserError, match="exceed the block size 256"):
        memory_estimate(model, 1, 512)
