"""What a recipe may say, and the line that answers what it may not."""

import pytest

from lingpt.common.errors import UserError
from lingpt.data import DataConfig
from lingpt.models import ATTENTIONS, ModelArgs
from lingpt.train import Recipe, TrainConfig
from lingpt.train.config import check, differences


def recipe(**train) -> Recipe:
    return Recipe(ModelArgs(), DataConfig(), TrainConfig(**{"max_steps": 10, **train}))


def test_steps_are_whole_and_cover_the_tokens():
    assert recipe(max_steps=None, max_tokens=3_000_000_000, global_batch_size=256).total_steps == 45777
    assert recipe(max_steps=7, max_tokens=10**12).total_steps == 7
    assert recipe(segments=4, context_parallel=2).piece_len == recipe().data.seq_len // 8
    with pytest.raises(UserError, match=r"max_steps or --train.max_tokens"):
        _ = recipe(max_steps=None).total_steps


@pytest.mark.parametrize(
    ("train", "world_size", "message"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 4}, 1, r"micro_batch_size 1, 2, 5, 10 would divide"),
        (
            {"global_batch_size": 12, "micro_batch_size": 4},
            2,
            r"4 × 2 devices: --train.micro_batch_size 1, 2, 3, 6",
        ),
        ({"global_batch_size": 10, "micro_batch_size": 1}, 4, r"multiple of 4"),
        ({"micro_batch_size": 0}, 1, "from 1 to"),
        ({"learning_rate": 0.0}, 1, "above 0"),
        ({"max_steps": 0}, 1, "train.max_steps is 0; it must be a whole number from 1 to 1,000,"),
        ({"decay_steps": 5}, 1, "decay_steps is of the schedule wsd, and train.schedule is cosine"),
        ({"imitate": "blocks"}, 1, "train.imitate blocks is for what a teacher has: give --train.teacher"),
        ({"z_loss": 1e-4, "teacher": "x"}, 1, "train.z_loss is for the loss of the next token: leave it out"),
        ({"muon_learning_rate": 0.1}, 1, "train.muon_learning_rate is for train.optimizer muon"),
        ({"offload_activations": True}, 1, "inputs that --train.activation_checkpointing true keeps: give"),
        ({"decay_steps": 50, "schedule": "wsd"}, 1, "train.decay_steps is 50; it must be 1 to 9"),
        ({"eval_tokens": 100}, 1, "less than one sequence"),
        ({"beta1": 2.0}, 1, "train.beta1 is 2.0; it must be a number of at least 0 and below 1"),
        ({"beta2": 1.0}, 1, "train.beta2 is 1.0"),
        ({"seed": -1}, 1, "train.seed is -1; it must be a whole number from 0 to 4,294,967,295"),
        (
            {"timeout_minutes": 1e13},
            1,
            "train.timeout_minutes is .*; it must be a number above 0 and at most 525,600",
        ),
        ({"seed": 2**32}, 1, "train.seed is 4294967296"),
        ({"weight_decay": -1.0}, 1, "train.weight_decay is -1.0"),
        ({"warmup_steps": -5}, 1, "train.warmup_steps is -5"),
        ({"sample_tokens": -4}, 1, "train.sample_tokens is -4"),
        ({"eval_tokens": -4}, 1, "train.eval_tokens is -4"),
        ({"min_learning_rate": float("nan")}, 1, "train.min_learning_rate is nan"),
        ({"learning_rate": 1e-6}, 1, "min_learning_rate is 5e-05, above the peak, train.learning_rate 1e-06"),
        ({"name": " "}, 1, 'train.name is " "; it must be text that is not blank'),
        ({"name": ""}, 1, 'train.name is ""; it must be text'),
        ({"out_dir": " "}, 1, 'train.out_dir is " "; it must be text'),
        ({"learning_rate": float("inf")}, 1, "train.learning_rate is inf"),
        ({"global_batch_size": 10**12}, 1, "from 1 to 1,048,576"),
        ({"name": "../../x"}, 1, r"'../../x' cannot be a folder's: .*--train.out_dir"),
        ({"name": ".hidden"}, 1, "cannot be a folder's"),
        ({"name": "a\0b"}, 1, "text that is not blank"),
        ({"name": "a\nb"}, 1, "cannot be a folder's"),
        (
            {"keep_best": True, "keep_checkpoints": 0},
            1,
            "train.keep_best saves, and train.keep_checkpoints 0",
        ),
        ({"name": "x" * 300}, 1, "cannot be a folder's"),
    ],
)
def test_numbers_that_make_no_run(train, world_size, message):
    """Nothing is floored in silence; the message names what would do."""
    with pytest.raises(UserError, match=message):
        check(recipe(**train), world_size)


