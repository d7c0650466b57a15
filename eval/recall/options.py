"""The options of `lingpt mqar`, which are also those of `mqar` in a study's file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lingpt.common.arguments import as_word, parse_arguments
from lingpt.common.errors import UserError

if TYPE_CHECKING:
    from lingpt.eval.recall.mqar import Trial

_WITH_CONV = ("gla", "ours", "ours-decay", "ours-gated", "ours-gated+output_gate")
RENAMED = {"rates": "learning_rates"}  # old name → new name of an option
DEFAULT = ("softmax", *(name + conv for name in _WITH_CONV for conv in ("", "+short_conv")))


def configure(parser: ArgumentParser) -> None:
    """Adds the options of `lingpt mqar` to `parser`."""
    add = parser.add_argument
    names = "attentions, with options after a +: ours-gated+output_gate+short_conv"
    add("--attentions", nargs="+", default=list(DEFAULT), help=names)
    add("--widths", nargs="+", type=int, default=[64, 128], help="model widths")
    pairs = "key-value pairs per sequence; the sequence has 8 times as many tokens"
    add("--pairs", nargs="+", type=int, default=[16, 32], help=pairs)
    peaks = "peak learning rates; the best one counts"
    add("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2], help=peaks)
    add(
        "--steps",
        type=int,
        default=4000,
        help="most training steps; training stops early once 99.9 % of answers are right",
    )
    add("--batch_size", type=int, default=256, help="sequences per step")
    add("--vocabulary", type=int, default=8192, help="vocabulary size, half keys and half values")
    add("--workers", type=int | None, help="processes (default: 8 per GPU, 1 without a GPU)")
    add("--out", type=str, default="runs/mqar", help="folder of mqar.json, the table and the figure")


def asked_trials(args: Namespace) -> "list[Trial]":
    """The models that the arguments describe. UserError if they are invalid."""
    from lingpt.eval.recall.mqar import make_trials

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: give at least 1")
    for name in ("steps", "batch_size", "widths", "pairs", "learning_rates"):
        values = args[name] if isinstance(args[name], list) else [args[name]]
        if min(values) <= 0:
            raise UserError(f"--{name} is {min(values)}: give more than 0")
    sizes = {"steps": args.steps, "batch_size": args.batch_size, "vocabulary": args.vocabulary}
    return make_trials(args.attentions, args.widths, args.pairs, args.learning_rates, **sizes)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """The command-line arguments for a study's `mqar: {steps: 500, widths: [64]}`."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    given = {key: values for key, values in lists.items() if values != [None]}
    return [word for key, values in given.items() for word in (f"--{key}", *map(as_word, values))]


def trials_left(options: Mapping[str, Any], folder: Path) -> "list[Trial]":
    """The models of a study's `mqar` that have no result in `folder`. UserError for options that `lingpt
    mqar` does not accept."""
    from lingpt.eval.recall.results import RESULTS, read_known

    try:
        trials = asked_trials(parse_arguments("mqar", configure, command_line(options), renamed=RENAMED))
    except UserError as error:
        raise UserError(f"the study's `mqar`: {error}") from error
    try:
        known = read_known(folder / RESULTS, trials)[1]
    except UserError:  # `lingpt mqar` sets the damaged file aside
        known = {}
    return [trial for trial in trials if trial.key not in known]
