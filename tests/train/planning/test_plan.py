"""What a plan foretells of sequences that are divided."""

import pytest

from lingpt.common.format import scaled
from lingpt.models import GPT, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.plan import estimate, format_plan


def foretold(attention: str, seq_len: int, n: int = 1, devices: int = 1, **options) -> tuple:
    """tokens/s a device, the share of sending, and the plan's text."""
    recipe = Recipe(
        ModelArgs("pythia-1.4b", attention, block_size=seq_len),
        train=TrainConfig(
            max_steps=1, global_batch_size=devices // n, micro_batch_size=1, context_parallel=n, **options
        ),
    )
    recipe.data.seq_len = seq_len
    machine = Machine("cuda", devices, 1, "bf16-mixed", "NVIDIA H100", 85 * 10**9, "ddp")
    gpt = GPT.on_meta(recipe.model.config())
    found = estimate(recipe, machine, gpt)
    return found.tokens_per_second / devices, found.sending, format_plan(recipe, machine, gpt)


def test_a_linear_attention_keeps_its_rate_at_any_length():
    """Less what is sent, a little more of it where blocks are recomputed, and much more beyond one host."""
    one, nothing, alone = foretold("ours", 8192)
    assert "\ncontext" not in alone and "blocks' inputs" not in alone, "of options that are not given"
    rate, sending, plan = foretold("ours", 2**20, n=8, devices=8)
    assert nothing == 0 and 0 < sending < 0.01
    assert rate == pytest.approx(one * (1 - sending), rel=1e-6)
    assert f"{sending:.1%} over 8" in plan
    assert foretold("ours", 2**20, n=8, devices=8, activation_checkpointing=True)[1] == pytest.approx(
        1.5 * sending, rel=0.02
    )
    assert foretold("ours", 2**21, n=16, devices=16)[1] > 4 * sending


def test_softmax_is_divided_evenly():
    """Each device computes as many heads; a quarter of q, k, v and o of its piece goes to each device."""
    one, *_ = foretold("softmax", 2**17)
    rate, sending, plan = foretold("softmax", 2**17, n=4, devices=4)
    assert rate == pytest.approx(one * (1 - sending), rel=1e-6)
    sent = 2 * 24 * 2**15 * 4 * 2048 // 4
    waits = 2 * (3 * sent / 300e9 + 24 * 30e-6)  # forward and backward, over NVLink
    assert sending == pytest.approx(waits / (waits + 2**15 / one), rel=1e-6)
    assert f"each sends {scaled(sent, 'B')} to each of the others" in plan
    assert "4 devices × micro-batch 1 × 1 accumulated" in plan


def test_devices_beyond_a_sequences_train_others():
    assert foretold("ours", 2**16, n=2, devices=8)[:2] == foretold("ours", 2**16, n=2, devices=2)[:2]


def test_softmax_layers_attend_within_a_segment():
    """Guards: the plan's FLOPs were those of the whole sequence, and the MFU of training was not."""
    hybrid = ["ours", "softmax"] * 12
    whole, *_ = foretold(hybrid, 2**16, segments=16)
    short, _, plan = foretold(hybrid, 2**12)
    assert whole == short > foretold(hybrid, 2**16)[0]
    model = next(line for line in plan.splitlines() if line.startswith("model "))
    assert model in foretold(hybrid, 2**16, segments=16)[2]
