"""`lingpt replay`: looks at a step of a run: the samples of its batch, their losses, the gradient's norm."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

HELP = "Show what a step of a run was trained on: a loss spike, or a step that was skipped."


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=str, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step, as in metrics.jsonl")
    parser.add_argument("--samples", type=int, default=8, help="how many of its samples are shown")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")


def run(args: Namespace) -> None:
    from lingpt.train.replay import replay

    print(replay(Path(args.run), args.step, args.samples, args.device))
