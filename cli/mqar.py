"""`lingpt mqar`: trains small models on associative recall, in parallel, and shows how much each recalls."""

from pathlib import Path

from lingpt.eval.recall.options import Options, asked_trials


def run(options: Options) -> None:
    from lingpt.eval.recall.runs import run_mqar

    run_mqar(asked_trials(options), Path(options.out), options.workers)
