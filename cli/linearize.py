"""`lingpt linearize`: gives a trained model another attention."""

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.common.files import read_yaml
from lingpt.common.options import as_word, flatten
from lingpt.common.run_folder import CONFIG
from lingpt.models.attention import attention_options
from lingpt.train import train
from lingpt.train.config import Recipe
from lingpt.train.recipe import parse_recipe

HELP = """Give a trained model another attention: lingpt linearize TEACHER --model.attention hybrid. TEACHER
is a run or a model folder. A first run, a quarter of the steps, fits each new attention to the teacher's; a
second one fits the logits. Without --config the recipe is that of the teacher's run, with a tenth of its
steps."""
TRANSFER_DIVISOR = 4  # the steps of both runs over those of the first
STEPS_DIVISOR = 10  # the steps of the teacher over those of both runs
LENGTH = {"--train.max_steps", "--train.max_tokens"}


def parse(words: Sequence[str]) -> tuple[Recipe, Recipe]:
    """The recipes of the two runs; UserError if the arguments are invalid."""
    teacher = words[0] if words and not words[0].startswith("-") else None
    given, rest = {word.partition("=")[0] for word in words}, list(words[1:] if teacher else words)
    own = Path(teacher or "") / CONFIG
    if teacher:
        rest = [f"--train.init_from={teacher}", f"--train.teacher={teacher}", *rest]
        if "--config" not in given and own.is_file():
            rest = [*_recipe_of(own, given), *rest]
    recipe = parse_recipe(rest, verb="linearize", about=HELP)
    if teacher is None:
        raise UserError(
            "lingpt linearize needs a teacher first: lingpt linearize runs/<name> --model.attention …"
        )
    steps = recipe.total_steps
    if not {"--config", *LENGTH} & given:
        steps = steps // STEPS_DIVISOR
    if (first := steps // TRANSFER_DIVISOR) < 1:
        raise UserError(f"{steps} steps are too few for two runs: raise --train.max_steps")
    name = recipe.run_name if "--train.name" in given else f"{recipe.run_name}-linearized"
    runs = {f"{name}-transfer": first, name: steps - first}
    attention, logits = (
        replace(recipe, train=replace(recipe.train, name=run, max_steps=n, max_tokens=None))
        for run, n in runs.items()
    )
    attention.train.imitate, logits.train.init_from = "attention", str(attention.run_folder)
    return attention, logits


def _recipe_of(config: Path, given: Set[str]) -> list[str]:
    """The options in a run's recipe, except its attention, what belongs to that run alone, and its length if
    another is given."""
    values = flatten(Recipe, read_yaml(config))
    others = {f"model.{name}" for name in ("attention", *attention_options())}
    others |= {f"train.{name}" for name in ("name", "resume", "init_from", "teacher", "imitate")}
    others |= {option.removeprefix("--") for option in LENGTH if LENGTH & given}
    return [
        f"--{key}={as_word(value)}"
        for key, value in values.items()
        if value is not None and key not in others
    ]


def run(recipes: tuple[Recipe, Recipe]) -> None:
    for recipe in recipes:
        train(recipe)
