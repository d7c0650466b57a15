"""`lingpt linearize`: gives a trained model another attention."""

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.common.options import as_word, flatten
from lingpt.common.run_folder import CONFIG, find_model_folder, newest_checkpoint, read_config
from lingpt.models import check_source
from lingpt.models.attention import attention_options
from lingpt.train import train
from lingpt.train.config import Recipe, recipe_from_dict
from lingpt.train.recipe import parse_recipe
from lingpt.train.softmax_layers import place_softmax_layers

HELP = """Give a trained model another attention: lingpt linearize <teacher> --model.attention hybrid. The
teacher is a run or a model folder; the model learns its distribution of the next token, and at first each
block's output. The softmax layers of an evenly spaced hybrid move to where the teacher needs them. With
--train.imitate attention a quarter of the steps first fits each new attention to the teacher's. Without
--config the recipe is that of the teacher's run, with a tenth of its tokens, a quarter of its batch, half of
its rate, and twice its rate for the new attentions, both down to 0."""
TRANSFER_DIVISOR = 4  # the steps of both runs over those of the attentions' own
TOKENS_DIVISOR = 10  # the teacher's over the student's; a smaller batch and rate: docs/results/linearize
BATCH_DIVISOR = 4
ATTENTION_RATE = "--train.attention_learning_rate"
LENGTH = {"--train.max_steps", "--train.max_tokens"}


def parse(words: Sequence[str]) -> list[Recipe]:
    """The recipes of the run, or of the two runs; UserError if the arguments are invalid."""
    teacher = words[0] if words and not words[0].startswith("-") else None
    given, rest = {word.partition("=")[0] for word in words}, list(words[1:] if teacher else words)
    if teacher:
        check_source(find_model_folder(Path(teacher), verify=False))
        rest = [f"--train.init_from={teacher}", f"--train.teacher={teacher}", "--train.imitate=blocks", *rest]
        if "--config" not in given and (Path(teacher) / CONFIG).is_file():
            rest = [*_student_options(Path(teacher), given), *rest]
    recipe = parse_recipe(rest, verb="linearize", about=HELP)
    if teacher is None:
        raise UserError(
            "lingpt linearize needs a teacher first: lingpt linearize runs/<name> --model.attention …"
        )
    if not given & {"--config", ATTENTION_RATE} and not recipe.model.config().has_linear_attention:
        recipe.train.attention_learning_rate = None
    name = recipe.run_name if "--train.name" in given else f"{recipe.run_name}-linearized"
    if recipe.train.imitate != "attention":
        return [_run(recipe, name, recipe.total_steps)]
    if (first := recipe.total_steps // TRANSFER_DIVISOR) < 1:
        raise UserError(f"{recipe.total_steps} steps are too few for two runs: raise --train.max_steps")
    attention = _run(recipe, f"{name}-transfer", first)
    logits = _run(recipe, name, recipe.total_steps - first)
    logits.train.imitate = "logits"
    if not recipe.train.dry_run or newest_checkpoint(attention.run_folder):  # a plan would miss it
        logits.train.init_from = str(attention.run_folder)
    return [attention, logits]


def _run(recipe: Recipe, name: str, steps: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, name=name, max_steps=steps, max_tokens=None))


def _student_options(run: Path, given: Set[str]) -> list[str]:
    """The options in the recipe of the teacher's run, except its attention and what belongs to that run
    alone, with the student's length, batch and rate."""
    recipe = recipe_from_dict(read_config(run))
    values, t = flatten(Recipe, recipe.to_dict()), recipe.train
    # Of both lengths, `max_steps` counts.
    tokens = (not t.max_steps and t.max_tokens) or recipe.total_steps * recipe.tokens_per_step
    batch, micro = (max(1, x // BATCH_DIVISOR) for x in (t.global_batch_size, t.micro_batch_size))
    values |= {"train.global_batch_size": batch, "train.micro_batch_size": math.gcd(batch, micro)}
    rate = values["train.learning_rate"]
    values |= {"train.learning_rate": rate / 2, "train.min_learning_rate": 0.0}
    values[ATTENTION_RATE.removeprefix("--")] = None if "--train.learning_rate" in given else 2 * rate
    if (muon := values.get("train.muon_learning_rate")) is not None:
        values["train.muon_learning_rate"] = muon / 2
    values |= {"train.max_steps": None, "train.max_tokens": tokens // TOKENS_DIVISOR}
    others = {f"model.{name}" for name in ("attention", *attention_options())}
    others |= {
        f"train.{name}" for name in ("name", "resume", "init_from", "teacher", "imitate", "decay_steps")
    }
    others |= {f"train.{name}" for name in ("z_loss", "segments", "context_parallel")}  # not with a teacher
    others |= {option.removeprefix("--") for option in LENGTH if LENGTH & given}
    return [
        f"--{key}={as_word(value)}"
        for key, value in values.items()
        if value is not None and key not in others
    ]


def run(recipes: list[Recipe]) -> None:
    place_softmax_layers(recipes[0])  # both have one `model`
    for recipe in recipes:
        train(recipe)
