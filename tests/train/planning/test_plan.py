"""What a plan foretells of sequences that are divided."""

import pytest

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
    """Less what is sent, a little more of it where blocks are recomputed."""
    one, nothing, _ = foretold("ours", 8192)
    rate, sending, plan = foretold("ours", 2**20, n=8, devices=8)
    assert nothing == 0 and 0 < sending < 0.01
    assert rate == pytest.approx(one * (1 - sending), rel=1e-6)
    assert f"{sending:.1%} over 8" in plan
    assert foretold("ours", 2**20, n=8, devices=8, activation_checkpointing=True)[1] == pytest.approx(
        1.5 * sending, rel=0.02
    )


def test_all_wait_for_the_last_piece_of_softmax():
    """It reads all others, 2 - 1/n times the mean work of attention."""
    gpt = GPT.on_meta(ModelArgs("pythia-1.4b", "softmax", block_size=2**17).config())
    attention = 2 * (gpt.flops_per_token(2**17) - gpt.flops_per_token(2**16))
    linear = gpt.flops_per_token(2**17) - attention
    one = foretold("softmax", 2**17)[0]
    rate, sending, _ = foretold("softmax", 2**17, n=4, devices=4)
    slower = (linear + attention * (2 - 1 / 4)) / (linear + attention)
    assert rate == pytest.approx(one / slower * (1 - sending), rel=1e-3)


def test_devices_beyond_a_sequences_train_others():
    assert foretold("ours", 2**16, n=2, devices=8)[:2] == foretold("ours", 2**16, n=2, devices=2)[:2]
