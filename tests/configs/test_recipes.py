"""Every shipped YAML is loaded against the dataclasses, and has the numbers of the paper's recipe."""

import pytest

from lingpt.configs import FOLDER, recipe_names
from lingpt.configs.recipe import parse_recipe, training_recipes
from lingpt.train import Recipe
from lingpt.train.config import check
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.machine import Machine
from lingpt.train.memory_fit import fits, memory_here, memory_needed
from lingpt.train.model import model_config

PYTHIA = ["pythia-14m", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1.4b"]
LARGE = ["pythia-2.8b", "pythia-6.9b", "pythia-12b"]


def load(name: str) -> Recipe:
    return parse_recipe(["--config", name])


def test_the_recipes_of_the_readme_ship():
    assert {"demo", *PYTHIA, *LARGE} <= set(training_recipes())
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(recipe_names())


@pytest.mark.parametrize("name", training_recipes())
def test_loads_makes_a_model_and_divides(name):
    recipe = load(name)
    assert recipe.model.name == name, "a recipe is named after its model"
    assert model_config(recipe).block_size >= recipe.data.seq_len
    devices = recipe.train.devices
    for world_size in (1, 2, 4, 8) if devices == "auto" else (devices,):
        check(recipe, world_size)


@pytest.mark.parametrize("name", PYTHIA)
def test_pythia_recipes_are_the_papers(name):
    """3 B tokens of Wiki-40B at N = 8192, 256 sequences a step; the micro-batch fits an A6000."""
    recipe = load(name)
    t = recipe.train
    data = (recipe.data.source, recipe.data.tokenizer, recipe.data.seq_len)
    assert data == ("wiki40b", f"EleutherAI/{name}", 8192)
    assert (t.global_batch_size, t.max_tokens) == (256, 3 * 10**9)
    assert (t.learning_rate, t.min_learning_rate) == (1e-3, 5e-5)
    assert (t.warmup_steps, t.weight_decay, t.beta1, t.beta2, t.grad_clip) == (100, 0.1, 0.9, 0.95, 1.0)
    need = memory_needed(model_config(recipe), recipe, "bf16-mixed")["total"]
    assert fits(need, 48e9)


@pytest.mark.parametrize(
    ("name", "cards", "memory", "recompute", "strategy"),
    [
        ("pythia-1.4b", 2, 80e9, False, "ddp"),
        ("pythia-2.8b", 2, 80e9, False, "ddp"),
        ("pythia-2.8b", 4, 48e9, True, "fsdp"),
        ("pythia-6.9b", 2, 80e9, True, "fsdp"),
        ("pythia-6.9b", 2, 141e9, False, "fsdp"),
        ("pythia-6.9b", 8, 80e9, False, "fsdp"),
        ("pythia-12b", 2, 141e9, True, "fsdp"),
        ("pythia-12b", 4, 80e9, True, "fsdp"),
        ("pythia-12b", 4, 141e9, False, "fsdp"),
        ("pythia-12b", 8, 141e9, True, "fsdp"),
    ],
)
def test_several_cards_share_what_one_cannot_hold(name, cards, memory, recompute, strategy):
    """By the estimate, the large recipes fit the cards that they name, and `auto` shards where it must."""
    recipe = load(name)
    assert recipe.train.activation_checkpointing == (name in ("pythia-6.9b", "pythia-12b"))
    recipe.train.activation_checkpointing = recompute
    config = model_config(recipe)
    machine, why = choose_strategy(
        Machine("cuda", cards, 1, "bf16-mixed", "a card", int(memory)), config, recipe
    )
    assert machine.strategy == strategy and strategy.upper() in (why or "")
    assert fits(memory_needed(config, recipe, "bf16-mixed", over=machine.sharded_over)["total"], memory)
    assert fits(memory_needed(config, recipe, "32-true")["parameters"], memory), "whole, when it is made"
    assert machine.gathers_once == ((name, cards) in (("pythia-2.8b", 4), ("pythia-12b", 8))), "with room"
    assert fits(memory_here(machine, config, recipe)["total"], memory)