def test_a_decay_begins_after_the_warm_up():
    """Guards: a decay that overlaps it dropped the rate off a cliff. A short run warms up over a tenth."""
    for steps, warmup, longest in ((1000, 100, 900), (100, 90, 90), (100, 5, 95), (2, 100, 1), (1, 100, 1)):
        run = {"schedule": "wsd", "max_steps": steps, "warmup_steps": warmup}
        check(recipe(**run, decay_steps=longest), 1)
        with pytest.raises(UserError, match=rf"decay_steps is {longest + 1}; it must be 1 to {longest}"):
            check(recipe(**run, decay_steps=longest + 1), 1)


def test_a_rate_may_be_constant_and_a_validation_one_sequence_or_all():
    for tokens, blocks in ((0, 9), (256, 1), (10**6, 9)):
        constant = recipe(learning_rate=1e-3, min_learning_rate=1e-3, eval_tokens=tokens)
        constant.data.seq_len = 256
        check(constant, 1)
        assert constant.validation_blocks(available=9) == blocks


def test_names():
    assert recipe().run_name == "demo-ours"
    hybrid = Recipe(ModelArgs(attention=["ours", "ours", "softmax", "ours"]), DataConfig(), TrainConfig())
    assert hybrid.run_name == "demo-ours-softmax_every_4"
    named = Recipe(ModelArgs("pythia-70m", attention="hybrid"), DataConfig(), TrainConfig())
    assert named.run_name == "pythia-70m-hybrid"
    more = Recipe(ModelArgs(attention="hybrid+value_residual"), DataConfig(), TrainConfig())
    assert more.run_name == "demo-hybrid-value_residual"
    other = Recipe(ModelArgs(attention=["softmax", "ours", "ours", "ours"]), DataConfig(), TrainConfig())
    assert other.run_name == "demo-softmax+ours", "no hybrid of one word"
    assert recipe(name="mine").run_folder.as_posix() == "runs/mine"


def test_a_sequence_of_no_tokens_is_one_line():
    """Guards: a division by zero."""
    with pytest.raises(UserError, match=r"data\.seq_len is 0"):
        check(Recipe(ModelArgs(), DataConfig(seq_len=0), TrainConfig(max_tokens=100)), 1)


def test_options_of_the_attention_are_in_the_name():
    """Guards: a run with another b that is refused for its name, until one is found by hand."""

    def name(*args, **options) -> str:
        return Recipe(ModelArgs(*args, **options), DataConfig(), TrainConfig()).run_name

    assert name("demo", "ours", learnable_b=True) == "demo-ours-learnable_b"
    assert name("demo", "ours-gated", output_gate=True, short_conv=True).startswith("demo-ours-gated-")
    assert name("demo", "gla", gla_n_head=2) == "demo-gla-gla_n_head_2"
    assert name("demo", "softmax", gla_n_head=2, learnable_b=True) == "demo-softmax", "not its options"
    hybrid = ["ours", "gla", "softmax", "ours"]
    assert name("demo", hybrid, learnable_b=True, gla_n_head=2) == (
        "demo-ours+gla+softmax-learnable_b-gla_n_head_2"
    )
    for attention in ATTENTIONS:
        assert name("pythia-70m", attention) == f"pythia-70m-{attention}"


def test_differences_name_what_must_stay_and_pass_over_what_may_change():
    old = recipe().to_dict()
    may_change = {"max_steps": 99, "devices": 2, "micro_batch_size": 2, "save_interval": 1}
    assert differences(old, recipe(**may_change, eval_interval=9, name="x").to_dict()) == []
    assert differences(old, recipe(learning_rate=0.5).to_dict()) == ["train.learning_rate: 0.001 → 0.5"]


def test_a_run_from_before_an_option_existed_had_its_default():
    old = recipe().to_dict()
    del old["model"]["output_gate"]
    assert differences(old, recipe().to_dict()) == []
    changed = recipe().to_dict()
    changed["model"]["output_gate"] = True
    assert differences(old, changed) == ["model.output_gate: False → True"]
