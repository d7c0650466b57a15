"""`lingpt mqar`: trains small models on associative recall, in parallel, and shows how much each recalls."""

from pathlib import Path

from jsonargparse import Namespace

from lingpt.study import mqar

HELP = "Train small models on associative recall (MQAR), and show how much each attention recalls."
RENAMED = mqar.RENAMED
configure = mqar.configure_mqar


def run(args: Namespace) -> None:
    from lingpt.eval.mqar_runs import run_mqar

    run_mqar(mqar.asked_trials(args), Path(args.out), args.workers)
