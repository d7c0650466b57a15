"""`lingpt mqar`: trains small models on associative recall, in parallel, and shows how much each recalls."""

from pathlib import Path

from jsonargparse import Namespace

from lingpt.eval.recall import options

HELP = "Train small models on associative recall (MQAR), and show how much each attention recalls."
RENAMED = options.RENAMED
configure = options.configure


def run(args: Namespace) -> None:
    from lingpt.eval.recall.runs import run_mqar

    run_mqar(options.asked_trials(args), Path(args.out), args.workers)
