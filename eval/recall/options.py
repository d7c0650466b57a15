"""The options of `lingpt mqar`, which are also those of `mqar` in a study's file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lingpt.common.arguments import command_line, parse
from lingpt.common.errors import UserError
from lingpt.common.options import Option

if TYPE_CHECKING:
    from lingpt.eval.recall.mqar import Trial

_WITH_CONV = ("gla", "ours", "ours-decay", "ours-gated", "ours-gated+output_gate")
DEFAULT = ("softmax", *(name + conv for name in _WITH_CONV for conv in ("", "+short_conv")))


@dataclass
class Options:
    """Train small models on associative recall (MQAR), and show how much each attention recalls."""

    # fmt: off
    attentions: Annotated[tuple[str, ...], Option(
        "attentions, with options after a +: ours-gated+output_gate+short_conv")] = DEFAULT
    widths: Annotated[tuple[int, ...], Option("model widths", least=1)] = (64, 128)
    pairs: Annotated[tuple[int, ...], Option(
        "key-value pairs per sequence; the sequence has 8 times as many tokens", least=1)] = (16, 32)
    learning_rates: Annotated[tuple[float, ...], Option(
        "peak learning rates; the best one counts", above=0)] = (1e-3, 3e-3, 1e-2)
    steps: Annotated[int, Option(
        "most training steps; training stops early once 99.9 % of answers are right",
        least=1, most=10**12)] = 4000
    batch_size: Annotated[int, Option("sequences per step", least=1)] = 256
    vocabulary: Annotated[int, Option("vocabulary size, half keys and half values", least=2)] = 8192
    workers: Annotated[int | None, Option(
        "processes (default: 8 per GPU, 1 without a GPU)", least=1, most=1024)] = None
    out: Annotated[str, Option("folder of mqar.json, the table and the figure")] = "runs/mqar"
    # fmt: on


def asked_trials(options: Options) -> "list[Trial]":
    """The models that the options describe. UserError if they are invalid."""
    from lingpt.eval.recall.mqar import make_trials

    sizes = {"steps": options.steps, "batch_size": options.batch_size, "vocabulary": options.vocabulary}
    return make_trials(options.attentions, options.widths, options.pairs, options.learning_rates, **sizes)


def trials_left(options: Mapping[str, Any], folder: Path) -> "list[Trial]":
    """The models of a study's `mqar` that have no result in `folder`. UserError for options that `lingpt
    mqar` does not accept."""
    from lingpt.eval.recall.results import RESULTS, read_known

    try:
        trials = asked_trials(parse("mqar", Options, command_line(options)))
    except UserError as error:
        raise UserError(f"the study's `mqar`: {error}") from error
    try:
        known = read_known(folder / RESULTS, trials)[1]
    except UserError:  # `lingpt mqar` sets the damaged file aside
        known = {}
    return [trial for trial in trials if trial.key not in known]
