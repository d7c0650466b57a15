"""Every shipped YAML is loaded against the dataclasses, and has the numbers of the paper's recipe."""

import json
from pathlib import Path

import pytest
import yaml

from lingpt.common.errors import UserError
from lingpt.common.options import options_of
from lingpt.models import GPT, Config, read_model_config, save_model
from lingpt.models.architecture import Architecture
from lingpt.train import Recipe
from lingpt.train.config import check
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.model import model_config
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.memory_fit import fits, memory_here, memory_needed
from lingpt.train.recipe import RECIPES, parse_recipe, recipe_names

PYTHIA = ["pythia-14m", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b", "pythia-1.4b"]
LLAMA = ["llama-130m", "llama-340m", "llama-1b", "llama-1.3b"]
LARGE = ["pythia-2.8b", "pythia-6.9b", "pythia-12b"]


def load(name: str) -> Recipe:
    return parse_recipe(["--config", name])


S, T = {"max_steps": 7}, {"max_tokens": 1000}


@pytest.mark.parametrize(
    ("files", "options", "length"),
    [
        ([S, T], "", (None, 1000)),
        ([S, T, S], "", (7, None)),
        ([T, S | T, {"seed": 1}], "", (7, 1000)),  # one file with both: the steps count
        ([S, T], "--train.max_steps 5", (5, None)),
        ([S, T], "--train.max_steps 7", (7, None)),
        ([T, S], "--train.max_tokens=99", (None, 99)),
        ([S, {"max_steps": None}, T], "", (None, 1000)),
    ],
)
def test_the_last_length_wins(tmp_path, files, options, length):
    """Guards: of several files the first one's, or a refusal as if the command line gave two."""
    words = options.split()
    for i, train in enumerate(files):
        (tmp_path / f"{i}.yaml").write_text(yaml.safe_dump({"train": train}))
        words += ["--config", str(tmp_path / f"{i}.yaml")]
    train = parse_recipe(words).train
    assert (train.max_steps, train.max_tokens) == length


def test_a_recipe_whose_name_is_null_is_named_after_its_file(tmp_path):
    """As one without a name; but a run's own recipe, which has every key, goes on with that run."""
    for file, name in (("mine.yaml", "mine-ours"), ("config.yaml", "demo-ours")):
        (tmp_path / file).write_text(yaml.safe_dump({"model": {"name": "demo"}, "train": {"name": None}}))
        assert parse_recipe(["--config", str(tmp_path / file)]).run_name == name


def test_a_home_folder_is_written_out(monkeypatch):
    """Guards: a folder called `~`, while the data's `~` is the home folder."""
    monkeypatch.setenv("HOME", "/home/me")
    train = parse_recipe(
        ["--train.out_dir", "~/runs", "--train.resume=~/a/step-1", "--train.init_from", "~/b"]
    ).train
    assert (train.out_dir, train.resume, train.init_from) == (
        "/home/me/runs",
        "/home/me/a/step-1",
        "/home/me/b",
    )
    with pytest.raises(UserError, match="no home folder ~nobody-here"):
        parse_recipe(["--train.out_dir", "~nobody-here/runs"])
    for blank in ("", " "):
        with pytest.raises(UserError, match=r"train\.out_dir is .*; it must be text that is not blank"):
            parse_recipe(["--train.out_dir", blank])


@pytest.fixture
def smollm(tmp_path) -> Path:
    """The config of a small Llama, as transformers writes it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 160, "max_position_embeddings": 96, "vocab_size": 320}
    (tmp_path / "smollm").mkdir()
    (tmp_path / "smollm/config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    return tmp_path / "smollm"


def test_the_sizes_are_those_of_init_from(smollm, tmp_path):
    """Guards: a recipe that had to name what the folder says, from n_layer to rope_base."""
    words = ["--train.init_from", str(smollm), "--model.attention", "hybrid"]
    recipe, theirs = parse_recipe(words), read_model_config(smollm)
    ours = recipe.model.config()
    assert all(getattr(ours, size) == getattr(theirs, size) for size in options_of(Architecture))
    assert recipe.run_name == "smollm-hybrid" and len(recipe.model.attention) == 5
    (tmp_path / "mine.yaml").write_text("model: {name: mine, block_size: 64}")
    recipe = parse_recipe([*words, "--config", str(tmp_path / "mine.yaml"), "--model.n_layer", "4"])
    assert (recipe.model.name, recipe.run_name) == ("mine", "mine-hybrid-n_layer_4")
    assert (recipe.model.n_layer, recipe.model.n_embd, recipe.model.block_size) == (4, 64, 64)
    missing = parse_recipe(["--train.init_from", str(tmp_path / "gone")])
    assert missing.model == parse_recipe([]).model  # a run that resumes does not need it


def test_a_model_that_ships_keeps_its_name_alone(tmp_path):
    """Guards: runs from a Pythia's weights, whose recipes had no sizes, refused as others."""
    save_model(GPT.create(Config.from_name("demo", attention="softmax"), seed=0), tmp_path / "own")
    given, plain = parse_recipe(["--train.init_from", str(tmp_path / "own")]), parse_recipe([])
    assert given.model == plain.model and given.run_name == plain.run_name


def test_the_recipes_of_the_readme_ship():
    assert {"demo", *PYTHIA, *LARGE, *LLAMA} == set(recipe_names())
    assert {path.name for path in RECIPES.iterdir() if path.suffix != ".yaml"} == {"studies"}


@pytest.mark.parametrize("name", recipe_names())
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
    need = memory_needed(GPT.on_meta(model_config(recipe)), recipe, "bf16-mixed")["total"]
    assert fits(need, 48e9)


@pytest.mark.parametrize(
    ("name", "tokens", "warmup"), [("llama-340m", 15e9, 0.5e9), ("llama-1.3b", 100e9, 1e9)]
)
def test_the_gla_papers_recipes(name, tokens, warmup):
    """arXiv 2312.06635, section 5.1: batches of 0.5 and 2 M tokens; every one fits a card of 80 GB."""
    recipe = load(name)
    t = recipe.train
    per_step = t.global_batch_size * recipe.data.seq_len
    assert (t.max_tokens, t.learning_rate, t.min_learning_rate, t.weight_decay) == (tokens, 3e-4, 3e-5, 0.01)
    assert per_step == {"llama-340m": 2**19, "llama-1.3b": 2**21}[name]
    assert t.warmup_steps * per_step == pytest.approx(warmup, rel=0.05)
    need = memory_needed(GPT.on_meta(model_config(recipe)), recipe, "bf16-mixed")["total"]
    assert fits(need, 80e9)


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
    gpt = GPT.on_meta(model_config(recipe))
    machine, why = choose_strategy(
        Machine("cuda", cards, 1, "bf16-mixed", "a card", int(memory)), gpt, recipe
    )
    assert machine.strategy == strategy and strategy.upper() in (why or "")
    assert fits(memory_needed(gpt, recipe, "bf16-mixed", over=machine.sharded_over)["total"], memory)
    assert fits(memory_needed(gpt, recipe, "32-true")["parameters"], memory), "whole, when it is made"
    assert machine.gathers_once == ((name, cards) in (("pythia-2.8b", 4), ("pythia-12b", 8))), "with room"
    assert fits(memory_here(machine, gpt, recipe)["total"], memory)
